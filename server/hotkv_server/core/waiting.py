"""Blocks of host memory that wait to be copied to a tier, in the order in which they were stored or
used."""

from collections import deque

import numpy as np

from hotkv import table
from hotkv_server.core.index import BlockIndex
from hotkv_server.core.values import Entries


class WaitingBlocks:
    """See the module. Those that are evicted meanwhile wait no longer; if more wait than the index
    has entries, those that have waited longest are forgotten."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        # Entries with their generations.
        self._parts: deque[tuple[Entries, Entries]] = deque()
        self._num_entries = 0

    def __repr__(self) -> str:
        return f"WaitingBlocks({self._num_entries})"

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entries: Entries) -> None:
        """Ready blocks, those of a chain in its order."""
        if not len(entries):
            return
        generations = self._index.table.records[entries, table.W_GENERATION]
        self._parts.append((entries.copy(), generations.copy()))
        self._num_entries += len(entries)
        while self._num_entries > self._index.capacity:
            self._num_entries -= len(self._parts.popleft()[0])

    def take(self, num_bytes: int) -> Entries:
        """The next blocks that were added together, about so many bytes of slots; without those
        that are gone or not verified. They wait no longer."""
        entries, generations = self._parts[0]
        sizes = np.cumsum(self._index.slot_bytes(entries))
        count = max(1, int(np.searchsorted(sizes, num_bytes, side="right")))
        if count < len(entries):
            self._parts[0] = entries[count:], generations[count:]
        else:
            self._parts.popleft()
        self._num_entries -= min(count, len(entries))
        some, known = entries[:count], generations[:count]
        same = self._index.table.records[some, table.W_GENERATION] == known
        taken: Entries = some[same & self._index.is_ready(some) & ~self._index.unverified[some]]
        return taken
