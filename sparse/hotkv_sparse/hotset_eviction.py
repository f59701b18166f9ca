"""Chooses the blocks of a hot set to evict, and the slots to use.

Always true: mapped blocks that are always kept (sinks, recent window, the partial block) or have no
copy in host memory are never chosen. `lru`, `lru_prior` and `none` choose the block that was
selected least recently, of equals the lowest; `clock` approximates that.

Called at every change but those that `hotset_kernels` compiles; there it is their reference.
Nothing is evicted here: the caller does it. Only `clock` writes, its marks and its hand.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.hotset_tables import FREE, MAPPED, NO_BLOCKS, HotTables

I32 = npt.NDArray[np.int32]
Slots = npt.NDArray[np.intp]


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
    """Up to `count` mapped blocks to evict (`whole`: all or none), by policy.

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
    if tables.policy == "clock":
        swept: I32 = tables.block_of[_sweep(tables, slots, count)]
        return swept
    order = (tables.used_at[slots] << 32) | tables.block_of[slots]
    if count < len(order):
        order = np.partition(order, count - 1)[:count]
    return (np.sort(order) & 0xFFFFFFFF).astype(np.int32)


def _sweep(tables: HotTables, slots: Slots, count: int) -> Slots:
    """Slots from the clock's hand on, those not referenced first; slots that the hand passes lose
    their mark."""
    order = np.concatenate([slots[slots >= tables.hand], slots[slots < tables.hand]])
    marked = tables.referenced[order]
    cold = np.flatnonzero(~marked)
    if len(cold) >= count:
        passed = order[: cold[count - 1] + 1]
        chosen = order[cold[:count]]
    else:
        passed = order
        chosen = np.concatenate([order[cold], order[marked][: count - len(cold)]])
    tables.referenced[passed] = False
    if len(chosen):
        tables.hand = (int(chosen[-1]) + 1) % len(tables.state)
    return chosen
