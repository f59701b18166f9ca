"""Checks descriptors that peers send before they are mapped: they must be memory whose pages nobody
can withhold.

A file on disk, on the network or in user space (FUSE) could hang a copy thread; a pipe, a socket or
a device is no memory at all.
"""

import ctypes
import os
import stat
from typing import Final

from hotkv_proto.errors import HotKVError, Reason

MEMORY_FILE_SYSTEMS: Final = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}
"""File systems in memory, by their magic numbers in statfs(2)."""
STATFS_BYTES = 256
"""More than the size of struct statfs on any architecture; its first member is the magic number."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_memory(fd: int, name: str) -> None:
    """Raises INVALID_LAYOUT unless the descriptor is a regular file in memory: a memfd, or one of
    /dev/shm or of hugetlbfs."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise HotKVError(
            Reason.INVALID_LAYOUT,
            f"handle {name!r} is of kind {stat.filemode(mode)[0]!r}, no file; send a memfd",
        )
    buffer = ctypes.create_string_buffer(STATFS_BYTES)
    if _libc.fstatfs(fd, buffer):
        raise OSError(ctypes.get_errno(), f"handle {name!r}: {os.strerror(ctypes.get_errno())}")
    if ctypes.c_long.from_buffer(buffer).value & 0xFFFF_FFFF not in MEMORY_FILE_SYSTEMS:
        raise HotKVError(
            Reason.INVALID_LAYOUT,
            f"handle {name!r} is a file on a disk or network; send a memfd or a file of /dev/shm",
        )
