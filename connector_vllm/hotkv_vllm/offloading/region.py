"""Finds the file that holds vLLM's primary tier, which the server must map.

vLLM gives a tier only a memoryview. So /proc/self/maps tells which file is mapped at its
address, and /proc/self/fd its descriptors, even if vLLM has unlinked it.
"""

import contextlib
import os
from dataclasses import dataclass

import numpy as np


class NoRegion(ValueError):
    """The primary tier is not in a single shared file that this process has open."""


@dataclass(frozen=True, slots=True)
class PrimaryRegion:
    """Row r begins at byte `offset` + r * `row_bytes` of `fd`, a duplicate of vLLM's descriptor.
    The owner must call `close`."""

    fd: int
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def close(self) -> None:
        os.close(self.fd)


def region_of(view: memoryview) -> PrimaryRegion:
    """Raises NoRegion or OSError.

    view: as vLLM passes it to tiers: shape [rows, bytes of a row].
    """
    rows = np.asarray(view)
    if rows.ndim != 2 or not rows.size or rows.strides != (rows.shape[1], 1):
        raise NoRegion(f"the primary tier has shape {rows.shape} and strides {rows.strides}")
    begin = rows.ctypes.data
    inode, path, offset = _mapped_file(begin, begin + rows.nbytes)
    return PrimaryRegion(_descriptor_of(inode, path), offset, rows.shape[0], rows.strides[0])


def _mapped_file(begin: int, end: int) -> tuple[int, str, int]:
    """Inode and path of the file mapped at `begin` to `end`, and the offset of `begin` in it.
    Raises NoRegion unless one file is mapped in order."""
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
    """A duplicate of this process's descriptor of a file in /dev/shm. Raises NoRegion without one.

    path: as the kernel shows it. Inodes alone may collide between file systems, as /dev/shm and
        an arena's directory mounted below it.
    """
    for name in os.listdir("/proc/self/fd"):
        # Another thread may have closed the descriptor.
        with contextlib.suppress(OSError):
            is_named = os.readlink(f"/proc/self/fd/{name}") == path
            if is_named and os.fstat(int(name)).st_ino == inode and path.startswith("/dev/shm/"):
                return os.dup(int(name))
    raise NoRegion("this process has no descriptor of the primary tier's file")
