"""Simulates disk faults for tests. Wraps the block I/O of the disk tier, and makes chosen blocks
fail, hang, or be copied only in part.

Always true: blocks without a fault are read and written by the wrapped block I/O, so the tested
tier uses its real file.
"""

import threading
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.disk.slab_file import BlockIO
from hotkv_server.tiers.protocol import Int64s

EVERYWHERE = -1
"""A key in `FaultyDisk.reads` and `FaultyDisk.writes`. Its fault is the fault of all blocks that
have none of their own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault that a read or write of a block has.

    code: errno with which the read or write fails; 0: it does not fail.
    moved_bytes: number of bytes that are read or written, without an error; None: all bytes.
    hangs: True: the call first waits for `FaultyDisk.release`.
    """

    code: int = 0
    moved_bytes: int | None = None
    hangs: bool = False


@dataclass
class FaultyDisk:
    """Block I/O for tests, with faults for chosen blocks. Wraps other block I/O, which reads and
    writes the blocks that have no fault. Implements `BlockIO`.

    under: the wrapped block I/O.
    reads, writes: faults by offset in the file, or by EVERYWHERE; may be changed at any time.
    cached: offsets of blocks that are in the page cache. Reads at these offsets have no fault.
    begun: (is_write, offset) of each block, in the order in which reads and writes began.
    num_hung: number of blocks that hang now.
    """

    under: BlockIO
    reads: dict[int, Fault] = field(default_factory=dict)
    writes: dict[int, Fault] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    begun: list[tuple[bool, int]] = field(default_factory=list)
    num_hung: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _num_released: int = 0

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Implements `BlockIO`."""
        return self._move_many(False, addresses, offsets, sizes)

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        """Implements `BlockIO`."""
        return self._move_many(True, addresses, offsets, sizes)

    def drop_cached(self) -> None:
        """Implements `BlockIO`."""
        self.cached.clear()
        self.under.drop_cached()

    def heal(self) -> None:
        """Removes all faults, and lets the reads and writes that hang continue."""
        with self._changed:
            self.reads.clear()
            self.writes.clear()
        self.release()

    def release(self) -> None:
        """Lets the reads and writes that hang now continue. Later reads and writes of blocks with a
        fault that hangs will hang again."""
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    def wait_hung(self, count: int, timeout_s: float = 30.0) -> None:
        """Waits until the reads or writes of `count` blocks hang. Raises AssertionError if fewer
        hang after `timeout_s`."""
        with self._changed:
            hung = self._changed.wait_for(lambda: self.num_hung >= count, timeout_s)
        assert hung, f"{self.num_hung} blocks hang, not {count}"

    def _move_many(
        self, is_write: bool, addresses: Int64s, offsets: Int64s, sizes: Int64s
    ) -> Int64s:
        rows = zip(addresses.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        return np.array([self._move(is_write, *row) for row in rows], np.int64)

    def _move(self, is_write: bool, address: int, offset: int, size: int) -> int:
        faults = self.writes if is_write else self.reads
        with self._changed:
            self.begun.append((is_write, offset))
            fault = faults.get(offset) or faults.get(EVERYWHERE) or Fault()
            if not is_write and offset in self.cached:
                fault = Fault()
            if fault.hangs:
                self._hang()
        if fault.code:
            return -fault.code
        move = self.under.write_many if is_write else self.under.read_many
        num_bytes = size if fault.moved_bytes is None else fault.moved_bytes
        (moved,) = move(np.array([address]), np.array([offset]), np.array([num_bytes])).tolist()
        return int(moved)

    def _hang(self) -> None:
        released = self._num_released
        self.num_hung += 1
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._num_released > released)
        self.num_hung -= 1
