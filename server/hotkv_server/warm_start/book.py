"""Finds the most useful blocks of a key space (a model in a configuration), so that another
node can fetch them.

The hottest blocks are the blocks that the eviction policy would evict last. The first blocks of a
prompt are hotter than its last blocks. Always true: this module does not change the cache, and
examines the entries in parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.inspect import PART_ENTRIES
from hotkv_server.cache.values import Entries, HashList, Int64s


@dataclass(frozen=True, slots=True)
class Warmth:
    """A snapshot of n ready blocks: arrays [n] of their entry numbers, reuses, heat, and slot
    sizes in bytes. A block with more heat is evicted later. The reuse count shows later whether the
    entry number still belongs to the same block."""

    entries: Entries
    reuses: NDArray[np.uint32]
    heat: NDArray[np.float64]
    num_bytes: Int64s

    def hottest(self, byte_count: int) -> "Warmth":
        """Returns the blocks with the most heat that together take at most `byte_count` bytes; 0:
        all blocks. The hottest block comes first. Uses only the snapshot, not the cache.
        Thread-safe."""
        order = np.argsort(-self.heat, kind="stable")
        if byte_count:
            order = order[np.cumsum(self.num_bytes[order]) <= byte_count]
        return self.at(order)

    def at(self, places: NDArray[np.int64] | slice) -> "Warmth":
        """Returns the part of this snapshot (of ready blocks) that has the blocks at these
        positions."""
        return Warmth(
            self.entries[places],
            self.reuses[places],
            self.heat[places],
            self.num_bytes[places],
        )


def warmth(core: CacheCore, key_space_id: int) -> Iterator[Warmth]:
    """Yields snapshots (`Warmth`) that together contain all ready blocks of a key space (a model
    in a configuration)."""
    index, policy = core.space.index, core.space.policy
    reuses = index.table.records[:, table.W_REUSES]
    for start in range(0, index.num_numbers, PART_ENTRIES):
        entries = index.ready_blocks(key_space_id, start, start + PART_ENTRIES)
        yield Warmth(entries, reuses[entries], policy.heat(entries), index.slot_bytes(entries))


def joined(parts: list[Warmth]) -> Warmth:
    """Joins snapshots of blocks (`Warmth`) into one snapshot, in their order."""
    return Warmth(
        np.concatenate([part.entries for part in parts] or [np.empty(0, np.uint32)]),
        np.concatenate([part.reuses for part in parts] or [np.empty(0, np.uint32)]),
        np.concatenate([part.heat for part in parts] or [np.empty(0)]),
        np.concatenate([part.num_bytes for part in parts] or [np.empty(0, np.int64)]),
    )


def names(core: CacheCore, some: Warmth) -> list[HashList]:
    """Returns the hashes of those blocks of a snapshot that are still cached, by group, in the
    order of the snapshot."""
    index = core.space.index
    reuses = index.table.records[some.entries, table.W_REUSES]
    is_same = (reuses == some.reuses) & index.is_ready(some.entries)
    _, groups, hashes = index.keys(some.entries[is_same])
    return [HashList(group, hashes[groups == group]) for group in np.unique(groups).tolist()]
