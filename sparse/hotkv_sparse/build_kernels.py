# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that rotate and quantise keys to sketches, and queries to int8 codes. Loaded by
`all_kernels`; `tests/oracles/sparse.py` is the numpy twin.

Arguments are not checked, only scratch memory is allocated, the GIL is released. A register holds
one channel of sixteen tokens of a head, or of sixteen heads' queries. Loops assign single elements:
numba compiles a slice assignment for a second. Functions `_emit_…` emit LLVM code with `vectors`
for any machine: they take an IR builder and `args`, integers (addresses and counts), without bounds
checks. numba's disk cache does not notice changes of `vectors`.

Arguments of several kernels:
mu: [H, D], the centre.
num_tokens: [B], valid tokens.
factors, starts, sizes: `rotation.factors`, `rotation.pass_arrays`.

Shapes: B blocks, T tokens of a block, H KV heads, R runs, Q query heads, D channels, C coded
    channels with padding, P parts, N bytes of a block and head.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hotkv_sparse.formats import FORMATS, LINE_BYTES, NO_TOKEN
from hotkv_sparse.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    call,
    floats,
    ints,
    load,
    offset,
    operation,
    splat,
    store,
    variable,
)

_KEYS = types.Array(types.float32, 4, "A", readonly=True)
_F32_2 = types.Array(types.float32, 2, "C", readonly=True)
_I32_1 = types.Array(types.int32, 1, "C", readonly=True)
_I64_1 = types.Array(types.int64, 1, "C", readonly=True)
_F32_3 = types.Array(types.float32, 3, "C", readonly=True)
_F32_4 = types.Array(types.float32, 4, "A", readonly=True)

# ---------------------------------------------------------------------- operations on sixteen lanes


def _emit_scale_rows(builder: Any, args: Any) -> None:
    """rows[r] *= factors[r]; float32 [num_rows][16] and [num_rows]."""
    rows, factors, num_rows = args
    with cgutils.for_range(builder, num_rows, intp=I64) as loop:
        place = offset(builder, rows, loop.index, 4 * LANES)
        factor = splat(builder, load(builder, offset(builder, factors, loop.index, 4), F32), FLOATS)
        store(builder, builder.fmul(load(builder, place, FLOATS), factor), place)


def _emit_butterfly(builder: Any, args: Any) -> None:
    """A stage of the Walsh-Hadamard transform: two rows `half` apart become their sum and
    difference. `rows`: float32 [2 * num_pairs][16]."""
    rows, half, num_pairs = args
    mask = builder.sub(half, I64(1))
    apart = builder.mul(half, I64(4 * LANES))
    with cgutils.for_range(builder, num_pairs, intp=I64) as loop:
        inner = builder.and_(loop.index, mask)
        first = offset(
            builder, rows, builder.sub(builder.shl(loop.index, I64(1)), inner), 4 * LANES
        )
        second = builder.add(first, apart)
        low, high = load(builder, first, FLOATS), load(builder, second, FLOATS)
        store(builder, builder.fadd(low, high), first)
        store(builder, builder.fsub(low, high), second)


