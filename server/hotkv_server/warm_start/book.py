"""Finds the hottest blocks of a key space. The first blocks of a prompt are hotter than its last.

Always true: does not change the cache, and examines the entries in parts.
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
    """A snapshot of n ready blocks, as arrays [n]. A block with more heat is evicted later. The
    reuse count shows later whether an entry still belongs to the same block."""

    entries: Entries
    reuses: NDArray[np.uint32]
    heat: NDArray[np.float64]
    num_bytes: Int64s

    def hottest(self, byte_count: int) -> "Warmth":
        """The hottest blocks that together take at most `byte_count` bytes (0: all), hottest
        first. Thread-safe."""
        order = np.argsort(-self.heat, kind="stable")
        if byte_count:
            order = order[np.cumsum(self.num_bytes[order]) <= byte_count]
        return self.at(order)

    def at(self, places: NDArray[np.int64] | slice) -> "Warmth":
        return Warmth(
            self.entries[places],
            self.reuses[places],
            self.heat[places],
            self.num_bytes[places],
        )


def warmth(core: CacheCore, key_space_id: int) -> Iterator[Warmth]:
    """Snapshots that together have all ready blocks of a key space."""
    index, policy = core.space.index, core.space.policy
    reuses = index.table.records[:, table.W_REUSES]
    for start in range(0, index.num_numbers, PART_ENTRIES):
        entries = index.ready_blocks(key_space_id, start, start + PART_ENTRIES)
        yield Warmth(entries, reuses[entries], policy.heat(entries), index.slot_bytes(entries))


def joined(parts: list[Warmth]) -> Warmth:
    return Warmth(
        np.concatenate([part.entries for part in parts] or [np.empty(0, np.uint32)]),
        np.concatenate([part.reuses for part in parts] or [np.empty(0, np.uint32)]),
        np.concatenate([part.heat for part in parts] or [np.empty(0)]),
        np.concatenate([part.num_bytes for part in parts] or [np.empty(0, np.int64)]),
    )


def names(core: CacheCore, some: Warmth) -> list[HashList]:
    """Hashes of the snapshot's blocks that are still cached, by group, in its order."""
    index = core.space.index
    reuses = index.table.records[some.entries, table.W_REUSES]
    is_same = (reuses == some.reuses) & index.is_ready(some.entries)
    _, groups, hashes = index.keys(some.entries[is_same])
    return [HashList(group, hashes[groups == group]) for group in np.unique(groups).tolist()]
