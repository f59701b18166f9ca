"""Block I/O: the seam between the disk tier and the file; the tests put a disk with faults here.

Always true: nothing here decides what a result means; that is the tier's.
"""

from typing import Protocol

import numpy as np

from hotkv_proto import native
from hotkv_server.tiers.protocol import Int64s


class BlockIO(Protocol):
    """Moves blocks between memory and a file. Thread-safe; blocks as long as the disk takes; raises
    nothing."""

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Reads blocks to memory; arrays and result int64 [n], as `kernels.read_many`."""

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Writes blocks from memory; arrays and result int64 [n], as `kernels.write_many`."""


class FileIO:
    """Block I/O of a descriptor. Loads kernels, which takes seconds the first time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kernels = native.require("hotkv_server.tiers.disk.kernels")

    def __repr__(self) -> str:
        return f"FileIO({self._fd})"

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """See `BlockIO`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.read_many(self._fd, addresses, offsets, sizes, results)
        return results

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """See `BlockIO`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.write_many(self._fd, addresses, offsets, sizes, results)
        return results