def _pack_run(bits: int) -> Any:
    """Quantises 16 rotated keys of a head to `bits`-bit codes, packed as a run (`formats`).
    Operands:

    rows: float32 [num_steps * channels of a step][16], a channel each; from `num_channels` on zero
        padding.
    num_steps: with 2 bits low lines, with 3 bits pairs of low lines.
    out: address of the run.
    valid: tokens, at most 16.
    """
    form = FORMATS[f"rot{bits}u"]
    step_channels = 16 if bits == 2 else 32
    num_lines = step_channels // 16
    steps_between = zip(form.levels, form.levels[1:], strict=False)
    cuts = [
        (float(np.float32((low + high) / 2.0 / form.level_unit)), float(high - low))
        for low, high in steps_between
    ]

    def emit(builder: Any, args: Any) -> None:
        rows, num_channels, num_steps, out, valid = args
        energy, product = variable(builder, floats(0.0)), variable(builder, floats(0.0))
        with cgutils.for_range(builder, num_channels, intp=I64) as loop:
            value = load(builder, offset(builder, rows, loop.index, 4 * LANES), FLOATS)
            builder.store(
                call(builder, "llvm.fma.v16f32", FLOATS, [value, value, builder.load(energy)]),
                energy,
            )
        count = splat(builder, builder.sitofp(num_channels, F32), FLOATS)
        rms = call(builder, "llvm.sqrt.v16f32", FLOATS, [builder.fdiv(builder.load(energy), count)])
        bounds = [(builder.fmul(floats(cut), rms), floats(rise)) for cut, rise in cuts]
        high_base = offset(builder, out, num_steps, num_lines * LINE_BYTES)
        with cgutils.for_range(builder, num_steps, intp=I64) as loop:
            lines, high_line = [ints(0)] * num_lines, ints(0)
            for channel in range(step_channels):
                row = builder.add(builder.mul(loop.index, I64(step_channels)), I64(channel))
                value = load(builder, offset(builder, rows, row, 4 * LANES), FLOATS)
                code, level = ints(0), floats(float(form.levels[0]))
                for bound, rise in bounds:
                    above = builder.fcmp_ordered(">", value, bound)
                    code = builder.add(code, builder.zext(above, INTS))
                    level = builder.fadd(level, builder.select(above, rise, floats(0.0)))
                builder.store(
                    call(builder, "llvm.fma.v16f32", FLOATS, [value, level, builder.load(product)]),
                    product,
                )
                line, inner = divmod(channel, 16)
                low = builder.and_(code, ints(3)) if bits == 3 else code
                lines[line] = builder.or_(
                    lines[line], builder.shl(low, ints(8 * (inner % 4) + 2 * (inner // 4)))
                )
                if bits == 3:
                    bit = builder.lshr(code, ints(2))
                    high_line = builder.or_(
                        high_line, builder.shl(bit, ints(8 * (channel % 4) + channel // 4))
                    )
            for line in range(num_lines):
                place = builder.add(builder.mul(loop.index, I64(num_lines)), I64(line))
                store(builder, lines[line], offset(builder, out, place, LINE_BYTES))
            if bits == 3:
                store(builder, high_line, offset(builder, high_base, loop.index, LINE_BYTES))
        along = builder.load(product)
        sigma = builder.fmul(builder.fdiv(builder.load(energy), along), floats(form.level_unit))
        sigma = builder.select(builder.fcmp_ordered(">", along, floats(0.0)), sigma, floats(0.0))
        sigma = call(builder, "llvm.minnum.v16f32", FLOATS, [sigma, floats(65504.0)])
        lane = ir.Constant(INTS, list(range(LANES)))
        present = builder.icmp_signed("<", lane, splat(builder, builder.trunc(valid, I32), INTS))
        sigma = builder.fptrunc(
            builder.select(present, sigma, floats(NO_TOKEN)), ir.VectorType(ir.HalfType(), LANES)
        )
        store(builder, sigma, offset(builder, high_base, num_steps, LINE_BYTES if bits == 3 else 0))

    return operation(5, emit)


SCALE_ROWS, BUTTERFLY = operation(3, _emit_scale_rows), operation(3, _emit_butterfly)
PACK_2, PACK_3 = _pack_run(2), _pack_run(3)


# ---------------------------------------------------------------------- rotated and summary formats


@numba.njit(nogil=True, cache=True)
def _rotate_lanes(y: Any, factors: Any, starts: Any, sizes: Any) -> None:
    """Rotates sixteen vectors in place, the columns of y [>= D, 16]."""
    for index in range(starts.shape[0]):
        size, rows = sizes[index], y.ctypes.data + starts[index] * 64
        SCALE_ROWS(rows, factors[index, starts[index] :].ctypes.data, size)
        half = 1
        while half < size:
            BUTTERFLY(rows, half, size // 2)
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
    """Sketches in a token format of `bits` bits: out uint8 [B, H, N] from keys [B, T, H, D].

    channels: with padding.
    """
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
                    PACK_2(y.ctypes.data, head_size, steps, place, valid)
                else:
                    PACK_3(y.ctypes.data, head_size, steps, place, valid)


@numba.njit(nogil=True, cache=True)
def _mean_of(keys: Any, mu: Any, parts: Any) -> None:
    """parts[0]: mean over the tokens of keys [T, D] - mu [D]; 0 without tokens."""
    parts[0] = 0
    for token in range(keys.shape[0]):
        for channel in range(keys.shape[1]):
            parts[0, channel] += keys[token, channel] - mu[channel]
    for channel in range(keys.shape[1]):
        parts[0, channel] /= np.float32(max(keys.shape[0], 1))


@numba.njit(nogil=True, cache=True)
def _edges_of(keys: Any, mu: Any, parts: Any) -> None:
    """parts[0] and [1]: maximum and minimum over the tokens of keys [T, D] - mu [D]; 0 without
    tokens."""
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
    """Quantises queries [Q, D] to int8, but not for mix2.

    rotated: rotate them first (token formats).
    kind: 0: two parts, the positive and the negative channels (quest); 1: one part.
    peaks: [Q], output: magnitude of the largest channel, whose code is 127 or -127.
    sums: [Q, P], output: the sum of each part's codes is added.
    codes: [Q, P, C], output.
    """
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
    """Sketches in a summary format: out uint8 [B, H, N] from keys [B, T, H, D].

    kind: `Format.kind`, 0: quest (maximum and minimum); 1: mean.
    channels: with padding.
    """
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


# -------------------------------------------------------------------- mix2: codes of principal axes


@numba.njit(nogil=True, cache=True)
def _load_run(y: Any, first: Any, valid: Any, lanes: Any) -> None:
    """Tokens `first` to `first` + 15 of y [T, D] to the columns of lanes [>= D, 16]; from
    `valid` on 0."""
    for channel in range(y.shape[1]):
        for lane in range(16):
            lanes[channel, lane] = y[first + lane, channel] if lane < valid else np.float32(0)


@numba.njit(nogil=True, cache=True)
def _measure(
    lanes: Any, rms: Any, num_fine: Any, num_coded: Any, head_size: Any, energy: Any, inverse: Any
) -> None:
    """What mix2 needs of sixteen tokens: `energy` = |y|², and `inverse`, one over the token's gain:
    the rms of its coded channels, each divided by its usual rms. 0 if all coded channels are 0.

    lanes: [>= D, 16], a token per column.
    rms: [2], usual rms of the first `num_fine` channels (4-bit codes), and of the other coded ones.
    num_coded: channels with any code.
    energy, inverse: [16], output.
    """
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
    """Sketches in mix2: channels are components along principal axes, with codes of 4, 2 or 0 bits.
    Writes codes to `out`, uint8 [B, H, N], with a place for scales behind each run; scales to
    `sigma`, float32 [B, H, R, 16], -1 without a token, for the caller to copy.

    y: float32 [H, B, T, D] (`axes.channels_of`).
    rms: [H, 2] (`Axes.rms`).
    half_steps: [H, C] (`axes.half_steps`).
    offsets: [C], largest codes (`axes.offsets_of`).
    num_fine: channels with 4-bit codes; `num_coded`: with any.
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
                        # NaN gets the code 0.
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
    """Quantises query @ weights for mix2: the change of a score with each channel's code.

    weights: [H, D, C] (`Axes.weights`), for half a step.
    offsets: [C] (`axes.offsets_of`).
    codes: int8 [Q, C], output.
    peaks: [Q], output: magnitude of the largest channel, whose code is 127 or -127.
    sums: [Q], output: minus the sum of code * offset, for keys' codes c stand for 2 * c -
        offset.
    """
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
