# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that score blocks with a step's queries; part of `hotkv_sparse.kernels`, through
which they are loaded.

Their references are in `hotkv_sparse.scores`. The callers check the arrays. All run
without the GIL and allocate only scratch. Sixteen tokens of one head lie side by side in the lanes
of a vector.

Shapes: B blocks, H KV heads, Q query heads, D channels, C channels with padding, P parts.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_proto.kernels import prefetch_address
from hotkv_sparse import score_lanes as lanes
from hotkv_sparse.vectors import MIN_SCORE

_CHUNK_BLOCKS = 64
_AHEAD_BLOCKS = 2
"""Kernels prefetch the block this far ahead: the hardware's prefetch stops at the end of a page."""
_TRANSPOSED_RUNS = 2
"""Blocks of more runs than this are summed lane by lane and then across: that costs less than
transposing all of them."""
_PACKED = types.Array(types.uint8, 3, "A", readonly=True)
_F32_1, _F32_2 = (
    types.Array(types.float32, 1, "C", readonly=True),
    types.Array(types.float32, 2, "C", readonly=True),
)
_I8_2, _I32_1, _I32_2 = (
    types.int8[:, ::1],
    types.Array(types.int32, 1, "C", readonly=True),
    types.int32[:, ::1],
)
_BF16_1, _BF16_4 = lanes.BF16_KEYS
_F16_1, _F16_4 = lanes.F16_KEYS
_BF16_PAIR_1, _BF16_PAIR_4 = lanes.BF16_PAIRS
_F16_PAIR_1, _F16_PAIR_4 = lanes.F16_PAIRS
_F32_KEYS_1, _F32_KEYS_4 = lanes.F32_KEYS


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
        lanes.AXES_4(run, steps, query, stride, bias, factor, out, width)
    elif heads == 3:
        lanes.AXES_3(run, steps, query, stride, bias, factor, out, width)
    elif heads == 2:
        lanes.AXES_2(run, steps, query, stride, bias, factor, out, width)
    else:
        lanes.AXES_1(run, steps, query, stride, bias, factor, out, width)


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
    """out [Q, len(rows)]: logsumexp over the tokens of packed[row] (token format of `bits`,
    or `AXES_KERNEL`), plus `shift`.

    `query` int8 [Q, C], `bias` int32 [Q] = -128 * sum(query), `factor` float32 [Q]: byte
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
