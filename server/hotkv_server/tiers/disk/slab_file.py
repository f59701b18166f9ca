"""The slab file with the disk tier's blocks, always at its full size.

Always true: one server at a time uses it (flock), and only the server's user may. All its space
is allocated, so writes succeed on a full file system. Holes are never punched: there might be no
space to fill them.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.tiers.protocol import Int64s

SLABS_FILE = "slabs"
log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------- Block I/O

# Tests replace it by a simulated disk with faults. It only returns bytes and errors; the tier
# decides what they mean.


class BlockIO(Protocol):
    """Thread-safe. Methods block for the disk and never raise. Arguments and results are int64
    [n]."""

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Block i: `sizes[i]` bytes at offset `offsets[i]` to address `addresses[i]`. For each,
        bytes read or -errno."""

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Block i: `sizes[i]` bytes at address `addresses[i]` to offset `offsets[i]`. For each,
        bytes written or -errno."""

    def drop_cached(self) -> None:
        """Drops clean pages of the file, so that reads reach the disk."""


class FileIO:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kernels = native.require("hotkv_server.tiers.disk.disk_kernels")

    def __repr__(self) -> str:
        return f"FileIO({self._fd})"

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        results = np.empty(len(sizes), np.int64)
        self._kernels.read_many(self._fd, addresses, offsets, sizes, results)
        return results

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        results = np.empty(len(sizes), np.int64)
        self._kernels.write_many(self._fd, addresses, offsets, sizes, results)
        return results

    def drop_cached(self) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


# ----------------------------------------------------------------------------------------- The file


class SlabFileError(OSError):
    """The message says what the operator can do."""


class SlabFile:
    """See the module. `is_direct`: I/O bypasses the page cache; addresses, offsets and sizes
    must be multiples of SLOT_ALIGN."""

    def __init__(self, path: Path, fd: int, num_bytes: int, is_direct: bool) -> None:
        """Owns the descriptor. Use `open`."""
        self.path = path
        self.fd = fd
        self.num_bytes = num_bytes
        self.is_direct = is_direct
        self._lock = threading.Lock()
        self.is_open = True

    def __repr__(self) -> str:
        how = "direct" if self.is_direct else "buffered"
        return f"SlabFile({str(self.path)!r}, {self.num_bytes} bytes, {how})"

    @staticmethod
    def open(folder: Path, num_bytes: int, *, direct: bool = True) -> "SlabFile":
        """Opens or creates `slabs` in `folder`, locks it and sets its size, a multiple of
        SLOT_ALIGN. Blocks for the allocation.

        A smaller file loses its end. Raises SlabFileError if the file is unusable or can't grow (it
        keeps its size), OSError without the folder.

        `direct`: logs a warning if the file system has no direct I/O.
        """
        if num_bytes <= 0 or num_bytes % SLOT_ALIGN:
            raise ValueError(f"{num_bytes} bytes are no multiple of {SLOT_ALIGN}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / SLABS_FILE
        fd = _open_own(path)
        try:
            _lock(fd, path)
            _resize(fd, path, num_bytes)
            is_direct = direct and _make_direct(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return SlabFile(path, fd, num_bytes, is_direct)

    def mend(self) -> bool:
        """Restores a shortened file with zeros, or logs that space is short. True if it was
        shorter. May block. Thread-safe."""
        with self._lock:
            if not self.is_open or (left := os.fstat(self.fd).st_size) >= self.num_bytes:
                return False
            log.error("%s was cut to %d bytes, %d are gone", self.path, left, self.num_bytes - left)
            try:
                _allocate(self.fd, self.path, self.num_bytes)
            except SlabFileError as error:
                log.error("%s", error)
            return True

    def close(self) -> None:
        """All I/O must have ended: late I/O could go to another file with the same descriptor."""
        with self._lock:
            if self.is_open:
                try:
                    os.close(self.fd)
                finally:
                    # Linux frees it even if close fails.
                    self.is_open = False


def _open_own(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise SlabFileError(
            error.errno, f"can't open {path} ({error.strerror}): choose another tiers.disk.path"
        ) from error
    found = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(found.st_mode):
        problem = "is no regular file"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to uid {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may access it"
    if problem:
        os.close(fd)
        raise SlabFileError(
            errno.EPERM, f"{path} {problem}: remove it, or choose another tiers.disk.path"
        )
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SlabFileError(
            error.errno,
            f"{path} is in use by another hotkv-server: give each its own tiers.disk.path",
        ) from error


def _resize(fd: int, path: Path, num_bytes: int) -> None:
    found = os.fstat(fd)
    if found.st_size > num_bytes:
        os.ftruncate(fd, num_bytes)
        log.info("%s has %d bytes now, it had %d", path, num_bytes, found.st_size)
    missing_bytes = num_bytes - os.fstat(fd).st_blocks * 512
    if missing_bytes > (free_bytes := _free_bytes(fd)):
        # First, as a failing allocation could fill the file system for a moment.
        raise SlabFileError(
            errno.ENOSPC,
            f"{path} needs {missing_bytes >> 20} MiB more and its file system has "
            f"{free_bytes >> 20} MiB free: lower tiers.disk.bytes ({num_bytes >> 20} MiB), or make "
            "room",
        )
    _allocate(fd, path, num_bytes)


def _free_bytes(fd: int) -> int:
    space = os.fstatvfs(fd)
    return space.f_bavail * space.f_frsize


def _allocate(fd: int, path: Path, num_bytes: int) -> None:
    before_bytes = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        # The failed allocation may have enlarged the file.
        os.ftruncate(fd, before_bytes)
        raise SlabFileError(
            error.errno,
            f"can't allocate {num_bytes >> 20} MiB for {path} ({error.strerror}): lower "
            "tiers.disk.bytes, or make room in its file system",
        ) from error


def _make_direct(fd: int, path: Path) -> bool:
    """Tests direct I/O with a read, where some file systems refuse it first. False if there is
    none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, SLOT_ALIGN) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise SlabFileError(
                error.errno, f"can't read {path} ({error.strerror}): check its disk"
            ) from error
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        log.warning("%s: its file system has no direct I/O, the page cache is used", path)
        return False
    return True
