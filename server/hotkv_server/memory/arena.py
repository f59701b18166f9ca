"""The arena (the file of host memory with all slots) and the files beside it: block table, state,
times of last use.

All files lie in one directory on tmpfs, which one server locks. They outlive the server: the next
server over the directory continues with the arena unchanged and builds its own table from the old
table's records (`Leftover`). Always true: until `adopt` the directory stays as the old server left
it, so a start that is killed loses nothing. Before the server is ready, all buckets of the table,
some of its records and some of the arena have memory. The rest is prefaulted in the background:
first the records, then the arena (`filling`).
"""

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import RECORD_WORDS, BlockTable, TableGeometry
from hotkv_proto.words import WORD_BYTES, file_bytes, words_offset_bytes
from hotkv_server.memory.filling import Filling, read_note
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.memory.state import ServerState, StateError, read_state, write_state

# ----------------------------------------------------------------------- Records of the block table
# Records get memory in pieces, from the first record on. The start prefaults some; the thread that
# fills the arena prefaults the rest.
#
# Always true: the first `num_entries` records have memory, and the number only grows. The core has
# at most that many entries. So the server never writes to a record without memory, which could kill
# the process.

FIRST_ENTRIES = 1 << 21
"""Records that the start prefaults: 144 MiB, enough for an arena of 32 GiB with the default number
of blocks."""
PIECE_ENTRIES = 1 << 20


class RecordsMemory:
    """Prefaults the records of a table file, whose buckets have memory already.

    num_entries: how many entries may exist at the moment.
    """

    def __init__(self, fd: int, geometry: TableGeometry, num_entries: int) -> None:
        self.num_entries = num_entries
        self._fd = fd
        self._geometry = geometry

    def __repr__(self) -> str:
        return f"RecordsMemory({self.num_entries}/{self._geometry.capacity} entries)"

    @property
    def is_done(self) -> bool:
        """Whether all records have memory."""
        return self.num_entries == self._geometry.capacity

    def back(self, num_entries: int) -> None:
        """Prefaults the first `num_entries` records, at most all. Blocks the calling thread. Raises
        OSError if memory is short; the number of usable entries is then unchanged."""
        end = min(num_entries, self._geometry.capacity)
        if end > self.num_entries:
            start_bytes, end_bytes = (
                self._geometry.records_offset_bytes + count * RECORD_WORDS * 4
                for count in (self.num_entries, end + 1)
            )
            os.posix_fallocate(self._fd, start_bytes, end_bytes - start_bytes)
            self.num_entries = end

    def back_rest(self) -> Iterator[int]:
        """Prefaults the remaining records; yields `num_entries` after each piece. Each step blocks
        for a piece. Raises OSError if memory is short."""
        while not self.is_done:
            self.back(self.num_entries + PIECE_ENTRIES)
            yield self.num_entries


# --------------------------------------------------------- For clients that read the arena in place
# The file of the arena ends with the validity words (`hotkv_proto.words`), by which clients check
# what they read. The file of the block table ends with the marks of the blocks that clients may
# read directly in the arena.
#
# Always true: the words have memory, so writing a word never fails. The marks are in the table's
# file, so that they are replaced together with the entry numbers they refer to. A file of an older
# server has neither: its arena is extended, its table has no marks.

Marks = NDArray[np.uint8]


def map_words(fd: int, arena_bytes: int) -> NDArray[np.uint64]:
    """Maps the validity words of an arena's file (by which clients check that blocks are still
    pinned), writable, until the array is freed. Extends the file if it has no words. Raises
    OSError."""
    start = words_offset_bytes(arena_bytes)
    os.posix_fallocate(fd, start, WORD_BYTES)
    return np.frombuffer(mmap.mmap(fd, WORD_BYTES, offset=start), "<u8")


