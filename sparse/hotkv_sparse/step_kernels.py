# mypy: disable-error-code="untyped-decorator"
"""The numba kernel of a layer's decode step. In one call it scores blocks with a query, selects the
best blocks and updates the hot set (the blocks on the device).

This kernel calls the kernels of `score_kernels`, `choice_kernels` and `hotset_kernels` in the same
order as `hotkv_sparse.selection` and `hotkv_sparse.hotset`, so the result is the same.
`hotkv_sparse.all_kernels` loads this module. The kernel checks only whether indices of sketches
and pages are in range. It does not check the shapes of arrays: an array of a wrong shape makes it
overwrite other memory. A call that refuses its arguments leaves the hot set unchanged. numba's disk
cache does not notice changes of the kernels that this kernel calls.

Shapes: Q query heads, H KV heads, D channels, C channels with padding, P vectors (parts) per block
in a summary format, B blocks of a pool (the array of sketches), N bytes of a block and head,
n blocks of a selection, K hot slots.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_sparse.build_kernels import prepare, prepare_axes
from hotkv_sparse.choice_kernels import choose
from hotkv_sparse.formats import AXES_KERNEL, LEVEL_OFFSET
from hotkv_sparse.hotset_kernels import (
    REFUSED,
    hot_adopt,
    hot_begin_prefetch,
    hot_finish_prefetch,
    hot_step,
)
from hotkv_sparse.score_kernels import page_log_mass, score_parts, score_tokens

NO_PAGE = -2
"""Returned by `decode_step` in place of a count if an always kept block (sink, recent window) is
outside the pages."""
_LOG2_E = np.float32(1.4426950408889634)
_F32_1, _F32_2, _F32_3 = (
    types.Array(types.float32, ndim, "C", readonly=True) for ndim in (1, 2, 3)
)
_I32_1, _I64_1 = (types.Array(kind, 1, "C", readonly=True) for kind in (types.int32, types.int64))
_I32_A = types.Array(types.int32, 1, "A", readonly=True)
_BYTES = types.Array(types.uint8, 3, "A", readonly=True)
_INT, _FLOAT = types.int64, types.float64


@numba.njit(nogil=True, cache=True)
def _are_within(numbers: Any, count: Any) -> Any:
    for i in range(numbers.shape[0]):  # noqa: SIM110 - numba compiles no generators
        if not 0 <= numbers[i] < count:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _score(
    query: Any, rotation: Any, axes: Any, mu: Any, form: Any, units: Any, pool: Any, rows: Any,
    out: Any,
) -> None:  # fmt: skip
    """Computes the scores of blocks for a query, out [Q, len(rows)]: estimates of how much
    attention each query head pays to each block. The result is the same as with
    `hotkv_sparse.scores.prepare` followed by `score`. `decode_step` explains the arguments."""
    (factors, starts, sizes), (weights, offsets) = rotation, axes
    (kernel, parts, kind, channels, run_bytes), (scale, unit, bias) = form, units
    num_heads = query.shape[0]
    peaks, factor = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    shift = np.full(num_heads, -np.float32(bias), np.float32)
    sums = np.zeros((num_heads, parts), np.int32)
    codes = np.zeros((num_heads, parts, channels), np.int8)
    flat = codes.reshape(num_heads, parts * channels)
    if kernel == AXES_KERNEL:
        prepare_axes(query, weights, offsets, peaks, sums.reshape(num_heads), flat)
    else:
        prepare(query, factors, starts, sizes, kernel, kind, peaks, sums, codes)
        sums *= np.int32(-LEVEL_OFFSET)
    for head in range(num_heads):
        factor[head] = peaks[head] * np.float32(scale / (127.0 * unit))
        if mu.shape[0]:
            centre, total = mu[head // (num_heads // mu.shape[0])], np.float32(0)
            for channel in range(query.shape[1]):
                total += query[head, channel] * centre[channel]
            shift[head] += total * np.float32(scale)
    if kernel:
        factor *= _LOG2_E
        score_tokens(
            pool, rows, kernel, run_bytes, flat, sums.reshape(num_heads), factor, shift, out
        )
    else:
        score_parts(pool, rows, parts, flat, sums, factor, shift, out)


@numba.njit(
    types.Tuple((types.UniTuple(_INT, 7), _FLOAT))(
        _F32_2,
        types.Tuple((_F32_2, _I64_1, _I64_1)),
        types.Tuple((_F32_3, _I32_1)),
        _F32_2,
        types.UniTuple(_INT, 5),
        types.UniTuple(_FLOAT, 3),
        _BYTES, _I32_1,
        _BYTES, _I32_1, types.UniTuple(_INT, 5),
        _F32_1, types.boolean[::1],
        types.int32[::1], types.float32[::1], _INT,
        _I32_A, types.int32[:, ::1], types.int32[:, ::1], _I32_A, types.int32[:, ::1],
        types.int8[::1], types.int32[::1], types.int64[::1], types.int32[::1], types.boolean[::1],
        _INT, _INT, types.boolean, _INT, _INT, _INT,
    ), nogil=True, cache=True,
)  # fmt: skip
def decode_step(
    query: Any, rotation: Any, axes: Any, mu: Any, form: Any, units: Any, pool: Any, rows: Any,
    pages: Any, always: Any, packing: Any, beside: Any, selected: Any, blocks: Any, weights: Any,
    max_loads: Any, mapped: Any, maps: Any, moves: Any, arriving: Any, ahead: Any, state: Any,
    block_of: Any, used_at: Any, slot_of: Any, has_copy: Any, capacity: Any, clock: Any,
    keeps_unselected: Any, first: Any, last: Any, count: Any,
) -> Any:  # fmt: skip
    """Makes a decode step of a layer:
    1. Adds the prefetched blocks to the map (the blocks of the hot set, which are on the device).
    2. Scores all candidates (blocks that are not always kept) and selects the best.
    3. Adds missing selected blocks to the map and evicts other blocks (`hot_step`).
    4. Begins the next prefetch.

    query: float32 [Q, D].
    rotation: the factors, first channels and numbers of channels of the rotation's passes, from
        `rotation.factors` and `rotation.pass_arrays`.
    axes: for the format mix2, `Axes.weights` [H, D, C] and `axes.offsets_of` [C]; empty for other
        formats.
    mu: [H, D], the centre (mean key of each head); empty: 0.
    form: five numbers of the format of sketches: `Format.kernel` (0: a summary format), P,
        `Format.kind` of a summary format, C, bytes of a run (16 tokens of a head).
    units: scale of attention, `level_unit` of the format, bias.
    pool: uint8 [blocks, KV heads, bytes], the layer's sketches (compact forms of blocks'
        keys).
    rows: for each block of the context, its row in `pool`.
    pages: uint8 [blocks, KV heads, bytes], the layer's keys.
    always: indices in `pages` of the always kept blocks (sinks, recent window).
    packing: number of tokens in `always` (0: do not use the pages), tokens of a block, and the
        layout of the pages: `run`, `pair` and `kind` of `page_log_mass`.
    beside: float32 [Q], log of an attention mass that is added to the mass of `always`, such as
        that of learned sinks.
    selected: bool [>= count], output: True for each selected block.
    blocks, weights: [n], output: the selection; n is the number of blocks to select.
    arriving: slots that the previous step named for prefetch; all of them are written.
    ahead: [2, K], output: blocks and slots to prefetch before the next step.
    mapped: int32 [M], the blocks of the current map (`old` in `hot_step`).
    first, last, count: the context has `count` blocks; blocks `first` to `last` - 1 are the
        candidates (`selection.CandidateSpan`).

    The other arguments are the same as in `hot_step`. Returns seven counts, and the share of the
    attention mass that the selection has. The counts, in this order:
    - blocks of the new map (REFUSED for a row outside the pool, NO_PAGE for a block outside the
      pages),
    - candidates loaded by this step,
    - blocks added after a prefetch,
    - slots to prefetch,
    - selected blocks that are always kept,
    - selected candidates that were already in the map,
    - 1 if the map has changed, otherwise 0.
    """
    candidates, num_tokens = rows[first:last], packing[0]
    if not _are_within(candidates, pool.shape[0]):
        return (REFUSED, 0, 0, 0, 0, 0, 0), 0.0
    if not _are_within(always, pages.shape[0]) and num_tokens:
        return (NO_PAGE, 0, 0, 0, 0, 0, 0), 0.0
    log_mass = beside.copy()
    if num_tokens:
        found = np.empty(query.shape[0], np.float32)
        scaled = query * (np.float32(units[0]) * _LOG2_E)
        page_log_mass(
            pages, always, num_tokens, packing[1], packing[2], packing[3], packing[4], scaled, found
        )
        for head in range(query.shape[0]):
            log_mass[head] = np.logaddexp(log_mass[head], found[head])
    scores = np.empty((query.shape[0], candidates.shape[0]), np.float32)
    _score(query, rotation, axes, mu, form, units, pool, candidates, scores)
    always_mass, mass = choose(scores, log_mass, first, count, blocks, weights)
    for i in range(blocks.shape[0]):
        selected[blocks[i]] = True
    num_adopted, old, has_changed = 0, mapped.copy(), False
    if arriving.shape[0]:
        hot_finish_prefetch(arriving, state)
        num, num_adopted, num_out = hot_adopt(
            mapped, maps, moves, state, block_of, used_at, slot_of, has_copy, capacity, clock - 1,
            first, last,
        )  # fmt: skip
        has_changed = num_adopted + num_out > 0
        if has_changed:
            old = maps[0, :num].copy()
    num, num_loads, num_out, num_rest, num_always, num_resident, num_kept = hot_step(
        blocks, weights, max_loads, old, maps, moves, state, block_of, used_at, slot_of, has_copy,
        capacity, clock, keeps_unselected, first, last, count,
    )  # fmt: skip
    has_changed |= num_loads + num_out > 0
    num_moved = 0
    for i in range(num_loads):
        num_moved += first <= moves[0, i] < last
    num_ahead = hot_begin_prefetch(
        moves[3, :num_rest], ahead, state, block_of, used_at, slot_of, has_copy, clock, count
    )
    return (
        num, num_moved, num_adopted, num_ahead, num_always, num_resident - num_kept,
        np.int64(has_changed),
    ), min(always_mass + mass, 1.0)  # fmt: skip
