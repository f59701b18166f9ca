"""A queue of blocks of host memory that wait to be copied to a tier, in the order in which they
were stored or used."""

from collections import deque

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Int64s

MAX_LOOKED, PART_BLOCKS = 1 << 14, 8
"""Most waiting blocks that a turn checks; each part of the queue counts as PART_BLOCKS more. The
limit is needed because most blocks that wait after a use, or after an outage of the tier, are in
the tier already or were evicted."""


class WaitingBlocks:
    """A queue of blocks; see the module.

    `take` skips blocks that were evicted meanwhile. If more blocks wait than the index can have
    entries, the queue drops the oldest.

    `num_bytes`: total size of the waiting blocks' slots in host memory.
    `takes_unverified`: True if `take` also returns blocks whose check values were not compared
        since a restart.
    """

    def __init__(self, index: BlockIndex, *, takes_unverified: bool = False) -> None:
        self._index = index
        self._takes_unverified = takes_unverified
        # Entries with their generations, and the sizes of their slots.
        self._parts: deque[tuple[Entries, Entries, Int64s]] = deque()
        self._num_entries = 0
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"WaitingBlocks({self._num_entries})"

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entries: Entries) -> None:
        """Queues ready blocks. Blocks of a sequence must be in the order of the sequence."""
        if not len(entries):
            return
        generations = self._index.table.records[entries, table.W_GENERATION]
        sizes = self._index.slot_bytes(entries)
        self._parts.append((entries.copy(), generations.copy(), sizes))
        self._num_entries += len(entries)
        self.num_bytes += int(sizes.sum())
        while self._num_entries > self._index.capacity:
            forgotten, _, sizes = self._parts.popleft()
            self._num_entries -= len(forgotten)
            self.num_bytes -= int(sizes.sum())

    def take(self, num_bytes: int) -> Entries:
        """Removes the next blocks of the queue, whose slots have about `num_bytes` in total; at
        least one, and only blocks of the same `add`. Returns those that are still in host memory;
        without `takes_unverified`, only those that are also verified. The queue must not be
        empty."""
        entries, generations, sizes = self._parts[0]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), num_bytes, side="right")))
        if count < len(entries):
            self._parts[0] = entries[count:], generations[count:], sizes[count:]
        else:
            self._parts.popleft()
        self._num_entries -= min(count, len(entries))
        self.num_bytes -= int(sizes[:count].sum())
        some, known = entries[:count], generations[:count]
        same = self._index.table.records[some, table.W_GENERATION] == known
        may_go = same & self._index.is_ready(some)
        if not self._takes_unverified:
            may_go &= ~self._index.unverified[some]
        taken: Entries = some[may_go]
        return taken
