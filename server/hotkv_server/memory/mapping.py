"""`FileMapping` maps a file, and guards the server against clients that truncate theirs.

Always true: address and file offset are congruent modulo 2 MiB, or the kernel gives no huge
pages (Python's mmap does not choose so). Views from `array` end with `close`. While the kernel
populates or unmaps memory, no other thread can map any: both are done in pieces.
"""

import ctypes
import errno
import mmap
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


# --------------------------------------------------------------------- Files that clients cut short
# An access beyond the end of a mapped file raises SIGBUS, which kills the process. A check
# beforehand does not help: the client may truncate in the middle of a copy. So the SIGBUS handler
# replaces a guarded mapping by empty memory and calls its `on_cut`. The copy continues with zeros,
# which are discarded. Any other SIGBUS goes to faulthandler, which writes stacks and ends the
# process.
#
# The handler waits for the GIL: a thread that copies holds neither it nor a lock. Known fault: a
# SIGBUS sent with kill(2) may reach a thread that is just acquiring the GIL. Then the server hangs
# until its watchdog ends it.

_SA_SIGINFO = 4
_CODE_OFFSET, _ADDRESS_OFFSET = 8, 16
"""Of si_code, si_addr in siginfo_t, 64-bit Linux."""


class _Action(ctypes.Structure):
    """struct sigaction of glibc and musl, on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_guarded: dict[int, tuple[int, Callable[[], None]]] = {}
"""By address: length, and what to call at an access beyond the file's end."""


def _guard(address: int, num_bytes: int, on_fault: Callable[[], None]) -> None:
    """`on_fault`, called in the accessing thread, must replace the mapping by anonymous memory."""
    _guarded[address] = num_bytes, on_fault


def _release(address: int) -> None:
    """Called before the mapping is unmapped."""
    _guarded.pop(address, None)


def _handle(number: int, info: int, context: int) -> None:
    at = ctypes.c_size_t.from_address(info + _ADDRESS_OFFSET).value
    is_fault = ctypes.c_int.from_address(info + _CODE_OFFSET).value > 0
    for address, (num_bytes, on_fault) in list(_guarded.items()):
        if is_fault and address <= at < address + num_bytes:
            on_fault()
            return
    # The fault comes again when this handler returns. Python's signal() refuses here.
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)
    if not is_fault:
        os.kill(os.getpid(), signal.SIGBUS)


_on_bus_error = _Handler(_handle)
_before = _Action()
"""Action for SIGBUS before `install_guard`."""


def install_guard() -> None:
    """Called once, at the start of the server. Raises OSError."""
    action = _Action(
        ctypes.cast(_on_bus_error, ctypes.c_void_p), (ctypes.c_byte * 128)(), _SA_SIGINFO, None
    )
    if _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# -------------------------------------------------------------------------------------- The mapping

