# mypy: disable-error-code="untyped-decorator"
"""Operations on sixteen lanes that turn scores into a choice of blocks: shares of the attention
mass, counting, collecting.

As `hotkv_sparse.score_lanes`: written in the vectors of `hotkv_sparse.vectors`, operands are
integer addresses and counts, and nothing here checks bounds; the caller,
`hotkv_sparse.choice_kernels`, owns the arrays. (numba's disk cache sees changes of that file only.)
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from hotkv_sparse.vectors import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    LN2,
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


def _emit_exp(builder: Any, args: Any) -> None:
    """(scores, reference, weights, num_runs, total, ahead, factor, sums): sums += weights * factor,
    then weights = e^(score - reference).

    float32 [num_runs][16] each; adds the sum of the new weights to float32 `total`. What one head's
    weights add to the sums waits for the next head's pass, whose arithmetic hides it. Asks the
    caches for what lies `ahead` bytes behind the scores, which is read next.
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
    """(scores, num_runs, peak): raises float32 `peak` to the maximum of float32 [num_runs][16], in
    four chains of which none waits long."""
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
    """(values, factor, out, num_runs): out += values * factor, float32 [num_runs][16] and one
    float32."""
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
    """(values, num_runs, least, count): writes to int32 `count` how many of int32 [num_runs][16]
    are at least int32 `least`."""
    values, num_runs, least, count = args
    bound = splat(builder, load(builder, least, I32), INTS)
    sums = variable(builder, ints(0))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        enough = builder.icmp_signed(
            ">=", load(builder, offset(builder, values, loop.index, 4 * LANES), INTS), bound
        )
        # All bits of a lane that counts are set: minus one.
        builder.store(builder.sub(builder.load(sums), builder.sext(enough, INTS)), sums)
    store(builder, call(builder, "llvm.vector.reduce.add.v16i32", I32, [builder.load(sums)]), count)


def _emit_collect(builder: Any, args: Any) -> None:
    """(values, num_runs, least, out): writes to int32 `out` which of int32 [num_runs][16] are at
    least int32 `least`, ascending."""
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
