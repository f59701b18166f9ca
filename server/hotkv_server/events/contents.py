"""Keeps what engines send only once with a store: token ids, parent, adapter and extra keys of
blocks. Later events need them: after a move, for a new reader, after a restart.

A ring of records in a file beside the arena. A record is a run of at most RUN_BLOCKS blocks, or a
name of a key space's model; it never wraps. Positions count the bytes written since the ring was
made, so they only grow. A full ring overwrites its oldest records, but first appends again, within
limits, what is still cached or known.

A store only queues; a thread writes some ms later, and every reader writes the queue first.

Always true: ring and queue are bounded; file space is allocated before it is written; after a
kill, the half-written record is not read and the queue is lost. Thread-safe.
"""

import bisect
import contextlib
import itertools
import json
import logging
import mmap
import operator
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hotkv_proto.blocks import ExtraKey, RunContent
from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask
from hotkv_server.events.drive import StoredEvent, edges

log = logging.getLogger(__name__)

MAGIC: Final = b"HOTKVEC1"
START: Final = 4096
"""Offset of the ring in the file, behind the header."""
HEADER: Final = struct.Struct("<8sqqq")
"""Magic number, size of the ring, position of the oldest record, position after the newest."""
PREFIX: Final = struct.Struct("<III")
"""Begins each record: CRC-32 of what follows it, length of the record, kind."""
RUN: Final = struct.Struct("<32sIIIIII")
"""Follows PREFIX in a BLOCKS record: fingerprint, group, depth, number of blocks, number of
tokens, bytes of the adapter's name, bytes of the extra keys. Then: parent's hash, hashes, token
ids, name, extra keys."""
ALIGN: Final = 16
"""Of a record's length, in bytes."""
GROWTH_BYTES: Final = 4 << 20
FILLER, BLOCKS, NAME = 0, 1, 2
"""Kinds of records. FILLER: unused bytes at the end of the ring. BLOCKS: a run. NAME: a model's
name."""
MOST_MOVES = 64
"""Records appended again for one new record, and at most an eighth of the ring. If there are
more, the ring is nearly all cached blocks; then no run is appended again until an eighth of it
has been overwritten."""
AT_BITS = 17
"""The index's values: record's position << AT_BITS | number of the block in its run."""
RUN_BLOCKS = 128
"""Longer runs get several records: a step of an iteration parses a whole record."""
NO_PARENT = bytes(32)
"""In place of a parent's hash: none, or unknown."""

GATHER_S = 0.02
"""Pause of the thread before it writes, so that it wakes once for several stores."""
MAX_QUEUED_BYTES = 8 << 20
"""Above this `Contents.keep` itself writes the oldest contents: the thread can't keep up."""

