"""The files of a server: arena, block table, state, and the blocks' times of last use.

They lie in one directory on tmpfs, which the server locks. The next server continues with the
arena unchanged, and builds a new table from the old records (`Leftover`). Always true: table and
state file stay as they were until `adopt`, so a start that is killed loses no block. Buckets,
some records and some of the arena have memory before the server is ready; the rest is prefaulted
in the background.
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

from hotkv_proto.table import (
    RECORD_WORDS,
    SLOT_ALIGN,
    STATE_DETACHED,
    STATE_READY,
    W_GROUP_STATE,
    W_OFFSET,
    W_SIZE,
    BlockTable,
    TableGeometry,
)
from hotkv_proto.words import MAX_SESSION_WORD, WORD_BYTES, file_bytes, words_offset_bytes
from hotkv_server.memory.filling import Filling, read_note
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.memory.state import (
    ServerState,
    StateError,
    read_file,
    read_state,
    replace_file,
    write_state,
)

# ----------------------------------------------------------------------- Records of the block table
# Always true: the first `num_entries` records have memory, and the core has at most so many
# entries. A write to a record without memory could kill the process.

FIRST_ENTRIES = 1 << 21
"""At the start: 144 MiB, enough for 32 GiB with the default number of blocks."""
PIECE_ENTRIES = 1 << 20


class RecordsMemory:
    """num_entries: records that have memory. The buckets have it already.
    num_wanted: that shall have it.
    """

    def __init__(
        self, fd: int, geometry: TableGeometry, num_entries: int, num_wanted: int = 0
    ) -> None:
        """`num_wanted` 0: all."""
        self.num_entries = num_entries
        self.num_wanted = min(num_wanted or geometry.capacity, geometry.capacity)
        self._fd = fd
        self._geometry = geometry

    def __repr__(self) -> str:
        return f"RecordsMemory({self.num_entries}/{self.capacity} entries)"

    @property
    def capacity(self) -> int:
        return self._geometry.capacity

    @property
    def is_done(self) -> bool:
        return self.num_entries >= self.num_wanted

    def back(self, num_entries: int) -> None:
        """Prefaults the first records, or all. Blocks. Raises OSError, with nothing changed."""
        end = min(num_entries, self._geometry.capacity)
        if end > self.num_entries:
            start_bytes, end_bytes = (
                self._geometry.records_offset_bytes + count * RECORD_WORDS * 4
                for count in (self.num_entries, end + 1)
            )
            os.posix_fallocate(self._fd, start_bytes, end_bytes - start_bytes)
            self.num_entries = end

    def back_rest(self) -> Iterator[int]:
        """Yields `num_entries` after each piece, for which it blocks. Raises OSError."""
        while not self.is_done:
            self.back(min(self.num_entries + PIECE_ENTRIES, self.num_wanted))
            yield self.num_entries


# --------------------------------------------------------- For clients that read the arena in place
# The arena's file ends with the validity words (`hotkv_proto.words`), the table's with the marks: a
# byte for each entry, 1 if clients may read it in the arena. The words have memory, so writing one
# never fails. The marks are replaced together with the entry numbers. Files of an older version
# have neither: the arena's is extended, the table's counts as unmarked.

Marks = NDArray[np.uint8]


def map_words(fd: int, arena_bytes: int) -> NDArray[np.uint64]:
    """Extends a file without words. The mapping ends when the array is freed. Raises OSError."""
    start = words_offset_bytes(arena_bytes)
    os.posix_fallocate(fd, start, WORD_BYTES)
    return np.frombuffer(mmap.mmap(fd, WORD_BYTES, offset=start), "<u8")


def _marks_offset_bytes(geometry: TableGeometry) -> int:
    return -(-geometry.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def table_file_bytes(geometry: TableGeometry) -> int:
    """With the marks."""
    return _marks_offset_bytes(geometry) + geometry.capacity + 1


def table_memory_bytes(geometry: TableGeometry, num_entries: int) -> int:
    """That the file takes if only so many records get memory; 0: all."""
    absent = geometry.capacity - min(num_entries or geometry.capacity, geometry.capacity)
    return table_file_bytes(geometry) - absent * RECORD_WORDS * 4


# The arena's file and mapping may be larger than the arena (`NodeMemory.num_bytes`): behind it they
# have no memory. So the arena can grow while engines map the file, which never becomes shorter,
# since an access beyond its end would kill them.


def has_arena(directory: Path) -> bool:
    """`NodeMemory.open` may still refuse the cache."""
    return all(os.access(directory / name, os.F_OK) for name in (ARENA_FILE, STATE_FILE))


def _extent(table: BlockTable) -> int:
    """End of the last slot that a block, ready or still read, has in the arena."""
    records = table.records
    states = records[:, W_GROUP_STATE] >> np.uint32(16)
    mine = records[np.isin(states, (STATE_READY, STATE_DETACHED))]
    ends = mine[:, W_OFFSET].astype(np.int64) + mine[:, W_SIZE]
    return int(ends.max(initial=0)) * SLOT_ALIGN


def _move_words(fd: int, old_bytes: int, new_bytes: int) -> bool:
    """To the end of a longer file. False if clients of an earlier server may still look at them."""
    old = map_words(fd, old_bytes)
    if np.any(old[1 : MAX_SESSION_WORD + 1] & np.uint64(1)):
        return False
    os.truncate(fd, file_bytes(new_bytes))
    map_words(fd, new_bytes)[:] = old
    return True


def marks_of(mapping: NDArray[np.uint8], geometry: TableGeometry) -> Marks:
    """All 0 if the file has none."""
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
"""Patterns of files that stay when a cache is discarded: another can use them."""
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
"""In the order of removal: without the state file, the next server ignores the others. `.new` is
left by a kill."""
FIRST_FILL_S = 0.25
FIRST_FILL_BYTES = 64 << 20
"""The start prefaults the arena for FIRST_FILL_S, but at least so much."""
TABLE_HUGE_S = 0.1
"""Longest time for prefaulting the table as huge pages. With small ones, a lookup waits longer
for the page tables than for the table."""
LOCK_TRIES = 5
LOCK_RETRY_S = 0.01
"""Others that start or remove an arena hold the lock for a moment."""
LOOK_S = 5.0
"""Longest wait for processes that check whether a server runs: each holds a shared lock for
microseconds, unless it is stopped."""
USE_HEADER: Final = struct.Struct("<8sqdq")
USE_MAGIC: Final = b"HOTKVUS1"


class BusyError(OSError):
    """Another server has locked the directory."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """last_used_s: by entry number, on the monotonic clock; nan for an entry without a time, None
        without a valid file.
    marks: valid until `adopt`.
    """

    table: BlockTable
    state: ServerState
    last_used_s: NDArray[np.float64] | None
    marks: Marks


@dataclass(slots=True)
class NodeMemory:
    """num_bytes: of the arena.
    slab_bytes: an earlier cache keeps its own.
    leftover: None without an earlier cache, and after `adopt`.
    why_empty: why earlier files can't be used, if there are any.
    """

    directory: Path
    num_bytes: int
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
    prefault: bool = True
    place: Callable[[int, int], None] | None = None
    entries_for: Callable[[int], int] = lambda num_bytes: 0
    _lock_fd: int = -1
    _old_table: FileMapping | None = None
    _own_files: tuple[str, ...] = FILES

    @staticmethod
    def open(
        directory: Path, arena_bytes: int, slab_bytes: int, capacity: int, fresh_epoch: int,
        mode: int = 0o640, *, most_bytes: int = 0, prefault: bool = True,
        entries_for: Callable[[int], int] = lambda num_bytes: 0, gives_back: bool = True,
        place: Callable[[int, int], None] | None = None,
    ) -> "NodeMemory":  # fmt: skip
        """Opens the files if they can be used; else removes them and makes new ones. An earlier
        arena becomes as large as `arena_bytes`, or stays larger as far as its blocks lie.

        capacity: most entries of the table.
        most_bytes: to which the arena may grow later; at least `arena_bytes`. While clients of an
            earlier server may read in the arena, its own bound stays.
        entries_for: how many entries of the table an arena of so many bytes needs; only they get
            memory in the background. 0: all.
        fresh_epoch: random number that identifies a new cache.
        mode: permissions of new files.
        prefault: fills some now, `records` and `filling` the rest. If False, pages get memory when
            written, and the arena counts as filled.
        gives_back: False: an earlier arena stays as large as the memory that it has.
        place: chooses NUMA nodes for (address, num_bytes) of the arena before it is prefaulted;
            called again when it has grown.

        Raises BusyError if another server uses the directory. Raises OSError if memory is short,
        with a message that names the fix, or if files can't be read at the moment; their cache
        stays.
        """
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock_fd = _locked(directory)
        # Made by this start, and removed if it fails.
        own_files: tuple[str, ...] = (NEW_TABLE_FILE,)
        try:
            _remove_files(directory, own_files)
            leftover, old_table, why_empty = _usable(directory)
            if leftover is None:
                # Token ids stay: blocks on the disk outlive the arena.
                has_contents = (directory / CONTENTS_FILE).exists()
                own_files = tuple(
                    name for name in FILES if name != CONTENTS_FILE or not has_contents
                )
                _remove_files(directory, own_files)
            most_bytes = max(arena_bytes, most_bytes)
            arena_path, epoch, held_bytes = directory / ARENA_FILE, fresh_epoch, 0
            if leftover is not None:
                old = leftover.table.geometry
                arena_fd = _open_own(arena_path, os.O_RDWR)
                if old.arena_bytes >= most_bytes or not _move_words(
                    arena_fd, old.arena_bytes, most_bytes
                ):
                    most_bytes = old.arena_bytes
                slab_bytes, epoch = leftover.state.slab_bytes, old.epoch
                extent = -(-_extent(leftover.table) // slab_bytes) * slab_bytes
                arena_bytes = min(max(arena_bytes, extent), most_bytes)
                held_bytes = os.fstat(arena_fd).st_blocks * 512
                arena = FileMapping(arena_fd, most_bytes, str(arena_path), exclusive=True)
                if not gives_back:
                    arena_bytes = max(arena_bytes, read_note(directory / FILLED_FILE, arena))
            geometry = TableGeometry.for_capacity(capacity, epoch, most_bytes)
            table_bytes = table_file_bytes(geometry)
            # For two tables: the next start briefly has both, and should not fail. An earlier arena
            # has memory, or gets it while some is free.
            held_by_table = table_memory_bytes(geometry, entries_for(arena_bytes))
            more_bytes = 0 if leftover is not None else arena_bytes + held_by_table
            _check_room(directory, held_by_table + more_bytes, arena_bytes)
            if leftover is None:
                arena = FileMapping.create(arena_path, most_bytes, mode)
            table_path = directory / (TABLE_FILE if leftover is None else NEW_TABLE_FILE)
            words = map_words(arena.fd, most_bytes)
            table_file = FileMapping.create(table_path, table_bytes, mode)
        except BaseException:
            _remove_files(directory, own_files)
            os.close(lock_fd)
            raise
        view, header = table_file.array(), geometry.pack()
        view[: len(header)] = memoryview(header)
        table, marks = BlockTable(view, geometry), marks_of(view, geometry)
        filled_bytes = arena_bytes
        if prefault and (leftover is None or held_bytes < most_bytes):
            filled_bytes = 0 if leftover is None else read_note(directory / FILLED_FILE, arena)
        filled_bytes = min(filled_bytes, arena_bytes)
        filling = Filling(arena, directory / FILLED_FILE, filled_bytes, arena_bytes)
        records = RecordsMemory(
            table_file.fd, geometry, 0 if prefault else capacity, entries_for(arena_bytes)
        )
        memory = NodeMemory(
            directory,
            arena_bytes,
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
            prefault,
            place,
            entries_for,
            lock_fd,
            old_table,
            own_files,
        )
        try:
            if place is not None:
                place(arena.address, arena_bytes)
            if leftover is not None and gives_back:
                arena.punch(arena_bytes, most_bytes - arena_bytes)
            if prefault:
                table_file.make_huge(0, TABLE_HUGE_S)
                os.posix_fallocate(table_file.fd, 0, geometry.records_offset_bytes)
                os.posix_fallocate(table_file.fd, table_bytes - len(marks), len(marks))
                records.back(min(FIRST_ENTRIES, records.num_wanted))
                filling.fill_for(FIRST_FILL_S, FIRST_FILL_BYTES)
        except BaseException:
            _remove_files(directory, own_files)
            memory.release()
            raise
        return memory

    def grow(self, num_bytes: int) -> None:
        """At most to the size of the mapping; `filling` then brings the memory in. Blocks. Raises
        OSError."""
        self.records.num_wanted = min(
            self.records.capacity, max(self.records.num_wanted, self.entries_for(num_bytes))
        )
        if self.place is not None:
            self.place(self.arena.address, num_bytes)
        self.filling.grow(num_bytes)
        if not self.prefault:
            self.filling.filled_bytes = num_bytes
        self.num_bytes = num_bytes

    def shrink(self, num_bytes: int, kept_bytes: int = 0) -> None:
        """No block lies behind. kept_bytes: keep their memory. Blocks. Raises OSError."""
        self.filling.shrink(num_bytes, kept_bytes)
        self.num_bytes = num_bytes

    def adopt(self, state: ServerState) -> None:
        """Replaces the old table by the new one, into which entries were restored. Key spaces
        have the same numbers in both, so a kill after writing `state` does no harm. Raises
        OSError."""
        assert self._old_table is not None, "there is no old table"
        self.save_state(state)
        # The same entry numbers stand for other blocks in the new table.
        (self.directory / USE_FILE).unlink(missing_ok=True)
        (self.directory / NEW_TABLE_FILE).replace(self.directory / TABLE_FILE)
        self.leftover = None
        self._old_table.close()
        self._old_table = None

    def save_state(self, state: ServerState) -> None:
        """No block of a new key space is stored before this has ended. Raises OSError."""
        write_state(self.directory / STATE_FILE, state)

    def save_use(self, last_used_s: NDArray[np.float64]) -> None:
        """Raises OSError."""
        epoch, now_s = self.table.geometry.epoch, time.monotonic()
        header = USE_HEADER.pack(USE_MAGIC, epoch, now_s, len(last_used_s))
        ages = (last_used_s - now_s).astype("<f4").data
        replace_file(self.directory / USE_FILE, [header, ages])

    def open_for_engine(self, writes_arena: bool = False) -> tuple[int, int]:
        """New descriptors of arena and table, which the caller closes. Raises OSError."""
        flags, access = os.O_CLOEXEC | os.O_NOFOLLOW, os.O_RDWR if writes_arena else os.O_RDONLY
        arena = os.open(self.directory / ARENA_FILE, access | flags)
        try:
            return arena, os.open(self.directory / TABLE_FILE, os.O_RDONLY | flags)
        except OSError:
            os.close(arena)
            raise

    def release(self) -> None:
        """Leaves the files. Blocks while a piece is being prefaulted."""
        self.filling.close()
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Memory is freed once no process maps it. Blocks as `release`."""
        self.filling.close()
        remove_files(self.directory, self._lock_fd)

    def discard(self) -> None:
        """After a failed start. KEPT_FILES and earlier token ids stay. Blocks as `release`."""
        self.filling.close()
        _remove_files(self.directory, self._own_files)
        kept = (*KEPT_FILES, CONTENTS_FILE)
        if any(any(self.directory.glob(pattern)) for pattern in kept):
            os.close(self._lock_fd)
        else:
            remove_files(self.directory, self._lock_fd)


