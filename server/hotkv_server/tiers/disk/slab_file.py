"""The slab file: a file on the local disk with the blocks of the disk tier. It has its full size
from the start.

Always true: while a server has the file open, no other server uses it (flock). Only the server's
user may access it. Disk space is allocated for all its bytes, so writes succeed even when the file
system is full. hotkv never punches holes into the file, because there might be no disk space to
fill them again.
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

# Block I/O: the interface between the disk tier and the file. Tests replace it by a simulated disk
# with faults.
#
# Always true: block I/O only returns numbers of bytes and errors; the tier decides what they mean.


class BlockIO(Protocol):
    """Moves blocks between memory and a file. Thread-safe. A method blocks until the disk has
    answered, and never raises."""

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Reads n blocks. Block i is the `sizes[i]` bytes at offset `offsets[i]` of the file; it is
        read to memory at address `addresses[i]`. Returns, for each block, the number of bytes read,
        or -errno. Arguments and result: int64 [n]."""

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Writes n blocks. Block i is the `sizes[i]` bytes of memory at address `addresses[i]`; it
        is written to offset `offsets[i]` of the file. Returns, for each block, the number of bytes
        written, or -errno. Arguments and result: int64 [n]."""

    def drop_cached(self) -> None:
        """Drops the file's pages from the page cache, so that the next reads reach the disk. Pages
        that are not written yet stay."""


class FileIO:
    """Block I/O on the file with the descriptor `fd`. The constructor loads compiled functions
    (numba), which takes seconds the first time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kernels = native.require("hotkv_server.tiers.disk.disk_kernels")

    def __repr__(self) -> str:
        return f"FileIO({self._fd})"

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Reads blocks from the file; see `BlockIO.read_many`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.read_many(self._fd, addresses, offsets, sizes, results)
        return results

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Writes blocks to the file; see `BlockIO.write_many`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.write_many(self._fd, addresses, offsets, sizes, results)
        return results

    def drop_cached(self) -> None:
        """Drops the file's pages from the page cache; see `BlockIO.drop_cached`."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


# ----------------------------------------------------------------------------------------- The file


class SlabFileError(OSError):
    """The slab file is unusable. The message says why, and what the operator can do."""


class SlabFile:
    """The open slab file, which holds the blocks of the disk tier; see the module.

    `is_direct`: True if I/O bypasses the page cache. Then addresses, offsets and sizes must be
        multiples of SLOT_ALIGN.
    """

    def __init__(self, path: Path, fd: int, num_bytes: int, is_direct: bool) -> None:
        """Takes ownership of the descriptor. Callers use `open` instead."""
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
        """Opens the file `slabs` in `folder`, locks it, and gives it the size `num_bytes`. Creates
        folder and file if they are missing. Blocks while disk space is allocated.

        If the file becomes smaller, the bytes beyond `num_bytes` are lost; the other bytes stay.
        Raises SlabFileError if the file is unusable or can't get this size; a file that can't grow
        keeps its old size. Raises OSError if the folder can't be created.

        `num_bytes`: a multiple of SLOT_ALIGN.
        `direct`: True uses direct I/O, or logs a warning if the file system does not support it.
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
        """Restores the file's size if something has shortened the file. The restored part contains
        zeros. If disk space is short, logs an error and leaves the file as it is. Returns True if
        the file was shorter. May block. Thread-safe."""
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
        """Closes and unlocks the file. All I/O must have ended before: another file may get the
        same descriptor number, and late I/O would then go to that file."""
        with self._lock:
            if self.is_open:
                try:
                    os.close(self.fd)
                finally:
                    # Linux frees the descriptor even if close fails.
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
        # Check before allocating: an allocation that fails could fill the file system for a moment.
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
        # Restore the file's size, because the failed allocation may have enlarged the file.
        os.ftruncate(fd, before_bytes)
        raise SlabFileError(
            error.errno,
            f"can't allocate {num_bytes >> 20} MiB for {path} ({error.strerror}): lower "
            "tiers.disk.bytes, or make room in its file system",
        ) from error


def _make_direct(fd: int, path: Path) -> bool:
    """Turns direct I/O on. Tests it with a read, because some file systems refuse direct I/O only
    then. Returns False if the file system does not support direct I/O."""
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
