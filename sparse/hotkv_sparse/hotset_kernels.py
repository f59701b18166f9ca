# mypy: disable-error-code="untyped-decorator"
"""Numba kernels for steps and prefetches of the hot set. Loaded by `all_kernels`. `hotset` has the
invariants and the tables, `tests/sparse/naive.py` a naive model.

Many kernels take the tables of `HotSet` and change them in place; `clock` is the step's number. A
refused call changes nothing. The GIL is released. To sort by age or weight and then position, both
go into a non-negative int64 key.

Shapes: n selected blocks, K slots, M blocks of the map, C blocks of the context.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_sparse.hotset import SlotState

_FEW = 16
"""Keys up to which `_sort` sorts by insertion, beyond by radix."""
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
"""state [K], block_of [K], used_at [K], slot_of [>= C], has_copy [>= C]."""

# ------------------------------------------------------------------------------------ order of keys


@numba.njit(nogil=True, cache=True)
def _sort(keys: Any, num: Any) -> None:
    """keys[:num], non-negative int64, ascending; radix sort goes from the lowest byte on."""
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
    """keys[:count]: the smallest of keys[:num], ascending."""
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
    """Writes up to `count` blocks to evict to `out`, least recently used first; returns their
    number. Only candidates (`first` to `last` - 1) with a copy whose last use was before step
    `before`."""
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
    slot_of[block_of[slot]] = _NO_SLOT
    block_of[slot] = _NO_SLOT
    state[slot] = _FREE


@numba.njit(nogil=True, cache=True, inline="always")
def _abandon(block: Any, state: Any, block_of: Any, slot_of: Any) -> None:
    """Drops the block's prefetch, if any: a written slot is free at once, another when its write
    ends."""
    slot = slot_of[block]
    if slot >= 0:
        block_of[slot] = _NO_SLOT
        state[slot] = _CANCELLED if state[slot] == _LOADING else _FREE


@numba.njit(nogil=True, cache=True)
def _drop_unselected(
    clock: Any, state: Any, block_of: Any, used_at: Any, slot_of: Any, has_copy: Any, first: Any,
    last: Any, out: Any,
) -> Any:  # fmt: skip
    """For `none`: evicts all candidates with a copy that step `clock` has not selected, writes
    them to `out` and returns their number."""
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
    """Marks selected blocks on the device as used; finds the others.

    weights: inf for always kept blocks.
    keys: output: missing ones as indices in `blocks`, heaviest first.

    Returns the numbers of missing blocks, of always kept ones among them, and of selected blocks
    that are always kept.
    """
    num, num_kept, num_always = 0, 0, 0
    for i in range(blocks.shape[0]):
        slot, is_kept = slot_of[blocks[i]], np.isinf(weights[i])
        num_always += is_kept
        if slot >= 0 and state[slot] == _MAPPED:
            used_at[slot] = clock
        else:
            num_kept += is_kept
            # Bits as an integer have the order of positive floats, the reverse of negative ones.
            # -0 becomes 0. The heaviest block gets the smallest key.
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
    """Writes the new map to `maps`, int32 [2, K]: `old` without evicted blocks, with
    joined[:num_joined], ascending. Returns its length."""
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
    """See `HotSet.step`.

    blocks, weights: [n], the selection.
    max_loads: blocks to add at most.
    old: [M], blocks of the map.
    maps: [2, K], output: blocks and slots of the new map.
    moves: [4, max(n, K)], output: loaded blocks, their slots, evicted blocks, blocks to prefetch.
    capacity: of the map.
    keeps_unselected: `lru`; False: `none`.
    first, last, count: as in `CandidateSpan`.

    Returns seven numbers:
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
    # The second round is for always kept blocks only, and may evict even selected ones.
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
    """See `HotSet.adopt`. Maps ready slots' blocks, evicting others if the map is full; frees ready
    slots without room.

    If any is ready, writes maps [2, K] (blocks and slots) and moves [3, K] (added blocks, their
    slots, evicted blocks). Returns the numbers of mapped, added and evicted blocks.
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
    # After `resize` the map may exceed the capacity by more than there are ready slots.
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
    """See `HotSet.begin_prefetch`. Writes blocks and slots to moves [2, K]. Returns their
    number, or REFUSED if a block is outside the context."""
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
    """Slots become ready, or free if cancelled. Returns 0, or REFUSED without a change if no
    prefetch writes one of them."""
    for i in range(slots.shape[0]):
        if not 0 <= slots[i] < state.shape[0] or (
            state[slots[i]] != _LOADING and state[slots[i]] != _CANCELLED
        ):
            return REFUSED
    for i in range(slots.shape[0]):
        state[slots[i]] = _FREE if state[slots[i]] == _CANCELLED else _READY
    return 0