def forecast(directory: Path, arena_bytes: int) -> str:
    """What a start would do to an earlier server's cache, for people; empty without one. Raises
    OSError."""
    left, mapping, why_empty = _usable(directory)
    if left is None or mapping is None:
        return f"the cache in {directory} can't be used and goes: {why_empty}" if why_empty else ""
    extent, most_bytes = _extent(left.table), left.table.geometry.arena_bytes
    mapping.close()
    if extent > arena_bytes:
        return (
            f"the cache in {directory} stays; its blocks reach to {extent >> 20} MiB, so the arena "
            f"then shrinks to {arena_bytes >> 20} MiB, and the coldest of them go"
        )
    more = f", in an arena of {arena_bytes >> 20} MiB" if arena_bytes > most_bytes else ""
    return f"the cache in {directory} stays{more}"


def clear(directory: Path) -> None:
    """Raises BusyError if a server uses the directory, or OSError."""
    if directory.is_dir():
        remove_files(directory, _locked(directory))


def remove_files(directory: Path, lock_fd: int) -> None:
    """Removes files of servers, and the directory if it is then empty. `lock_fd`: closed here."""
    _remove_all(directory, lock_fd)
    if not any(directory.iterdir()):
        directory.rmdir()


def remove_by_descriptor(directory_fd: int) -> None:
    """From an open directory, even if its path has changed. Raises BusyError before it removes a
    file, or OSError."""
    directory = Path(f"/proc/self/fd/{directory_fd}")
    _remove_all(directory, _locked(directory))


