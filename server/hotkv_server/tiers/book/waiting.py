"""Queue of blocks to copy to a tier, in the order of their stores or uses."""

from collections import deque

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Int64s

MAX_LOOKED, PART_BLOCKS = 1 << 14, 8
"""Blocks that a tier's driver checks in a turn, and what each `WaitingBlocks.take` counts beyond
its result. Turns could else be long: the tier may have most blocks, or most may be evicted."""
SHARED_BLOCKS = 1 << 10
"""Up to so many blocks, `WaitingBlocks.add` extends the newest part."""


class WaitingBlocks:
    """Waiting blocks are not pinned: `take` skips evicted ones. The oldest are dropped if more
    wait than host memory has entries. `num_bytes`: of their slots."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        # Entries, reuse counts, slot sizes. One part per small `add` would take some 500 bytes
        # per block, much while a tier is down.
        self._parts: deque[tuple[Entries, Entries, Int64s]] = deque()
        self._num_entries = 0
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"WaitingBlocks({self._num_entries})"

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entries: Entries) -> None:
        """Blocks of a prompt must be in its order."""
        if not len(entries):
            return
        part = self._part(entries)
        if self._parts and len(self._parts[-1][0]) + len(entries) <= SHARED_BLOCKS:
            old, old_generations, old_sizes = self._parts.pop()
            part = (
                np.concatenate((old, part[0])),
                np.concatenate((old_generations, part[1])),
                np.concatenate((old_sizes, part[2])),
            )
        self._parts.append(part)
        self._drop_oldest()

    def add_first(self, entries: Entries) -> None:
        """Puts blocks that `take` has just returned back at the head."""
        if len(entries):
            self._parts.appendleft(self._part(entries))
            self._drop_oldest()

    def _part(self, entries: Entries) -> tuple[Entries, Entries, Int64s]:
        sizes = self._index.slot_bytes(entries)
        self._num_entries += len(entries)
        self.num_bytes += int(sizes.sum())
        return entries.copy(), self._index.table.records[entries, table.W_REUSES].copy(), sizes

    def _drop_oldest(self) -> None:
        while self._num_entries > self._index.capacity:
            self._cut(self._num_entries - self._index.capacity)

    def _cut(self, count: int) -> tuple[Entries, Entries]:
        """Removes up to `count` blocks of the first part: entries and reuse counts."""
        entries, reuses, sizes = self._parts[0]
        if count < len(entries):
            self._parts[0] = entries[count:], reuses[count:], sizes[count:]
        else:
            self._parts.popleft()
        self._num_entries -= min(count, len(entries))
        self.num_bytes -= int(sizes[:count].sum())
        return entries[:count], reuses[:count]

    def take(self, num_bytes: int) -> Entries:
        """Takes the next blocks, at most `num_bytes` but at least one, and returns those still
        ready. Stops at the end of a part. The queue must not be empty."""
        sizes = self._parts[0][2]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), num_bytes, side="right")))
        some, known = self._cut(count)
        same = self._index.table.records[some, table.W_REUSES] == known
        taken: Entries = some[same & self._index.is_ready(some)]
        return taken
