# mypy: disable-error-code="untyped-decorator"
"""Operations on sixteen lanes that build representations: rotation, and packing a run of tokens.

As `hotkv_sparse.score_lanes`: written in the vectors of `hotkv_sparse.vectors`, operands are
integer addresses and counts, and nothing here checks bounds; the caller,
`hotkv_sparse.build_kernels`, owns the arrays. (numba's disk cache sees changes of that file only.)
"""

from typing import Any

import numpy as np
from llvmlite import ir
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


def _emit_scale_rows(builder: Any, args: Any) -> None:
    """(rows, factors, num_rows): row r of float32 [num_rows][16] times float32 factors[r]."""
    rows, factors, num_rows = args
    with cgutils.for_range(builder, num_rows, intp=I64) as loop:
        place = offset(builder, rows, loop.index, 4 * LANES)
        factor = splat(builder, load(builder, offset(builder, factors, loop.index, 4), F32), FLOATS)
        store(builder, builder.fmul(load(builder, place, FLOATS), factor), place)


def _emit_butterfly(builder: Any, args: Any) -> None:
    """(rows, half, num_pairs): a stage of the Walsh-Hadamard transform of float32 [2 *
    num_pairs][16]; partners are `half` rows apart."""
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
    """(rows, num_channels, num_steps, out, valid): packs rotated keys float32 [num_steps * channels
    of a step][16] into a run of 16 tokens.

    `num_channels` of them count for the rms; the rest are zero. Lanes from `valid` on have no
    token. See `formats` for steps and bytes.
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
