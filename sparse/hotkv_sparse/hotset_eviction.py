"""Chooses the blocks of a hot set to evict, and the slots to use.

Always true: mapped blocks that are always kept (sinks, recent window, the partial block) or have no
copy in host memory are never chosen. Of the others, the block that was selected least recently is
chosen, of equals the lowest.

Called at every change but those that `hotset_kernels` compiles; there it is their reference.
Nothing is written here: the caller evicts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.hotset_tables import FREE, MAPPED, NO_BLOCKS, HotTables

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Room:
    """Slots to use, and the blocks to evict first.

    There may be more victims than slots: a map above a capacity that was lowered shrinks.
    """

    slots: I32
    victims: I32


def room(tables: HotTables, count: int, *, whole: bool = False) -> Room:
    """Slots for up to `count` blocks (`whole`: for all of them or none): free ones while the map
    may grow, then those of victims."""
    growth = tables.capacity_blocks - tables.num_mapped
    free = NO_BLOCKS
    if growth > 0:
        free = np.flatnonzero(tables.state == FREE)[: max(min(count, growth), 0)].astype(np.int32)
    excess = count - len(free) + max(-growth, 0)
    evicted = victims(tables, excess, protected=not whole, whole=whole)
    return Room(np.concatenate([free, tables.slot_of[evicted]])[:count], evicted)


def victims(tables: HotTables, count: int, *, protected: bool = False, whole: bool = False) -> I32:
    """Up to `count` mapped blocks to evict (`whole`: all or none), the least recently used first.

    `protected`: none that the running step has selected.
    """
    if count <= 0:
        return NO_BLOCKS
    evictable = tables.state == MAPPED
    if protected:
        evictable &= tables.used_at < tables.clock
    slots = np.flatnonzero(evictable)
    slots = slots[~tables.is_pinned(tables.block_of[slots])]
    if whole and len(slots) < count:
        return NO_BLOCKS
    order = (tables.used_at[slots] << 32) | tables.block_of[slots]
    if count < len(order):
        order = np.partition(order, count - 1)[:count]
    return (np.sort(order) & 0xFFFFFFFF).astype(np.int32)
