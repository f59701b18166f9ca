"""The arena: the file of host memory in which all slots lie, and the files beside it: block table,
state, times of last use.

All are files of one directory on tmpfs, locked by one server. They outlive it: the next server over
the directory goes on with the arena as it is and makes a table of its own out of the old one's
records (`Leftover`). Always true: until `adopt` the directory is as the old server left it, so that
a start that is killed has lost nothing. Before the server is ready all buckets of the table have
memory, some of its records and some of the arena. The rest is prefaulted behind: first the
records, then the arena (`filling`).
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
# They get memory from the first on, in pieces. The start does some, the thread that fills the arena
# the rest.
#
# Always true: the first `num_entries` records have memory, and the number only grows; the core has
# no more entries than that, so nothing is written where memory might be missing, which would end
# the process.

FIRST_ENTRIES = 1 << 21
"""Records that the start prefaults: 144 MiB, enough for an arena of 32 GiB with as many blocks as
there are by default."""
PIECE_ENTRIES = 1 << 20


class RecordsMemory:
    """Records of one table file, whose buckets have memory. `num_entries`: how many entries there
    may be for now."""

    def __init__(self, fd: int, geometry: TableGeometry, num_entries: int) -> None:
        self.num_entries = num_entries
        self._fd = fd
        self._geometry = geometry

    def __repr__(self) -> str:
        return f"RecordsMemory({self.num_entries}/{self._geometry.capacity} entries)"

    @property
    def is_done(self) -> bool:
        """Returns True if all records have memory."""
        return self.num_entries == self._geometry.capacity

    def back(self, num_entries: int) -> None:
        """Prefaults the first so many records, or all there are. Blocks; raises OSError, with
        nothing changed, if memory is short."""
        end = min(num_entries, self._geometry.capacity)
        if end > self.num_entries:
            start_bytes, end_bytes = (
                self._geometry.records_offset_bytes + count * RECORD_WORDS * 4
                for count in (self.num_entries, end + 1)
            )
            os.posix_fallocate(self._fd, start_bytes, end_bytes - start_bytes)
            self.num_entries = end

    def back_rest(self) -> Iterator[int]:
        """Prefaults the rest; yields `num_entries` after each piece. Blocks for a piece at a time;
        raises OSError if memory is short."""
        while not self.is_done:
            self.back(self.num_entries + PIECE_ENTRIES)
            yield self.num_entries


# ------------------------------------------------------------ For those who read the arena in place
# Words behind the arena (`hotkv_proto.words`), and marks behind the block table of what they may
# read.
#
# Always true: words have memory, so that writing one never fails; the marks are in the table's
# file, so that they change place together with the entry numbers that they are about. A file of an
# older server has neither: its arena is extended, its table has no marks.

Marks = NDArray[np.uint8]


def map_words(fd: int, arena_bytes: int) -> NDArray[np.uint64]:
    """The words of an arena's file, writable, mapped as long as somebody holds them; added to the
    file if it has none. Raises OSError."""
    start = words_offset_bytes(arena_bytes)
    os.posix_fallocate(fd, start, WORD_BYTES)
    return np.frombuffer(mmap.mmap(fd, WORD_BYTES, offset=start), "<u8")


def _marks_offset_bytes(geometry: TableGeometry) -> int:
    """Where the marks begin in a table's file."""
    return -(-geometry.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def table_file_bytes(geometry: TableGeometry) -> int:
    """Bytes of a table's file, marks included."""
    return _marks_offset_bytes(geometry) + geometry.capacity + 1


def marks_of(mapping: NDArray[np.uint8], geometry: TableGeometry) -> Marks:
    """The marks in a mapped table's file, uint8 [capacity + 1] by entry number; all 0 if it has
    none."""
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
FILLED_FILE, OWNER_FILE = "filled", "server.json"
KEPT_FILES = ("calibration-*.json", "ledger*")
"""How fast devices copy, and the ledger: no part of the cache, kept as long as the directory."""
FILES: Final = (
    STATE_FILE,
    USE_FILE,
    TABLE_FILE,
    NEW_TABLE_FILE,
    FILLED_FILE,
    ARENA_FILE,
    OWNER_FILE,
)
"""In the order in which they are removed: without the state the other files count for nothing."""
FIRST_FILL_S = 0.25
FIRST_FILL_BYTES = 64 << 20
"""How long the start prefaults the arena before it continues, and how much of it at least."""
TABLE_HUGE_S = 0.1
"""How long the start prefaults the table as huge pages; in small ones a cold lookup waits longer
for page tables than for the table."""
LOCK_TRIES = 5
LOCK_RETRY_S = 0.01
"""A process that only checks whether a server runs holds its lock for microseconds."""
USE_HEADER: Final = struct.Struct("<8sqdq")
USE_MAGIC: Final = b"HOTKVUS1"


class BusyError(OSError):
    """Another server has locked the directory; the message names its pid."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an old server left. `last_used_s` float64 by entry number, in seconds of the monotonic
    clock, nan for entries that are newer. `marks` by entry number, until `adopt`."""

    table: BlockTable
    state: ServerState
    last_used_s: NDArray[np.float64] | None
    marks: Marks


@dataclass(slots=True)
class NodeMemory:
    """Arena and table of one server, and `leftover` of another until `adopt`. `why_empty`: why
    there is none, empty on a fresh directory.

    `arena.huge_bytes` says how much of it lies in huge pages, `filling` how much has memory,
    `readers` what `words` and `marks` are.
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
        """Goes on with the files in the directory if they fit, else makes all files anew, under
        `fresh_epoch`.

        `prefault`: prefaults the table's buckets, some of its records, and as much of the arena as
        FIRST_FILL_S allows; `records` and `filling` are for the rest. Otherwise memory comes as it
        is written, and all of the arena counts as filled. `place(address, num_bytes)`: called
        before any of the arena is prefaulted; chooses the nodes of its memory.

        Raises BusyError, or OSError that names what to do if memory is short. Files that can't be
        read only for now (no permission, too many open files) raise OSError too: then the cache is
        left as it is.
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
            # The next start has two tables for a moment, and should not fail if this one does not.
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
        """Puts the new table, which has what is kept of the old one, in its place, and its state
        beside it. Raises OSError.

        `is_renumbered`: a key space number of one table means another key space in the other. Then
        there is no state while the tables change places, so that a start that is killed there
        leaves nothing rather than one key space's blocks under another's name.
        """
        if is_renumbered:
            (self.directory / STATE_FILE).unlink()
        else:
            self.save_state(state)
        if self._old_table is not None:
            # Its entry numbers are those of the old table.
            (self.directory / USE_FILE).unlink(missing_ok=True)
            (self.directory / NEW_TABLE_FILE).replace(self.directory / TABLE_FILE)
            self.leftover = None
            self._old_table.close()
            self._old_table = None
        if is_renumbered:
            self.save_state(state)

    def save_state(self, state: ServerState) -> None:
        """Writes down what the bytes mean, before the first of them are stored. Raises OSError."""
        write_state(self.directory / STATE_FILE, state)

    def save_use(self, last_used_s: NDArray[np.float64]) -> None:
        """Writes down when entries were last used: float64 by entry number, seconds of the
        monotonic clock, nan for not known. Raises OSError."""
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
        """Fresh descriptors of arena (writable if asked) and table, to be sent and closed."""
        flags, access = os.O_CLOEXEC | os.O_NOFOLLOW, os.O_RDWR if writes_arena else os.O_RDONLY
        arena = os.open(self.directory / ARENA_FILE, access | flags)
        return arena, os.open(self.directory / TABLE_FILE, os.O_RDONLY | flags)

    def release(self) -> None:
        """Lets another server have the directory and its files. Blocks while a piece of the arena
        is being prefaulted."""
        self.filling.close()
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Removes the files; their memory is freed when nobody maps it any more. Blocks as
        `release`."""
        self.filling.close()
        remove_files(self.directory, self._lock_fd)


def clear(directory: Path) -> None:
    """Removes the files that servers have left in the directory. Raises BusyError if a server runs
    on it, or OSError."""
    if directory.is_dir():
        remove_files(directory, _locked(directory))


def remove_files(directory: Path, lock_fd: int) -> None:
    """Removes all files, then the lock, and the directory if nothing else is in it."""
    _remove_all(directory, lock_fd)
    if not any(directory.iterdir()):
        directory.rmdir()


def remove_by_descriptor(directory_fd: int) -> None:
    """Removes the files of a directory that is open, whatever its path means by now; the directory
    stays.

    Raises BusyError if a server runs on it, and then has removed nothing; OSError.
    """
    directory = Path(f"/proc/self/fd/{directory_fd}")
    _remove_all(directory, _locked(directory))


def _remove_all(directory: Path, lock_fd: int) -> None:
    """Removes all files and the lock, which is released."""
    _remove_files(directory)
    for path in [path for pattern in KEPT_FILES for path in directory.glob(pattern)]:
        path.unlink(missing_ok=True)
    (directory / LOCK_FILE).unlink(missing_ok=True)
    os.close(lock_fd)


def _remove_files(directory: Path) -> None:
    for name in FILES:
        (directory / name).unlink(missing_ok=True)


def lock_file(path: Path) -> int:
    """Descriptor of the locked file, with this process's pid in it. Raises BusyError, or
    OSError."""
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
        # Whoever removes the directory's files removes the lock while holding it: then this locks
        # a file that is not there any more.
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
    """What an old server left, with its table; else None and why it can't be used, empty on a fresh
    directory. Raises OSError if it can't be read only for now."""
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
    """Reads what an old server left. Raises StateError, ValueError or OSError if the files are not
    whole or were made with other settings."""
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
    """Times of last use; None if there is no such file of this table."""
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
    # Arithmetic on spoiled bytes would warn of a signalling NaN.
    ages = np.where(np.isfinite(ages), ages, np.float32(np.nan)).astype(np.float64)
    used_s[: len(ages)] = saved_s + np.minimum(ages, 0.0)
    return used_s