HUGE_PAGE_BYTES = 2 << 20
COLLAPSE_BYTES = 32 << 20
PIECE_BYTES = 8 << 20
"""Most that the kernel populates or unmaps at a time: some milliseconds."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_POPULATE_WRITE = 23
_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if mapped == _FAILED or mapped is None:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped)


def _map_aligned(fd: int, num_bytes: int) -> int:
    """Shared and writable, at a multiple of 2 MiB. Returns the address."""
    reserved_bytes = num_bytes + HUGE_PAGE_BYTES
    reserved = _map(
        None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1
    )
    aligned = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(aligned, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    end = -(-(aligned + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if aligned > reserved:
        _libc.munmap(reserved, aligned - reserved)
    _libc.munmap(end, reserved + reserved_bytes - end)
    return aligned


# A *hole* is a page without memory. The kernel allocates it when first touched, and charges the
# control group of who touched it.

_CACHESTAT = 451
"""cachestat(2) of Linux 6.5."""
_SETTLED_NS = 20_000_000
"""Longest tick of the clock that times changes of files."""


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


def is_sparse(fd: int) -> bool:
    """Less memory than bytes. Memory beyond the end counts, so a client can hide holes."""
    found = os.fstat(fd)
    return found.st_blocks * 512 < found.st_size


def has_holes(fd: int, num_bytes: int) -> bool:
    """True if the first `num_bytes` of a file in memory have a hole. Some 50 ms for a GiB in small
    pages. Any thread.

    Pages allocated but never written are no holes, except before Linux 6.5. On hugetlbfs, whose
    pages no control group pays, as `is_sparse`.
    """
    end = min(num_bytes, os.fstat(fd).st_size)
    found = _CacheStat()
    if not _libc.syscall(
        _CACHESTAT, fd, ctypes.byref(_Range(0, end)), ctypes.byref(found), ctypes.c_uint(0)
    ):
        return bool(found.cached + found.evicted < -(-end // mmap.PAGESIZE))
    if ctypes.get_errno() == errno.EOPNOTSUPP:
        return is_sparse(fd)
    # The client shares the descriptor's position.
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < end
    finally:
        os.lseek(fd, position, os.SEEK_SET)


def _file_system(fd: int) -> int:
    found = (ctypes.c_long * 32)()
    return int(found[0]) if _libc.fstatfs(fd, found) == 0 else 0


_IN_MEMORY = frozenset({0x0102_1994, 0x9584_58F6, 0x8584_58F6})
"""Types of tmpfs, hugetlbfs and ramfs (statfs(2))."""


class Look(NamedTuple):
    """is_whole: not truncated since it was mapped.
    is_known: its pages are those in which `has_holes` found none.
    """

    is_whole: bool
    is_sparse: bool
    is_known: bool


class FileMapping:
    """huge_bytes: that `make_huge` has made or found.
    is_in_memory: an access waits for no disk and no other process, as on other file systems.
    """

    def __init__(
        self,
        fd: int,
        num_bytes: int,
        name: str,
        *,
        exclusive: bool = False,
        on_cut: Callable[[], None] | None = None,
    ) -> None:
        """Owns `fd` from here on, even if it raises. Raises ValueError if the file is shorter.

        exclusive: the file is the server's; only then this process may allocate its pages.
        on_cut: for a client's file: called, in any thread, after an access beyond its end.
        """
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise ValueError(
                    f"{name} has {os.fstat(fd).st_size} bytes, fewer than the {num_bytes} declared"
                )
            self.address = _map_aligned(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.name = name
        self.num_bytes = num_bytes
        self.huge_bytes = 0
        self.is_in_memory = _file_system(fd) in _IN_MEMORY
        self._exclusive = exclusive
        self._open = True
        self._is_cut = False
        # The file's last change before `has_holes` last found none. The kernel sets it when a
        # page is freed, and at a process's first write to one.
        self._whole_at_ns = -1
        if on_cut is not None:
            _guard(self.address, num_bytes, partial(self._replace, on_cut))

    def __repr__(self) -> str:
        return (
            f"FileMapping({self.name!r}, {self.num_bytes} bytes{'' if self._open else ', closed'})"
        )

    @staticmethod
    def create(path: Path, num_bytes: int, mode: int) -> "FileMapping":
        """Replaces the file and maps it; old mappings keep the old contents."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        os.truncate(fd, num_bytes)
        return FileMapping(fd, num_bytes, str(path), exclusive=True)

    def array(self) -> NDArray[np.uint8]:
        """A view, which must not be used after `close`."""
        assert self._open, "mapping is closed"
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))

    def is_whole(self) -> bool:
        """False if the file was truncated; without `on_cut`, touching it could kill this
        process."""
        return not self._is_cut and os.fstat(self.fd).st_size >= self.num_bytes

    def look(self) -> Look:
        """One system call, a microsecond."""
        found = os.fstat(self.fd)
        return Look(
            not self._is_cut and found.st_size >= self.num_bytes,
            found.st_blocks * 512 < found.st_size,
            found.st_ctime_ns == self._whole_at_ns,
        )

    def has_holes(self) -> bool:
        """As the function; remembers that there was no hole. Any thread."""
        now_ns, changed_ns = time.time_ns(), os.fstat(self.fd).st_ctime_ns
        found = has_holes(self.fd, self.num_bytes)
        # A change within the same tick would not be seen later.
        is_settled = changed_ns + _SETTLED_NS < now_ns
        self._whole_at_ns = changed_ns if is_settled and not found else -1
        return found

    def populate(self, start: int = 0, num_bytes: int | None = None) -> None:
        """Prefaults a part (`num_bytes` None: to the end) and fills this process's page tables.
        Blocks. Raises OSError if memory is short."""
        end = self.num_bytes if num_bytes is None else start + num_bytes
        for at in range(start, end, PIECE_BYTES):
            self._populate_piece(at, min(PIECE_BYTES, end - at))

    def _populate_piece(self, start: int, num_bytes: int) -> None:
        try:
            self._advise(_POPULATE_WRITE, start, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if self._exclusive:
                # Before Linux 5.14. Allocate first, because touching a page that can't be
                # allocated would kill the process. Then read, because writing could overwrite
                # another process's data.
                os.posix_fallocate(self.fd, start, num_bytes)
                self.array()[start : start + num_bytes : mmap.PAGESIZE].max()

    def make_huge(
        self, start: int, budget_s: float, piece_bytes: int = COLLAPSE_BYTES, end: int | None = None
    ) -> int:
        """Prefaults `start` to `end` as huge pages, until `budget_s` or a refusal: the kernel is
        slow when it must compact memory. Returns how far it has tried, a multiple of 2 MiB; some
        may have been refused. Blocks.

        `piece_bytes`: a multiple of 2 MiB.
        """
        deadline_s = time.monotonic() + budget_s
        whole = (self.num_bytes if end is None else end) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        while start < whole and time.monotonic() < deadline_s:
            length = min(piece_bytes, whole - start)
            got = self._collapse(start, length)
            if got < length:
                # One page may have been in use: try them one by one.
                got = sum(
                    self._collapse(at, HUGE_PAGE_BYTES)
                    for at in range(start, start + length, HUGE_PAGE_BYTES)
                )
            if got == 0:
                break
            self.huge_bytes += got
            start += length
        return start

    def _collapse(self, start: int, num_bytes: int) -> int:
        """Length of the range, or 0 if the kernel refused."""
        try:
            # The kernel makes a huge page only where a small one is allocated.
            for at in range(start, start + num_bytes, HUGE_PAGE_BYTES) if self._exclusive else ():
                self._advise(_POPULATE_WRITE, at, mmap.PAGESIZE)
            self._advise(_COLLAPSE, start, num_bytes)
        except OSError:
            return 0
        return num_bytes

    def punch(self, start: int, num_bytes: int) -> None:
        """Gives the memory of a part back, also of pages that other processes map: they read
        zeros then. Blocks. Raises OSError."""
        for at in range(start, start + num_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, start + num_bytes - at)
            if _libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, at, length):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """May be called twice."""
        if self._open:
            self._open = False
            _release(self.address)
            for at in range(0, self.num_bytes, PIECE_BYTES):
                _libc.munmap(self.address + at, min(PIECE_BYTES, self.num_bytes - at))
            os.close(self.fd)

    def _replace(self, on_cut: Callable[[], None]) -> None:
        """In the SIGBUS handler, in the middle of the access."""
        self._is_cut = True
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _map(self.address, self.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
        on_cut()

    def _advise(self, advice: int, start: int, num_bytes: int) -> None:
        assert self._open, "mapping is closed"
        if _libc.madvise(self.address + start, num_bytes, advice):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
