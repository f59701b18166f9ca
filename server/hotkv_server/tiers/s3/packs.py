"""Packs: objects of a bucket, each with the blocks of one write. A pack begins with a list of its
blocks; the blocks follow in the order of the list.

Always true:

- a pack is written once and never changed;
- the names of packs are unique, because a name contains the name of the node and a number. A name
  begins with a number that falls with time, so newer packs sort first;
- the list has a seal (checksum) that is seeded with the path of the pack. So a reader refuses
  the list of another pack, and bytes that are no list;
- a block is accepted only if its bytes match its seal, which is seeded with its key. So a wrong
  offset in the list does no harm.

The path of a pack is `blocks/1/{fingerprint}/{generation}/{name}`. A lifecycle rule of the bucket
removes objects below `blocks/`.
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
"""A key space in one generation (a number that each flush raises), as `{fingerprint}/{generation}`.
Its packs are in a folder of this name."""
Tags = NDArray[np.uint64]
"""Tags of keys: results of `tag`."""

BLOCKS = "blocks/1"
"""Folder of all packs. The number is the version of the format."""
MIN_PACK_BYTES = 4 << 20
"""Least size of the last pack of a write. If fewer bytes are left, they go into the preceding pack,
if there is one."""
_KEY = re.compile(rb"hotkv/1/([0-9A-Za-z_-]{1,64})/([0-9]{1,20})/")
_NAME = re.compile(r"([0-9]{16})-[0-9a-z]{1,32}-[0-9a-f]{1,16}-([0-9]{1,5})")
_LAST_US = 10**16 - 1
"""A pack's name begins with this number minus the pack's time in microseconds, so newer packs sort
first."""
_HEAD = struct.Struct("<4sIQ")
"""The first bytes of a pack's list of blocks, before the rows: magic number, zero, seal (checksum)
of the rows. Little endian."""
_MAGIC = b"hkvp"
_ROW = np.dtype([("tag", "<u8"), ("num_bytes", "<i8"), ("seal", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A pack (object with the blocks of a write), as its list of blocks describes it. The arrays
    have a row for each block, in the order of the blocks.

    `tags`: tags (hashes) of the blocks' keys, see `tag`.
    `begins`: byte offsets of the blocks in the object.
    `num_bytes`: sizes of the blocks.
    `seals`: seals (checksums) of the blocks.
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
        """The path of the pack's object."""
        return path_of(self.space, self.name)

    @property
    def age(self) -> int:
        """The age of the pack: a number that is greater for older packs (objects with blocks)."""
        return age_of(self.name)


def tag(key: bytes) -> int:
    """Returns the tag of a key: a 64-bit hash that represents the key in the list of a pack (object
    with blocks). If two keys have the same tag, a read of one key may get the block of the other;
    its seal (checksum) then does not match, and the result is CORRUPT."""
    return xxhash.xxh3_64_intdigest(key)


def space_of(key: bytes) -> Space | None:
    """Returns the key space (a model in a configuration) and generation (number that each flush
    raises) in a block's key; None if `key` is not the key of a block."""
    match = _KEY.match(key)
    return Space((b"%b/%b" % match.groups()).decode()) if match else None


def folder_of(space: Space) -> str:
    """Returns the path of the folder with the packs (objects with blocks) of a key space (a model
    in a configuration) in one generation (number that each flush raises)."""
    return f"{BLOCKS}/{space}"


def path_of(space: Space, name: str) -> str:
    """Returns the path of a pack (object with blocks) in the bucket."""
    return f"{BLOCKS}/{space}/{name}"


def new_name(now_us: int, node: str, number: int, count: int) -> str:
    """Returns the name for a new pack (object with blocks).

    `now_us`: the time of the wall clock in microseconds.
    `node`: name of the node that writes the pack.
    `number`: number of the pack among the packs that the node has written since its start.
    `count`: number of blocks in the pack.
    """
    return f"{_LAST_US - now_us:016d}-{node}-{number:x}-{count}"


def age_of(name: str) -> int:
    """Returns the age of a pack (object with blocks): a number that is greater for older packs.
    `name`: the pack's name, or at least its first 16 characters."""
    return int(name[:16])


def age_at(time_us: int) -> int:
    """Returns the age of a pack (object with blocks) that was made at `time_us`, in microseconds of
    the wall clock. As for `age_of`, the age is a number that is greater for older packs."""
    return _LAST_US - time_us


def list_bytes(name: str) -> int:
    """Returns the size of the list of blocks with which a pack (object with blocks) begins, in
    bytes. Computes it from the pack's name, which has the number of blocks. Returns 0 if `name` is
    not the name of a pack."""
    match = _NAME.fullmatch(name)
    return _HEAD.size + int(match[2]) * _ROW.itemsize if match else 0


def packed(
    space: Space, name: str, keys: Sequence[bytes], slots: Sequence[memoryview]
) -> tuple[Pack, bytearray]:
    """Makes a pack, the content of an object, of n blocks of a key space (a model in a
    configuration). Returns the pack, and the bytes to store as its object.

    `name`: name of the pack: a result of `new_name` for n blocks.
    `keys`: the keys of the blocks.
    `slots`: for each key, the memory with the block's bytes.
    """
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
    """Parses the list of blocks with which the object of a pack begins. Returns the pack; None if
    the list is damaged.

    `name`: name of the pack.
    `front`: the first `list_bytes(name)` bytes of the object.
    """
    if len(front) != list_bytes(name) or len(front) < _HEAD.size:
        return None
    magic, zero, sealed = _HEAD.unpack_from(front)
    listed = front[_HEAD.size :]
    if magic != _MAGIC or zero or sealed != seal(path_of(space, name).encode(), listed):
        return None
    return _pack(space, name, np.frombuffer(listed, _ROW))


def cut_packs(num_bytes: Int64s, pack_bytes: int) -> Iterator[slice]:
    """Splits the blocks of a write into parts, one for each pack (object with blocks). Yields each
    part as a slice. A part ends as soon as it has `pack_bytes` or more. The last part may have
    fewer bytes. If the last part would have fewer than MIN_PACK_BYTES, its blocks are added to the
    part before it, if there is one.

    `num_bytes`: size of each block, int64.
    `pack_bytes`: least size of a pack, in bytes of blocks.
    """
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
