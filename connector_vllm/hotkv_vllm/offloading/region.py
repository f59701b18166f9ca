"""Finds the file that holds vLLM's primary tier (the CPU memory of its offloading).

The server must map this file, but vLLM gives a tier only a memoryview of the primary tier's memory.
So this module asks Linux: /proc/self/maps says which file is mapped at the view's address, and
/proc/self/fd lists the descriptors of that file. The file is found even if vLLM has unlinked it.
"""

import contextlib
import os
from dataclasses import dataclass

import numpy as np


class NoRegion(ValueError):
    """Raised if vLLM's primary tier (the CPU memory of its offloading) is not in a single shared
    file that this process has open."""


@dataclass(frozen=True, slots=True)
class PrimaryRegion:
    """The memory with the rows of vLLM's primary tier (the CPU memory of its offloading): row r
    begins at byte `offset` + r * `row_bytes` of the file `fd`. The server maps this file, to copy
    to and from the rows. The owner of this object must call `close`.

    fd: a duplicate of vLLM's descriptor of the file.
    """

    fd: int
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def close(self) -> None:
        """Closes the descriptor of the primary tier's file."""
        os.close(self.fd)


def region_of(view: memoryview) -> PrimaryRegion:
    """Returns where the rows of vLLM's primary tier (CPU memory) are in a file. Raises NoRegion or
    OSError if they are not in a file that this process has open.

    view: the memory of the rows, which vLLM passes to each tier: shape [rows, bytes of a row].
    """
    rows = np.asarray(view)
    if rows.ndim != 2 or not rows.size or rows.strides != (rows.shape[1], 1):
        raise NoRegion(f"the primary tier has shape {rows.shape} and strides {rows.strides}")
    begin = rows.ctypes.data
    inode, path, offset = _mapped_file(begin, begin + rows.nbytes)
    return PrimaryRegion(_descriptor_of(inode, path), offset, rows.shape[0], rows.strides[0])


def _mapped_file(begin: int, end: int) -> tuple[int, str, int]:
    """Returns the inode and the path of the file that is mapped at the addresses from `begin` to
    `end` (exclusive), and the offset of `begin` in the file. Raises NoRegion if these addresses are
    not all mapped to one file in order."""
    found: tuple[int, str, int] | None = None
    at = begin
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            span, _, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(part, 16) for part in span.split("-"))
            if not low <= at < high:
                continue
            here = (int(inode), "".join(path), int(offset, 16) + at - low)
            found = found or here
            if not here[0] or here != (*found[:2], found[2] + at - begin):
                raise NoRegion("the primary tier is not one file")
            at = high
            if at >= end:
                return found
    raise NoRegion("the primary tier is not mapped")


def _descriptor_of(inode: int, path: str) -> int:
    """Returns a duplicate of the descriptor by which this process has a file in /dev/shm open.
    Raises NoRegion if the process does not have the file open.

    inode: the inode of the file.
    path: the path of the file, as the kernel shows it. The inode's number alone is not enough:
        files of two file systems may have the same number, for example in /dev/shm and in the
        directory of the server's arena, which may be mounted below /dev/shm.
    """
    for name in os.listdir("/proc/self/fd"):
        # Skips a descriptor that another thread has closed in the meantime.
        with contextlib.suppress(OSError):
            is_named = os.readlink(f"/proc/self/fd/{name}") == path
            if is_named and os.fstat(int(name)).st_ino == inode and path.startswith("/dev/shm/"):
                return os.dup(int(name))
    raise NoRegion("this process has no descriptor of the primary tier's file")