_position = operator.attrgetter("position")
Present = Callable[[bytes, int, Words], BoolMask]
"""(fingerprint, group, words [n, 8]) → mask [n] of the cached blocks."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A run or a name in the ring.

    `group_index`, `depth`: 0 for a name.
    `name`: may be empty; None for a run.
    """

    position: int
    fingerprint: bytes
    group_index: int = 0
    depth: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run as it was stored.

    `packed`: its record.
    `is_newest`: mask [n]; False for a block that a later record has too.
    """

    fingerprint: bytes
    group_index: int
    packed: bytes
    is_newest: BoolMask

    @property
    def hashes(self) -> Words:
        return _hashes(self.packed)

    def run(self) -> StoredEvent:
        """Parses the record, which takes longer than the fields."""
        return _unpacked_run(self.packed)


class Contents:
    """The ring and its index.

    `path`: None: in private memory.
    `max_bytes`: of the ring. The index takes some 200 bytes more per block.
    `present`, `known`: what a full ring keeps longer: cached blocks, names of known key spaces.
    """

    def __init__(
        self, path: Path | None, max_bytes: int, present: Present, known: Container[bytes] = ()
    ) -> None:
        self._max_bytes = max(max_bytes // GROWTH_BYTES, 1) * GROWTH_BYTES
        self._present = present
        self._known = known
        self._lock = threading.Lock()
        self._records: deque[_Record] = deque()
        # Runs by key space and depth, in order of position: `runs` yields by depth without
        # sorting.
        self._by_depth: dict[bytes, dict[int, deque[_Record]]] = {}
        self._index: dict[tuple[bytes, int], dict[bytes, int]] = {}
        self._names: dict[bytes, list[str]] = {}
        self._tail = self._head = self._size = self._moves_from = 0
        # (fingerprint, run, index of its first block not yet written).
        self._queue: deque[tuple[bytes, StoredEvent, int]] = deque()
        self._put_bytes = self._taken_bytes = 0
        self._has_work = threading.Event()
        self._is_closed = False
        self.unknown_blocks = 0
        """Blocks that `find` did not know."""
        self._fd = (
            -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )
        self._map = self._mapped()
        if path is not None:
            self._read()
        self._thread = threading.Thread(target=self._run, name="hotkv-contents", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Contents({len(self._records)} runs, {self._head - self._tail} bytes)"

    def close(self) -> None:
        """Writes the queue; afterwards `keep` does nothing."""
        self._is_closed = True
        self._has_work.set()
        self._thread.join()
        with self._written():
            self._map.close()
            if self._fd != -1:
                os.close(self._fd)

    # Contents

    def keep(self, fingerprint: bytes, run: StoredEvent) -> None:
        """Does nothing if the engine sent no token ids."""
        if not len(run.content.token_ids) or self._is_closed:
            return
        self._put_bytes += run.num_bytes
        self._queue.append((fingerprint, run, 0))
        while self._put_bytes - self._taken_bytes > MAX_QUEUED_BYTES:
            self._write_one()
        if not self._has_work.is_set():
            self._has_work.set()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def find(
        self, fingerprint: bytes, group_index: int, hashes: list[bytes]
    ) -> tuple[list[StoredEvent], list[int]]:
        """Runs of the known blocks (consecutive blocks of a record form one), and the positions
        in `hashes` (32 bytes each) of the unknown ones."""
        with self._written():
            index = self._index.get((fingerprint, group_index), {})
            places = [index.get(one) for one in hashes]
            unknown = [at for at, place in enumerate(places) if place is None]
            self.unknown_blocks += len(unknown)
            found: list[StoredEvent] = []
            known = sorted(place for place in places if place is not None)
            # Parse each record once: a tier may move thousands of blocks at a time.
            for position, of_record in itertools.groupby(known, lambda place: place >> AT_BITS):
                run = _unpacked_run(self._bytes_at(position))
                mask = np.zeros(len(run.hashes), np.bool_)
                mask[[place & ((1 << AT_BITS) - 1) for place in of_record]] = True
                found += [run.part(first, end) for first, end in edges(mask)]
        return found, unknown

    def add_name(self, fingerprint: bytes, name: str) -> None:
        with self._lock:
            if name not in self._names.get(fingerprint, ()):
                text = name.encode()
                self._add(_packed(NAME, fingerprint + struct.pack("<I", len(text)) + text))

    def names(self, fingerprint: bytes) -> list[str]:
        """Names by which requests address the key space's model."""
        with self._lock:
            return list(self._names.get(fingerprint, ()))

    @property
    def num_blocks(self) -> int:
        with self._written():
            return sum(map(len, self._index.values()))

    @property
    def head(self) -> int:
        """Position after the newest record."""
        with self._written():
            return self._head

    def runs(self, begin: int = 0, fingerprint: bytes | None = None) -> Iterator[KnownRun]:
        """Yields runs at position `begin` or later, also those added meanwhile. Earlier blocks of a
        sequence come first, unless they were added meanwhile. Steps are short: each reads the list
        of one depth.

        `fingerprint`: None: all key spaces.
        """
        while True:
            with self._written():
                end = self._head
                places = [
                    (one, depth)
                    for one in (self._by_depth if fingerprint is None else (fingerprint,))
                    for depth in sorted(self._by_depth.get(one, ()))
                ]
            if end == begin:
                return
            for one, depth in places:
                with self._lock:
                    records = self._between(one, depth, begin, end)
                for record in records:
                    with self._lock:
                        if record.position < self._tail:
                            continue
                        packed = self._bytes_at(record.position)
                        is_newest = self._is_newest(record, _keys(packed))
                    yield KnownRun(one, record.group_index, packed, is_newest)
            begin = end

    def _between(self, fingerprint: bytes, depth: int, begin: int, end: int) -> list[_Record]:
        """Records at positions from `begin` to before `end`."""
        kept = self._by_depth.get(fingerprint, {}).get(depth)
        if not kept or kept[-1].position < begin:
            return []
        # A deque is slow in its middle.
        records = list(kept)
        places = (bisect.bisect_left(records, at, key=_position) for at in (begin, end))
        return records[slice(*places)]

    def check_invariants(self) -> None:
        """The tables have exactly the records of the ring."""
        with self._written():
            runs = {one.position: one for one in self._records if one.name is None}
            lists = [one for depths in self._by_depth.values() for one in depths.values()]
            listed = [record for records in lists for record in records]
            assert all(lists) and all(self._by_depth.values()), "an empty list is kept"
            assert {one.position: one for one in listed} == runs, "runs by depth and records differ"
            assert len(listed) == len(runs), "a run is listed twice"
            assert all(self._index.values()), "an empty index is kept"
            places = [place for index in self._index.values() for place in index.values()]
            assert {place >> AT_BITS for place in places} <= runs.keys(), "a block has no record"
            named = sorted(
                (one.fingerprint, one.name) for one in self._records if one.name is not None
            )
            names = sorted((key, name) for key, names in self._names.items() for name in names)
            assert named == names, "names and records differ"

    # The queue

    def _run(self) -> None:
        while not self._is_closed:
            self._has_work.wait()
            self._has_work.clear()
            time.sleep(GATHER_S)
            while self._write_one():
                # Let the event loop have the GIL.
                time.sleep(0)

    def _write_one(self) -> bool:
        """False if the queue is empty afterwards."""
        with self._lock:
            if self._queue:
                self._write_next()
            return bool(self._queue)

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Holds the lock, with the queue written."""
        with self._lock:
            while self._queue:
                self._write_next()
            yield

    def _write_next(self) -> None:
        fingerprint, run, first = self._queue.popleft()
        end = first + RUN_BLOCKS
        if end < len(run.hashes):
            self._queue.appendleft((fingerprint, run, end))
        else:
            self._taken_bytes += run.num_bytes
        self._add(_packed_run(fingerprint, run.part(first, end)))

    # The ring

    def _add(self, packed: bytes) -> None:
        """Ignores a record larger than a quarter of `max_bytes`."""
        if len(packed) > self._max_bytes // 4:
            return
        if self._head <= self._size < self._head + len(packed):
            self._grow(self._head + len(packed))
        if not self._size:
            return
        moved, end = list[bytes](), self._head
        while self._end_of(packed, end) - self._tail > self._size:
            if not self._records:
                return
            if len(moved) >= MOST_MOVES or end - self._head >= self._size // 8:
                self._moves_from = self._head + self._size // 8
            has_room = end - self._head < self._size // 2
            kept = self._still_of_use(self._records[0]) if has_room else []
            self._drop_oldest()
            for one in kept:
                end = self._end_of(one, end)
            moved += kept
        for one in (*moved, packed):
            self._append(one)

    def _end_of(self, packed: bytes, head: int) -> int:
        """Where a record appended at `head` would end, behind a filler if need be."""
        left = self._size - head % self._size
        return head + len(packed) + (0 if left >= len(packed) else left)

    def _grow(self, end: int) -> None:
        """Must not be called after the ring has wrapped."""
        size = min(-(-end // GROWTH_BYTES) * GROWTH_BYTES, self._max_bytes)
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._fd, 0, START + size)
        except OSError as error:
            log.warning(
                "contents of blocks for events stay at %d bytes: %s", self._size, error.strerror
            )
            self._max_bytes = self._size
            return
        self._size = size
        self._map = self._mapped()
        self._note()

    def _append(self, packed: bytes) -> None:
        left = self._size - self._head % self._size
        if left < len(packed):
            self._write(_packed(FILLER, b"", left))
        position = self._head
        self._write(packed)
        self._list(position, packed)

    def _write(self, packed: bytes) -> None:
        start = START + self._head % self._size
        self._map[start : start + len(packed)] = packed
        self._head += max(len(packed), PREFIX.unpack_from(packed)[1])
        self._note()

    def _note(self) -> None:
        """Updates the header, only after the records that it refers to are written."""
        HEADER.pack_into(self._map, 0, MAGIC, self._size, self._tail, self._head)

    def _list(self, position: int, packed: bytes) -> None:
        """Enters a record into the tables; fillers are skipped."""
        kind = PREFIX.unpack_from(packed)[2]
        if kind == BLOCKS:
            fingerprint, group_index, depth, *_ = RUN.unpack_from(packed, PREFIX.size)
            record = _Record(position, fingerprint, group_index, depth)
            self._records.append(record)
            self._by_depth.setdefault(fingerprint, {}).setdefault(depth, deque()).append(record)
            index = self._index.setdefault((fingerprint, group_index), {})
            keys, base = _keys(packed), position << AT_BITS
            index.update(zip(keys, range(base, base + len(keys)), strict=True))
        elif kind == NAME:
            fingerprint, name = _unpacked_name(packed)
            self._records.append(_Record(position, fingerprint, name=name))
            if name not in (names := self._names.setdefault(fingerprint, [])):
                names.append(name)

    def _drop_oldest(self) -> None:
        record = self._records.popleft()
        if record.name is not None:
            names = self._names[record.fingerprint]
            names.remove(record.name)
            if not names:
                del self._names[record.fingerprint]
        else:
            depths = self._by_depth[record.fingerprint]
            depths[record.depth].popleft()
            if not depths[record.depth]:
                del depths[record.depth]
            if not depths:
                del self._by_depth[record.fingerprint]
            index = self._index[record.fingerprint, record.group_index]
            base = record.position << AT_BITS
            for at, key in enumerate(_keys(self._bytes_at(record.position))):
                if index.get(key) == base | at:
                    del index[key]
            if not index:
                del self._index[record.fingerprint, record.group_index]
        self._tail = self._records[0].position if self._records else self._head
        self._note()

    def _still_of_use(self, record: _Record) -> list[bytes]:
        """What to append again when this record is dropped: a known key space's name, or one
        record per unbroken sequence of blocks that are cached and in no newer record."""
        if record.name is not None:
            is_known = record.fingerprint in self._known
            return [self._bytes_at(record.position)] if is_known else []
        if self._head < self._moves_from:
            return []
        packed = self._bytes_at(record.position)
        run, mask = _unpacked_run(packed), self._is_newest(record, _keys(packed))
        if mask.any():
            mask &= self._present(record.fingerprint, record.group_index, run.hashes)
        return [_packed_run(record.fingerprint, run.part(first, end)) for first, end in edges(mask)]

    def _is_newest(self, record: _Record, keys: list[bytes]) -> BoolMask:
        """Mask [n] of blocks that no later record has."""
        index = self._index.get((record.fingerprint, record.group_index), {})
        base = record.position << AT_BITS
        return np.array(
            [index.get(key) == base + at for at, key in enumerate(keys)],
            np.bool_,
        )

    def _bytes_at(self, position: int) -> bytes:
        start = START + position % self._size
        length = PREFIX.unpack_from(self._map, start)[1]
        return bytes(self._map[start : start + length])

    def _mapped(self) -> mmap.mmap:
        if self._fd == -1:
            # Its largest size at once: untouched pages use no memory.
            self._size = self._max_bytes
            return mmap.mmap(-1, START + self._size)
        if not self._size:
            os.posix_fallocate(self._fd, 0, START)
        return mmap.mmap(self._fd, START + self._size)

    def _read(self) -> None:
        """Reads an earlier server's records, up to the first damaged one."""
        magic, size, tail, head = HEADER.unpack_from(self._map)
        num_bytes = os.fstat(self._fd).st_size - START
        is_aligned = (size | tail | head) % ALIGN == 0
        if magic != MAGIC or not (
            is_aligned and 0 < size <= num_bytes and 0 <= tail <= head <= tail + size
        ):
            self._note()
            return
        self._size = size
        # Keeps its size even if the setting is lower now; once wrapped it can't grow.
        self._max_bytes = max(size, self._max_bytes) if head <= size else size
        self._map = self._mapped()
        self._tail = self._head = tail
        while self._head < head:
            packed = self._checked_at(self._head, head)
            if packed is None:
                log.warning("contents of blocks for events are damaged behind %d", self._head)
                break
            self._list(self._head, packed)
            self._head += len(packed)
        self._note()

    def _checked_at(self, position: int, end: int) -> bytes | None:
        """None if the record is damaged. `end`: position after the newest record."""
        start = START + position % self._size
        crc, length, kind = PREFIX.unpack_from(self._map, start)
        left = self._size - position % self._size
        if not ALIGN <= length <= min(left, end - position) or length % ALIGN:
            return None
        packed = bytes(self._map[start : start + length])
        if kind == FILLER:
            return packed
        return packed if zlib.crc32(packed[4:]) == crc else None


