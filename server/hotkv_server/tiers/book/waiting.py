"""A queue of blocks in host memory that wait to be copied to a tier. Its order is the order in
which the blocks were stored or used."""

from collections import deque

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Int64s

MAX_LOOKED, PART_BLOCKS = 1 << 14, 8
"""Limits of the blocks that a tier's driver checks in one turn of its loop. The driver stops when
its calls of `WaitingBlocks.take` have returned about MAX_LOOKED blocks. Each call counts as
PART_BLOCKS more blocks than it returns, so that calls without a result count too. Without the limit
a turn could take long: the tier may already have most of the waiting blocks, or most of them may
have been evicted."""
SHARED_BLOCKS = 1 << 10
"""The queue consists of parts, each with some blocks. `WaitingBlocks.add` appends its blocks to the
newest part if the part then has at most this many blocks; otherwise it makes a new part."""


class WaitingBlocks:
    """A queue of blocks in host memory that wait to be copied to a tier.

    The waiting blocks are not pinned; `take` skips blocks that were evicted while they waited. If
    more blocks wait than host memory can have entries (records in the block table), the queue drops
    the oldest.

    `num_bytes`: total size of the waiting blocks' slots in host memory.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        # Each part has waiting entries, their reuses, and the sizes of their slots. The
        # reuse count of an entry changes when its number is reused. Blocks of many small calls of
        # `add` share a part: a part for each such call would take some 500 bytes per block, which
        # adds up while a tier is down.
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
        """Queues ready blocks again, before all other blocks. Call it only with blocks that `take`
        has just returned: then the blocks of a sequence stay in the order of the sequence."""
        if len(entries):
            self._parts.appendleft(self._part(entries))
            self._drop_oldest()

    def _part(self, entries: Entries) -> tuple[Entries, Entries, Int64s]:
        """Returns a new part for the queue, with these blocks, the reuses of their entries
        (numbers that change when an entry is reused) and the sizes of their slots. Counts the
        blocks as waiting."""
        sizes = self._index.slot_bytes(entries)
        self._num_entries += len(entries)
        self.num_bytes += int(sizes.sum())
        return entries.copy(), self._index.table.records[entries, table.W_REUSES].copy(), sizes

    def _drop_oldest(self) -> None:
        """Drops the oldest blocks if more blocks wait than host memory can have entries."""
        while self._num_entries > self._index.capacity:
            self._cut(self._num_entries - self._index.capacity)

    def _cut(self, count: int) -> tuple[Entries, Entries]:
        """Removes the first `count` entries (blocks) from the queue, but only from its first part.
        Returns them, and their reuses (numbers that show whether an entry was reused)."""
        entries, reuses, sizes = self._parts[0]
        if count < len(entries):
            self._parts[0] = entries[count:], reuses[count:], sizes[count:]
        else:
            self._parts.popleft()
        self._num_entries -= min(count, len(entries))
        self.num_bytes -= int(sizes[:count].sum())
        return entries[:count], reuses[:count]

    def take(self, num_bytes: int) -> Entries:
        """Removes the next blocks from the queue: at most `num_bytes` in total, but at least one
        block. May stop earlier, at the end of a part of the queue. Returns the removed blocks that
        are still ready in host memory. The queue must not be empty."""
        sizes = self._parts[0][2]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), num_bytes, side="right")))
        some, known = self._cut(count)
        same = self._index.table.records[some, table.W_REUSES] == known
        taken: Entries = some[same & self._index.is_ready(some)]
        return taken
