"""Keeps the contents of stored blocks (token ids, parent, adapter, extra keys) for later events.

An engine sends the token ids of a block only with the block's store. But the server also sends
events about the block later: when a tier moves it, when a new reader asks for the present state,
and after a restart. A router that matches prompts by tokens can't use such events without token
ids.

The contents are records in a ring buffer. A record has the contents of a run (consecutive blocks of
a sequence that were stored together; at most RUN_BLOCKS), or a name of a key space's model. The
ring is a file beside the arena, so that the next server can read it. The position of a record
counts the bytes that were written before it since the ring was made, so positions only grow. A
record never wraps around the end of the ring.

A store only queues its contents, so the event loop does not wait. A thread writes them into the
ring some milliseconds later. A method that reads contents writes the queued contents first.

If the ring is full, the oldest records are overwritten. Before an old record is overwritten, its
useful part is appended again as a new record: the contents of blocks that are still cached, or a
name of a key space that the server still knows. The number and bytes of such records per store are
limited.

Always true: the ring and the queue are bounded, and the file space of the ring is allocated before
it is written. If the server is killed, the record that it is writing is not read later, and the
queued contents are lost. Thread-safe.
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
"""Offset of the ring buffer in the file; the header is before it."""
HEADER: Final = struct.Struct("<8sqqq")
"""Header of the file: magic number, size of the ring buffer, position of the oldest record,
position after the newest record."""
PREFIX: Final = struct.Struct("<III")
"""First fields of each record: CRC-32 of the rest of the record, length of the whole record in
bytes, kind (FILLER, BLOCKS or NAME)."""
RUN: Final = struct.Struct("<32sIIIIII")
"""Fields after PREFIX in a record of kind BLOCKS: fingerprint of the key space, group, depth
(number of blocks before the record's blocks in their sequence), number of blocks, number of tokens,
bytes of the adapter's name, bytes of the extra keys. They are followed by the hash of the block
before, the hashes of the blocks, the token ids, the name and the extra keys."""
ALIGN: Final = 16
"""Lengths of records are multiples of this many bytes."""
GROWTH_BYTES: Final = 4 << 20
"""The ring buffer's size grows in steps of this many bytes."""
FILLER, BLOCKS, NAME = 0, 1, 2
"""Kinds of records. FILLER: unused bytes up to the end of the ring buffer. BLOCKS: a run
(consecutive blocks that were stored together). NAME: a name of a key space's model."""
MOST_MOVES = 64
"""Limits the work of adding a record to a full ring buffer. The old records that it overwrites are
appended again if their blocks are still cached: at most about this number of records, and at most
about an eighth of the ring buffer. If there are more such records, nearly all of the ring buffer is
about cached blocks, and there is no room for all of them. Then no records of blocks are appended
again until an eighth of the ring buffer has been overwritten."""
AT_BITS = 17
"""The index maps a block's hash to a number with two parts: the lowest AT_BITS bits are the number
of the block in its run, the higher bits are the position of the run's record in the ring buffer."""
RUN_BLOCKS = 128
"""Most blocks in a record. A longer run (consecutive blocks) gets several records. So each step of
an iteration over runs is short, although a step parses a whole record."""
NO_PARENT = bytes(32)
"""Stands in a record in place of the hash of the block before the run, if there is no such block or
it is not known."""

GATHER_S = 0.02
"""Time, in seconds, that the thread waits after contents were queued, before it writes them to the
ring buffer. So it wakes up once for several stores."""
MAX_QUEUED_BYTES = 8 << 20
"""If more bytes of contents than this are queued, because the thread can't keep up, the call that
queues them (`Contents.keep`) writes the oldest contents itself."""

_position = operator.attrgetter("position")
Present = Callable[[bytes, int, Words], BoolMask]
"""Returns a mask [n] of the blocks that are cached. Arguments: fingerprint of the key space, group,
hashes as uint32 words [n, 8]."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record in the ring buffer: a run (consecutive blocks), or a name of a key space's model.

    `position`: position of the record; see the module.
    `fingerprint`: fingerprint of the key space.
    `group_index`: KV cache group of the run; 0 for a name.
    `depth`: number of blocks before the run in its sequence; 0 for a name.
    `name`: the name of the model, which may be empty; None for a run.
    """

    position: int
    fingerprint: bytes
    group_index: int = 0
    depth: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run (consecutive blocks of a sequence) as it was stored.

    `fingerprint`: fingerprint of the key space (a model in a configuration).
    `group_index`: KV cache group of the blocks.
    `packed`: the bytes of the run's record, which `run` parses.
    `is_newest`: mask [n]; False for a block that a later record contains too.
    """

    fingerprint: bytes
    group_index: int
    packed: bytes
    is_newest: BoolMask

    @property
    def hashes(self) -> Words:
        """The blocks' hashes, uint32 words [n, 8]."""
        return _hashes(self.packed)

    def run(self) -> StoredEvent:
        """Parses the record and returns the run (consecutive blocks of a group). This takes longer
        than reading the other fields."""
        return _unpacked_run(self.packed)


class Contents:
    """Keeps the contents of stored blocks (token ids, parent, adapter, extra keys) in a ring
    buffer, and finds them; see the module.

    `path`: file of the ring; None: the ring is in private memory of the process.
    `max_bytes`: largest size of the ring. The index, which is in memory of the process, takes about
        200 further bytes for each block.
    `present`: returns which blocks are still cached (see `Present`). If the ring is full, the
        contents of cached blocks are kept longer than other contents.
    `known`: has the fingerprints of the key spaces that the server knows. If the ring is full,
        model names of other key spaces are dropped.
    """

    def __init__(
        self, path: Path | None, max_bytes: int, present: Present, known: Container[bytes] = ()
    ) -> None:
        self._max_bytes = max(max_bytes // GROWTH_BYTES, 1) * GROWTH_BYTES
        self._present = present
        self._known = known
        self._lock = threading.Lock()
        self._records: deque[_Record] = deque()
        # For each key space, and each depth (number of blocks before a run in its sequence): the
        # records of the runs, in the order of their positions. So `runs` can yield the runs of a
        # key space by depth without sorting all records first.
        self._by_depth: dict[bytes, dict[int, deque[_Record]]] = {}
        self._index: dict[tuple[bytes, int], dict[bytes, int]] = {}
        self._names: dict[bytes, list[str]] = {}
        self._tail = self._head = self._size = self._moves_from = 0
        # The contents that wait to be written, as (fingerprint of the key space, run, index of the
        # first block of the run that is not written yet).
        self._queue: deque[tuple[bytes, StoredEvent, int]] = deque()
        self._put_bytes = self._taken_bytes = 0
        self._has_work = threading.Event()
        self._is_closed = False
        self.unknown_blocks = 0
        """Number of blocks whose contents `find` did not know."""
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
        """Stops the thread, writes the queued contents and closes the file. Afterwards `keep` does
        nothing."""
        self._is_closed = True
        self._has_work.set()
        self._thread.join()
        with self._written():
            self._map.close()
            if self._fd != -1:
                os.close(self._fd)

    # Contents

    def keep(self, fingerprint: bytes, run: StoredEvent) -> None:
        """Queues the contents of a run (consecutive blocks) that was stored, so that the thread
        writes them into the ring buffer. Does nothing if the engine sent no token ids."""
        if not len(run.content.token_ids) or self._is_closed:
            return
        self._put_bytes += run.num_bytes
        self._queue.append((fingerprint, run, 0))
        while self._put_bytes - self._taken_bytes > MAX_QUEUED_BYTES:
            self._write_one()
        if not self._has_work.is_set():
            self._has_work.set()

    def is_alive(self) -> bool:
        """Returns False if the thread that writes the contents of blocks to the ring buffer has
        died."""
        return self._thread.is_alive()

    def find(
        self, fingerprint: bytes, group_index: int, hashes: list[bytes]
    ) -> tuple[list[StoredEvent], list[int]]:
        """Finds the contents of blocks. Returns two lists. The first has runs (consecutive blocks
        of a sequence) with the blocks whose contents are known; consecutive blocks of a record
        become one run. The second has the positions in `hashes` of the blocks whose contents are
        not known.

        `hashes`: the hash of each block, 32 bytes.
        """
        with self._written():
            index = self._index.get((fingerprint, group_index), {})
            places = [index.get(one) for one in hashes]
            unknown = [at for at, place in enumerate(places) if place is None]
            self.unknown_blocks += len(unknown)
            found: list[StoredEvent] = []
            known = sorted(place for place in places if place is not None)
            # Parse each record only once, even if it has many of the wanted blocks: a tier may move
            # thousands of blocks at a time.
            for position, of_record in itertools.groupby(known, lambda place: place >> AT_BITS):
                run = _unpacked_run(self._bytes_at(position))
                mask = np.zeros(len(run.hashes), np.bool_)
                mask[[place & ((1 << AT_BITS) - 1) for place in of_record]] = True
                found += [run.part(first, end) for first, end in edges(mask)]
        return found, unknown

    def add_name(self, fingerprint: bytes, name: str) -> None:
        """Records a name by which requests address the model of a key space (a model in a
        configuration), unless it was recorded before."""
        with self._lock:
            if name not in self._names.get(fingerprint, ()):
                text = name.encode()
                self._add(_packed(NAME, fingerprint + struct.pack("<I", len(text)) + text))

    def names(self, fingerprint: bytes) -> list[str]:
        """Returns the recorded names by which requests address the model of a key space (a model
        in a configuration)."""
        with self._lock:
            return list(self._names.get(fingerprint, ()))

    @property
    def num_blocks(self) -> int:
        """Number of blocks whose content (for example token ids) is known."""
        with self._written():
            return sum(map(len, self._index.values()))

    @property
    def head(self) -> int:
        """Position in the ring buffer after its newest record, at which the next record will be
        written."""
        with self._written():
            return self._head

    def runs(self, begin: int = 0, fingerprint: bytes | None = None) -> Iterator[KnownRun]:
        """Yields the runs (consecutive blocks of a sequence) whose records are at position `begin`
        or later, and also the runs that are added during the iteration. In a sequence, earlier
        blocks come first, unless their record was added during the iteration.

        Each step is short, because it reads only the list of records of one depth (number of blocks
        before the run in its sequence).

        `fingerprint`: the key space whose runs are yielded; None: all key spaces.
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
        """Returns the records in the ring buffer of a key space's runs (consecutive blocks) at one
        depth (number of blocks before the run in its sequence), with positions from `begin` to
        before `end`."""
        kept = self._by_depth.get(fingerprint, {}).get(depth)
        if not kept or kept[-1].position < begin:
            return []
        # Copy the deque to a list, because finding a place in the middle of a deque is slow.
        records = list(kept)
        places = (bisect.bisect_left(records, at, key=_position) for at in (begin, end))
        return records[slice(*places)]

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables in memory do not have exactly the records of the ring
        buffer."""
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
                # Release the GIL between two records, for the event loop.
                time.sleep(0)

    def _write_one(self) -> bool:
        """Writes the oldest contents in the queue (for example token ids of blocks) into the ring
        buffer, as one record. Returns False if the queue is empty afterwards."""
        with self._lock:
            if self._queue:
                self._write_next()
            return bool(self._queue)

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Context manager that holds the lock. Writes all queued contents into the ring buffer
        before the body of the `with` block is executed."""
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
        """Appends a record to the ring buffer. If the ring buffer is full, first drops old records.
        The blocks of dropped records that are still cached are appended again, before the new
        record. Ignores a record larger than a quarter of `max_bytes`. `packed`: the bytes of the
        record."""
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
        """Returns the position in the ring buffer at which a new record would end. `head`: the
        position after the newest record. `packed`: the bytes of the new record."""
        left = self._size - head % self._size
        return head + len(packed) + (0 if left >= len(packed) else left)

    def _grow(self, end: int) -> None:
        """Grows the ring buffer to at least `end` bytes, or to its largest size, which a ring
        buffer in private memory has from the start. Must not be called after the ring buffer has
        wrapped around (records were written from its beginning again)."""
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
        """Writes into the header of the file the ring buffer's size, the position of its oldest
        record, and the position after its newest record. Called only after the records to which the
        positions refer were written."""
        HEADER.pack_into(self._map, 0, MAGIC, self._size, self._tail, self._head)

    def _list(self, position: int, packed: bytes) -> None:
        """Adds a record in the ring buffer to the tables in memory: the index, the list of records,
        the names. Does nothing for a record of kind FILLER (unused bytes at the end of the ring
        buffer).

        `position`: position of the record in the ring buffer; see the module.
        `packed`: the bytes of the record.
        """
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
        """Returns the records to append again when this record is dropped. If the record is a name
        of a known key space, returns the record itself. If it is a run (consecutive blocks),
        selects the blocks of the run that are still cached and are in no newer record. Returns a
        new record for each unbroken sequence of such blocks."""
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
        """Returns a mask [n]: True for each block of a record that no later record of the ring
        buffer contains. `keys`: the blocks' hashes, 32 bytes each."""
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
            # Map the ring with its largest size at once: untouched pages use no memory.
            self._size = self._max_bytes
            return mmap.mmap(-1, START + self._size)
        if not self._size:
            os.posix_fallocate(self._fd, 0, START)
        return mmap.mmap(self._fd, START + self._size)

    def _read(self) -> None:
        """Reads the records that an earlier server has written into the ring buffer, up to the
        first damaged record."""
        magic, size, tail, head = HEADER.unpack_from(self._map)
        num_bytes = os.fstat(self._fd).st_size - START
        is_aligned = (size | tail | head) % ALIGN == 0
        if magic != MAGIC or not (
            is_aligned and 0 < size <= num_bytes and 0 <= tail <= head <= tail + size
        ):
            self._note()
            return
        self._size = size
        # The ring keeps its size even if the limit in the settings is lower now, and it can't grow
        # after it has wrapped.
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
        """Returns the bytes of the record at a position in the ring buffer; None if the record is
        damaged. `end`: position after the newest record."""
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
    """Returns the bytes of a record.

    `kind`: FILLER, BLOCKS or NAME.
    `body`: the bytes after the record's first fields (PREFIX).
    `length`: length of the record; 0: the least multiple of ALIGN that has room for the body.
    """
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
    """Parses the record of a run (consecutive blocks of a group) and returns the run. Its
    `key_space_id` is 0, because a record has only the fingerprint of the key space. `packed`: the
    bytes of the record."""
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
    """Returns the hashes of the blocks in the record of a run (consecutive blocks of a group),
    uint32 words [n, 8]. `packed`: the bytes of the record."""
    count = RUN.unpack_from(packed, PREFIX.size)[3]
    start = PREFIX.size + RUN.size + 32
    return np.frombuffer(packed, np.uint32, count * 8, start).reshape(-1, 8)


def _keys(packed: bytes) -> list[bytes]:
    """Returns the hashes of the blocks in the record of a run (consecutive blocks of a group), as
    bytes, 32 each. `packed`: the bytes of the record."""
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
