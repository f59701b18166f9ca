# mypy: disable-error-code="untyped-decorator"
"""The numba kernel of a layer's decode step: scores blocks, selects the best and updates the hot
set.

Calls the kernels of `score_kernels`, `choice_kernels` and `hotset_kernels` in the order of
`hotkv_sparse.selection` and `hotset`, with the same result. Checks only that indices of sketches
and pages are in range: arrays of a wrong shape overwrite other memory. A refused call leaves the
hot set unchanged. numba's disk cache does not notice changes of the kernels called here. Loaded by
`all_kernels`.

Shapes: Q query heads, H KV heads, D channels, C channels with padding, P parts of a block in a
    summary format, B blocks of a pool, N bytes of a block and head, n blocks of a selection, M
    blocks of the map, K hot slots.
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
"""In place of a count: an always kept block is outside the pages."""
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
    """Scores, out [Q, len(rows)], as `scores.prepare` and `score` give. Arguments as in
    `decode_step`."""
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
        _BYTES, _I32_1, types.UniTuple(_INT, 5), _FLOAT,
        _F32_1, types.boolean[::1],
        types.int32[::1], types.float32[::1], _INT,
        _I32_A, types.int32[:, ::1], types.int32[:, ::1], _I32_A, types.int32[:, ::1],
        types.int8[::1], types.int32[::1], types.int64[::1], types.int32[::1], types.boolean[::1],
        _INT, _INT, types.boolean, _INT, _INT, _INT,
    ), nogil=True, cache=True,
)  # fmt: skip
def decode_step(
    query: Any, rotation: Any, axes: Any, mu: Any, form: Any, units: Any, pool: Any, rows: Any,
    pages: Any, always: Any, packing: Any, key_scale: Any, beside: Any, selected: Any, blocks: Any,
    weights: Any, max_loads: Any, mapped: Any, maps: Any, moves: Any, arriving: Any, ahead: Any,
    state: Any, block_of: Any, used_at: Any, slot_of: Any, has_copy: Any, capacity: Any, clock: Any,
    keeps_unselected: Any, first: Any, last: Any, count: Any,
) -> Any:  # fmt: skip
    """Makes a decode step of a layer:
    1. Adds the prefetched blocks to the map.
    2. Scores all candidates and selects the best.
    3. Adds missing selected blocks to the map and evicts others (`hot_step`).
    4. Begins the next prefetch.

    query: float32 [Q, D].
    rotation: `rotation.factors`, then `rotation.pass_arrays`.
    axes: for mix2 `Axes.weights` [H, D, C] and `axes.offsets_of` [C]; else empty.
    mu: [H, D]; empty: 0.
    form: `Format.kernel` (0: a summary format), P, `Format.kind`, C, bytes of a run.
    units: scale of attention, `level_unit`, bias.
    pool: uint8 [B, H, N].
    rows: row in `pool` of each block of the context.
    pages: uint8 [pages, H, bytes], the layer's keys.
    always: indices in `pages` of the always kept blocks.
    packing: tokens in `always` (0: do not use the pages), tokens of a block, and `run`, `pair` and
        `kind` of `page_log_mass`.
    key_scale: of the keys in `pages`.
    beside: float32 [Q], log of a mass added to that of `always`, such as learned sinks.
    selected: bool [>= count], output.
    blocks, weights: [n], output: the selection of n blocks.
    arriving: slots that the last step named for prefetch; all are written.
    ahead: [2, K], output: blocks and slots to prefetch before the next step.
    mapped: int32 [M], blocks of the current map (`old` in `hot_step`).
    first, last, count: as in `CandidateSpan`.

    The others are as in `hot_step`. Returns seven counts, and the selection's share of the mass.
    The counts:
    - blocks of the new map (REFUSED for a row outside the pool, NO_PAGE for a block outside the
      pages),
    - candidates loaded by this step,
    - blocks added after a prefetch,
    - slots to prefetch,
    - selected blocks that are always kept,
    - selected candidates that were already in the map,
    - 1 if the map has changed, else 0.
    """
    candidates, num_tokens = rows[first:last], packing[0]
    if not _are_within(candidates, pool.shape[0]):
        return (REFUSED, 0, 0, 0, 0, 0, 0), 0.0
    if not _are_within(always, pages.shape[0]) and num_tokens:
        return (NO_PAGE, 0, 0, 0, 0, 0, 0), 0.0
    log_mass = beside.copy()
    if num_tokens:
        found = np.empty(query.shape[0], np.float32)
        scaled = query * (np.float32(units[0] * key_scale) * _LOG2_E)
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
