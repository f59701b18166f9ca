"""Which of vLLM's settings decide the bytes of a KV block: all of them, but for those that
`harmless` lists.

So a setting that is new in another vLLM version keeps engines apart until somebody has looked at
it. Nothing here knows a model, a layer or a value: `key_space_factors` walks vLLM's config objects
as they are.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from vllm import envs

from hotkv_vllm import versions
from hotkv_vllm.compat.harmless import HARMLESS, HARMLESS_ENVIRONMENT

_WITHOUT_OWN_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculation that keep no KV of their own."""


def key_space_factors(vllm_config: Any, layer_specs: Mapping[str, Any]) -> tuple[str, ...]:
    """What of an engine's settings decides KV bytes: `name=digest` for each of vLLM's config
    objects, so that two engines that don't share can be compared part by part. `layer_specs`: KV
    cache spec by layer name.
    """
    parts = {name: value for name, value in _fields(vllm_config).items() if value is not None}
    if draft_model(vllm_config) is not None:
        parts["speculative_config"] = vllm_config.speculative_config
    parts["layers"] = dict(layer_specs)
    parts["environment"] = environment()
    return (
        f"vllm={versions.VERSION}",
        *(f"{name}={digest(value)}" for name, value in sorted(parts.items())),
    )


def draft_model(vllm_config: Any) -> Any | None:
    """vLLM's config of the model that drafts, and may keep KV of its own; None where nothing
    drafts, or no model does."""
    speculative = vllm_config.speculative_config
    return (
        None
        if speculative is None or speculative.method in _WITHOUT_OWN_KV
        else speculative.draft_model_config
    )


def environment() -> dict[str, str]:
    """vLLM's environment variables that are set and not known to be harmless."""
    known = envs.compile_factors()
    return {
        name: os.environ[name]
        for name in sorted(known)
        if name in os.environ and name not in HARMLESS_ENVIRONMENT
    }


def digest(value: Any) -> str:
    """32 hexadecimal digits over `canonical(value)`."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def canonical(value: Any, within: tuple[int, ...] = ()) -> Any:
    """`value` as JSON that is equal in every process for equal settings: no addresses, no order of
    sets.

    Objects of unknown classes stand for their class and attributes, an object inside itself for its
    class. `within`: ids of the objects around this one.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in within:
        return type(value).__qualname__
    within = (*within, id(value))
    if isinstance(value, Mapping):
        entries = (
            (json.dumps(canonical(key, within)), canonical(entry, within))
            for key, entry in value.items()
        )
        return dict(sorted(entries, key=lambda entry: entry[0]))
    if isinstance(value, set | frozenset):
        return sorted(
            (canonical(entry, within) for entry in value),
            key=lambda entry: json.dumps(entry, sort_keys=True),
        )
    if isinstance(value, Sequence) and type(value).__module__ != "torch":
        return [canonical(entry, within) for entry in value]
    return _canonical_object(value, within)


def _canonical_object(value: Any, within: tuple[int, ...]) -> Any:
    name = type(value).__qualname__
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):
        return canonical(_model_settings(value.to_dict()), within)
    if dataclasses.is_dataclass(value):
        return [name, canonical(_fields(value), within)]
    if isinstance(value, functools.partial):
        return [name, canonical([value.func, value.args, value.keywords], within)]
    attributes = getattr(value, "__dict__", None)
    if attributes is not None and type(value).__module__ != "torch":
        return [name, canonical(attributes, within)]
    # The text of dtypes, devices, numbers and patterns says what they are. Where it is only an
    # address, the class has to do.
    text = str(value)
    return name if f"at {id(value):#x}" in text else [name, text]


def _fields(value: Any) -> dict[str, Any]:
    """A config object's fields that are not harmless, by the lists of its class and that class's
    bases."""
    harmless = frozenset[str]().union(
        *(HARMLESS.get(kind.__name__, frozenset()) for kind in type(value).__mro__)
    )
    # A field that vLLM declares and never sets has no value to differ in.
    names = [
        field.name
        for field in dataclasses.fields(value)
        if field.name not in harmless and hasattr(value, field.name)
    ]
    return {name: getattr(value, name) for name in names}


def _model_settings(config: Any) -> Any:
    """A transformers config without where it was read from and what wrote it, at any depth."""
    if isinstance(config, dict):
        return {
            name: _model_settings(entry)
            for name, entry in config.items()
            if name not in ("_name_or_path", "transformers_version")
        }
    return [_model_settings(entry) for entry in config] if isinstance(config, list) else config
