"""Finds the file behind vLLM's primary tier (the CPU memory of its offloading).

vLLM gives its tiers a memoryview. Nothing else of vLLM's is read here: the kernel says which file
is mapped at the view's address, and which descriptor of this process belongs to that file. So a
file that vLLM has unlinked is found too.
"""

import contextlib
import os
from dataclasses import dataclass

import numpy as np


class NoRegion(ValueError):
    """Raised if the primary tier does not lie in a single shared file that this process has
    open."""


@dataclass(frozen=True, slots=True)
class Region:
    """The rows of vLLM's primary tier (the CPU memory of its KV offloading), each a chunk of one KV
    cache group. Row r begins at byte `offset` + r * `row_bytes` of the file `fd`.

    fd: a duplicate of vLLM's descriptor of the file. The owner of the region closes the duplicate.
    """

    fd: int
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


def region_of(view: memoryview) -> Region:
    """Returns the file in which the rows of `view` (shape [rows, bytes]) lie, and their place in
    the file. Raises NoRegion, OSError."""
    rows = np.asarray(view)
    if rows.ndim != 2 or not rows.size or rows.strides != (rows.shape[1], 1):
        raise NoRegion(f"the primary tier has shape {rows.shape} and strides {rows.strides}")
    begin = rows.ctypes.data
    inode, offset = _mapped_file(begin, begin + rows.nbytes)
    return Region(_descriptor_of(inode), offset, rows.shape[0], rows.strides[0])


def _mapped_file(begin: int, end: int) -> tuple[int, int]:
    """Returns the inode that is mapped over all of the addresses, and the offset in the file at
    which the addresses begin. Raises NoRegion."""
    found: tuple[int, int] | None = None
    at = begin
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *_ = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            if not low <= at < high:
                continue
            here = (int(inode), int(offset, 16) + at - low)
            found = found or here
            if not here[0] or here != (found[0], found[1] + at - begin):
                raise NoRegion("the primary tier is not one file")
            at = high
            if at >= end:
                return found
    raise NoRegion("the primary tier is not mapped")


def _descriptor_of(inode: int) -> int:
    """Returns a duplicate of this process's descriptor of a file in shared memory."""
    for name in os.listdir("/proc/self/fd"):
        # Descriptors come and go in other threads.
        with contextlib.suppress(OSError):
            found = os.fstat(int(name))
            is_shared = os.readlink(f"/proc/self/fd/{name}").startswith("/dev/shm/")
            if found.st_ino == inode and is_shared:
                return os.dup(int(name))
    raise NoRegion("this process has no descriptor of the primary tier's file")
