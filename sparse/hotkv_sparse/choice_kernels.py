# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that choose blocks by their scores. Loaded by `all_kernels`;
`tests/oracles/sparse.py` is the numpy twin.

Arguments are not checked, only scratch memory is allocated, the GIL is released. A head's scores
are read twice, the second time from the nearest cache. Functions `_emit_…` emit LLVM code with
`vectors` for any machine: they take an IR builder and `args`, integers (addresses and counts),
without bounds checks. numba's disk cache does not notice changes of `vectors`.

Shapes: Q query heads, H KV heads, S scored blocks, n blocks of a selection.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hotkv_sparse.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    LN2,
    MIN_SCORE,
    call,
    exp2,
    floats,
    ints,
    larger,
    load,
    offset,
    operation,
    prefetch,
    splat,
    store,
    variable,
)

_F32_1, _F32_2 = (
    types.Array(types.float32, 1, "C", readonly=True),
    types.Array(types.float32, 2, "C", readonly=True),
)

# ---------------------------------------------------------------------- operations on sixteen lanes


def _emit_exp(builder: Any, args: Any) -> None:
    """sums += weights * factor, with the last head's weights; then weights = e^(score - reference).
    The addition costs no time: the CPU does it while it computes exponentials.

    Operands, all addresses but `num_runs` and `ahead`:
    scores, weights, sums: float32 [num_runs][16]; `weights` holds the last head's.
    reference, factor: float32.
    total: float32, to which the new weights are added.
    ahead: bytes behind the scores to prefetch.
    """
    scores, reference, weights, num_runs, total, ahead, factor, out = args
    base = splat(builder, builder.fmul(load(builder, reference, F32), F32(-1 / LN2)), FLOATS)
    scale = splat(builder, load(builder, factor, F32), FLOATS)
    sums = variable(builder, floats(0.0))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        at = builder.mul(loop.index, I64(4 * LANES))
        prefetch(builder, builder.add(builder.add(scores, at), ahead))
        values = load(builder, builder.add(scores, at), FLOATS)
        place, target = builder.add(weights, at), builder.add(out, at)
        added = [load(builder, place, FLOATS), scale, load(builder, target, FLOATS)]
        store(builder, call(builder, "llvm.fma.v16f32", FLOATS, added), target)
        weight = exp2(
            builder, call(builder, "llvm.fma.v16f32", FLOATS, [values, floats(1 / LN2), base])
        )
        builder.store(builder.fadd(builder.load(sums), weight), sums)
        store(builder, weight, place)
    summed = call(
        builder,
        "llvm.vector.reduce.fadd.v16f32",
        F32,
        [load(builder, total, F32), builder.load(sums)],
        ("reassoc",),
    )
    store(builder, summed, total)


def _emit_peak(builder: Any, args: Any) -> None:
    """*peak = max(*peak, scores). `scores`: float32 [num_runs][16].

    Four independent maxima, so that no instruction waits for the one before it.
    """
    scores, num_runs, peak = args
    initial = splat(builder, load(builder, peak, F32), FLOATS)
    peaks = [variable(builder, initial) for _ in range(4)]

    def visit(chain: int, index: Any) -> None:
        values = load(builder, offset(builder, scores, index, 4 * LANES), FLOATS)
        builder.store(larger(builder, values, builder.load(peaks[chain])), peaks[chain])

    quads = builder.lshr(num_runs, I64(2))
    with cgutils.for_range(builder, quads, intp=I64) as loop:
        for chain in range(4):
            visit(chain, builder.add(builder.shl(loop.index, I64(2)), I64(chain)))
    done = builder.shl(quads, I64(2))
    with cgutils.for_range(builder, builder.sub(num_runs, done), intp=I64) as loop:
        visit(0, builder.add(done, loop.index))
    highest = builder.load(peaks[0])
    for chain in range(1, 4):
        highest = larger(builder, highest, builder.load(peaks[chain]))
    store(
        builder,
        call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [highest], ("nnan", "nsz")),
        peak,
    )


def _emit_add_scaled(builder: Any, args: Any) -> None:
    """out += values * factor, float32 [num_runs][16]."""
    values, factor, out, num_runs = args
    scale = splat(builder, load(builder, factor, F32), FLOATS)
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        at = builder.mul(loop.index, I64(4 * LANES))
        place = builder.add(out, at)
        operands = [
            load(builder, builder.add(values, at), FLOATS),
            scale,
            load(builder, place, FLOATS),
        ]
        store(builder, call(builder, "llvm.fma.v16f32", FLOATS, operands), place)


def _emit_count(builder: Any, args: Any) -> None:
    """Counts values (int32 [num_runs][16]) that are at least `least`."""
    values, num_runs, least, count = args
    bound = splat(builder, load(builder, least, I32), INTS)
    sums = variable(builder, ints(0))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        enough = builder.icmp_signed(
            ">=", load(builder, offset(builder, values, loop.index, 4 * LANES), INTS), bound
        )
        # A true lane has all bits set: -1.
        builder.store(builder.sub(builder.load(sums), builder.sext(enough, INTS)), sums)
    store(builder, call(builder, "llvm.vector.reduce.add.v16i32", I32, [builder.load(sums)]), count)


