"""The hot set's step, prefetch and adoption in plain numpy: the reference of `hotset_kernels`, and
what runs without numba.

Each function changes the tables as its kernel does; tests run both beside each other. Errors are
those of `hotkv_sparse.hotset`; a call that raises has changed nothing.
"""

import numpy as np
import numpy.typing as npt

from hotkv_sparse import hotset_eviction as eviction
from hotkv_sparse.hotset_answers import SlotMoves, Step
from hotkv_sparse.hotset_tables import (
    CANCELLED,
    FREE,
    LOADING,
    MAPPED,
    NO_BLOCKS,
    NO_SLOT,
    READY,
    HotTables,
)
from hotkv_sparse.topk import Selection

I32 = npt.NDArray[np.int32]


def step(tables: HotTables, selection: Selection, max_loads: int) -> Step:
    """See `HotSet.step`."""
    tables.check_blocks(selection.blocks)
    tables.clock += 1
    blocks, weights = selection.blocks, selection.weights
    slots = tables.slot_of[blocks]
    mapped = (slots >= 0) & (tables.state[slots] == MAPPED)
    tables.used_at[slots[mapped]] = tables.clock
    dropped = _drop_unselected(tables) if tables.policy == "none" else NO_BLOCKS
    missing = np.flatnonzero(~mapped)
    missing = missing[np.argsort(-weights[missing], kind="stable")]
    num_kept = int(np.isinf(weights[missing]).sum())
    wanted = missing[: max(num_kept, max_loads)]
    room = eviction.room(tables, len(wanted))
    chosen = blocks[wanted[: len(room.slots)]]
    tables.evict(room.victims)
    tables.abandon(chosen)
    tables.put(chosen, room.slots, MAPPED)
    num_always = int(np.isinf(weights).sum())
    rest = blocks[missing[len(chosen) :]]
    prefetch = rest[tables.slot_of[rest] == NO_SLOT]
    num_resident = int(mapped.sum()) - (num_always - num_kept)
    moves = SlotMoves(chosen, room.slots, np.concatenate([dropped, room.victims]))
    return Step(tables.map(), moves, prefetch, len(blocks) - num_always, num_resident)


def _drop_unselected(tables: HotTables) -> I32:
    """Evicts what the running step has not selected; returns the blocks."""
    slots = np.flatnonzero((tables.state == MAPPED) & (tables.used_at < tables.clock))
    blocks: I32 = tables.block_of[slots]
    blocks = blocks[~tables.is_pinned(blocks)]
    tables.evict(blocks)
    return blocks


def begin_prefetch(tables: HotTables, blocks: I32) -> SlotMoves:
    """See `HotSet.begin_prefetch`."""
    tables.check_blocks(blocks)
    _, order = np.unique(blocks, return_index=True)
    blocks = blocks[np.sort(order)]
    blocks = blocks[(tables.slot_of[blocks] == NO_SLOT) & tables.has_copy[blocks]]
    free = np.flatnonzero(tables.state == FREE).astype(np.int32)
    count = min(len(blocks), len(free))
    tables.put(blocks[:count], free[:count], LOADING)
    return SlotMoves(blocks[:count], free[:count], NO_BLOCKS)


def finish_prefetch(tables: HotTables, slots: I32, success: bool) -> None:
    """See `HotSet.finish_prefetch`."""
    if len(slots) and not 0 <= slots.min() <= slots.max() < len(tables.state):
        raise tables.not_loading()
    state = tables.state[slots]
    if not np.isin(state, (LOADING, CANCELLED)).all():
        raise tables.not_loading()
    wanted = (state == LOADING) & success
    tables.state[slots[wanted]] = READY
    unwanted = slots[~wanted]
    loading = unwanted[tables.state[unwanted] == LOADING]
    tables.slot_of[tables.block_of[loading]] = NO_SLOT
    tables.release(unwanted)


def adopt(tables: HotTables) -> SlotMoves:
    """See `HotSet.adopt`."""
    ready = np.flatnonzero(tables.state == READY).astype(np.int32)
    if not len(ready):
        return SlotMoves(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)
    excess = tables.num_mapped + len(ready) - tables.capacity_blocks
    victims = eviction.victims(tables, excess)
    num_kept = len(ready) - max(excess - len(victims), 0)
    kept, lost = ready[:num_kept], ready[num_kept:]
    tables.evict(victims)
    tables.slot_of[tables.block_of[lost]] = NO_SLOT
    tables.release(lost)
    tables.state[kept] = MAPPED
    tables.used_at[kept] = tables.clock
    tables.version += 1
    return SlotMoves(tables.block_of[kept], kept, victims)
