"""The sources of settings: names of flags and variables, suggestions for wrong names, and the list
of all settings.

Always true: an unknown flag is refused. An unknown variable with `HOTKV_` is refused only if it
is similar to a setting, or names a section (`HOTKV_ARENA__…`). Others may belong to other
programs: Kubernetes sets some for a service called hotkv.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

CLOSE_RATIO = 0.85
"""Least similarity (as of difflib) to a suggestion. HOTKV_VENV is not similar to HOTKV_EVENTS."""
PREFIX = "HOTKV_"
OTHERS = frozenset({"HOTKV_TARGET"})
"""The command `hotkv` reads these."""
MAX_NAME_BYTES = 255
"""Of a file or directory."""
OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT(_\d+_(TCP|UDP)\w*)?$")
NOT_JSON = re.compile(r'error parsing value for field "(\w+)" from source "(\w+)"')
GONE: Mapping[str, str] = {
    "arena.max_blocks": "the index has an entry for each 16 KiB of the arena",
    "arena.pin_piece_bytes": "the arena is pinned in pieces of 1 GiB",
    "arena.slab_bytes": "slabs have a 512th of the arena, 64 KiB to 16 MiB",
    "copy.depth": "a GPU has 4 pieces in its queue, in each direction",
    "copy.method": "a measurement chooses how a GPU copies",
    "copy.piece_bytes": "a GPU copies in pieces of 32 MiB",
    "copy.staging_bytes": "staging takes 128 MiB of a GPU",
    "events.buffer_bytes": "events that wait may take 64 MiB, and those kept for replay too",
    "events.buffer_steps": "10,000 messages of a topic are kept for replay",
    "events.int_hashes": "hashes are published as 64-bit numbers",
    "integrity.start_check_s": "a start compares blocks with their checksums for 0.3 s",
    "leases.held_share": "requests may keep a quarter of the arena",
    "leases.ttl_s": "a lease for which the client names no time lives 30 s",
    "policy": "blocks are evicted by their hotness",
    "security.malformed_per_s": "50 malformed messages are answered a second",
    "tiers.mooncake.connect_timeout_s": "a child has 10 s to be ready",
    "tiers.mooncake.timeout_s": "a batch of blocks has 5 s",
    "tiers.s3.connect_timeout_s": "the bucket has 3 s to answer",
    "tiers.s3.index_blocks": "a node knows 1,048,576 blocks of the bucket",
    "tiers.s3.pack_bytes": "an object has up to 16 MiB of blocks",
    "tiers.s3.refresh_s": "a node looks for others' blocks every 10 s",
    "tiers.s3.timeout_s": "a batch of blocks has 15 s",
    "tiers.valkey.connect_timeout_s": "a connection has 1 s to be usable",
    "tiers.valkey.timeout_s": "a batch of blocks has 5 s",
    "tracing.max_spans_per_s": "1,000 spans are recorded in a second",
    "tracing.queue_spans": "4,096 spans may wait for the collector",
    "tracing.service_name": "spans name the service hotkv-server",
}
"""Settings that there were, by dotted name, and what holds without them."""
BINARY_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings by dotted name, such as `arena.bytes`; with those of sections that may be None.

    prefix: dotted name of the section of `model`, with a dot at the end.
    """
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{info.alias or name}"
        inner = _required(info)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{dotted}.")
        else:
            yield dotted, info


def without_empty_paths(model: type[BaseModel], values: Any) -> Any:
    """Drops empty paths, which would be the working directory, so that they count as not set. Keeps
    an empty `client_ca`, which is then refused: without it a server would ask clients for no
    certificate.

    values: by name, before pydantic checks them.
    """
    if not isinstance(values, Mapping):
        return values
    kept = {}
    for name, value in values.items():
        info = model.model_fields.get(name)
        inner = None if info is None else _required(info)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            kept[name] = without_empty_paths(inner, value)
        elif inner is not Path or value != "" or name == "client_ca":
            kept[name] = value
    return kept


def is_gone(name: str) -> str:
    """What to say of a setting that there was, or of a section without any left; empty for another
    name."""
    lines = [
        f"{one} is no setting any more: {now}; remove it"
        for one, now in GONE.items()
        if one == name or one.startswith(f"{name}.")
    ]
    return "\n".join(lines)


def _required(info: FieldInfo) -> Any:
    """The type of a setting, without None."""
    inner, *others = [one for one in get_args(info.annotation) if one is not NoneType] or [None]
    if others or NoneType not in get_args(info.annotation):
        return info.annotation
    return inner


