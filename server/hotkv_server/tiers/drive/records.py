"""The disk tier's records, from which the next server restores it: block table, key spaces, recent
writes. They are in memory; a thread writes changes to files.

Always true:

- the event loop neither opens nor maps a file of the tier, so a disk that hangs stops only the
  thread;
- a block moves to the disk only after its key space is in a file (`kept_revision`);
- a kill during the start leaves the old table: the new one is a separate file until it is complete;
- a wrong record does no harm: each read compares the bytes with the seal. So the file may be
  older than the table, by KEEP_S and what the disk takes.
"""

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import RECORD_WORDS, SLOT_ALIGN, BlockTable, TableGeometry
from hotkv_server.cache.values import Entries
from hotkv_server.memory.arena import lock_file
from hotkv_server.memory.state import (
    ServerState,
    StateError,
    read_file,
    read_state,
    replace_file,
    write_state,
)

LOCK_FILE, STATE_FILE, TABLE_FILE, NEW_TABLE_FILE = "lock", "state.json", "records", "records.new"
WRITTEN_FILE = "written.json"
Written = list[tuple[float, int]]
"""(seconds since 1970, bytes) of writes to the disk."""
MODE = 0o600
KEEP_S = 0.5
"""Least time between two searches of the whole table for changes."""
MAX_LOOK_SHARE = 0.02
"""Largest share of the thread's time for these searches, so a large table is searched less
often."""
RETRY_S = 1.0
"""Pause after a failed write."""
RECORD_BYTES = RECORD_WORDS * 4
PART_BYTES, READ_BYTES = 64 << 10, 16 << 20
SYNCED_PARTS = 256
"""Parts of a new table between two syncs. A slow disk takes seconds for a large table; each sync
shows that it does not hang."""
CLOSE_WAIT_S = 5.0
_ZEROS = bytes(PART_BYTES)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class LowerMemory:
    """See the module.

    `table`: empty until the core fills it.
    `old`: an earlier server's table; None if there is no usable one, and after `start`.
    `state`: key spaces and slab size of `old`.
    `why_empty`: why the old table is unusable; "" if it is usable or there was none.
    `kept_revision`: of the key spaces in the file; -1 before the first write.
    `problem`: why the last write failed, or "".
    `num_changed`: records that `changed` has reported.
    `num_saved`: those of them in the file.
    """

    folder: Path
    slab_bytes: int
    num_bytes: int
    table: BlockTable
    old: BlockTable | None
    state: ServerState | None
    why_empty: str
    _bytes: NDArray[np.uint8]
    _lock_fd: int
    kept_revision: int = -1
    problem: str = ""
    num_changed: int = 0
    num_saved: int = 0
    _wanted: tuple[int, ServerState] | None = None
    _admitted: Written | None = None
    _noted: Written | None = None
    _sums: NDArray[np.uint64] | None = None
    _keeps_numbers: bool = False
    _begun_s: float = 0.0
    _thread: threading.Thread | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _asked: threading.Event = field(default_factory=threading.Event)
    _waiting: "deque[Future[None]]" = field(default_factory=deque)
    _changed: "deque[Entries]" = field(default_factory=deque)

    @staticmethod
    def open(
        folder: Path, num_bytes: int, slab_bytes: int, capacity: int, *, reset: bool = False
    ) -> "LowerMemory":
        """Locks the folder, makes a new table, reads the old one. Blocking. Raises BusyError if
        another server uses the folder, or OSError.

        `num_bytes`: rounded down to whole slabs.
        `slab_bytes`: a usable old table's is used instead.
        `reset`: first removes the old table.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = lock_file(folder / LOCK_FILE)
        try:
            if reset:
                for name in (STATE_FILE, TABLE_FILE):
                    (folder / name).unlink(missing_ok=True)
            old, state, why_empty = _left(folder, num_bytes)
            slab_bytes = slab_bytes if state is None else state.slab_bytes
            num_bytes = num_bytes // slab_bytes * slab_bytes
            geometry = TableGeometry.for_capacity(capacity, 1, num_bytes)
            # Now, so that a server that can't write the folder does not start.
            _new_file(folder / NEW_TABLE_FILE, geometry.file_bytes)
        except BaseException:
            os.close(lock_fd)
            raise
        view, header = _memory(geometry.file_bytes), geometry.pack()
        view[: len(header)] = memoryview(header)
        table = BlockTable(view, geometry)
        return LowerMemory(
            folder, slab_bytes, num_bytes, table, old, state, why_empty, view, lock_fd
        )

    def start(self, revision: int, state: ServerState) -> None:
        """Starts the thread, once the core has filled the table. It replaces the old table's file
        and writes `state`, then changes.

        `revision`: becomes `kept_revision`.
        """
        self._keeps_numbers = self.state is not None and _agree(self.state, state)
        self.old = self.state = None
        self._wanted = (revision, state)
        self._thread = threading.Thread(target=self._work, name="hotkv-disk-records", daemon=True)
        self._thread.start()

    def keep(self, revision: int, state: ServerState) -> None:
        """Has the thread write these key spaces; `kept_revision` then is `revision`."""
        self._wanted = (revision, state)
        self._asked.set()

    def changed(self, entries: Entries) -> None:
        """Has the thread write these records at once, not at its next search. Event loop only:
        it alone changes the table."""
        self.num_changed += len(entries)
        self._changed.append(entries)
        self._asked.set()

    def written(self) -> "Future[None]":
        """Done once the file has all records as they are now. Thread-safe."""
        future: Future[None] = Future()
        self._waiting.append(future)
        self._asked.set()
        return future

    def is_alive(self) -> bool:
        """True before `start`."""
        return self._thread is None or self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """How long the present write has lasted; 0 if there is none. `now_s`: time.monotonic."""
        begun_s = self._begun_s
        return now_s - begun_s if begun_s else 0.0

    def keep_written(self, written: Written) -> None:
        """Has the thread save the writes of the last 24 hours. A reset keeps this file: the
        blocks are gone, but the disk is worn."""
        self._admitted = written
        self._asked.set()

    def read_written(self) -> Written:
        """An earlier server's writes; empty if there are none. Blocking. Raises StateError if
        the file is damaged, or OSError."""
        path = self.folder / WRITTEN_FILE
        try:
            found = [(float(at_s), int(size)) for at_s, size in json.loads(read_file(path))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StateError(f"{path.name} is damaged: {error}") from error
        if not all(math.isfinite(at_s) and size >= 0 for at_s, size in found):
            raise StateError(f"{path.name} is damaged: a time or a size that can't be")
        return found

    def close(self) -> None:
        """Writes all changes, then unlocks the folder. The table must not change any more. If
        the disk hangs for CLOSE_WAIT_S, the folder stays locked until the process ends."""
        self._closing.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)
            if self._thread.is_alive():
                log.error("%s: the disk hangs, its newest records are lost", self.folder)
                return
        os.close(self._lock_fd)

    # On the thread

    def _work(self) -> None:
        walk_at_s, num_left = 0.0, 0
        while True:
            is_last = self._closing.is_set()
            self._asked.clear()
            began_s = self._begun_s = time.monotonic()
            # After a failed write, search for what was not written.
            walks = is_last or bool(self._waiting or num_left) or began_s >= walk_at_s
            # Later requests wait for the next turn.
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            changed = [self._changed.popleft() for _ in range(len(self._changed))]
            num_left += sum(map(len, changed))
            try:
                self._write(changed, walks=walks)
                self.num_saved, num_left = self.num_saved + num_left, 0
                while waiting:
                    waiting.pop().set_result(None)
                self._write_note()
                self._say("")
            except (OSError, MemoryError) as error:
                self._waiting.extend(waiting)
                self._say(str(error) or "no memory")
            self._begun_s = 0.0
            if is_last:
                return
            if walks:
                now_s = time.monotonic()
                walk_at_s = now_s + max(KEEP_S, (now_s - began_s) / MAX_LOOK_SHARE)
            if self.problem:
                self._closing.wait(RETRY_S)
            else:
                self._asked.wait(max(0.0, walk_at_s - time.monotonic()))

    def _say(self, problem: str) -> None:
        if problem and not self.problem:
            log.warning(
                "%s: records not written, a restart before they are loses what is new: %s",
                self.folder,
                problem,
            )
        elif self.problem and not problem:
            log.info("%s: records are written again", self.folder)
        self.problem = problem

    def _write(self, changed: list[Entries], *, walks: bool) -> None:
        """`walks`: searches the whole table for changes. The first call writes it whole."""
        if self._sums is None:
            self._adopt()
        else:
            parts = self._parts_of(changed)
            with _opened(self.folder / TABLE_FILE) as fd:
                self._write_parts(fd, self._all_parts() if walks else parts, self._sums)
        if (wanted := self._wanted) is not None and wanted[0] != self.kept_revision:
            write_state(self.folder / STATE_FILE, wanted[1], sync=True)
            self.kept_revision = wanted[0]

    def _write_note(self) -> None:
        if (admitted := self._admitted) is not self._noted:
            replace_file(self.folder / WRITTEN_FILE, [json.dumps(admitted)])
            self._noted = admitted

    def _adopt(self) -> None:
        """Writes the table to a new file, which then replaces the old one. Empty parts are
        allocated but not written: a large tier uses little of its table, and writes wear the disk.

        Before that the file is synced, or it might be empty after a power loss. And the file of
        key spaces is removed if a number has a new meaning: a kill would else leave the new
        table with the old key spaces.
        """
        scratch = self.folder / NEW_TABLE_FILE
        _new_file(scratch, self.table.geometry.file_bytes)
        import xxhash

        sums = np.full(
            -(-len(self._bytes) // PART_BYTES), xxhash.xxh3_64_intdigest(_ZEROS), np.uint64
        )
        parts, first_byte = self._all_parts(), self.table.geometry.records_offset_bytes
        with _opened(scratch) as fd:
            self._begun_s = time.monotonic()
            os.posix_fallocate(fd, first_byte, len(self._bytes) - first_byte)
            for at in range(0, len(parts), SYNCED_PARTS):
                self._write_parts(fd, parts[at : at + SYNCED_PARTS], sums)
                os.fsync(fd)
        if not self._keeps_numbers:
            (self.folder / STATE_FILE).unlink(missing_ok=True)
        scratch.replace(self.folder / TABLE_FILE)
        self._sums = sums

    def _all_parts(self) -> list[int]:
        """Parts with the header and the records; the next server does not need the hash index."""
        first = self.table.geometry.records_offset_bytes // PART_BYTES
        return sorted({0, *range(first, -(-len(self._bytes) // PART_BYTES))})

    def _parts_of(self, changed: list[Entries]) -> list[int]:
        if not changed:
            return []
        begins = (
            self.table.geometry.records_offset_bytes
            + np.concatenate(changed).astype(np.int64) * RECORD_BYTES
        )
        ends = begins + RECORD_BYTES - 1
        parts: list[int] = np.union1d(begins // PART_BYTES, ends // PART_BYTES).tolist()
        return parts

    def _write_parts(self, fd: int, parts: list[int], sums: NDArray[np.uint64]) -> None:
        """Writes parts whose hash differs from `sums`, which it updates."""
        # Servers without a tier need no xxhash.
        import xxhash

        for at in parts:
            # Progress also without a write: a long search must not look like a hung disk.
            self._begun_s = time.monotonic()
            part = self._bytes[at * PART_BYTES : (at + 1) * PART_BYTES]
            if xxhash.xxh3_64_intdigest(part.data) == sums[at]:
                continue
            content = part.tobytes()
            written = os.pwrite(fd, content, at * PART_BYTES)
            if written < len(content):
                raise OSError(f"{TABLE_FILE} took {written} of {len(content)} bytes")
            sums[at] = xxhash.xxh3_64_intdigest(content)


def records_file_bytes(capacity: int, num_bytes: int) -> int:
    """Disk space of the records of a tier with `capacity` blocks in `num_bytes`."""
    geometry = TableGeometry.for_capacity(capacity, 1, num_bytes)
    return geometry.file_bytes - geometry.records_offset_bytes


def _agree(one: ServerState, other: ServerState) -> bool:
    """Numbers that both states have stand for the same key spaces."""
    known = {known.number: known.key_space.fingerprint for known in one.key_spaces}
    return all(
        known.get(entry.number, entry.key_space.fingerprint) == entry.key_space.fingerprint
        for entry in other.key_spaces
    )


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Private zeroed memory."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _new_file(path: Path, num_bytes: int) -> None:
    path.unlink(missing_ok=True)
    with _opened(path, os.O_CREAT | os.O_EXCL) as fd:
        os.ftruncate(fd, num_bytes)


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def _left(folder: Path, num_bytes: int) -> tuple[BlockTable | None, ServerState | None, str]:
    """An earlier server's table and state, or None and the reason; "" if there are no files."""
    path = folder / TABLE_FILE
    if not path.exists() and not (folder / STATE_FILE).exists():
        return None, None, ""
    try:
        state = read_state(folder / STATE_FILE)
        if not 0 < state.slab_bytes <= num_bytes or state.slab_bytes % SLOT_ALIGN:
            raise StateError(
                f"slabs were of {state.slab_bytes} bytes, the disk has {num_bytes} now"
            )
        with _opened(path) as fd:
            return BlockTable.open(_read(fd)), state, ""
    except (FileNotFoundError, ValueError, StateError) as error:
        return None, None, str(error)


def _read(fd: int) -> NDArray[np.uint8]:
    """A file's content; zeros from where it became shorter meanwhile. Raises ValueError for a
    pipe and the like. Reads only data: the table of a large tier is mostly holes, which would
    take memory (5 GB for a disk of 1 TiB)."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{TABLE_FILE} is no regular file")
    content = _memory(max(1, status.st_size))
    view = content.data
    for begin, end in _data(fd, len(view)):
        at = begin
        while at < end and (count := os.preadv(fd, [view[at : min(at + READ_BYTES, end)]], at)):
            at += count
    return content


def _data(fd: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the parts with data; the rest are holes."""
    end = 0
    while end < num_bytes:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            # ENXIO: no data from here on. Other errors: the file system can't tell holes.
            if error.errno != errno.ENXIO:
                yield end, num_bytes
            return
        yield begin, min(end, num_bytes)
