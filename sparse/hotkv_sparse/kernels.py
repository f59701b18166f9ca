# mypy: disable-error-code="untyped-decorator"
"""Numba kernels of sparse selection. Import through `hotkv.native.load`, never at import time; the
first import compiles for seconds.

They are called with checked arrays by the modules that hold their plain references. All run without
the GIL and allocate only scratch. Sixteen tokens of one head lie side by side in the lanes of a
vector, in building as in scoring. Loops assign single elements: an assignment of slices takes numba
a second to compile, with its error messages.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels, C channels with
padding, P parts.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv.kernels import prefetch_address
from hotkv_sparse import lanes
from hotkv_sparse.choice_kernels import aggregate, choose, top
from hotkv_sparse.hotset_kernels import (
    REFUSED,
    hot_adopt,
    hot_begin_prefetch,
    hot_finish_prefetch,
    hot_step,
)
from hotkv_sparse.vectors import MIN_SCORE

__all__ = [
    "REFUSED",
    "aggregate",
    "build_parts",
    "build_tokens",
    "choose",
    "hot_adopt",
    "hot_begin_prefetch",
    "hot_finish_prefetch",
    "hot_step",
    "page_log_mass",
    "prepare",
    "score_parts",
    "score_tokens",
    "top",
]

_CHUNK_BLOCKS = 64
_AHEAD_BLOCKS = 2
"""How many blocks ahead the caches are asked for one: the hardware stops at the end of a page."""
_TRANSPOSED_RUNS = 2
"""Blocks of more runs than this are summed lane by lane and then across: that costs less than
transposing all of them."""
_PACKED = types.Array(types.uint8, 3, "A", readonly=True)
_KEYS = types.Array(types.float32, 4, "A", readonly=True)
_F32_1, _F32_2 = (
    types.Array(types.float32, 1, "C", readonly=True),
    types.Array(types.float32, 2, "C", readonly=True),
)
_I8_2, _I32_1, _I32_2 = (
    types.int8[:, ::1],
    types.Array(types.int32, 1, "C", readonly=True),
    types.int32[:, ::1],
)
_I64_1 = types.Array(types.int64, 1, "C", readonly=True)


@numba.njit(nogil=True, cache=True, inline="always")
def _run_scores(
    bits: Any,
    heads: Any,
    run: Any,
    steps: Any,
    query: Any,
    stride: Any,
    bias: Any,
    factor: Any,
    out: Any,
    width: Any,
) -> None:
    if bits == 2:
        if heads == 4:
            lanes.RUN_2_4(run, steps, query, stride, bias, factor, out, width)
        elif heads == 3:
            lanes.RUN_2_3(run, steps, query, stride, bias, factor, out, width)
        elif heads == 2:
            lanes.RUN_2_2(run, steps, query, stride, bias, factor, out, width)
        else:
            lanes.RUN_2_1(run, steps, query, stride, bias, factor, out, width)
    elif bits == 3:
        if heads == 4:
            lanes.RUN_3_4(run, steps, query, stride, bias, factor, out, width)
        elif heads == 3:
            lanes.RUN_3_3(run, steps, query, stride, bias, factor, out, width)
        elif heads == 2:
            lanes.RUN_3_2(run, steps, query, stride, bias, factor, out, width)
        else:
            lanes.RUN_3_1(run, steps, query, stride, bias, factor, out, width)
    elif heads == 4:
        lanes.RUN_1_4(run, steps, query, stride, bias, factor, out, width)
    elif heads == 3:
        lanes.RUN_1_3(run, steps, query, stride, bias, factor, out, width)
    elif heads == 2:
        lanes.RUN_1_2(run, steps, query, stride, bias, factor, out, width)
    else:
        lanes.RUN_1_1(run, steps, query, stride, bias, factor, out, width)


@numba.njit(nogil=True, cache=True)
def _finish(scores: Any, runs: Any, shift: Any, out: Any, start: Any, count: Any) -> None:
    """out[:, start : start + count] from scratch scores [Q, 16 blocks, runs * 16 tokens] in base
    2."""
    peaks, totals = np.empty(16, np.float32), np.ones(16, np.float32)
    peaks_at, totals_at, shifts_at, stride = (
        peaks.ctypes.data,
        totals.ctypes.data,
        shift.ctypes.data,
        runs * 64,
    )
    for head in range(scores.shape[0]):
        rows = scores.ctypes.data + head * 16 * stride
        if runs <= _TRANSPOSED_RUNS:
            lanes.EXP_SUMS(rows, stride, runs, peaks_at, totals_at)
        else:
            for i in range(count):
                lanes.EXP_SUM(rows + i * stride, runs, peaks_at + 4 * i, totals_at + 4 * i)
        lanes.FINISH(peaks_at, totals_at, shifts_at + head * 4, peaks_at, 1)
        for i in range(count):
            out[head, start + i] = peaks[i]


@numba.njit(
    types.void(
        _PACKED,
        _I32_1,
        types.int64,
        types.int64,
        _I8_2,
        _I32_1,
        _F32_1,
        _F32_1,
        types.float32[:, ::1],
    ),
    nogil=True,
    cache=True,
)
def score_tokens(
    packed: Any,
    rows: Any,
    bits: Any,
    run_bytes: Any,
    query: Any,
    bias: Any,
    factor: Any,
    shift: Any,
    out: Any,
) -> None:
    """out [Q, len(rows)]: logsumexp over the tokens of packed[row] (token format of `bits`), plus
    `shift`.

    `query` int8 [Q, C], `bias` int32 [Q] = -offset * sum(query), `factor` float32 [Q]: byte
    products to base-2 scores.
    """
    num_heads, kv_heads, num_rows = query.shape[0], packed.shape[1], rows.shape[0]
    group, runs = num_heads // kv_heads, packed.shape[2] // run_bytes
    steps = (run_bytes - 32) // (192 if bits == 3 else 64)
    base, row_stride, head_stride = packed.ctypes.data, packed.strides[0], packed.strides[1]
    scores = np.zeros((num_heads, 16, runs * 16), np.float32)
    queries, biases, factors = query.ctypes.data, bias.ctypes.data, factor.ctypes.data
    scratch, width, stride = scores.ctypes.data, runs * 64, query.shape[1]
    for start in range(0, num_rows, 16):
        count = min(16, num_rows - start)
        for i in range(count):
            block = base + np.int64(rows[start + i]) * row_stride
            ahead = base + np.int64(rows[min(start + i + _AHEAD_BLOCKS, num_rows - 1)]) * row_stride
            for kv_head in range(kv_heads):
                address = block + kv_head * head_stride
                for line in range(0, packed.shape[2], 64):
                    prefetch_address(ahead + kv_head * head_stride + line)
                for first in range(0, group, 4):
                    heads, head = min(4, group - first), kv_head * group + first
                    place = scratch + (head * 16 + i) * width
                    for run in range(runs):
                        _run_scores(
                            bits, heads, address + run * run_bytes, steps, queries + head * stride,
                            stride,
                            biases + head * 4, factors + head * 4, place + run * 64, 16 * width,
                        )  # fmt: skip
        _finish(scores, runs, shift, out, start, count)


@numba.njit(nogil=True, cache=True, inline="always")
def _part_scores(
    heads: Any,
    parts: Any,
    count: Any,
    steps: Any,
    query: Any,
    stride: Any,
    bias: Any,
    factor: Any,
    out: Any,
) -> None:
    if heads == 4:
        lanes.PART_4(parts, count, steps, query, stride, bias, factor, out, 4 * _CHUNK_BLOCKS)
    elif heads == 3:
        lanes.PART_3(parts, count, steps, query, stride, bias, factor, out, 4 * _CHUNK_BLOCKS)
    elif heads == 2:
        lanes.PART_2(parts, count, steps, query, stride, bias, factor, out, 4 * _CHUNK_BLOCKS)
    else:
        lanes.PART_1(parts, count, steps, query, stride, bias, factor, out, 4 * _CHUNK_BLOCKS)


@numba.njit(
    types.void(_PACKED, _I32_1, types.int64, _I8_2, _I32_2, _F32_1, _F32_1, types.float32[:, ::1]),
    nogil=True,
    cache=True,
)
def score_parts(
    packed: Any, rows: Any, num_parts: Any, query: Any, bias: Any, factor: Any, shift: Any, out: Any
) -> None:
    """out [Q, len(rows)]: score of the summary packed[row], plus `shift`.

    `query` int8 [Q, P * C], `bias` int32 [Q, P] = -128 * sum of a part's query, `factor` float32
    [Q]: byte products to scores.
    """
    num_heads, kv_heads, num_rows = query.shape[0], packed.shape[1], rows.shape[0]
    group, stride = num_heads // kv_heads, query.shape[1]
    steps = stride // (32 * num_parts)
    scores = np.empty((num_heads, _CHUNK_BLOCKS), np.float32)
    base, row_stride, head_stride = packed.ctypes.data, packed.strides[0], packed.strides[1]
    queries, biases, factors = query.ctypes.data, bias.ctypes.data, factor.ctypes.data
    for start in range(0, num_rows, _CHUNK_BLOCKS):
        count = min(_CHUNK_BLOCKS, num_rows - start)
        for i in range(count):
            block = base + np.int64(rows[start + i]) * row_stride
            ahead = base + np.int64(rows[min(start + i + 4, num_rows - 1)]) * row_stride
            for kv_head in range(kv_heads):
                for line in range(0, packed.shape[2], 64):
                    prefetch_address(ahead + kv_head * head_stride + line)
                for first in range(0, group, 4):
                    heads, head = min(4, group - first), kv_head * group + first
                    _part_scores(
                        heads, block + kv_head * head_stride, num_parts, steps,
                        queries + head * stride, stride,
                        biases + head * num_parts * 4, factors + head * 4,
                        scores.ctypes.data + (head * _CHUNK_BLOCKS + i) * 4,
                    )  # fmt: skip
        for head in range(num_heads):
            for i in range(count):
                value = scores[head, i]
                out[head, start + i] = value + shift[head] if value > MIN_SCORE else -np.inf


@numba.njit(nogil=True, cache=True)
def _rotate_lanes(y: Any, factors: Any, starts: Any, sizes: Any) -> None:
    """Rotates y [>= D, 16], a vector of D channels in each lane."""
    for index in range(starts.shape[0]):
        size, rows = sizes[index], y.ctypes.data + starts[index] * 64
        lanes.SCALE_ROWS(rows, factors[index, starts[index] :].ctypes.data, size)
        half = 1
        while half < size:
            lanes.BUTTERFLY(rows, half, size // 2)
            half *= 2


@numba.njit(
    types.void(
        _KEYS,
        _F32_2,
        _I32_1,
        _F32_2,
        _I64_1,
        _I64_1,
        types.int64,
        types.int64,
        types.uint8[:, :, :],
    ),
    nogil=True,
    cache=True,
)
def build_tokens(
    keys: Any,
    mu: Any,
    num_tokens: Any,
    factors: Any,
    starts: Any,
    sizes: Any,
    bits: Any,
    channels: Any,
    out: Any,
) -> None:
    """A token format of `bits`: out uint8 [B, H, N] from keys [B, T, H, D]; `factors` [passes, D]:
    signs of the rotation, normalised."""
    head_size, run_bytes = keys.shape[3], 2 * channels * bits + 32
    steps = channels // (16 if bits == 2 else 32)
    y = np.zeros((channels, 16), np.float32)
    for block in range(keys.shape[0]):
        for head in range(keys.shape[2]):
            for run in range(out.shape[2] // run_bytes):
                first = run * 16
                valid = min(16, max(0, num_tokens[block] - first))
                for lane in range(16):
                    if lane < valid:
                        for channel in range(head_size):
                            y[channel, lane] = (
                                keys[block, first + lane, head, channel] - mu[head, channel]
                            )
                    else:
                        y[:head_size, lane] = 0
                _rotate_lanes(y, factors, starts, sizes)
                place = out[block, head, run * run_bytes :].ctypes.data
                if bits == 1:
                    lanes.PACK_1(y.ctypes.data, head_size, steps, place, valid)
                elif bits == 2:
                    lanes.PACK_2(y.ctypes.data, head_size, steps, place, valid)
                else:
                    lanes.PACK_3(y.ctypes.data, head_size, steps, place, valid)


@numba.njit(nogil=True, cache=True)
def _mean_of(keys: Any, mu: Any, parts: Any) -> None:
    """parts[0] = the mean of keys [T, D] less `mu`; 0 where there are none."""
    parts[0] = 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            parts[0, channel] += keys[token, channel] - mu[channel]
    for channel in range(keys.shape[1]):
        parts[0, channel] /= np.float32(max(keys.shape[0], 1))


@numba.njit(nogil=True, cache=True)
def _edges_of(keys: Any, mu: Any, cuboid: Any, parts: Any) -> None:
    """parts = max, min of keys [T, D] less `mu`, or their middle and the mean distance to it; 0
    where there are none."""
    high, low = parts[0], parts[1]
    high[:] = -np.inf if keys.shape[0] else 0
    low[:] = np.inf if keys.shape[0] else 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            value = keys[token, channel] - mu[channel]
            high[channel] = max(high[channel], value)
            low[channel] = min(low[channel], value)
    if not cuboid:
        return
    for channel in range(keys.shape[1]):
        high[channel] = (low[channel] + high[channel]) / np.float32(2)
        low[channel] = 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            low[channel] += abs(keys[token, channel] - mu[channel] - high[channel])
    for channel in range(keys.shape[1]):
        low[channel] /= np.float32(max(keys.shape[0], 1))


@numba.njit(
    types.void(
        _F32_2,
        _F32_2,
        _I64_1,
        _I64_1,
        types.int64,
        types.int64,
        types.float32[::1],
        types.int32[:, ::1],
        types.int8[:, :, ::1],
    ),
    nogil=True,
    cache=True,
)
def prepare(
    query: Any,
    factors: Any,
    starts: Any,
    sizes: Any,
    rotated: Any,
    kind: Any,
    peaks: Any,
    sums: Any,
    codes: Any,
) -> None:
    """int8 codes [Q, P, C] of queries [Q, D] with their sums [Q, P], one step per 127th of peaks
    [Q]; `kind` 0: q+, q-; 1: q, |q|; 2: q."""
    num_heads, head_size = query.shape
    y = np.empty((head_size, 16), np.float32)
    for first in range(0, num_heads, 16):
        count = min(16, num_heads - first)
        for lane in range(16):
            for channel in range(head_size):
                y[channel, lane] = query[first + lane, channel] if lane < count else np.float32(0)
        if rotated:
            _rotate_lanes(y, factors, starts, sizes)
        for lane in range(count):
            peak = np.float32(1e-20)
            for channel in range(head_size):
                peak = max(peak, abs(y[channel, lane]))
            peaks[first + lane] = peak
            unit = np.float32(127) / peak
            for channel in range(head_size):
                step = np.int32(np.rint(y[channel, lane] * unit))
                code = max(step, 0) if kind == 0 else step
                codes[first + lane, 0, channel] = code
                sums[first + lane, 0] += code
                if kind < 2:
                    code = min(step, 0) if kind == 0 else abs(step)
                    codes[first + lane, 1, channel] = code
                    sums[first + lane, 1] += code


@numba.njit(
    types.void(_KEYS, _F32_2, _I32_1, types.int64, types.int64, types.uint8[:, :, :]),
    nogil=True,
    cache=True,
)
def build_parts(keys: Any, mu: Any, num_tokens: Any, kind: Any, channels: Any, out: Any) -> None:
    """A summary format, out uint8 [B, H, N] from keys [B, T, H, D]; `kind` 0: quest, 1: cuboid, 2:
    mean."""
    head_size, num_parts = keys.shape[3], 1 if kind == 2 else 2
    parts, scale = np.empty((2, head_size), np.float32), np.empty(1, np.float32)
    scale_bytes = scale.view(np.uint8)
    for block in range(keys.shape[0]):
        count = num_tokens[block]
        for head in range(keys.shape[2]):
            if kind == 2:
                _mean_of(keys[block, :count, head], mu[head], parts)
            else:
                _edges_of(keys[block, :count, head], mu[head], kind == 1, parts)
            for part in range(num_parts):
                peak = np.float32(1e-20)
                for channel in range(head_size):
                    peak = max(peak, abs(parts[part, channel]))
                scale[0] = peak / np.float32(126 if kind == 0 else 127)
                place = part * channels
                for channel in range(head_size):
                    step = parts[part, channel] / scale[0]
                    step = (
                        np.rint(step)
                        if kind != 0
                        else np.ceil(step)
                        if part == 0
                        else np.floor(step)
                    )
                    out[block, head, place + channel] = np.uint8(np.int32(step) + 128)
                for channel in range(head_size, channels):
                    out[block, head, place + channel] = 128
                scale[0] = scale[0] if count > 0 else np.float32(-1)
                for byte in range(4):
                    out[block, head, num_parts * channels + 4 * part + byte] = scale_bytes[byte]


_BF16_1, _BF16_4 = lanes.BF16_KEYS
_F16_1, _F16_4 = lanes.F16_KEYS
_BF16_PAIR_1, _BF16_PAIR_4 = lanes.BF16_PAIRS
_F16_PAIR_1, _F16_PAIR_4 = lanes.F16_PAIRS
_F32_KEYS_1, _F32_KEYS_4 = lanes.F32_KEYS


@numba.njit(nogil=True, cache=True, inline="always")
def _key_scores(
    kind: Any,
    pair: Any,
    heads: Any,
    keys: Any,
    steps: Any,
    step_bytes: Any,
    query: Any,
    stride: Any,
    out: Any,
    width: Any,
) -> None:
    if heads == 4:
        if kind == 0:
            if pair == 1:
                _BF16_4(keys, steps, step_bytes, query, stride, out, width)
            else:
                _BF16_PAIR_4(keys, steps, step_bytes, query, stride, out, width)
        elif kind == 1:
            if pair == 1:
                _F16_4(keys, steps, step_bytes, query, stride, out, width)
            else:
                _F16_PAIR_4(keys, steps, step_bytes, query, stride, out, width)
        else:
            _F32_KEYS_4(keys, steps, step_bytes, query, stride, out, width)
    elif kind == 0:
        if pair == 1:
            _BF16_1(keys, steps, step_bytes, query, stride, out, width)
        else:
            _BF16_PAIR_1(keys, steps, step_bytes, query, stride, out, width)
    elif kind == 1:
        if pair == 1:
            _F16_1(keys, steps, step_bytes, query, stride, out, width)
        else:
            _F16_PAIR_1(keys, steps, step_bytes, query, stride, out, width)
    else:
        _F32_KEYS_1(keys, steps, step_bytes, query, stride, out, width)


@numba.njit(
    types.void(
        types.Array(types.uint8, 3, "A", readonly=True), _I32_1, types.int64, types.int64,
        types.int64, types.int64, types.int64, _F32_2,
        types.float32[::1],
    ), nogil=True, cache=True,
)  # fmt: skip
def page_log_mass(
    pages: Any,
    rows: Any,
    num_tokens: Any,
    block_tokens: Any,
    run: Any,
    pair: Any,
    kind: Any,
    query: Any,
    out: Any,
) -> None:
    """out [Q]: logsumexp of q . k over the first `num_tokens` > 0 tokens of the blocks `rows`,
    queries [Q, D] scaled to base 2.

    `pages` [B, H, bytes]: of each head its keys, in runs of `run` tokens, each [D /
    pair][run][pair]; `kind` 0: bfloat16, 1: float16, 2: float32.
    """
    num_heads, head_size = query.shape
    group = num_heads // pages.shape[1]
    value_bytes, num_runs = 4 if kind == 2 else 2, (num_tokens + 15) // 16
    scores, peak, total = (
        np.empty((num_heads, num_runs * 16), np.float32),
        np.empty(16, np.float32),
        np.ones(16, np.float32),
    )
    shift, width = np.zeros(1, np.float32), num_runs * 64
    for number in range(num_runs):
        token = number * 16 % block_tokens
        block = pages.ctypes.data + np.int64(rows[number * 16 // block_tokens]) * pages.strides[0]
        place = (token // run * run * head_size + token % run * pair) * value_bytes
        for kv_head in range(pages.shape[1]):
            head = kv_head * group
            while head < kv_head * group + group:
                heads = 4 if head + 4 <= kv_head * group + group else 1
                _key_scores(
                    kind, pair, heads, block + kv_head * pages.strides[1] + place,
                    head_size // pair, run * pair * value_bytes,
                    query.ctypes.data + head * head_size * 4, head_size * 4,
                    scores.ctypes.data + (head * num_runs + number) * 64, width,
                )  # fmt: skip
                head += heads
    for head in range(num_heads):
        for i in range(num_tokens, num_runs * 16):
            scores[head, i] = MIN_SCORE
        lanes.EXP_SUM(
            scores.ctypes.data + head * width, num_runs, peak.ctypes.data, total.ctypes.data
        )
        lanes.FINISH(peak.ctypes.data, total.ctypes.data, shift.ctypes.data, peak.ctypes.data, 1)
        out[head] = peak[0]
