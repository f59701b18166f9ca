"""The records of a tier whose places the core chooses: a block table in memory, which a thread
writes to a file as it changes, what its key spaces are, and how much was written to it.

Always true: the event loop touches no file of the tier, also by no mapping, so a disk that hangs
stops the thread alone. Nothing of a key space may be stored before `kept_revision` says that the
key space is written down. A start that is killed has changed nothing, because the new table is
another file until it is whole. No record is trusted beyond its shape: a block is the one that its
seal says. So the file may be older than memory, by KEEP_S and what the disk takes.
"""

import contextlib
import json
import logging
import math
import mmap
import os
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
    read_state,
    replace_file,
    write_state,
)

LOCK_FILE, STATE_FILE, TABLE_FILE, NEW_TABLE_FILE = "lock", "state.json", "records", "records.new"
WRITTEN_FILE = "written.json"
Written = list[tuple[float, int]]
"""Bytes that were written, each with when they were: seconds since 1970."""
MODE = 0o600
KEEP_S = 0.5
"""Between two looks at what has changed."""
MAX_LOOK_SHARE = 0.02
"""Share of its time that the thread looks for changes: of large tables it waits longer."""
RETRY_S = 1.0
RECORD_BYTES = RECORD_WORDS * 4
PART_BYTES, READ_BYTES = 64 << 10, 16 << 20
CLOSE_WAIT_S = 5.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class LowerMemory:
    """The table of one tier, empty until the core has filled it, and `old` of an earlier server
    with its `state`. `why_empty`: why there is none; empty on a fresh folder. `kept_revision`: of
    the newest key spaces that are written down; -1 before any. `problem`: why the last write
    failed; empty if it did not. `num_changed`: entries told to have changed since the start;
    `num_saved`: those of them whose records are written."""

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
        """Makes a new table for at most `num_bytes` of places, in whole slabs, and reads the one
        that is there. Slabs are as large as they were, if that one can be used, else of
        `slab_bytes`. `reset`: drops that one. Raises BusyError if another server has the folder, or
        OSError. Blocks."""
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
            # Made now, so that a folder that can't be written keeps the server from starting.
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
        """The table is filled: puts it in the place of the old one, with these key spaces, and
        keeps its file as the table is. Does not wait for the disk."""
        self.old = self.state = None
        self._wanted = (revision, state)
        self._thread = threading.Thread(target=self._work, name="hotkv-disk-records", daemon=True)
        self._thread.start()

    def keep(self, revision: int, state: ServerState) -> None:
        """Has key spaces written down in place of those before. Does not wait for the disk."""
        self._wanted = (revision, state)
        self._asked.set()

    def changed(self, entries: Entries) -> None:
        """The records of these entries of the table have changed: they are written at once, before
        others that have. Does not wait for the disk. On the table's thread."""
        self.num_changed += len(entries)
        self._changed.append(entries)
        self._asked.set()

    def written(self) -> "Future[None]":
        """Returns a future that is done once all that the table holds now is in its file. Does not
        wait for the disk. Thread-safe."""
        future: Future[None] = Future()
        self._waiting.append(future)
        self._asked.set()
        return future

    def is_alive(self) -> bool:
        """Returns whether what has changed is still written."""
        return self._thread is None or self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """How long the write that is under way has lasted; 0 if none is."""
        begun_s = self._begun_s
        return now_s - begun_s if begun_s else 0.0

    def keep_written(self, written: Written) -> None:
        """Has written down how much was written and when, in place of what was noted before. It
        stays if the tier is made anew: what was written has worn the disk. Does not wait for the
        disk."""
        self._admitted = written
        self._asked.set()

    def read_written(self) -> Written:
        """What an earlier server has written; nothing if it has noted nothing. Raises StateError if
        its note can't be used, or OSError."""
        path = self.folder / WRITTEN_FILE
        try:
            found = [(float(at_s), int(size)) for at_s, size in json.loads(path.read_bytes())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OverflowError) as error:
            raise StateError(f"{path.name} is damaged: {error}") from error
        if not all(math.isfinite(at_s) and size >= 0 for at_s, size in found):
            raise StateError(f"{path.name} is damaged: a time or a size that can't be")
        return found

    def close(self) -> None:
        """Writes what has changed, and lets another server have the folder. The table must not
        change any more. Waits CLOSE_WAIT_S for a disk that hangs; its folder stays locked until
        this process has ended."""
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
        walk_at_s = 0.0
        while True:
            is_last = self._closing.is_set()
            self._asked.clear()
            began_s = self._begun_s = time.monotonic()
            walks = is_last or bool(self._waiting) or began_s >= walk_at_s
            # What comes later has to wait for the next turn.
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            changed = [self._changed.popleft() for _ in range(len(self._changed))]
            try:
                self._write(changed, walks=walks)
                self.num_saved += sum(map(len, changed))
                self._say("")
                for future in waiting:
                    future.set_result(None)
            except OSError as error:
                self._waiting.extend(waiting)
                self._changed.extend(changed)
                self._say(str(error))
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
        """Writes the records of entries that have changed, and all others that have if it `walks`;
        then the key spaces, since no record may name one that is gone from them."""
        if self._sums is None:
            self._adopt()
        else:
            parts = self._parts_of(changed)
            with _opened(self.folder / TABLE_FILE) as fd:
                self._write_parts(fd, self._all_parts() if walks else parts, self._sums)
        if (wanted := self._wanted) is not None and wanted[0] != self.kept_revision:
            write_state(self.folder / STATE_FILE, wanted[1])
            self.kept_revision = wanted[0]
        if (admitted := self._admitted) is not self._noted:
            replace_file(self.folder / WRITTEN_FILE, [json.dumps(admitted)])
            self._noted = admitted

    def _adopt(self) -> None:
        """Writes the whole table, and puts it in the place of the old one. Between the two there
        are no key spaces, so that no block is found under another's."""
        scratch = self.folder / NEW_TABLE_FILE
        _new_file(scratch, self.table.geometry.file_bytes)
        sums = np.zeros(-(-len(self._bytes) // PART_BYTES), np.uint64)
        with _opened(scratch) as fd:
            self._write_parts(fd, self._all_parts(), sums)
        (self.folder / STATE_FILE).unlink(missing_ok=True)
        scratch.replace(self.folder / TABLE_FILE)
        self._sums = sums

    def _all_parts(self) -> list[int]:
        """Header and records. Nobody reads the buckets."""
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
        """Writes those of these parts that are not as they were written last, by their `sums`,
        which it changes."""
        # Servers without a tier need no xxhash.
        import xxhash

        for at in parts:
            part = self._bytes[at * PART_BYTES : (at + 1) * PART_BYTES]
            if xxhash.xxh3_64_intdigest(part.data) == sums[at]:
                continue
            content = part.tobytes()
            written = os.pwrite(fd, content, at * PART_BYTES)
            if written < len(content):
                raise OSError(f"{TABLE_FILE} took {written} of {len(content)} bytes")
            sums[at] = xxhash.xxh3_64_intdigest(content)


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Empty memory of this process, which no file backs."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _new_file(path: Path, num_bytes: int) -> None:
    """Makes a file of so many zeros, in place of any old one."""
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
    """Table and key spaces of an earlier server, read; else why they can't be used."""
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
    """Returns a file's content; zeros in the place of what was cut off meanwhile."""
    content = _memory(max(1, os.fstat(fd).st_size))
    view, at = content.data, 0
    while at < len(view) and (count := os.preadv(fd, [view[at : at + READ_BYTES]], at)):
        at += count
    return content
