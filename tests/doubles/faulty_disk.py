"""Block I/O of the disk tier that fails, hangs or moves only a part for chosen blocks. Others go
through the wrapped I/O to the real file."""

import threading
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.disk.slab_file import BlockIO
from hotkv_server.tiers.protocol import Int64s

EVERYWHERE = -1
"""Key of the fault of all blocks that have none of their own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a block's read or write.

    code: errno; 0: none.
    moved_bytes: moved without an error; None: all.
    hangs: first waits for `FaultyDisk.release`.
    """

    code: int = 0
    moved_bytes: int | None = None
    hangs: bool = False


@dataclass
class FaultyDisk:
    """Implements `BlockIO`.

    under: the wrapped I/O.
    reads, writes: faults by offset, or EVERYWHERE; may be changed at any time.
    cached: offsets in the page cache, whose reads have no fault.
    begun: (is_write, offset) in order.
    num_hung: blocks that hang now.
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
        return self._move_many(False, addresses, offsets, sizes)

    def write_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        return self._move_many(True, addresses, offsets, sizes)

    def drop_cached(self) -> None:
        self.cached.clear()
        self.under.drop_cached()

    def heal(self) -> None:
        """Removes all faults and releases."""
        with self._changed:
            self.reads.clear()
            self.writes.clear()
        self.release()

    def release(self) -> None:
        """Ends the hangs of now; later ones hang again."""
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    def wait_hung(self, count: int, timeout_s: float = 30.0) -> None:
        """Raises AssertionError if fewer than `count` blocks hang after `timeout_s`."""
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
