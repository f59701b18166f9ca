# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that rotate and quantise: keys of a block into a representation, queries into
codes. Part of `hotkv_sparse.kernels`, through which they are loaded.

Their references are in `hotkv_sparse.representations` and `hotkv_sparse.scores`. The callers check
the arrays. All run without the GIL and allocate only scratch. Sixteen tokens of one head, or the
queries of sixteen heads, lie side by side in the lanes of a vector. Loops assign single elements:
an assignment of slices takes numba a second to compile, with its error messages.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels, C channels with
padding, P parts, N bytes of a block and head.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from hotkv_sparse import build_lanes as lanes

_KEYS = types.Array(types.float32, 4, "A", readonly=True)
_F32_2 = types.Array(types.float32, 2, "C", readonly=True)
_I32_1 = types.Array(types.int32, 1, "C", readonly=True)
_I64_1 = types.Array(types.int64, 1, "C", readonly=True)


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
                if bits == 2:
                    lanes.PACK_2(y.ctypes.data, head_size, steps, place, valid)
                else:
                    lanes.PACK_3(y.ctypes.data, head_size, steps, place, valid)


@numba.njit(nogil=True, cache=True)
def _mean_of(keys: Any, mu: Any, parts: Any) -> None:
    """parts[0] = the mean of keys [T, D] less `mu`; 0 if there are none."""
    parts[0] = 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            parts[0, channel] += keys[token, channel] - mu[channel]
    for channel in range(keys.shape[1]):
        parts[0, channel] /= np.float32(max(keys.shape[0], 1))


@numba.njit(nogil=True, cache=True)
def _edges_of(keys: Any, mu: Any, parts: Any) -> None:
    """parts = max, min of keys [T, D] less `mu`; 0 if there are none."""
    high, low = parts[0], parts[1]
    high[:] = -np.inf if keys.shape[0] else 0
    low[:] = np.inf if keys.shape[0] else 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            value = keys[token, channel] - mu[channel]
            high[channel] = max(high[channel], value)
            low[channel] = min(low[channel], value)


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
    [Q]; `kind` 0: q+, q-; 1: q."""
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
                if kind == 0:
                    code = min(step, 0)
                    codes[first + lane, 1, channel] = code
                    sums[first + lane, 1] += code


@numba.njit(
    types.void(_KEYS, _F32_2, _I32_1, types.int64, types.int64, types.uint8[:, :, :]),
    nogil=True,
    cache=True,
)
def build_parts(keys: Any, mu: Any, num_tokens: Any, kind: Any, channels: Any, out: Any) -> None:
    """A summary format, out uint8 [B, H, N] from keys [B, T, H, D]; `kind` 0: quest, 1: mean."""
    head_size, num_parts = keys.shape[3], 1 if kind == 1 else 2
    parts, scale = np.empty((2, head_size), np.float32), np.empty(1, np.float32)
    scale_bytes = scale.view(np.uint8)
    for block in range(keys.shape[0]):
        count = num_tokens[block]
        for head in range(keys.shape[2]):
            if kind == 1:
                _mean_of(keys[block, :count, head], mu[head], parts)
            else:
                _edges_of(keys[block, :count, head], mu[head], parts)
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