def _remove_all(directory: Path, lock_fd: int) -> None:
    """Also the lock file; releases the lock."""
    _remove_files(directory)
    for path in [path for pattern in KEPT_FILES for path in directory.glob(pattern)]:
        path.unlink(missing_ok=True)
    (directory / LOCK_FILE).unlink(missing_ok=True)
    os.close(lock_fd)


def _remove_files(directory: Path, names: tuple[str, ...] = FILES) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def lock_file(path: Path) -> int:
    """Closing the descriptor releases the lock. Raises BusyError or OSError."""
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
    """True if others hold no exclusive lock, but perhaps shared ones to look."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _locked(directory: Path) -> int:
    while True:
        fd = lock_file(directory / LOCK_FILE)
        # Who removes the directory's files also removes the lock file, while holding it: then
        # try again.
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
    """Raises OSError for a link, StateError for another user's file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        os.close(fd)
        raise StateError(f"{path.name} belongs to uid {owner}")
    return fd


def _usable(directory: Path) -> tuple[Leftover | None, FileMapping | None, str]:
    """The earlier cache and its table's file, or None for both and the reason; empty without
    files. Raises OSError if they can't be read at the moment."""
    if not (directory / STATE_FILE).exists() and not (directory / TABLE_FILE).exists():
        return None, None, ""
    try:
        return *_leftover(directory), ""
    except (FileNotFoundError, ValueError, StateError) as error:
        return None, None, str(error)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None, None, str(error)


