"""The shared block table: its binary format, and how to probe it.

Only the server writes the file (`hotkv_server.cache.table.index`); who has its descriptor reads it
without a call. A lookup is a *hint*: a block may be evicted until a lease pins it.

The file has a header (4096 bytes), buckets and records of little-endian uint32. Entries are
numbered from 1 on.

A bucket has 64 bytes: sequence number (odd while the bucket is being written), overflow count, 7
tags, 7 entry words.
- A tag is 32 bits of the mixed hash of a hash's first 8 bytes and a *salt*, a number per key space
  and group or kind of sketch: equal hashes of two groups get different tags.
- An entry word is the entry's number, with the high bit set while it is reserved; 0: none.
- The mixed hash also chooses the home bucket (`home_buckets`). If it is full, the entry is in one
  of the next 63, and the overflow count of each bucket passed over grows.

A record has 72 bytes, indexed by entry number:
- hash (32 bytes, zero-padded), checksum (8 bytes), key space;
- group | state << 16;
- offset and size of the slot, in units of SLOT_ALIGN bytes;
- reuse count, parent's entry, depth;
- entry of the block's sketch; of a sketch, that of its block.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native

Words = NDArray[np.uint32]

MAGIC: Final = b"HOTKVTB1"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096
HEADER: Final = struct.Struct("<8sIIqqqq")
SLOT_ALIGN: Final = 4096
BUCKET_WORDS: Final = 16
WAYS: Final = 7
RECORD_WORDS: Final = 18
STATE_RESERVED: Final = 1
STATE_READY: Final = 2
STATE_DETACHED: Final = 3
"""Lookups can't find the entry, but its slot is still pinned."""
RESERVED_FLAG: Final = np.uint32(0x8000_0000)
TARGET_LOAD: Final = 0.7
MAX_PROBE_BUCKETS: Final = 64
SEQ, OVERFLOW, TAGS, ENTRIES = 0, 1, 2, 9
(
    W_CHECK,
    W_KEY_SPACE,
    W_GROUP_STATE,
    W_OFFSET,
    W_SIZE,
    W_REUSES,
    W_PARENT,
    W_DEPTH,
    W_SKETCH,
) = 8, 10, 11, 12, 13, 14, 15, 16, 17
_MULTIPLIER: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_MAX_RETRIES: Final = 1000


@dataclass(frozen=True, slots=True)
class TableGeometry:
    """The header of a table file.

    capacity: highest entry number; entry 0 is never used.
    epoch: changes when the server loses the cache's contents.
    arena_bytes: without the validity words.
    """

    num_buckets: int
    capacity: int
    epoch: int
    arena_bytes: int

    @staticmethod
    def for_capacity(capacity: int, epoch: int, arena_bytes: int) -> "TableGeometry":
        """`capacity` entries fill the share TARGET_LOAD of the buckets' places."""
        return TableGeometry(
            max(8, int(capacity / (WAYS * TARGET_LOAD)) + 1), capacity, epoch, arena_bytes
        )

    @property
    def records_offset_bytes(self) -> int:
        return HEADER_BYTES + self.num_buckets * BUCKET_WORDS * 4

    @property
    def file_bytes(self) -> int:
        return self.records_offset_bytes + (self.capacity + 1) * RECORD_WORDS * 4

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC, FORMAT_VERSION, 0, self.num_buckets, self.capacity, self.epoch, self.arena_bytes
        )

    @staticmethod
    def unpack(data: bytes | memoryview, file_bytes: int) -> "TableGeometry":
        """Raises ValueError for another format, or if the sizes do not fit into `file_bytes`."""
        if len(data) < HEADER.size:
            raise ValueError(
                f"block table has a header of {len(data)} bytes; it needs {HEADER.size}"
            )
        magic, version, _, num_buckets, capacity, epoch, arena_bytes = HEADER.unpack(
            bytes(data[: HEADER.size])
        )
        if magic != MAGIC or version != FORMAT_VERSION:
            raise ValueError(
                f"block table has magic {magic!r} version {version}; this software reads "
                f"{MAGIC!r} version {FORMAT_VERSION}"
            )
        geometry = TableGeometry(num_buckets, capacity, epoch, arena_bytes)
        if num_buckets <= 0 or capacity <= 0 or geometry.file_bytes > file_bytes:
            raise ValueError(
                f"block table header asks for {geometry.file_bytes} bytes, the file has "
                f"{file_bytes}"
            )
        return geometry


