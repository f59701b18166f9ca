# mypy: disable-error-code="untyped-decorator"
"""Numba kernels of mix2: channels of keys into codes, queries into weights of codes. Part of
`hotkv_sparse.kernels`, through which they are loaded.

Their references are in `hotkv_sparse.axis_codes`. The callers check the arrays. Both run without
the GIL and allocate only scratch. Sixteen tokens of one head lie side by side.

Shapes: B blocks, T tokens of a block, H KV heads, R runs of 16 tokens, Q query heads, D channels, C
coded channels with padding, N bytes of a block and head.
"""

from typing import Any

import numba
import numpy as np
from numba import types

_F32_2, _F32_3 = (types.Array(types.float32, axes, "C", readonly=True) for axes in (2, 3))
_F32_4 = types.Array(types.float32, 4, "A", readonly=True)
_I32_1 = types.Array(types.int32, 1, "C", readonly=True)


@numba.njit(nogil=True, cache=True)
def _load_run(y: Any, first: Any, valid: Any, lanes: Any) -> None:
    """lanes [>= D, 16] = the channels y [T, D] of sixteen tokens; 0 from `valid` on."""
    for channel in range(y.shape[1]):
        for lane in range(16):
            lanes[channel, lane] = y[first + lane, channel] if lane < valid else np.float32(0)


@numba.njit(nogil=True, cache=True)
def _measure(
    lanes: Any, rms: Any, num_fine: Any, num_coded: Any, head_size: Any, energy: Any, inverse: Any
) -> None:
    """`energy` [16] of the tokens, and `inverse` [16]: 1 / gain, 0 of a token without coded
    energy."""
    energy[:] = 0
    inverse[:] = 0
    for channel in range(head_size):
        usual = rms[0] if channel < num_fine else rms[1]
        for lane in range(16):
            value = lanes[channel, lane]
            energy[lane] += value * value
            if channel < num_coded:
                relative = value / usual
                inverse[lane] += relative * relative
    for lane in range(16):
        gain = np.sqrt(inverse[lane] / np.float32(num_coded))
        inverse[lane] = np.float32(1) / gain if gain > 0 else np.float32(0)


@numba.njit(
    types.void(
        _F32_4,
        _F32_2,
        _F32_2,
        _I32_1,
        _I32_1,
        types.int64,
        types.int64,
        types.float32[:, :, :, ::1],
        types.uint8[:, :, :],
    ),
    nogil=True,
    cache=True,
)
def build_axes(
    y: Any,
    rms: Any,
    half_steps: Any,
    offsets: Any,
    num_tokens: Any,
    num_fine: Any,
    num_coded: Any,
    sigma: Any,
    out: Any,
) -> None:
    """Lines of codes in out uint8 [B, H, N], and sigma [B, H, R, 16], -1 if there is no token, from
    channels y [H, B, T, D]; `rms` [H, 2], `half_steps` [H, C], `offsets` [C].

    The caller puts sigma behind the lines.
    """
    head_size, channels, num_runs = y.shape[3], offsets.shape[0], sigma.shape[2]
    run_bytes = out.shape[2] // num_runs
    lanes = np.zeros((max(channels, head_size), 16), np.float32)
    energy, inverse, product = (
        np.empty(16, np.float32),
        np.empty(16, np.float32),
        np.empty(16, np.float32),
    )
    for block in range(y.shape[1]):
        for head in range(y.shape[0]):
            for run in range(num_runs):
                valid = min(16, max(0, num_tokens[block] - run * 16))
                _load_run(y[head, block], run * 16, valid, lanes)
                _measure(lanes, rms[head], num_fine, num_coded, head_size, energy, inverse)
                product[:] = 0
                for byte in range(run_bytes - 32):
                    out[block, head, run * run_bytes + byte] = 0
                for channel in range(channels):
                    most, half = offsets[channel], half_steps[head, channel]
                    step, middle = np.float32(2) * half, np.float32((most + 1) // 2)
                    if channel < num_fine:
                        line, inner, width = channel // 8, channel % 8, 4
                    else:
                        beyond = channel - num_fine
                        line, inner, width = num_fine // 8 + beyond // 16, beyond % 16, 2
                    place = run * run_bytes + line * 64 + inner % 4
                    shift = width * (inner // 4)
                    for lane in range(16):
                        value = lanes[channel, lane]
                        position = value * inverse[lane] / step + middle
                        # A value that is not a number has code 0, as in the reference.
                        position = position if position > 0 else np.float32(0)
                        code = np.int32(min(position, np.float32(most)))
                        product[lane] += value * (np.float32(2 * code - most) * half)
                        out[block, head, place + 4 * lane] |= np.uint8(code << shift)
                for lane in range(16):
                    along = product[lane]
                    scale = energy[lane] / along if along > 0 else np.float32(0)
                    scale = min(scale, np.float32(65504))
                    sigma[block, head, run, lane] = scale if lane < valid else np.float32(-1)


@numba.njit(
    types.void(_F32_2, _F32_3, _I32_1, types.float32[::1], types.int32[::1], types.int8[:, ::1]),
    nogil=True,
    cache=True,
)
def prepare_axes(query: Any, weights: Any, offsets: Any, peaks: Any, sums: Any, codes: Any) -> None:
    """int8 codes [Q, C] of queries [Q, D], one step per 127th of peaks [Q], and minus their
    products with `offsets`, sums [Q]; `weights` [H, D, C]."""
    num_heads, head_size = query.shape
    channels, group = weights.shape[2], num_heads // weights.shape[0]
    worth = np.empty(channels, np.float32)
    for head in range(num_heads):
        own = weights[head // group]
        worth[:] = 0
        for channel in range(head_size):
            value = query[head, channel]
            for code in range(channels):
                worth[code] += value * own[channel, code]
        peak = np.float32(1e-20)
        for code in range(channels):
            peak = max(peak, abs(worth[code]))
        peaks[head] = peak
        unit, total = np.float32(127) / peak, np.int32(0)
        for code in range(channels):
            step = np.int32(np.rint(worth[code] * unit))
            codes[head, code] = step
            total += step * offsets[code]
        sums[head] = -total
