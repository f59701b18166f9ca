"""The arena (the file of host memory with all slots) and the files beside it: block table, key
spaces, and the blocks' times of last use.

All files lie in one directory on tmpfs, which the server locks while it runs. The files outlive the
server: the next server that uses the directory continues with the arena unchanged, and builds a new
table from the records of the old table (`Leftover`). Always true: the old table and the state file
stay as the old server left them until `adopt`, so a start that is killed loses no block. Before the
server is ready, all buckets of the table, some of its records and some of the arena have memory.
The rest is prefaulted in the background: first the records, then the arena (`memory.filling`).
"""

import errno
import fcntl
import mmap
import os
import stat
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
from hotkv_server.memory.mapping import FileMapping, is_sparse
from hotkv_server.memory.state import (
    ServerState,
    StateError,
    read_file,
    read_state,
    replace_file,
    write_state,
)

# ----------------------------------------------------------------------- Records of the block table
# The block table has a record for each block. Its records get memory in pieces, from the first
# record on. The start of the server prefaults the first FIRST_ENTRIES records; the thread that
# fills the arena prefaults the others.
#
# Always true: the first `num_entries` records have memory, and `num_entries` only grows. The core
# has at most `num_entries` entries. So the server never writes to a record without memory: if
# memory were short, such a write could kill the process.

FIRST_ENTRIES = 1 << 21
"""Number of records that the start of the server prefaults. They have 144 MiB, and are enough for
an arena of 32 GiB with the default number of blocks."""
PIECE_ENTRIES = 1 << 20


class RecordsMemory:
    """Prefaults the records in a block table's file. The buckets of the table (its hash index) have
    memory already.

    fd: descriptor of the table's file.
    geometry: sizes of the table, and offsets of its parts in the file.
    num_entries: number of records that have memory. The core may have at most this many entries.
    """

    def __init__(self, fd: int, geometry: TableGeometry, num_entries: int) -> None:
        self.num_entries = num_entries
        self._fd = fd
        self._geometry = geometry

    def __repr__(self) -> str:
        return f"RecordsMemory({self.num_entries}/{self._geometry.capacity} entries)"

    @property
    def is_done(self) -> bool:
        """True if all records of the block table have memory."""
        return self.num_entries == self._geometry.capacity

    def back(self, num_entries: int) -> None:
        """Prefaults the first `num_entries` records, or all records if the table has fewer. Skips
        records that have memory already. Blocks the calling thread. Raises OSError if memory is
        short; `self.num_entries` is then unchanged."""
        end = min(num_entries, self._geometry.capacity)
        if end > self.num_entries:
            start_bytes, end_bytes = (
                self._geometry.records_offset_bytes + count * RECORD_WORDS * 4
                for count in (self.num_entries, end + 1)
            )
            os.posix_fallocate(self._fd, start_bytes, end_bytes - start_bytes)
            self.num_entries = end

    def back_rest(self) -> Iterator[int]:
        """Prefaults the remaining records of the block table, in pieces. Yields the number of
        records with memory after each piece. Each step blocks for a piece. Raises OSError if memory
        is short."""
        while not self.is_done:
            self.back(self.num_entries + PIECE_ENTRIES)
            yield self.num_entries


# --------------------------------------------------------- For clients that read the arena in place
# The file of the arena ends with the validity words (`hotkv_proto.words`): numbers by which clients
# check that the blocks they read were still pinned. The file of the block table ends with the
# marks: a byte for each entry, 1 if clients may read its block directly in the arena.
#
# Always true: the words have memory, so writing a word never fails. The marks are in the table's
# file, so that they are replaced together with the entry numbers to which they refer. The files of
# an older version of the server have neither words nor marks. Such an arena's file is extended by
# the words; such a table counts as a table in which no entry is marked.

Marks = NDArray[np.uint8]


def map_words(fd: int, arena_bytes: int) -> NDArray[np.uint64]:
    """Maps the validity words (by which clients check that blocks are still pinned) at the end of
    an arena's file. Returns them as a writable array; the mapping ends when the array is freed.
    Extends the file if it has no words. Raises OSError."""
    start = words_offset_bytes(arena_bytes)
    os.posix_fallocate(fd, start, WORD_BYTES)
    return np.frombuffer(mmap.mmap(fd, WORD_BYTES, offset=start), "<u8")