def _marks_offset_bytes(geometry: TableGeometry) -> int:
    """Returns where the marks (of entries that clients may read in the arena) begin in a table's
    file."""
    return -(-geometry.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def table_file_bytes(geometry: TableGeometry) -> int:
    """Returns the size of a table's file in bytes, including the marks (of entries that clients may
    read in the arena)."""
    return _marks_offset_bytes(geometry) + geometry.capacity + 1


def marks_of(mapping: NDArray[np.uint8], geometry: TableGeometry) -> Marks:
    """Returns the marks in a mapped table's file: by entry number, 1 for an entry that clients may
    read in the arena, uint8 [capacity + 1]; all 0 if the file has no marks."""
    start, end = _marks_offset_bytes(geometry), table_file_bytes(geometry)
    return mapping[start:end] if len(mapping) >= end else np.zeros(end - start, np.uint8)


# ----------------------------------------------------------------------------- The memory of a node

ARENA_FILE, TABLE_FILE, NEW_TABLE_FILE, STATE_FILE, USE_FILE, LOCK_FILE = (
    "arena",
    "table",
    "table.new",
    "state.json",
    "use",
    "lock",
)
FILLED_FILE, OWNER_FILE, CONTENTS_FILE = "filled", "server.json", "contents"
KEPT_FILES = ("calibration-*", "ledger*", "names.json*")
"""Measured copy speeds of devices, the ledger, and names. They are not part of the cache and are
retained as long as the directory."""
FILES: Final = (
    STATE_FILE,
    USE_FILE,
    TABLE_FILE,
    NEW_TABLE_FILE,
    FILLED_FILE,
    ARENA_FILE,
    CONTENTS_FILE,
    OWNER_FILE,
    *(f"{name}.new" for name in (STATE_FILE, USE_FILE, OWNER_FILE)),
)
"""In the order of removal: without the state the other files are ignored. A server that is killed
while it writes leaves the last of them."""
FIRST_FILL_S = 0.25
FIRST_FILL_BYTES = 64 << 20
"""The start prefaults the arena for FIRST_FILL_S, and at least FIRST_FILL_BYTES of it."""
TABLE_HUGE_S = 0.1
"""How long the start prefaults the table as huge pages. With small pages a cold lookup waits longer
for page tables than for the table."""
LOCK_TRIES = 5
LOCK_RETRY_S = 0.01
"""Pause between two tries: a process that only checks for a running server holds the lock for
microseconds."""
USE_HEADER: Final = struct.Struct("<8sqdq")
USE_MAGIC: Final = b"HOTKVUS1"


class BusyError(OSError):
    """Raised if another server has locked the directory; the message names its pid."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The cache that an earlier server left.

    last_used_s: float64 by entry number, in seconds of the monotonic clock; nan for entries newer
        than the file of these times. None without the file.
    marks: by entry number, 1 for entries that clients may read in the arena; valid until `adopt`.
    """

    table: BlockTable
    state: ServerState
    last_used_s: NDArray[np.float64] | None
    marks: Marks


@dataclass(slots=True)
class NodeMemory:
    """Arena and table of a server.

    arena: its `huge_bytes` counts the bytes in huge pages.
    filling: prefaults the arena and says how much of it has memory.
    words, marks: validity words and marks, for clients that read the arena directly (see above).
    leftover: the cache of an earlier server, until `adopt`.
    why_empty: why there is no leftover; empty on a fresh directory.
    """

    directory: Path
    slab_bytes: int
    arena: FileMapping
    table_file: FileMapping
    table: BlockTable
    filling: Filling
    records: RecordsMemory
    words: NDArray[np.uint64]
    marks: Marks
    leftover: Leftover | None = None
    why_empty: str = ""
    _lock_fd: int = -1
    _old_table: FileMapping | None = None

    @staticmethod
    def open(
        directory: Path, arena_bytes: int, slab_bytes: int, capacity: int, fresh_epoch: int,
        mode: int = 0o640, *, prefault: bool = True,
        place: Callable[[int, int], None] | None = None,
    ) -> "NodeMemory":  # fmt: skip
        """Opens the files in the directory if they fit the arguments; otherwise makes all files
        anew.

        fresh_epoch: epoch of a new table, a random number that identifies the cache.
        prefault: prefaults the table's buckets, some of its records, and as much of the arena as
            FIRST_FILL_S allows; `records` and `filling` prefault the rest. If False, pages get
            memory when they are written, and all of the arena counts as filled.
        place: called with (address, num_bytes) before the arena is prefaulted; chooses the NUMA
            nodes of its memory.

        Raises BusyError, or OSError if memory is short; the error's message names the fix. Also
        raises OSError if files can't be read at the moment (no permission, too many open files);
        the cache is then left unchanged.
        """
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock_fd = _locked(directory)
        (directory / NEW_TABLE_FILE).unlink(missing_ok=True)
        try:
            leftover, old_table, why_empty = _usable(directory, arena_bytes, slab_bytes)
            if leftover is None:
                _remove_files(directory)
            epoch = fresh_epoch if leftover is None else leftover.table.geometry.epoch
            geometry = TableGeometry.for_capacity(capacity, epoch, arena_bytes)
            table_bytes = table_file_bytes(geometry)
            # The next start briefly has two tables. It should not fail if this start does not.
            more_bytes = 0 if leftover is not None else arena_bytes + table_bytes
            _check_room(directory, table_bytes + more_bytes, arena_bytes)
            arena_path = directory / ARENA_FILE
            if leftover is None:
                arena = FileMapping.create(arena_path, arena_bytes, mode)
            else:
                arena_fd = _open_own(arena_path, os.O_RDWR)
                arena = FileMapping(arena_fd, arena_bytes, str(arena_path), exclusive=True)
            table_path = directory / (TABLE_FILE if leftover is None else NEW_TABLE_FILE)
            words = map_words(arena.fd, arena_bytes)
            table_file = FileMapping.create(table_path, table_bytes, mode)
        except BaseException:
            os.close(lock_fd)
            raise
        view, header = table_file.array(), geometry.pack()
        view[: len(header)] = memoryview(header)
        table, marks = BlockTable(view, geometry), marks_of(view, geometry)
        filled_bytes = arena_bytes
        if prefault and (leftover is None or arena.has_holes()):
            filled_bytes = 0 if leftover is None else read_note(directory / FILLED_FILE, arena)
        filling = Filling(arena, directory / FILLED_FILE, filled_bytes)
        records = RecordsMemory(table_file.fd, geometry, 0 if prefault else capacity)
        memory = NodeMemory(
            directory,
            slab_bytes,
            arena,
            table_file,
            table,
            filling,
            records,
            words,
            marks,
            leftover,
            why_empty,
            lock_fd,
            old_table,
        )
        try:
            if place is not None:
                place(arena.address, arena.num_bytes)
            if prefault:
                table_file.make_huge(0, TABLE_HUGE_S)
                os.posix_fallocate(table_file.fd, 0, geometry.records_offset_bytes)
                os.posix_fallocate(table_file.fd, table_bytes - len(marks), len(marks))
                records.back(FIRST_ENTRIES)
                filling.fill_for(FIRST_FILL_S, FIRST_FILL_BYTES)
        except BaseException:
            memory.release()
            raise
        return memory

    def adopt(self, state: ServerState, *, is_renumbered: bool = False) -> None:
        """Replaces the old table by the new table, which has the retained entries, and saves its
        state. Raises OSError.

        is_renumbered: True if a key space number means different key spaces in the two tables. Then
            no state exists while the tables are exchanged: a start that is killed there leaves an
            empty cache, not blocks under the wrong key space.
        """
        if is_renumbered:
            (self.directory / STATE_FILE).unlink()
        else:
            self.save_state(state)
        if self._old_table is not None:
            # The file uses entry numbers of the old table.
            (self.directory / USE_FILE).unlink(missing_ok=True)
            (self.directory / NEW_TABLE_FILE).replace(self.directory / TABLE_FILE)
            self.leftover = None
            self._old_table.close()
            self._old_table = None
        if is_renumbered:
            self.save_state(state)

    def save_state(self, state: ServerState) -> None:
        """Writes the state file, without which the next server can't interpret the arena. Must
        return before the first block of a new key space is stored. Raises OSError."""
        write_state(self.directory / STATE_FILE, state)

    def save_use(self, last_used_s: NDArray[np.float64]) -> None:
        """Saves when entries were last used. Raises OSError.

        last_used_s: float64 by entry number, seconds of the monotonic clock; nan if unknown.
        """
        scratch = self.directory / f"{USE_FILE}.new"
        with open(scratch, "wb") as file:
            file.write(
                USE_HEADER.pack(
                    USE_MAGIC, self.table.geometry.epoch, time.monotonic(), len(last_used_s)
                )
            )
            file.write((last_used_s - time.monotonic()).astype("<f4").data)
        scratch.replace(self.directory / USE_FILE)

    def open_for_engine(self, writes_arena: bool = False) -> tuple[int, int]:
        """Opens new descriptors of arena and table, to be sent and closed.

        writes_arena: the arena's descriptor is writable.
        """
        flags, access = os.O_CLOEXEC | os.O_NOFOLLOW, os.O_RDWR if writes_arena else os.O_RDONLY
        arena = os.open(self.directory / ARENA_FILE, access | flags)
        return arena, os.open(self.directory / TABLE_FILE, os.O_RDONLY | flags)

    def release(self) -> None:
        """Unlocks the directory for another server. Blocks while a piece of the arena is being
        prefaulted."""
        self.filling.close()
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Removes the files; the files' memory is freed once no process maps the files. Blocks
        while a piece of the arena is being prefaulted."""
        self.filling.close()
        remove_files(self.directory, self._lock_fd)

    def discard(self) -> None:
        """Removes the cache, whose server did not start. Files of earlier servers that outlive a
        cache (KEPT_FILES) stay. Blocks while a piece of the arena is being prefaulted."""
        self.filling.close()
        _remove_files(self.directory)
        if any(any(self.directory.glob(pattern)) for pattern in KEPT_FILES):
            os.close(self._lock_fd)
        else:
            remove_files(self.directory, self._lock_fd)


def clear(directory: Path) -> None:
    """Removes the files that servers have left in the directory. Raises BusyError if a server uses
    the directory, or OSError."""
    if directory.is_dir():
        remove_files(directory, _locked(directory))


def remove_files(directory: Path, lock_fd: int) -> None:
    """Removes all files, then the lock, and the directory if it is empty."""
    _remove_all(directory, lock_fd)
    if not any(directory.iterdir()):
        directory.rmdir()


def remove_by_descriptor(directory_fd: int) -> None:
    """Removes the files of an open directory, even if its path has changed; the directory stays.

    Raises BusyError, before it removes a file, if a server uses the directory; or OSError.
    """
    directory = Path(f"/proc/self/fd/{directory_fd}")
    _remove_all(directory, _locked(directory))


def _remove_all(directory: Path, lock_fd: int) -> None:
    """Removes all files and the lock file, and releases the lock."""
    _remove_files(directory)
    for path in [path for pattern in KEPT_FILES for path in directory.glob(pattern)]:
        path.unlink(missing_ok=True)
    (directory / LOCK_FILE).unlink(missing_ok=True)
    os.close(lock_fd)


def _remove_files(directory: Path) -> None:
    for name in FILES:
        (directory / name).unlink(missing_ok=True)


def lock_file(path: Path) -> int:
    """Locks a file and writes this process's pid into it; returns its descriptor. Raises BusyError,
    or OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if left:
                time.sleep(LOCK_RETRY_S)
                continue
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise BusyError(
                f"{path.parent} is in use by hotkv-server with pid {pid or 'unknown'}"
            ) from error
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _locked(directory: Path) -> int:
    while True:
        fd = lock_file(directory / LOCK_FILE)
        # A process that removes the directory's files removes the lock file while it holds the
        # lock. Then this process has locked a file that is gone from the directory.
        try:
            if os.stat(directory / LOCK_FILE).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.close(fd)


def _check_room(directory: Path, needed_bytes: int, arena_bytes: int) -> None:
    space = os.statvfs(directory)
    if (free_bytes := space.f_bavail * space.f_frsize) < needed_bytes:
        raise OSError(
            f"{directory} has {free_bytes >> 20} MiB free, arena and table need "
            f"{needed_bytes >> 20} MiB more: lower arena.bytes ({arena_bytes >> 20} MiB), "
            "or enlarge the file system (Docker, Kubernetes: mount a directory of the node's "
            "/dev/shm)"
        )


def _open_own(path: Path, flags: int) -> int:
    """Opens a file of this user. Raises OSError for a link, StateError for another user's file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise StateError(f"{path.name} belongs to uid {owner}")
    return fd


def _usable(
    directory: Path, arena_bytes: int, slab_bytes: int
) -> tuple[Leftover | None, FileMapping | None, str]:
    """Returns an earlier server's leftover and its table. If the files are not usable, returns the
    reason instead; the reason is empty on a fresh directory. Raises OSError if the files can't be
    read at the moment."""
    if not (directory / STATE_FILE).exists() and not (directory / TABLE_FILE).exists():
        return None, None, ""
    try:
        return *_leftover(directory, arena_bytes, slab_bytes), ""
    except (FileNotFoundError, ValueError, StateError) as error:
        return None, None, str(error)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None, None, str(error)


def _leftover(directory: Path, arena_bytes: int, slab_bytes: int) -> tuple[Leftover, FileMapping]:
    """Reads an earlier server's leftover. Raises StateError, ValueError or OSError if the files are
    damaged or were made with other settings."""
    state = read_state(directory / STATE_FILE)
    if state.slab_bytes != slab_bytes:
        raise StateError(f"arena.slab_bytes was {state.slab_bytes} and is {slab_bytes} now")
    arena_fd = _open_own(directory / ARENA_FILE, os.O_RDWR)
    size = os.fstat(arena_fd).st_size
    os.close(arena_fd)
    fd = _open_own(directory / TABLE_FILE, os.O_RDWR)
    mapping = FileMapping(fd, os.fstat(fd).st_size, str(directory / TABLE_FILE))
    try:
        old = BlockTable.open(mapping.array())
        if old.geometry.arena_bytes != arena_bytes:
            raise StateError(f"arena.bytes was {old.geometry.arena_bytes} and is {arena_bytes} now")
        if size not in (arena_bytes, file_bytes(arena_bytes)):
            raise StateError(f"the arena's file has {size} bytes, not those of its block table")
    except BaseException:
        mapping.close()
        raise
    marks = marks_of(mapping.array(), old.geometry)
    return Leftover(old, state, _read_use(directory / USE_FILE, old.geometry), marks), mapping


def _read_use(path: Path, geometry: TableGeometry) -> NDArray[np.float64] | None:
    """Reads the times of last use; None if there is no valid file for this table."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < USE_HEADER.size:
        return None
    magic, epoch, saved_s, count = USE_HEADER.unpack_from(content)
    whole = len(content) == USE_HEADER.size + 4 * count
    if (
        magic != USE_MAGIC
        or epoch != geometry.epoch
        or not whole
        or not saved_s <= time.monotonic()
    ):
        return None
    used_s = np.full(geometry.capacity + 1, np.nan)
    ages = np.frombuffer(content, "<f4", offset=USE_HEADER.size)[: len(used_s)]
    # Arithmetic on damaged bytes could warn of a signalling NaN.
    ages = np.where(np.isfinite(ages), ages, np.float32(np.nan)).astype(np.float64)
    used_s[: len(ages)] = saved_s + np.minimum(ages, 0.0)
    return used_s
