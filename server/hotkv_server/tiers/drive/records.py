"""The records of the disk tier, from which the next server restores the blocks on the disk. There
are three records: a block table, which has the place of each block; the key spaces (each is a
model in a configuration) of these blocks; and a note of the bytes written to the disk. The
records are in memory, and a thread writes their changes to files.

Always true:

- the event loop neither opens nor maps a file of the tier, so a disk that hangs stops only the
  thread;
- a block is moved to the disk only after its key space was written to a file (`kept_revision`);
- if a server is killed during its start, the next server still finds the old table, because the new
  table is a separate file until it is complete;
- a wrong record in the file does no harm: each read compares the bytes at the block's place with
  the block's seal (checksum). So the file may be older than the table in memory, by KEEP_S and
  the time that the disk takes.
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
"""Writes to the disk, as pairs of their time in seconds since 1970 and their size in bytes."""
MODE = 0o600
KEEP_S = 0.5
"""Least time between two searches of the disk's whole block table for changed records."""
MAX_LOOK_SHARE = 0.02
"""Largest share of its time that the thread which writes the records spends on searches of the
whole block table. So a large table is searched less often than every KEEP_S."""
RETRY_S = 1.0
"""Wait after a failed write, before the next try."""
RECORD_BYTES = RECORD_WORDS * 4
PART_BYTES, READ_BYTES = 64 << 10, 16 << 20
SYNCED_PARTS = 256
"""Number of parts of a new table that are written between two syncs. A slow disk takes seconds for
a large table; each completed sync shows that the disk does not hang."""
CLOSE_WAIT_S = 5.0
_ZEROS = bytes(PART_BYTES)
"""A part of the table without records."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class LowerMemory:
    """The records of the disk tier, in memory and in files from which the next server restores the
    tier; see the module.

    `folder`: folder of the tier, with its files.
    `slab_bytes`: size of a slab (one of the equal pieces of the tier's disk space).
    `num_bytes`: size of the whole tier.
    `table`: the block table in memory; empty until the core fills it.
    `old`: the table that an earlier server left; None if there is no usable table, and after
        `start`.
    `state`: the key spaces and slab size that belong to `old`.
    `why_empty`: the reason why the old table is unusable; empty if it is usable or there was none.
    `kept_revision`: revision of the key spaces that are in the file; -1 before the first write.
    `problem`: the reason why the last write to the files failed; empty if it succeeded.
    `num_changed`: number of changed records that `changed` has reported since the start.
    `num_saved`: number of these records that are in the file.
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
        """Locks the folder, makes a new table, and reads the table that an earlier server left.
        Blocks the calling thread. Raises BusyError if another server uses the folder, or OSError.

        `num_bytes`: size of the disk tier; it is rounded down to whole slabs.
        `slab_bytes`: size of a slab (one of the equal pieces of the tier's disk space). If there is
            a usable old table, its slab size is used instead.
        `capacity`: most blocks in the table.
        `reset`: True first removes the old table.
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
            # Make the file now, so that a server whose folder can't be written does not start.
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
        """Starts the thread, which replaces the file of the old table, writes the key spaces (each
        is a model in a configuration) in `state`, and from then on writes changes. The core
        must have filled the table before. Does not wait for the disk.

        `revision`: number of the present set of key spaces; becomes `kept_revision` when the key
            spaces are in the file.
        `state`: the key spaces and the slab size.
        """
        self._keeps_numbers = self.state is not None and _agree(self.state, state)
        self.old = self.state = None
        self._wanted = (revision, state)
        self._thread = threading.Thread(target=self._work, name="hotkv-disk-records", daemon=True)
        self._thread.start()

    def keep(self, revision: int, state: ServerState) -> None:
        """Makes the thread replace the content of the file of key spaces (each is a model in a
        configuration) by the key spaces in `state`. Does not wait for the disk. Once the file is
        written, `kept_revision` is `revision`."""
        self._wanted = (revision, state)
        self._asked.set()

    def changed(self, entries: Entries) -> None:
        """Makes the thread write the records of these entries at once. Otherwise the thread finds
        the changes at its next search of the table. Does not wait for the disk. Only the event loop
        may call this method, because only the event loop changes the table."""
        self.num_changed += len(entries)
        self._changed.append(entries)
        self._asked.set()

    def written(self) -> "Future[None]":
        """Returns a future that is done once the file has all records as they are now. Does not
        wait for the disk. Thread-safe."""
        future: Future[None] = Future()
        self._waiting.append(future)
        self._asked.set()
        return future

    def is_alive(self) -> bool:
        """Returns False if the thread that writes the disk's records has died or ended. True before
        `start`."""
        return self._thread is None or self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """Returns for how many seconds the thread's present write of the disk's records has lasted;
        0 if it does not write. `now_s`: a time of time.monotonic."""
        begun_s = self._begun_s
        return now_s - begun_s if begun_s else 0.0

    def keep_written(self, written: Written) -> None:
        """Makes this object's thread replace the file with the recent writes to the disk: their
        times and sizes, as the budget of disk writes counts them. Does not wait for the disk. A
        reset of the tier keeps this file: the blocks are then gone, but their writes have worn the
        disk.

        `written`: the writes of the last 24 hours.
        """
        self._admitted = written
        self._asked.set()

    def read_written(self) -> Written:
        """Returns the disk writes that an earlier server has noted; empty without a note. Blocks
        the calling thread. Raises StateError if the note is damaged, or OSError."""
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
        """Writes all changes, then unlocks the folder for another server. The table must not change
        any more. If the disk hangs for CLOSE_WAIT_S, returns; the folder then stays locked until
        the process ends."""
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
            # After a failed write, search the whole table for the changes that were not written.
            walks = is_last or bool(self._waiting or num_left) or began_s >= walk_at_s
            # Take only the requests (calls of `written` and `changed`) that have arrived by now.
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
        """Writes the changed records, then the key spaces (each is a model in a configuration)
        if they have changed. The first call writes the whole table (`_adopt`).

        `changed`: entries whose records have changed.
        `walks`: True also searches the whole table for changed records.
        """
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
        """Writes the note of the bytes written to the disk into its file, if it has changed."""
        if (admitted := self._admitted) is not self._noted:
            replace_file(self.folder / WRITTEN_FILE, [json.dumps(admitted)])
            self._noted = admitted

    def _adopt(self) -> None:
        """Writes the whole table to a new file, which then replaces the file of the old table. For
        the parts that have no records yet, allocates disk space but writes nothing. The reason:
        writes wear the disk, and a large tier with large blocks uses only a small part of its
        table.

        Two steps precede the replacement. First, the new file is synced, because otherwise it might
        be empty after a power loss. Second, the file of key spaces is removed if a key space's
        number in the old table stands for another key space in the new table. Otherwise, if the
        process were killed before it has written the new key spaces, the next server would read the
        new table with the old key spaces.
        """
        scratch = self.folder / NEW_TABLE_FILE
        _new_file(scratch, self.table.geometry.file_bytes)
        # Servers without a tier need no xxhash.
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
        """Returns the numbers of the table's parts (PART_BYTES each) that are written to the file:
        the parts with the header and with the records. The next server does not need the parts with
        the buckets of the table's hash index."""
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
        """Writes parts of the disk's block table (PART_BYTES each) to the file, if they have
        changed since their last write.

        `fd`: descriptor of the file.
        `parts`: numbers of the parts.
        `sums`: the hash of each part of the table at its last write; this method updates it.
        """
        # Import it here, because servers without a tier need no xxhash.
        import xxhash

        for at in parts:
            # Record progress for an unchanged part too: a long search of a large table must not
            # look like a disk that hangs.
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
    """Returns the disk space, in bytes, of the file that records which blocks a disk tier has.

    `capacity`: most blocks that the tier may have.
    `num_bytes`: size of the tier.
    """
    geometry = TableGeometry.for_capacity(capacity, 1, num_bytes)
    return geometry.file_bytes - geometry.records_offset_bytes


def _agree(one: ServerState, other: ServerState) -> bool:
    """Compares the numbers by which the block tables of two states name key spaces (models in one
    configuration). Returns True if each number that both states have stands for the same key space
    in both."""
    known = {known.number: known.key_space.fingerprint for known in one.key_spaces}
    return all(
        known.get(entry.number, entry.key_space.fingerprint) == entry.key_space.fingerprint
        for entry in other.key_spaces
    )


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory of this process alone (an anonymous mapping), filled with zeros."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _new_file(path: Path, num_bytes: int) -> None:
    """Creates a file of zeros. Removes a file that is already there."""
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
    """Reads the records of the disk tier that an earlier server left in files. Returns the block
    table, the key spaces (each is a model in a configuration) and "". Returns None, None and a
    reason if the files are unusable. Returns None, None and "" if there are no files.

    `num_bytes`: present size of the disk tier.
    """
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
    """Returns a file's content. If the file becomes shorter during the read, the rest is zeros.
    Raises ValueError for a pipe and the like. Reads only parts that have data, because the table of
    a large tier is mostly empty, and its empty parts would take memory (5 GB for a disk of 1
    TiB)."""
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
    """Yields the begin and the end of each part with data in a file's first `num_bytes` bytes. The
    file system has stored nothing for the other parts, so they are zeros."""
    end = 0
    while end < num_bytes:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            # ENXIO: there are no data from this offset on. Other errors: this file system can't
            # tell data from holes, so all bytes from this offset on count as data.
            if error.errno != errno.ENXIO:
                yield end, num_bytes
            return
        yield begin, min(end, num_bytes)
