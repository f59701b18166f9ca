"""The state file: the server's key spaces, which the next server needs to interpret the blocks.

Always true: it is replaced as a whole. A file of another format version, or one that contradicts
itself, is refused, never read in part. `node.persistence` replaces it before the first block of
a new key space can be stored: unless a write failed, it has the key space of every ready block.
"""

import itertools
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_server.cache.values import KEY_SPACE_ROWS

FORMAT_VERSION = 1
MAX_NUMBER = 1 << 31
"""Of key spaces in a file. Records have 32 bits, so the greater numbers of new key spaces fit
too."""
MAX_BYTES = 1 << 30
"""Longest file that `read_file` reads by default."""
_texts: WeakKeyDictionary[KeySpace, str] = WeakKeyDictionary()
"""Computed once: all are written whenever one is added."""


class StateError(Exception):
    """The state file can't be used."""


@dataclass(frozen=True, slots=True)
class KnownKeySpace:
    """number: in the server that wrote the file.
    sketches: in the order of their group indices.
    """

    number: int
    key_space: KeySpace
    sketches: tuple[Sketch, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerState:
    """Key spaces are in the order of their numbers."""

    slab_bytes: int
    key_spaces: tuple[KnownKeySpace, ...] = ()


def write_state(path: Path, state: ServerState, *, sync: bool = False) -> None:
    """After an OSError the file has the old or the new content, complete. `sync`: waits for the
    disk."""
    begin = f'{{"format": {FORMAT_VERSION}, "slab_bytes": {state.slab_bytes}, "key_spaces": ['
    entries = ("," * (at > 0) + _entry(known) for at, known in enumerate(state.key_spaces))
    replace_file(path, itertools.chain([begin], entries, ["]}"]), sync=sync)


def replace_file(
    path: Path, pieces: Iterable[str | bytes | memoryview], *, sync: bool = False
) -> None:
    """As a whole. After an OSError the old file is unchanged and nothing is left of the new one,
    unless the sync of the directory has failed. `sync`: waits for the disk."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.unlink(missing_ok=True)
    fd = os.open(
        scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    if sync:
        # Else the old file may come back after a power loss.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Raises OSError if the file can't be read or is a link, ValueError if it is no regular file
    or longer than `max_bytes`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return file.read(max_bytes)


def _entry(known: KnownKeySpace) -> str:
    text = _texts.get(known.key_space)
    if text is None:
        text = _texts[known.key_space] = json.dumps(asdict(known.key_space))
    kinds = json.dumps([asdict(kind) for kind in known.sketches])
    fingerprint = known.key_space.fingerprint.hex()
    return (
        f'{{"number": {known.number}, "fingerprint": "{fingerprint}", "key_space": {text}, '
        f'"sketches": {kinds}}}'
    )


def read_state(path: Path) -> ServerState:
    """Raises StateError if the file is missing, foreign or damaged; OSError if it can't be read
    at the moment."""
    try:
        content = json.loads(read_file(path))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise StateError(f"{path.name}: {error}") from error
    if not isinstance(content, Mapping) or content.get("format") != FORMAT_VERSION:
        found = content.get("format") if isinstance(content, Mapping) else None
        raise StateError(f"{path.name} has format {found!r}; this version reads {FORMAT_VERSION}")
    try:
        known = tuple(_known(entry) for entry in content["key_spaces"])
        state = ServerState(int(content["slab_bytes"]), known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"{path.name} is damaged: {type(error).__name__} {error}") from error
    numbers = [entry.number for entry in known]
    if numbers != sorted(set(numbers)):
        raise StateError(f"{path.name} is damaged: key spaces are numbered out of order")
    # The core's arrays have a row `number % KEY_SPACE_ROWS` for each: no two may share one, and
    # row 0 is for none.
    rows = {0, *(number % KEY_SPACE_ROWS for number in numbers)}
    if len(rows) <= len(numbers) or (numbers and not 0 < numbers[0] <= numbers[-1] < MAX_NUMBER):
        raise StateError(f"{path.name} is damaged: key spaces have impossible numbers")
    if len({entry.key_space.fingerprint for entry in known}) < len(known):
        raise StateError(f"{path.name} is damaged: a key space is there twice")
    return state


def _known(entry: Mapping[str, Any]) -> KnownKeySpace:
    fields = dict(entry["key_space"])
    groups = tuple(
        GroupSpec(
            **{
                **group,
                **_tuples(group, "shard_bytes", "layer_names"),
                "kind": GroupKind(group["kind"]),
            }
        )
        for group in fields.pop("groups")
    )
    key_space = KeySpace(**{**fields, **_tuples(fields, "extra"), "groups": groups})
    if key_space.fingerprint.hex() != entry["fingerprint"]:
        raise ValueError("a key space does not have its fingerprint")
    kinds = tuple(Sketch(**{**kind, **_tuples(kind, "shard_bytes")}) for kind in entry["sketches"])
    return KnownKeySpace(int(entry["number"]), key_space, kinds)


def _tuples(fields: Mapping[str, Any], *names: str) -> dict[str, tuple[Any, ...]]:
    """JSON has read tuples as lists."""
    return {name: tuple(fields[name]) for name in names if name in fields}
