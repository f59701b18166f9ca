# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that turn scores into a choice of blocks; part of `hotkv_sparse.kernels`, through
which they are loaded.

Their references are in `hotkv_sparse.weights` and `hotkv_sparse.topk`. They are called with checked
arrays; scratch is their own; all run without the GIL. A row of scores is read twice,
the second time from the nearest cache.

Shapes: Q query heads, H KV heads, S scored blocks, n blocks of a selection.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_sparse import choice_lanes as lanes
from hotkv_sparse.vectors import MIN_SCORE

_F32_1, _F32_2 = (
    types.Array(types.float32, 1, "C", readonly=True),
    types.Array(types.float32, 2, "C", readonly=True),
)


@numba.njit(nogil=True, cache=True)
def _exps(
    scores: Any, head: Any, log_mass: Any, tail: Any, words: Any, weights: Any, sums: Any
) -> tuple[Any, Any]:
    """sums += weights * words[2], then weights = e^(scores[head] - peak); both are padded to whole
    runs.

    Returns (e^(log_mass - peak), the sum of the weights and it). Scratch: tail [16], words [0, 1].
    """
    num_blocks = scores.shape[1]
    runs, rest = num_blocks // 16, num_blocks % 16
    row, words_at = scores.ctypes.data + head * num_blocks * 4, words.ctypes.data
    weights_at, sums_at = weights.ctypes.data, sums.ctypes.data
    # The blocks beyond the last whole run stand apart, padded to a run.
    for i in range(rest):
        tail[i] = scores[head, runs * 16 + i]
    for i in range(rest, 16):
        tail[i] = -np.inf
    words[0] = max(log_mass, np.float32(MIN_SCORE))
    lanes.PEAK(row, runs, words_at)
    lanes.PEAK(tail.ctypes.data, 1, words_at)
    own = np.float32(np.exp(log_mass - words[0]))
    words[1] = own
    lanes.EXP(row, words_at, weights_at, runs, words_at + 4, num_blocks * 4, words_at + 8, sums_at)
    lanes.EXP(
        tail.ctypes.data,
        words_at,
        weights_at + runs * 64,
        1,
        words_at + 4,
        0,
        words_at + 8,
        sums_at + runs * 64,
    )
    return own, max(words[1], np.float32(1e-20))