# Records


def _packed(kind: int, body: bytes, length: int = 0) -> bytes:
    """`length`: 0: the least multiple of ALIGN that holds the body."""
    length = length or -(-(PREFIX.size + len(body)) // ALIGN) * ALIGN
    padding = b"" if kind == FILLER else bytes(length - PREFIX.size - len(body))
    head = struct.pack("<II", length, kind)
    crc = zlib.crc32(padding, zlib.crc32(body, zlib.crc32(head)))
    return b"".join((struct.pack("<I", crc), head, body, padding))


def _unpacked_name(packed: bytes) -> tuple[bytes, str]:
    start = PREFIX.size + 32
    (length,) = struct.unpack_from("<I", packed, start)
    return packed[PREFIX.size : start], packed[start + 4 : start + 4 + length].decode()


def _packed_run(fingerprint: bytes, run: StoredEvent) -> bytes:
    content = run.content
    name = content.lora_name.encode()
    keys = json.dumps([_plain_keys(one) for one in content.extra_keys]).encode()
    head = RUN.pack(
        fingerprint,
        run.group_index,
        run.depth,
        len(run.hashes),
        len(content.token_ids),
        len(name),
        len(keys),
    )
    parent = NO_PARENT if run.parent is None else run.parent.tobytes()
    tokens = content.token_ids.astype("<i4").tobytes()
    return _packed(BLOCKS, b"".join((head, parent, run.hashes.tobytes(), tokens, name, keys)))


def _unpacked_run(packed: bytes) -> StoredEvent:
    """Its `key_space_id` is 0: a record has only the fingerprint."""
    _, group_index, depth, count, num_tokens, name_length, keys_length = RUN.unpack_from(
        packed, PREFIX.size
    )
    at = PREFIX.size + RUN.size
    parent = packed[at : at + 32]
    hashes = np.frombuffer(packed, np.uint32, count * 8, at + 32).reshape(-1, 8)
    at += 32 + count * 32
    tokens = np.frombuffer(packed, "<i4", num_tokens, at).astype(np.int32)
    at += num_tokens * 4
    name = packed[at : at + name_length].decode()
    at += name_length
    keys = json.loads(packed[at : at + keys_length])
    return StoredEvent(
        0,
        group_index,
        hashes,
        None if parent == NO_PARENT else np.frombuffer(parent, np.uint32),
        depth,
        RunContent(tokens, name, tuple(map(_read_keys, keys))),
    )


def _hashes(packed: bytes) -> Words:
    count = RUN.unpack_from(packed, PREFIX.size)[3]
    start = PREFIX.size + RUN.size + 32
    return np.frombuffer(packed, np.uint32, count * 8, start).reshape(-1, 8)


def _keys(packed: bytes) -> list[bytes]:
    """32 bytes each."""
    count = RUN.unpack_from(packed, PREFIX.size)[3]
    keys: list[bytes] = np.frombuffer(packed, "V32", count, PREFIX.size + RUN.size + 32).tolist()
    return keys


def _plain_keys(keys: tuple[ExtraKey, ...] | None) -> Any:
    return keys and [{"bytes": key.hex()} if isinstance(key, bytes) else key for key in keys]


def _read_keys(keys: Any) -> tuple[ExtraKey, ...] | None:
    def key(one: Any) -> ExtraKey:
        if isinstance(one, dict):
            return bytes.fromhex(one["bytes"])
        return one if isinstance(one, str) else (str(one[0]), int(one[1]))

    return tuple(map(key, keys)) if keys else None
