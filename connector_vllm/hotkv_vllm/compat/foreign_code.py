"""Identifies code that is neither vLLM's nor hotkv's and may decide KV bytes: plugins, and their
models, attention backends, workers and platforms.

By distribution and version; by a digest of the top-level package's files if there is no
distribution, or it came from a folder or a repository, where code may change without the
version.
"""

import functools
import hashlib
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP

OWN = sys.stdlib_module_names | {"vllm", "torch", "transformers"}
"""Not foreign. The key space has the versions of vLLM and transformers; another torch only
rounds differently."""
CODE_SUFFIXES = (".py", ".so")


def foreign_code(vllm_config: Any) -> dict[str, Any]:
    """What this process has loaded, by use."""
    parallel = vllm_config.parallel_config
    workers = [parallel.worker_cls, parallel.worker_extension_cls]
    found = {
        "plugins": plugins(),
        "model_classes": plugin_classes(),
        "platform": named(type(current_platform)),
        "workers": [of for one in workers if one and (of := named(one))],
    }
    return {use: code for use, code in found.items() if code}


def plugins() -> dict[str, str]:
    """Loaded general plugins, without hotkv's, which changes no KV (`load_plugins_by_group`,
    vLLM 0.32)."""
    allowed = envs.VLLM_PLUGINS
    return {
        one.name: f"{one.value}{code}"
        for one in sorted(metadata.entry_points(group=DEFAULT_PLUGINS_GROUP))
        if (allowed is None or one.name in allowed) and (code := code_of(one.module))
    }


def plugin_classes() -> dict[str, str]:
    """Models that plugins have registered, by architecture (`_ModelRegistry.register_model`,
    vLLM 0.32). Also of other models: a multimodal one contains a text model, and a drafter has
    its own."""
    found = {}
    for architecture, registered in ModelRegistry.models.items():
        loaded = getattr(registered, "model_cls", None)
        module = getattr(registered, "module_name", "") if loaded is None else loaded.__module__
        name = getattr(registered, "class_name", "") if loaded is None else loaded.__qualname__
        if code := code_of(module):
            found[architecture] = f"{module}:{name}{code}"
    return found


def named(kind: Any) -> str:
    """A foreign class with its code's identity; empty if not foreign.

    kind: the class, or its dotted name.
    """
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
    else:
        module, name = kind.__module__, getattr(kind, "__qualname__", "")
    code = code_of(module)
    return f"{module}:{name}{code}" if code else ""


def code_of(module: str) -> str:
    """Identity of a foreign module's code, `@` first; empty if not foreign."""
    package = module.partition(".")[0]
    is_own = not package or package in OWN or package.startswith("hotkv_")
    return "" if is_own else f"@{_identity(package)}"


@functools.cache
def _identity(package: str) -> str:
    found, is_fixed = [], True
    for name in sorted(set(_distributions().get(package, ()))):
        one = metadata.distribution(name)
        found.append(f"{name}=={one.version}")
        is_fixed &= one.read_text("direct_url.json") is None
    if not found or not is_fixed:
        found.append(f"sha256={_digest(package)}")
    return ",".join(found)


@functools.cache
def _distributions() -> Any:
    return metadata.packages_distributions()


def _digest(package: str) -> str:
    found = hashlib.sha256()
    for name, file in sorted(_files(package)):
        found.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:32]


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """With their names inside the package."""
    module = sys.modules.get(package)
    if module is not None:
        folders, file = getattr(module, "__path__", None), getattr(module, "__file__", None)
    else:
        spec = util.find_spec(package)
        folders = None if spec is None else spec.submodule_search_locations
        file = None if spec is None else spec.origin
    for folder in folders or ():
        for one in Path(folder).rglob("*"):
            if one.suffix in CODE_SUFFIXES and one.is_file():
                yield str(one.relative_to(folder)), one
    if not folders and file:
        yield "", Path(file)