@numba.njit(
    types.void(_F32_2, _F32_1, types.float32[:, ::1], types.float32[::1], types.float32[::1]),
    nogil=True,
    cache=True,
)
def aggregate(scores: Any, always_log_mass: Any, per_head: Any, shared: Any, always: Any) -> None:
    """Shares of the attention mass: per_head [H, S], shared [S], always [H] from scores [Q, S] and
    always_log_mass [Q]."""
    num_heads, num_blocks = scores.shape
    kv_heads = per_head.shape[0]
    group, runs = num_heads // kv_heads, num_blocks // 16 + 1
    weights, sums = np.zeros(runs * 16, np.float32), np.zeros((kv_heads + 1, runs * 16), np.float32)
    tail, words = np.empty(16, np.float32), np.zeros(4, np.float32)
    factor_at = words.ctypes.data + 8
    always[:] = 0
    for head in range(num_heads):
        own, total = _exps(
            scores,
            head,
            always_log_mass[head],
            tail,
            words,
            weights,
            sums[max(head - 1, 0) // group],
        )
        words[2] = np.float32(1.0) / (total * np.float32(group))
        always[head // group] += own * words[2]
    lanes.ADD_SCALED(weights.ctypes.data, factor_at, sums[kv_heads - 1].ctypes.data, runs)
    words[2] = np.float32(1.0) / np.float32(kv_heads)
    for kv_head in range(kv_heads):
        lanes.ADD_SCALED(sums[kv_head].ctypes.data, factor_at, sums[kv_heads].ctypes.data, runs)
        for i in range(num_blocks):
            per_head[kv_head, i] = sums[kv_head, i]
    for i in range(num_blocks):
        shared[i] = sums[kv_heads, i]


@numba.njit(nogil=True, cache=True)
def _bits(weights: Any, values: Any) -> Any:
    """values = the bits of positive floats, which order like the floats, 0 for all else; returns
    the largest."""
    bits, largest = weights.view(np.int32), np.int32(0)
    for i in range(weights.shape[0]):
        value = bits[i] if weights[i] > 0 else np.int32(0)
        values[i] = value
        largest = max(largest, value)
    return largest


@numba.njit(nogil=True, cache=True)
def _top(values: Any, num: Any, largest: Any, out: Any) -> None:
    """out = indices of the len(out) < num largest of values[:num], ascending; of equals the lowest.

    `values` int32 >= 0, padded to whole runs with -1. Halves the range of the last value that is
    in: counting values above a bound takes no branch and no memory beside the values.
    """
    words, runs, count = np.empty(2, np.int32), (num + 15) // 16, out.shape[0]
    low, high, above = np.int64(0), np.int64(largest) + 1, np.int64(0)
    # At least `count` values are >= low, and `above` < count of them >= high.
    while high - low > 1:
        middle = (low + high) >> 1
        words[0] = middle
        lanes.COUNT(values.ctypes.data, runs, words.ctypes.data, words.ctypes.data + 4)
        if words[1] == count:
            lanes.COLLECT(values.ctypes.data, runs, words.ctypes.data, out.ctypes.data)
            return
        if words[1] > count:
            low = middle
        else:
            high, above = middle, words[1]
    equals, place = count - above, 0
    for i in range(num):
        if values[i] >= high or (values[i] == low and equals > 0):
            out[place] = i
            place += 1
            equals -= values[i] == low


@numba.njit(types.void(_F32_1, types.int32[::1]), nogil=True, cache=True)
def top(weights: Any, out: Any) -> None:
    """Indices of the len(out) < len(weights) largest, ascending; of equals the lowest. What is not
    above 0 ranks as 0."""
    num = weights.shape[0]
    values = np.full(num // 16 * 16 + 16, -1, np.int32)
    _top(values, num, _bits(weights, values), out)


@numba.njit(
    types.UniTuple(types.float64, 2)(
        _F32_2, _F32_1, types.int64, types.int64, types.int32[::1], types.float32[::1]
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def choose(
    scores: Any,
    always_log_mass: Any,
    first: Any,
    count: Any,
    blocks: Any,
    weights: Any,
) -> tuple[Any, Any]:
    """`aggregate` and `top` in one: blocks [n] and weights [n] of a selection from scores [Q, S].

    `first` blocks before the candidates and those after them, up to `count`, are always kept and
    weigh inf. Returns (share of blocks that are always kept, share of the chosen).
    """
    num_heads, num = scores.shape
    room, runs = weights.shape[0] - (count - num), num // 16 + 1
    exps, shared = np.zeros(runs * 16, np.float32), np.zeros(runs * 16, np.float32)
    tail, words = np.empty(16, np.float32), np.zeros(4, np.float32)
    always = np.float64(0)
    for head in range(num_heads):
        own, total = _exps(scores, head, always_log_mass[head], tail, words, exps, shared)
        words[2] = np.float32(1.0) / (total * np.float32(num_heads))
        always += own * words[2]
    lanes.ADD_SCALED(exps.ctypes.data, words.ctypes.data + 8, shared.ctypes.data, runs)
    num_chosen, mass = min(room, num), np.float64(0)
    chosen = blocks[first : first + num_chosen]
    if room >= num:
        for i in range(num):
            chosen[i] = i
    else:
        values = exps.view(np.int32)
        largest = _bits(shared[:num], values)
        for i in range(num, runs * 16):
            values[i] = -1
        _top(values, num, largest, chosen)
    for i in range(num_chosen):
        weights[first + i] = shared[chosen[i]]
        mass += shared[chosen[i]]
        chosen[i] += first
    for i in range(first):
        blocks[i], weights[i] = i, np.inf
    for i in range(count - first - num):
        blocks[first + num_chosen + i] = first + num + i
        weights[first + num_chosen + i] = np.inf
    return always, mass