class BlockTable:
    """A mapped block table. Safe while the server writes.

    buckets: uint32 [num_buckets, 16], a view of the file.
    records: uint32 [capacity + 1, 18], a view of the file.
    """

    def __init__(self, mapping: NDArray[np.uint8], geometry: TableGeometry) -> None:
        self.geometry = geometry
        words = mapping[: geometry.file_bytes].view(np.uint32)
        start, end = HEADER_BYTES // 4, geometry.records_offset_bytes // 4
        self.buckets: Words = words[start:end].reshape(-1, BUCKET_WORDS)
        self.records: Words = words[end:].reshape(-1, RECORD_WORDS)
        self._kernels = native.load("hotkv_proto.table_reading")

    @staticmethod
    def open(mapping: NDArray[np.uint8]) -> "BlockTable":
        """Raises ValueError if the file does not have this format."""
        return BlockTable(
            mapping, TableGeometry.unpack(mapping[: HEADER.size].tobytes(), len(mapping))
        )

    def __repr__(self) -> str:
        return (
            f"BlockTable(capacity={self.geometry.capacity}, "
            f"buckets={self.geometry.num_buckets}, epoch={self.geometry.epoch:#x})"
        )

    def probe(self, prefixes: NDArray[np.uint64], salt: int) -> Words:
        """Looks hashes up by tag only. Entry word per hash, 0 for a miss. A false hit among n
        hashes has a probability below n · 2^-29.

        prefixes: first 8 bytes of each hash, uint64 [hashes].
        """
        if self._kernels is None:
            return probe_reference(self.buckets, prefixes, salt)
        out = np.empty(len(prefixes), np.uint32)
        self._kernels.probe(self.buckets, prefixes, np.uint64(salt), out)
        return out

    def ready(self, packed: bytes, hash_bytes: int, salt: int) -> NDArray[np.bool_]:
        """Mask of the ready blocks, as a hint. Takes microseconds for a thousand hashes.

        packed: the hashes, joined.
        """
        return is_ready(self.probe(hash_prefixes(packed, hash_bytes), salt))

    def find(self, hashes: Words, salt: int, key_space: int, group: int) -> Words:
        """Looks hashes up in whole. Entry word per hash, 0 for a miss. Raises ImportError without
        numba.

        hashes: [hashes, 8] of `hash_words`.
        key_space, group: numbers in the server's records.
        """
        out = np.empty(len(hashes), np.uint32)
        native.require("hotkv_proto.table_reading").find(
            self.buckets,
            self.records,
            hashes,
            np.uint64(salt),
            np.uint32(key_space),
            np.uint32(group),
            out,
        )
        return out


def is_ready(words: Words) -> NDArray[np.bool_]:
    """False for a miss and for a reserved entry."""
    ready: NDArray[np.bool_] = (words != 0) & (words < RESERVED_FLAG)
    return ready


def hash_prefixes(packed: bytes, hash_bytes: int) -> NDArray[np.uint64]:
    """First 8 bytes of each, uint64 [hashes]; without a copy if `hash_bytes` is a multiple of 8."""
    if hash_bytes % 8 == 0:
        return np.frombuffer(packed, np.uint64)[:: hash_bytes // 8]
    rows = np.frombuffer(packed, np.uint8).reshape(-1, hash_bytes)
    return np.ascontiguousarray(rows[:, :8]).view(np.uint64).reshape(-1)


def hash_words(packed: bytes, hash_bytes: int) -> Words:
    """Zero-padded uint32 [hashes, 8]."""
    if hash_bytes == 32:
        return np.frombuffer(packed, np.uint32).reshape(-1, 8)
    rows = np.frombuffer(packed, np.uint8).reshape(-1, hash_bytes)
    padded = np.zeros((len(rows), 32), np.uint8)
    padded[:, :hash_bytes] = rows
    return padded.view(np.uint32)


def mix(hashes: Words, salt: int) -> NDArray[np.uint64]:
    """Upper 32 bits choose the home bucket, lower 32 bits are the tag.

    hashes: uint32 [hashes, 8].
    """
    return mix_prefixes(hashes.view(np.uint64)[:, 0], salt)


def mix_prefixes(prefixes: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """`mix` of the hashes' first 8 bytes."""
    return (prefixes ^ np.uint64(salt)) * _MULTIPLIER


def home_buckets(mixed: NDArray[np.uint64], num_buckets: int) -> NDArray[np.int64]:
    return (((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)


def _stable_rows(buckets: Words, rows: NDArray[np.int64]) -> Words:
    """Copies buckets in a consistent state (`hotkv_proto.table_reading`); one that keeps
    changing is empty, with an odd sequence number."""
    copy = np.zeros((len(rows), BUCKET_WORDS), np.uint32)
    torn = np.arange(len(rows))
    for _ in range(_MAX_RETRIES):
        # A row is read in pieces, in any order: hence the sequence number before and after it.
        before = buckets[rows[torn], SEQ]
        copy[torn] = buckets[rows[torn]]
        torn = torn[(before & 1 == 1) | (buckets[rows[torn], SEQ] != before)]
        if not len(torn):
            return copy
    copy[torn] = 0
    copy[torn, SEQ] = 1
    return copy


def probe_reference(buckets: Words, prefixes: NDArray[np.uint64], salt: int) -> Words:
    """`kernels.probe` in numpy, for processes without numba."""
    mixed = mix_prefixes(np.ascontiguousarray(prefixes), salt)
    tags = (mixed & np.uint64(0xFFFF_FFFF)).astype(np.uint32)
    rows = home_buckets(mixed, len(buckets))
    out = np.zeros(len(mixed), np.uint32)
    open_items = np.arange(len(mixed))
    for _ in range(MAX_PROBE_BUCKETS):
        if not len(open_items):
            break
        lines = _stable_rows(buckets, rows[open_items])
        match = lines[:, TAGS : TAGS + WAYS] == tags[open_items, None]
        words = np.where(match, lines[:, ENTRIES : ENTRIES + WAYS], 0).max(axis=1)
        out[open_items] = words
        going_on = (words == 0) & (lines[:, OVERFLOW] > 0)
        open_items = open_items[going_on]
        rows[open_items] = (rows[open_items] + 1) % len(buckets)
    return out
