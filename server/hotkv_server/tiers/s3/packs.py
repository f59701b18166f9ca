"""Packs: a list of blocks, then the blocks in its order.

Always true:

- a pack is written once and never changed;
- names are unique, by node and number, and newer ones sort first;
- the list's seal is seeded with the path, so another pack's list is refused;
- a block must match its seal, seeded with its key, so a wrong offset does no harm.

The path is `blocks/1/{fingerprint}/{generation}/{name}`. A lifecycle rule of the bucket removes
objects below `blocks/`.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import xxhash
from numpy.typing import NDArray

from hotkv_server.tiers.protocol import Int64s
from hotkv_server.tiers.seals import seal

Space = NewType("Space", str)
"""A key space in one generation: `{fingerprint}/{generation}`, the folder of its packs."""
Tags = NDArray[np.uint64]

BLOCKS = "blocks/1"
"""The number is the format's version."""
MIN_PACK_BYTES = 4 << 20
"""Least size of a write's last pack, or it joins the one before."""
_KEY = re.compile(rb"hotkv/1/([0-9A-Za-z_-]{1,64})/([0-9]{1,20})/")
_NAME = re.compile(r"([0-9]{16})-[0-9a-z]{1,32}-[0-9a-f]{1,16}-([0-9]{1,5})")
_LAST_US = 10**16 - 1
"""Minus the time in microseconds: begins a name, so newer packs sort first."""
_HEAD = struct.Struct("<4sIQ")
"""Before the list's rows: magic number, zero, seal of the rows. Little endian."""
_MAGIC = b"hkvp"
_ROW = np.dtype([("tag", "<u8"), ("num_bytes", "<i8"), ("seal", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A row for each block, in their order.

    `tags`: of the keys.
    `begins`: byte offsets in the object.
    """

    space: Space
    name: str
    tags: Tags
    begins: Int64s
    num_bytes: Int64s
    seals: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def path(self) -> str:
        return path_of(self.space, self.name)

    @property
    def age(self) -> int:
        """Greater for older packs."""
        return age_of(self.name)


def tag(key: bytes) -> int:
    """64-bit hash of a key. If two keys share it, the seal does not match: CORRUPT."""
    return xxhash.xxh3_64_intdigest(key)


def space_of(key: bytes) -> Space | None:
    """None if it is not a block's key."""
    match = _KEY.match(key)
    return Space((b"%b/%b" % match.groups()).decode()) if match else None


def folder_of(space: Space) -> str:
    return f"{BLOCKS}/{space}"


def path_of(space: Space, name: str) -> str:
    return f"{BLOCKS}/{space}/{name}"


def new_name(now_us: int, node: str, number: int, count: int) -> str:
    """`number`: among the node's packs since its start. `count`: of blocks."""
    return f"{_LAST_US - now_us:016d}-{node}-{number:x}-{count}"


def age_of(name: str) -> int:
    """Greater for older packs. 16 characters of the name suffice."""
    return int(name[:16])


def age_at(time_us: int) -> int:
    """Age of a pack made at this wall-clock time."""
    return _LAST_US - time_us


def list_bytes(name: str) -> int:
    """Size of a pack's list, from the number of blocks in its name; 0 if it is not a pack's
    name."""
    match = _NAME.fullmatch(name)
    return _HEAD.size + int(match[2]) * _ROW.itemsize if match else 0


def packed(
    space: Space, name: str, keys: Sequence[bytes], slots: Sequence[memoryview]
) -> tuple[Pack, bytearray]:
    """A pack of these blocks and its object's bytes. `name`: from `new_name`."""
    rows = np.empty(len(keys), _ROW)
    rows["tag"] = [tag(key) for key in keys]
    rows["num_bytes"] = [len(slot) for slot in slots]
    rows["seal"] = [seal(key, slot) for key, slot in zip(keys, slots, strict=True)]
    pack = _pack(space, name, rows)
    listed = rows.tobytes()
    body = bytearray(list_bytes(name) + int(rows["num_bytes"].sum()))
    _HEAD.pack_into(body, 0, _MAGIC, 0, seal(pack.path.encode(), listed))
    body[_HEAD.size : _HEAD.size + len(listed)] = listed
    view = memoryview(body)
    for begin, slot in zip(pack.begins.tolist(), slots, strict=True):
        view[begin : begin + len(slot)] = slot
    return pack, body


def parsed(space: Space, name: str, front: memoryview) -> Pack | None:
    """None if the list is damaged. `front`: the object's first `list_bytes(name)` bytes."""
    if len(front) != list_bytes(name) or len(front) < _HEAD.size:
        return None
    magic, zero, sealed = _HEAD.unpack_from(front)
    listed = front[_HEAD.size :]
    if magic != _MAGIC or zero or sealed != seal(path_of(space, name).encode(), listed):
        return None
    return _pack(space, name, np.frombuffer(listed, _ROW))


def cut_packs(num_bytes: Int64s, pack_bytes: int) -> Iterator[slice]:
    """Slices of a write, one per pack of `pack_bytes` or more. Only the last may be smaller;
    below MIN_PACK_BYTES it joins the one before."""
    ends, begin, total = list[int](), 0, 0
    for at, size in enumerate(num_bytes.tolist()):
        total += size
        if total >= pack_bytes:
            ends.append(at + 1)
            total = 0
    if total:
        if ends and total < MIN_PACK_BYTES:
            ends.pop()
        ends.append(len(num_bytes))
    for end in ends:
        yield slice(begin, end)
        begin = end


def _pack(space: Space, name: str, rows: NDArray[np.void]) -> Pack:
    num_bytes = rows["num_bytes"].astype(np.int64)
    begins = list_bytes(name) + np.cumsum(num_bytes) - num_bytes
    tags, seals = rows["tag"].astype(np.uint64), rows["seal"].astype(np.uint64)
    return Pack(space, name, tags, begins, num_bytes, seals)