def _emit_collect(builder: Any, args: Any) -> None:
    """Writes the indices of values that are at least `least`, ascending; operands as in
    `_emit_count`."""
    values, num_runs, least, out = args
    bound = splat(builder, load(builder, least, I32), INTS)
    place, left = variable(builder, out), variable(builder, I32(0))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        enough = builder.icmp_signed(
            ">=", load(builder, offset(builder, values, loop.index, 4 * LANES), INTS), bound
        )
        mask = builder.zext(builder.bitcast(enough, ir.IntType(LANES)), I32)
        builder.store(mask, left)
        first = builder.trunc(builder.mul(loop.index, I64(LANES)), I32)
        with cgutils.for_range(builder, call(builder, "llvm.ctpop.i32", I32, [mask]), intp=I32):
            lanes_left, where = builder.load(left), builder.load(place)
            lane = call(builder, "llvm.cttz.i32", I32, [lanes_left, ir.Constant(ir.IntType(1), 0)])
            store(builder, builder.add(first, lane), where)
            builder.store(builder.add(where, I64(4)), place)
            builder.store(builder.and_(lanes_left, builder.sub(lanes_left, I32(1))), left)


EXP, PEAK, ADD_SCALED = (
    operation(8, _emit_exp),
    operation(3, _emit_peak),
    operation(4, _emit_add_scaled),
)
COUNT, COLLECT = operation(4, _emit_count), operation(4, _emit_collect)


# ------------------------------------------------------------------------------------------ kernels


@numba.njit(nogil=True, cache=True)
def _exps(
    scores: Any, head: Any, log_mass: Any, tail: Any, words: Any, weights: Any, sums: Any
) -> tuple[Any, Any]:
    """Computes a head's weights, e^(score - peak), with `peak` the maximum of its scores and
    `log_mass`.
    1. sums += weights * words[2], with the last head's weights; the caller has set words[2] to 1 /
       (their sum * heads).
    2. weights = e^(scores[head] - peak).

    Returns the always kept blocks' weight, e^(log_mass - peak), and the sum of it and all
    weights. `weights` and `sums` are float32 [blocks], padded to 16; tail [16], words[0] and
    words[1] are scratch.
    """
    num_blocks = scores.shape[1]
    runs, rest = num_blocks // 16, num_blocks % 16
    row_bytes = num_blocks * 4
    row, words_at = scores.ctypes.data + head * row_bytes, words.ctypes.data
    weights_at, sums_at = weights.ctypes.data, sums.ctypes.data
    # Scores behind the last whole run, padded to a run.
    for i in range(rest):
        tail[i] = scores[head, runs * 16 + i]
    for i in range(rest, 16):
        tail[i] = -np.inf
    words[0] = max(log_mass, np.float32(MIN_SCORE))
    PEAK(row, runs, words_at)
    PEAK(tail.ctypes.data, 1, words_at)
    own = np.float32(np.exp(log_mass - words[0]))
    words[1] = own
    EXP(row, words_at, weights_at, runs, words_at + 4, row_bytes, words_at + 8, sums_at)
    EXP(
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


@numba.njit(nogil=True, cache=True)
def _add_scaled(weights: Any, words: Any, sums: Any) -> None:
    """Adds the last head's weights to `sums`. A function of its own, as its caller's arrays live
    until it returns."""
    ADD_SCALED(weights.ctypes.data, words.ctypes.data + 8, sums.ctypes.data, weights.shape[0] // 16)


@numba.njit(nogil=True, cache=True)
def _bits(weights: Any, values: Any) -> Any:
    """Writes the weights' bits as integers, which have the order of positive floats; 0 for
    weights not above 0. Returns the largest."""
    bits, largest = weights.view(np.int32), np.int32(0)
    for i in range(weights.shape[0]):
        value = bits[i] if weights[i] > 0 else np.int32(0)
        values[i] = value
        largest = max(largest, value)
    return largest


@numba.njit(nogil=True, cache=True)
def _top(values: Any, num: Any, largest: Any, words: Any, out: Any) -> None:
    """Writes the indices of the k largest of values[:num], ascending; of equal ones, the lower
    index first. Bisects for the smallest value to include: counting needs no branches and no
    memory.

    values: int32 >= 0, padded with -1 to a multiple of 16.
    largest: of the values.
    words: int32 [2], scratch.
    out: int32 [k], k < num.
    """
    runs, count = (num + 15) // 16, out.shape[0]
    low, high, above = np.int64(0), np.int64(largest) + 1, np.int64(0)
    # Invariant: at least `count` values are >= low; `above` values are >= high, and above < count.
    while high - low > 1:
        middle = (low + high) >> 1
        words[0] = middle
        COUNT(values.ctypes.data, runs, words.ctypes.data, words.ctypes.data + 4)
        if words[1] == count:
            COLLECT(values.ctypes.data, runs, words.ctypes.data, out.ctypes.data)
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
    """Indices of the k largest weights, ascending; of equal ones, the lower index first. Weights
    not above 0 count as 0.

    out: int32 [k], k < len(weights).
    """
    num = weights.shape[0]
    values = np.full(num // 16 * 16 + 16, -1, np.int32)
    _top(values, num, _bits(weights, values), np.empty(2, np.int32), out)


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
    """Chooses the candidates with the largest mean share of the mass over the query heads, the same
    for all heads.

    Candidates are consecutive from block `first` on; all other of the `count` blocks are always
    kept, with weight inf. Returns the shares of the mass of the always kept blocks and of the
    chosen candidates.

    scores: float32 [Q, candidates].
    always_log_mass: float32 [Q].
    blocks, weights: [n], output: the n selected blocks, always kept ones included, with their
        shares.
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
    _add_scaled(exps, words, shared)
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
        _top(values, num, largest, np.empty(2, np.int32), chosen)
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