def _marks_offset_bytes(geometry: TableGeometry) -> int:
    """Returns the offset in a table's file at which the marks (of entries that clients may read in
    the arena) begin."""
    return -(-geometry.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def table_file_bytes(geometry: TableGeometry) -> int:
    """Returns the size of a block table's file in bytes, including the marks (of entries that
    clients may read in the arena)."""
    return _marks_offset_bytes(geometry) + geometry.capacity + 1


def has_arena(directory: Path, arena_bytes: int) -> bool:
    """Returns True if an earlier server has left a cache in the directory, with an arena of this
    size. `NodeMemory.open` may refuse the cache for other reasons."""
    try:
        size = (directory / ARENA_FILE).stat().st_size
    except OSError:
        return False
    return size in (arena_bytes, file_bytes(arena_bytes)) and (directory / STATE_FILE).exists()


def marks_of(mapping: NDArray[np.uint8], geometry: TableGeometry) -> Marks:
    """Returns the marks in the mapped file of a block table: a uint8 for each entry number. A mark
    is 1 if clients may read the entry's block directly in the arena. All marks are 0 if the file
    has no marks."""
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
"""Patterns of files that stay in the directory when the cache in it is discarded, because another
cache can use them: measured copy speeds of devices, the ledger (counts of hits and misses), and
names of engines and models."""
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
"""The files of a cache, in the order in which they are removed. The state file is removed first:
without it, the next server ignores the other files. A file that ends in `.new` is left by a server
that was killed while it wrote."""
FIRST_FILL_S = 0.25
FIRST_FILL_BYTES = 64 << 20
"""The start of the server prefaults the arena for FIRST_FILL_S seconds, but at least
FIRST_FILL_BYTES of it."""
TABLE_HUGE_S = 0.1
"""Longest time, in seconds, that the start of the server spends on prefaulting the table as huge
pages. They make lookups faster: with small pages, a lookup in a table that is not in the
processor's cache waits longer for the page tables than for the table."""
LOCK_TRIES = 5
LOCK_RETRY_S = 0.01
"""Pause between two tries to lock the directory. A try may fail although no server runs, because
another process that starts or removes an arena there holds the lock for a moment."""
LOOK_S = 5.0
"""Longest time, in seconds, that a start waits for processes that check whether a server runs. Each
holds a shared lock for microseconds, or for longer if the system stops the process meanwhile."""
USE_HEADER: Final = struct.Struct("<8sqdq")
USE_MAGIC: Final = b"HOTKVUS1"


class BusyError(OSError):
    """Raised if another server has locked the directory. The message names the server's pid."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """The cache that an earlier server left in the directory.

    table: the block table.
    state: the size of a slab (a piece of the arena) and the key spaces.
    last_used_s: time of last use of each entry, float64 by entry number, in seconds of the
        monotonic clock. nan for an entry without a saved time. None if the file with these times is
        missing or not valid.
    marks: by entry number, 1 for entries that clients may read in the arena; valid until `adopt`.
    """

    table: BlockTable
    state: ServerState
    last_used_s: NDArray[np.float64] | None
    marks: Marks


@dataclass(slots=True)
class NodeMemory:
    """The files of a server in its directory: arena, block table and state.

    arena: the mapped arena; its `huge_bytes` counts the bytes in huge pages.
    table_file, table: the mapped file of the block table, and the table in it.
    filling: prefaults the arena and knows how much of it has memory.
    records: prefaults the records of the table.
    words: the validity words, by which clients that read the arena directly check that the blocks
        which they read were still pinned.
    marks: by entry number, 1 if clients may read the entry's block directly in the arena.
    leftover: the cache that an earlier server left; None if there is no such cache, and after
        `adopt`.
    why_empty: why the files of an earlier server can't be used; an empty text if they can be used,
        or if there are no such files.
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
    _own_files: tuple[str, ...] = FILES

    @staticmethod
    def open(
        directory: Path, arena_bytes: int, slab_bytes: int, capacity: int, fresh_epoch: int,
        mode: int = 0o640, *, prefault: bool = True,
        place: Callable[[int, int], None] | None = None,
    ) -> "NodeMemory":  # fmt: skip
        """Opens the files in the directory if they fit the arguments. Otherwise removes them and
        makes new files.

        capacity: most entries of the block table.
        fresh_epoch: epoch of a new cache: a random number that identifies the cache.
        mode: permissions of new files.
        prefault: if True, prefaults the table's buckets, some of its records, and as much of the
            arena as FIRST_FILL_S allows; `records` and `filling` prefault the rest. If False, pages
            get memory when they are written, and all of the arena counts as filled.
        place: function that chooses the NUMA nodes of the arena's memory. Called with (address,
            num_bytes) of the mapped arena, before the arena is prefaulted.

        Raises BusyError if another server uses the directory. Raises OSError if memory is short,
        with a message that names the fix. Also raises OSError if files can't be read at the moment
        (no permission, too many open files); the cache that they hold is then left unchanged.
        """
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock_fd = _locked(directory)
        # The files that this start makes, which are removed if it fails.
        own_files: tuple[str, ...] = (NEW_TABLE_FILE,)
        try:
            _remove_files(directory, own_files)
            leftover, old_table, why_empty = _usable(directory, arena_bytes, slab_bytes)
            if leftover is None:
                # The token ids of blocks stay: blocks on the disk outlive the arena.
                has_contents = (directory / CONTENTS_FILE).exists()
                own_files = tuple(
                    name for name in FILES if name != CONTENTS_FILE or not has_contents
                )
                _remove_files(directory, own_files)
            epoch = fresh_epoch if leftover is None else leftover.table.geometry.epoch
            geometry = TableGeometry.for_capacity(capacity, epoch, arena_bytes)
            table_bytes = table_file_bytes(geometry)
            # Require room for two block tables: the next start briefly has an old and a new table,
            # and should not fail if this start succeeds.
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
            _remove_files(directory, own_files)
            os.close(lock_fd)
            raise
        view, header = table_file.array(), geometry.pack()
        view[: len(header)] = memoryview(header)
        table, marks = BlockTable(view, geometry), marks_of(view, geometry)
        filled_bytes = arena_bytes
        if prefault and (leftover is None or is_sparse(arena.fd)):
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
            own_files,
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
            _remove_files(directory, own_files)
            memory.release()
            raise
        return memory

    def adopt(self, state: ServerState) -> None:
        """Writes `state`, then replaces the old table by the new table, into which the caller has
        restored the entries. Raises OSError.

        state: the key spaces with their numbers. A key space has the same number in both tables, so
            `state` fits the table also if the server is killed before the replacement.
        """
        assert self._old_table is not None, "there is no old table"
        self.save_state(state)
        # Remove the file with the times of last use of the old table's entries: the same entry
        # numbers stand for other blocks in the new table.
        (self.directory / USE_FILE).unlink(missing_ok=True)
        (self.directory / NEW_TABLE_FILE).replace(self.directory / TABLE_FILE)
        self.leftover = None
        self._old_table.close()
        self._old_table = None

    def save_state(self, state: ServerState) -> None:
        """Writes the state file, without which the next server can't interpret the arena. The
        caller stores no block of a new key space (a model in a configuration) before this call
        has ended. Raises OSError."""
        write_state(self.directory / STATE_FILE, state)

    def save_use(self, last_used_s: NDArray[np.float64]) -> None:
        """Writes the file of the entries' times of last use. Raises OSError.

        last_used_s: float64 by entry number, seconds of the monotonic clock; nan if unknown.
        """
        epoch, now_s = self.table.geometry.epoch, time.monotonic()
        header = USE_HEADER.pack(USE_MAGIC, epoch, now_s, len(last_used_s))
        ages = (last_used_s - now_s).astype("<f4").data
        replace_file(self.directory / USE_FILE, [header, ages])

    def open_for_engine(self, writes_arena: bool = False) -> tuple[int, int]:
        """Opens new descriptors of the files of arena and block table, read-only. The caller sends
        and closes them. Raises OSError.

        writes_arena: if True, the arena's descriptor is writable.
        """
        flags, access = os.O_CLOEXEC | os.O_NOFOLLOW, os.O_RDWR if writes_arena else os.O_RDONLY
        arena = os.open(self.directory / ARENA_FILE, access | flags)
        try:
            return arena, os.open(self.directory / TABLE_FILE, os.O_RDONLY | flags)
        except OSError:
            os.close(arena)
            raise

    def release(self) -> None:
        """Unlocks the directory, so that another server can use it, and leaves the files. Blocks
        while a piece of the arena is being prefaulted."""
        self.filling.close()
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Removes all files and unlocks the directory. The files' memory is freed once no process
        maps them. Blocks while a piece of the arena is being prefaulted."""
        self.filling.close()
        remove_files(self.directory, self._lock_fd)

    def discard(self) -> None:
        """Removes the files of the cache after a failed start, and unlocks the directory. The files
        that another cache can use (KEPT_FILES) stay, and token ids that an earlier server has left.
        Blocks while a piece of the arena is being prefaulted."""
        self.filling.close()
        _remove_files(self.directory, self._own_files)
        kept = (*KEPT_FILES, CONTENTS_FILE)
        if any(any(self.directory.glob(pattern)) for pattern in kept):
            os.close(self._lock_fd)
        else:
            remove_files(self.directory, self._lock_fd)


def clear(directory: Path) -> None:
    """Removes all files that servers have left in the directory. Raises BusyError if a server uses
    the directory, or OSError."""
    if directory.is_dir():
        remove_files(directory, _locked(directory))


def remove_files(directory: Path, lock_fd: int) -> None:
    """Removes all files of servers in a locked directory, then the lock file, and the directory if
    it is empty. `lock_fd`: descriptor of the locked lock file; closed here."""
    _remove_all(directory, lock_fd)
    if not any(directory.iterdir()):
        directory.rmdir()


def remove_by_descriptor(directory_fd: int) -> None:
    """Removes the files of servers in an open directory, even if its path has changed. The
    directory stays.

    Raises BusyError, before it removes a file, if a server uses the directory; or OSError.
    """
    directory = Path(f"/proc/self/fd/{directory_fd}")
    _remove_all(directory, _locked(directory))


def _remove_all(directory: Path, lock_fd: int) -> None:
    """Removes all files of servers and the lock file, and releases the lock."""
    _remove_files(directory)
    for path in [path for pattern in KEPT_FILES for path in directory.glob(pattern)]:
        path.unlink(missing_ok=True)
    (directory / LOCK_FILE).unlink(missing_ok=True)
    os.close(lock_fd)


def _remove_files(directory: Path, names: tuple[str, ...] = FILES) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def lock_file(path: Path) -> int:
    """Locks the file at `path` and writes this process's pid into the file. Returns the file's
    descriptor; closing it releases the lock. Raises BusyError if another process holds the lock, or
    OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file, so remove it", str(path))
    tries, until_s = 0, time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            tries += not _is_shared(fd)
            if tries < LOCK_TRIES and time.monotonic() < until_s:
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


def _is_shared(fd: int) -> bool:
    """Returns True if no process holds an exclusive lock on the file. Other processes may still
    hold shared locks, while they check whether a server runs."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _locked(directory: Path) -> int:
    while True:
        fd = lock_file(directory / LOCK_FILE)
        # A process that removes the directory's files also removes the lock file, while it holds
        # the lock. This process may then have locked a file that is no longer in the directory: try
        # again.
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
    """Opens a file that belongs to this user. Raises OSError for a symbolic link, StateError for
    another user's file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise StateError(f"{path.name} belongs to uid {owner}")
    return fd


def _usable(
    directory: Path, arena_bytes: int, slab_bytes: int
) -> tuple[Leftover | None, FileMapping | None, str]:
    """Returns the cache that an earlier server left, and the mapped file of its table. If the files
    can't be used, returns None for both and the reason; the reason is empty if there are no files.
    Raises OSError if the files can't be read at the moment."""
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
    """Reads the cache that an earlier server left. Raises StateError, ValueError or OSError if the
    files are damaged or were made with other settings."""
    state = read_state(directory / STATE_FILE)
    if state.slab_bytes != slab_bytes:
        raise StateError(f"arena.slab_bytes was {state.slab_bytes} and is {slab_bytes} now")
    arena_fd = _open_own(directory / ARENA_FILE, os.O_RDWR)
    size = os.fstat(arena_fd).st_size
    os.close(arena_fd)
    fd = _open_own(directory / TABLE_FILE, os.O_RDWR)
    # An empty file can't be mapped.
    mapping = FileMapping(fd, os.fstat(fd).st_size or 1, str(directory / TABLE_FILE))
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
    """Reads the file with the times of last use of the block table's entries. Returns float64 by
    entry number, in seconds of the monotonic clock (nan if unknown); None if there is no valid file
    for this table."""
    try:
        content = read_file(path)
    except (OSError, ValueError):
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
    # First replace values that are not finite: the file may be damaged, and numpy would warn if it
    # computed with a signalling NaN.
    ages = np.where(np.isfinite(ages), ages, np.float32(np.nan)).astype(np.float64)
    used_s[: len(ages)] = saved_s + np.minimum(ages, 0.0)
    return used_s