def _leftover(directory: Path) -> tuple[Leftover, FileMapping]:
    """Raises StateError, ValueError or OSError for damaged files."""
    state = read_state(directory / STATE_FILE)
    if state.slab_bytes <= 0 or state.slab_bytes % SLOT_ALIGN:
        raise StateError(f"slabs had {state.slab_bytes} bytes")
    arena_fd = _open_own(directory / ARENA_FILE, os.O_RDWR)
    size = os.fstat(arena_fd).st_size
    os.close(arena_fd)
    fd = _open_own(directory / TABLE_FILE, os.O_RDWR)
    # An empty file can't be mapped.
    mapping = FileMapping(fd, os.fstat(fd).st_size or 1, str(directory / TABLE_FILE))
    try:
        old = BlockTable.open(mapping.array())
        # A start that was killed may have made it longer.
        if size < old.geometry.arena_bytes:
            raise StateError(f"the arena's file has {size} bytes, not those of its block table")
    except BaseException:
        mapping.close()
        raise
    marks = marks_of(mapping.array(), old.geometry)
    return Leftover(old, state, _read_use(directory / USE_FILE, old.geometry), marks), mapping


def _read_use(path: Path, geometry: TableGeometry) -> NDArray[np.float64] | None:
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
    # The file may be damaged, and numpy warns of signalling NaNs.
    ages = np.where(np.isfinite(ages), ages, np.float32(np.nan)).astype(np.float64)
    used_s[: len(ages)] = saved_s + np.minimum(ages, 0.0)
    return used_s
