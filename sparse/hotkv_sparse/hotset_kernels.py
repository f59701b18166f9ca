# mypy: disable-error-code="untyped-decorator"
"""Numba kernels for steps and prefetches of the hot set (the blocks of a layer that are on the
device, in hot slots). `hotkv_sparse.all_kernels` loads this module.

`hotkv_sparse.hotset` states the invariants and the tables; `tests/sparse/naive.py` has a naive
model. Arguments of many kernels are the tables of `HotSet`: by slot `state`, `block_of` and
`used_at`, by block `slot_of` and `has_copy`. `clock` is the number of the step. Kernels change the
tables in place. A call that refuses its arguments changes no table. All kernels run without the
GIL. To sort blocks by age or weight and then by position, the kernels pack both numbers into a
non-negative int64 key.

Shapes: n selected blocks, K slots, M blocks of the map (the blocks to which a step attends), C
blocks of the context.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_sparse.hotset import SlotState

_FEW = 16
"""Largest number of keys that `_sort` sorts by insertion sort. It sorts more keys by radix sort."""
_FREE, _MAPPED, _LOADING, _READY, _CANCELLED = (int(state) for state in SlotState)
_NO_SLOT = -1
REFUSED = -1
_I32, _F32 = (
    types.Array(types.int32, 1, "A", readonly=True),
    types.Array(types.float32, 1, "A", readonly=True),
)
_ROWS, _INT = types.int32[:, ::1], types.int64
_SLOTS = (
    types.int8[::1],
    types.int32[::1],
    types.int64[::1],
    types.int32[::1],
    types.boolean[::1],
)
"""Types of the tables of `HotSet`: state [K], block_of [K], used_at [K], slot_of [>= C], has_copy
[>= C]."""

# ------------------------------------------------------------------------------------ order of keys


@numba.njit(nogil=True, cache=True)
def _sort(keys: Any, num: Any) -> None:
    """Sorts keys[:num], non-negative int64, ascending: up to _FEW keys by insertion sort, more keys
    by radix sort from the lowest byte on."""
    if num <= _FEW:
        for i in range(1, num):
            key, place = keys[i], i
            while place > 0 and keys[place - 1] > key:
                keys[place] = keys[place - 1]
                place -= 1
            keys[place] = key
        return
    counts, other = np.zeros((8, 256), np.int32), np.empty(num, np.int64)
    for i in range(num):
        key = keys[i]
        for byte in range(8):
            counts[byte, (key >> (8 * byte)) & 255] += 1
    source, target, is_elsewhere = keys, other, False
    for byte in range(8):
        shift = 8 * byte
        if counts[byte, (source[0] >> shift) & 255] == num:
            continue
        total = 0
        for digit in range(256):
            count = counts[byte, digit]
            counts[byte, digit] = total
            total += count
        for i in range(num):
            digit = (source[i] >> shift) & 255
            target[counts[byte, digit]] = source[i]
            counts[byte, digit] += 1
        source, target, is_elsewhere = target, source, not is_elsewhere
    if is_elsewhere:
        for i in range(num):
            keys[i] = other[i]


@numba.njit(nogil=True, cache=True)
def _coldest(keys: Any, num: Any, count: Any) -> None:
    """Sets keys[:count] to the `count` smallest of keys[:num], ascending."""
    if count > _FEW:
        _sort(keys, num)
        return
    size = 0
    for i in range(num):
        key = keys[i]
        if size == count:
            if key > keys[size - 1]:
                continue
            size -= 1
        place = size
        while place > 0 and keys[place - 1] > key:
            keys[place] = keys[place - 1]
            place -= 1
        keys[place] = key
        size += 1


# ------------------------------------------------------------------------------------------ kernels


@numba.njit(nogil=True, cache=True)
def _victims(
    state: Any, block_of: Any, used_at: Any, has_copy: Any, before: Any, first: Any, last: Any,
    count: Any, out: Any,
) -> Any:  # fmt: skip
    """Chooses up to `count` blocks of the hot set (blocks on the device) to evict, the least
    recently used first. Writes them to `out` and returns their number.

    Chooses only candidates (blocks `first` to `last` - 1; all other blocks are always kept) that
    have a copy in host memory and whose last use was before step `before`.
    """
    if count <= 0:
        return 0
    keys, num = np.empty(state.shape[0], np.int64), 0
    for slot in range(state.shape[0]):
        block = block_of[slot]
        if (
            state[slot] == _MAPPED
            and used_at[slot] < before
            and first <= block < last
            and has_copy[block]
        ):
            keys[num] = (used_at[slot] << 32) | block
            num += 1
    count = min(count, num)
    _coldest(keys, num, count)
    for i in range(count):
        out[i] = keys[i] & 0xFFFFFFFF
    return count


@numba.njit(nogil=True, cache=True, inline="always")
def _release(slot: Any, state: Any, block_of: Any, slot_of: Any) -> None:
    """Frees a hot slot (place on the device) that holds a block."""
    slot_of[block_of[slot]] = _NO_SLOT
    block_of[slot] = _NO_SLOT
    state[slot] = _FREE


@numba.njit(nogil=True, cache=True, inline="always")
def _abandon(block: Any, state: Any, block_of: Any, slot_of: Any) -> None:
    """Drops the prefetch of a block, if there is one.

    A hot slot (place on the device) that is already written becomes free at once. A slot that the
    prefetch still writes is cancelled, and becomes free when the write ends.
    """
    slot = slot_of[block]
    if slot >= 0:
        block_of[slot] = _NO_SLOT
        state[slot] = _CANCELLED if state[slot] == _LOADING else _FREE


@numba.njit(nogil=True, cache=True)
def _drop_unselected(
    clock: Any, state: Any, block_of: Any, used_at: Any, slot_of: Any, has_copy: Any, first: Any,
    last: Any, out: Any,
) -> Any:  # fmt: skip
    """For the policy `none`: evicts from the hot set (the blocks on the device) all blocks that
    step `clock` has not selected. Keeps always kept blocks (all except `first` to `last` - 1) and
    blocks of which host memory has no copy.

    Writes the evicted blocks to `out` and returns their number.
    """
    num = 0
    for slot in range(state.shape[0]):
        block = block_of[slot]
        is_cold = state[slot] == _MAPPED and used_at[slot] < clock
        if is_cold and first <= block < last and has_copy[block]:
            out[num] = block
            num += 1
            _release(slot, state, block_of, slot_of)
    return num


@numba.njit(nogil=True, cache=True, inline="always")
def _put(
    block: Any,
    slot: Any,
    as_state: Any,
    clock: Any,
    state: Any,
    block_of: Any,
    used_at: Any,
    slot_of: Any,
) -> None:
    slot_of[block], block_of[slot], state[slot] = slot, block, as_state
    used_at[slot] = clock


@numba.njit(nogil=True, cache=True)
def _missing(
    blocks: Any,
    weights: Any,
    clock: Any,
    state: Any,
    used_at: Any,
    slot_of: Any,
    keys: Any,
) -> Any:
    """Finds the selected blocks that are not on the device. Marks the other selected blocks as used
    in this step.

    blocks, weights: the selection: blocks, and their shares of the attention mass; inf for always
        kept blocks.
    keys: output: the missing blocks, as indices in `blocks`, heaviest first.

    Returns three numbers: missing blocks, missing blocks that are always kept, and all selected
    blocks that are always kept.
    """
    num, num_kept, num_always = 0, 0, 0
    for i in range(blocks.shape[0]):
        slot, is_kept = slot_of[blocks[i]], np.isinf(weights[i])
        num_always += is_kept
        if slot >= 0 and state[slot] == _MAPPED:
            used_at[slot] = clock
        else:
            num_kept += is_kept
            # Reads the bits of the weight as an integer. These integers have the same order as the
            # floats if the floats are positive, and the reverse order if they are negative. -0
            # becomes 0. The heaviest block gets the smallest key.
            bits = np.float32(weights[i] + np.float32(0)).view(np.int32)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            keys[num] = (np.int64(0x7FFFFFFF - np.int64(bits)) << 31) | i
            num += 1
    _sort(keys, num)
    for i in range(num):
        keys[i] &= 0x7FFFFFFF
    return num, num_kept, num_always


@numba.njit(nogil=True, cache=True)
def _merged(old: Any, joined: Any, num_joined: Any, state: Any, slot_of: Any, maps: Any) -> Any:
    """Writes the map (the blocks to which a step attends) after an eviction and additions to
    `maps`, int32 [2, K]: its blocks, ascending, and their slots. Returns the number of its blocks.

    The map consists of the blocks of the old map whose slot in `slot_of` still has the state MAPPED
    in `state`, and the first `num_joined` blocks of `joined`.
    """
    keys, num, place = np.empty(num_joined, np.int64), 0, 0
    for i in range(num_joined):
        keys[i] = joined[i]
    _sort(keys, num_joined)
    for i in range(old.shape[0]):
        block = old[i]
        while place < num_joined and keys[place] < block:
            maps[0, num] = keys[place]
            maps[1, num] = slot_of[keys[place]]
            num += 1
            place += 1
        slot = slot_of[block]
        if slot >= 0 and state[slot] == _MAPPED:
            maps[0, num] = block
            maps[1, num] = slot
            num += 1
    for i in range(place, num_joined):
        maps[0, num] = keys[i]
        maps[1, num] = slot_of[keys[i]]
        num += 1
    return num


@numba.njit(
    types.UniTuple(_INT, 7)(
        _I32, _F32, _INT, _I32, _ROWS, _ROWS, *_SLOTS, _INT, _INT, types.boolean, _INT, _INT, _INT
    ),
    nogil=True,
    cache=True,
)
def hot_step(
    blocks: Any, weights: Any, max_loads: Any, old: Any, maps: Any, moves: Any, state: Any,
    block_of: Any, used_at: Any, slot_of: Any, has_copy: Any, capacity: Any, clock: Any,
    keeps_unselected: Any, first: Any, last: Any, count: Any,
) -> Any:  # fmt: skip
    """Makes a step of the hot set (the blocks on the device): adds missing blocks of the selection
    to the map, and evicts blocks for them; see `HotSet.step`.

    blocks, weights: [n], the selection.
    max_loads: most blocks to add.
    old: [M], the blocks of the map.
    maps: [2, K], output: blocks and slots of the new map.
    moves: [4, max(n, K)], output: loaded blocks, their slots, evicted blocks, blocks to prefetch.
    capacity: largest number of blocks in the map.
    clock: number of the step.
    keeps_unselected: True for the policy `lru`, False for `none`.
    first, last, count: the context has `count` blocks; blocks `first` to `last` - 1 are candidates,
        all other blocks are always kept (`selection.CandidateSpan`).

    Returns seven numbers, in this order:
    - blocks of the new map (REFUSED if a block is outside the context),
    - loaded blocks, evicted blocks, blocks to prefetch,
    - selected blocks that are always kept,
    - selected blocks that were already mapped,
    - always kept blocks that were already mapped.
    """
    for i in range(blocks.shape[0]):
        if not 0 <= blocks[i] < count:
            return REFUSED, 0, 0, 0, 0, 0, 0
    keys = np.empty(blocks.shape[0], np.int64)
    num_missing, num_kept, num_always = _missing(
        blocks, weights, clock, state, used_at, slot_of, keys
    )
    num_victims = 0
    if not keeps_unselected:
        num_victims = _drop_unselected(
            clock, state, block_of, used_at, slot_of, has_copy, first, last, moves[2]
        )
    wanted = min(num_missing, max(num_kept, max_loads))
    growth, num_loads = capacity - (old.shape[0] - num_victims), 0
    if growth > 0:
        for slot in range(state.shape[0]):
            if num_loads == min(wanted, growth):
                break
            if state[slot] == _FREE:
                moves[1, num_loads] = slot
                num_loads += 1
    excess, num_unselected = wanted - num_loads + max(-growth, 0), 0
    # The second round makes room for always kept blocks only. It may evict even blocks that this
    # step has selected.
    for is_second in range(2):
        if is_second:
            num_unselected, excess = num_victims, num_kept - num_loads
        victims = moves[2, num_victims:]
        num_out = _victims(
            state, block_of, used_at, has_copy, clock + is_second, first, last, excess, victims
        )
        for i in range(num_out):
            slot = slot_of[victims[i]]
            _release(slot, state, block_of, slot_of)
            if num_loads < wanted:
                moves[1, num_loads] = slot
                num_loads += 1
        num_victims += num_out
    for i in range(num_loads):
        moves[0, i] = blocks[keys[i]]
        _abandon(blocks[keys[i]], state, block_of, slot_of)
    for i in range(num_loads):
        _put(moves[0, i], moves[1, i], _MAPPED, clock, state, block_of, used_at, slot_of)
    num_rest, num_left = 0, num_missing
    if num_victims > num_unselected:
        num_left, _, _ = _missing(blocks, weights, clock, state, used_at, slot_of, keys)
    for i in range(num_left):
        if slot_of[blocks[keys[i]]] == _NO_SLOT:
            moves[3, num_rest] = blocks[keys[i]]
            num_rest += 1
    num = old.shape[0]
    if num_loads or num_victims:
        num = _merged(old, moves[0], num_loads, state, slot_of, maps)
    return (
        num, num_loads, num_victims, num_rest, num_always, blocks.shape[0] - num_missing,
        num_always - num_kept,
    )  # fmt: skip


@numba.njit(
    types.UniTuple(_INT, 3)(_I32, _ROWS, _ROWS, *_SLOTS, *[_INT] * 4), nogil=True, cache=True
)
def hot_adopt(
    old: Any, maps: Any, moves: Any, state: Any, block_of: Any, used_at: Any, slot_of: Any,
    has_copy: Any, capacity: Any, clock: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    """Adds the blocks of ready slots (hot slots, places on the device, that a prefetch has written)
    to the map `old` [M], the blocks to which a step attends; see `HotSet.adopt`. Evicts other
    blocks for them if the map is full, and frees the ready slots for which there is no room.

    If any slot is ready, writes maps [2, K] (blocks and slots of the new map) and moves [3, K]
    (added blocks, their slots, evicted blocks). Returns the number of blocks of the new map, of
    added blocks and of evicted blocks.
    """
    num_ready = 0
    for slot in range(state.shape[0]):
        if state[slot] == _READY:
            moves[1, num_ready] = slot
            num_ready += 1
    if not num_ready:
        return old.shape[0], 0, 0
    excess, victims = old.shape[0] + num_ready - capacity, moves[2]
    num_victims = _victims(
        state, block_of, used_at, has_copy, clock + 1, first, last, excess, victims
    )
    for i in range(num_victims):
        _release(slot_of[victims[i]], state, block_of, slot_of)
    # At least 0: after `resize` the map may exceed the capacity by more blocks than there are ready
    # slots.
    num_kept = max(min(num_ready, num_ready - excess + num_victims), 0)
    for i in range(num_kept):
        slot = moves[1, i]
        moves[0, i], state[slot], used_at[slot] = block_of[slot], _MAPPED, clock
    for i in range(num_kept, num_ready):
        _release(moves[1, i], state, block_of, slot_of)
    return _merged(old, moves[0], num_kept, state, slot_of, maps), num_kept, num_victims


@numba.njit(_INT(_I32, _ROWS, *_SLOTS, _INT, _INT), nogil=True, cache=True)
def hot_begin_prefetch(
    blocks: Any,
    moves: Any,
    state: Any,
    block_of: Any,
    used_at: Any,
    slot_of: Any,
    has_copy: Any,
    clock: Any,
    count: Any,
) -> Any:
    """Assigns free hot slots (places on the device) to `blocks`, in order, until there are no free
    slots. Skips blocks that have a slot already, or no copy in host memory.

    Writes the blocks that got a slot, and their slots, to moves [2, K]. Returns their number, or
    REFUSED if a block is outside the context.
    """
    for i in range(blocks.shape[0]):
        if not 0 <= blocks[i] < count:
            return REFUSED
    num, slot = 0, 0
    for i in range(blocks.shape[0]):
        if slot_of[blocks[i]] != _NO_SLOT or not has_copy[blocks[i]]:
            continue
        while slot < state.shape[0] and state[slot] != _FREE:
            slot += 1
        if slot == state.shape[0]:
            break
        _put(blocks[i], slot, _LOADING, clock, state, block_of, used_at, slot_of)
        moves[0, num], moves[1, num] = blocks[i], slot
        num += 1
    return num


@numba.njit(_INT(_I32, types.int8[::1]), nogil=True, cache=True)
def hot_finish_prefetch(slots: Any, state: Any) -> Any:
    """Ends the prefetches into the hot slots (places on the device) `slots`. The slots become ready
    to be mapped, or free if their prefetch was cancelled.

    Returns 0. If `slots` contains a slot that no prefetch is writing, changes no table and returns
    REFUSED.
    """
    for i in range(slots.shape[0]):
        if not 0 <= slots[i] < state.shape[0] or (
            state[slots[i]] != _LOADING and state[slots[i]] != _CANCELLED
        ):
            return REFUSED
    for i in range(slots.shape[0]):
        state[slots[i]] = _FREE if state[slots[i]] == _CANCELLED else _READY
    return 0
