"""Block I/O: the seam between the disk tier and the file; the tests put a disk with faults here.

Always true: nothing here decides what a result means; that is the tier's.
"""

from typing import Any, Protocol

import numpy as np

from hotkv import native
from hotkv_server.tiers.disk import reference
from hotkv_server.tiers.protocol import Int64s


class BlockIO(Protocol):
    """Moves blocks between memory and a file. Thread-safe; blocks as long as the disk takes; raises
    nothing."""

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Reads blocks to memory; arrays and result int64 [n], as `reference.read_many`."""

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Writes blocks from memory; arrays and result int64 [n], as `reference.write_many`."""


class FileIO:
    """Block I/O of a descriptor, by `moves`, a module with the functions of `reference`: the
    kernels, if numba is there. The first use of the kernels takes seconds."""

    def __init__(self, fd: int, moves: Any = None) -> None:
        self._fd = fd
        self._moves = moves or native.load("hotkv_server.tiers.disk.kernels") or reference

    def __repr__(self) -> str:
        return f"FileIO({self._fd}, {self._moves.__name__})"

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """See `BlockIO`."""
        results = np.empty(len(sizes), np.int64)
        self._moves.read_many(self._fd, addresses, offsets, sizes, results)
        return results

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """See `BlockIO`."""
        results = np.empty(len(sizes), np.int64)
        self._moves.write_many(self._fd, addresses, offsets, sizes, results)
        return results