def origins(**given: Mapping[str, Any]) -> dict[str, str]:
    """By dotted name of each setting that a source has: the source that counts.

    given: what each source has, nested; a later one overrides.
    """

    def names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from names(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return {name: source for source, values in given.items() for name in names(values)}


def values_of(info: FieldInfo) -> dict[str, Any]:
    """What argparse, and so completion, knows of a setting's values."""
    inner = _required(info)
    if inner is bool:
        return {"choices": ("true", "false")}
    if get_origin(inner) is Literal:
        return {"choices": get_args(inner)}
    return {"type": Path} if inner is Path else {}


def flag_of(name: str) -> str:
    """`--arena.slab-bytes` for `arena.slab_bytes`."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """`HOTKV_ARENA__SLAB_BYTES` for `arena.slab_bytes`."""
    return PREFIX + name.replace(".", "__").upper()


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` if a known name is similar; else empty."""
    bare = {_bare(one): one for one in known}
    found = difflib.get_close_matches(_bare(word), bare, 1, CLOSE_RATIO)
    return f"; did you mean {bare[found[0]]}?" if found else ""


def _bare(name: str) -> str:
    """Letters and digits in lower case, without `HOTKV_`."""
    return re.sub(r"[^a-z0-9]", "", name.removeprefix(PREFIX).lower())


def wrong_flags(model: type[BaseModel], message: str) -> str:
    """Adds suggestions to argparse's message about unknown flags, and makes pydantic's about bad
    JSON readable. Other messages stay."""
    _, found, flags = message.partition("unrecognized arguments: ")
    match = NOT_JSON.match(message)
    if match and match[2] == "CliSettingsSource":
        return f"--{match[1]} takes a table in JSON; for one setting write --{match[1]}.NAME VALUE"
    if match:
        return (
            f"{variable_of(match[1])} or a variable that begins so is not JSON; lists and tables "
            f"are JSON, such as {PREFIX}SECURITY__ALLOWED_UIDS='[1000, 1001]'"
        )
    if not found:
        return message.removeprefix("error parsing CLI: ")
    known = [flag_of(name) for name, _ in leaves(model)] + ["--config", "--check", "--reset"]
    wrong = [word.partition("=")[0] for word in flags.split() if word.startswith("--")]
    gone = {flag_of(name): is_gone(name) for name in GONE}
    hint = "; --help-settings lists them"
    return "\n".join(
        gone.get(word, f"{word} is no setting{meant(word, known) or hint}")
        for word in wrong or [flags]
    )


def wrong_variables(model: type[BaseModel], environment: Mapping[str, str]) -> list[str]:
    """A sentence for each unknown variable that is similar to a setting. Sections refuse their
    own."""
    sections = {variable_of(info.alias or name) for name, info in model.model_fields.items()}
    known = {variable_of(name) for name, _ in leaves(model)} | sections
    gone = {variable_of(name): is_gone(name) for name in GONE}
    wrong = []
    for name in sorted(environment):
        upper = name.upper()
        is_ours = upper.startswith(PREFIX) and upper not in known | OTHERS
        if upper in gone:
            wrong.append(f"{name}: {gone[upper]}")
            continue
        if not is_ours or any(upper.startswith(f"{section}__") for section in sections):
            continue
        if not OF_KUBERNETES.search(upper) and (hint := meant(upper, known)):
            wrong.append(f"{name} is no setting{hint}")
    return wrong


def wrong_texts(value: object, name: str = "") -> Iterator[str]:
    """A sentence for each text or path that the system would refuse.

    value: settings as `model_dump` returns them, or a part.
    name: of the part, dotted.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from wrong_texts(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from wrong_texts(part, f"{name}.{at}")
    elif isinstance(value, str | Path):
        try:
            text = str(value).encode()
        except UnicodeEncodeError:
            yield f"{name} is not UTF-8"
            return
        if b"\0" in text:
            yield f"{name} has a NUL character"
        elif isinstance(value, Path) and max(map(len, text.split(b"/"))) > MAX_NAME_BYTES:
            yield f"{name} has a name of more than {MAX_NAME_BYTES} bytes"


def listing(model: type[BaseModel]) -> str:
    lines = ["Settings: flags, HOTKV_ variables, or a TOML file (--config); the first counts.", ""]
    for name, info in leaves(model):
        lines += [
            flag_of(name),
            f"    {info.description}",
            f"    Default: {shown_default(info)}. Variable: {variable_of(name)}",
        ]
    return "\n".join(lines)


def shown_default(info: FieldInfo) -> str:
    """As people write it."""
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "none, it must be set"
    if isinstance(value, ByteSize):
        for unit, size in BINARY_UNITS:
            if value and value % size == 0:
                return f"{value // size}{unit}"
        return str(int(value))
    if value is None:
        return "none"
    if isinstance(value, str | Path):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
