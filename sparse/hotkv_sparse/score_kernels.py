# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that score blocks by their sketches. Loaded by `all_kernels`;
`tests/oracles/sparse.py` is the numpy twin; `formats` describes the bytes.

Arguments are not checked, only scratch memory is allocated, the GIL is released. A register holds
values of sixteen tokens of a head. Functions `emit` and `_emit_…` emit LLVM code with `vectors` for
any machine: they take an IR builder and `args`, integers (addresses and counts), without bounds
checks. With AVX-512 VNNI one instruction multiplies 64 unsigned by 64 signed bytes, and one
replaces 64 codes by their levels. numba's disk cache does not notice changes of `vectors`: delete
it.

Shapes: B blocks, H KV heads, Q query heads, D channels, C channels with padding, P parts, N
    bytes of a block and head.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hotkv_proto.table_reading import prefetch_address
from hotkv_sparse.formats import FORMATS, LEVEL_OFFSET, LINE_BYTES
from hotkv_sparse.vectors import (
    BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    LN2,
    MIN_SCORE,
    SHORTS,
    VNNI,
    call,
    dot4,
    exp2,
    floats,
    ints,
    larger,
    load,
    log2,
    offset,
    operation,
    splat,
    store,
    transposed,
    variable,
)

BF16, F16, F32_KEYS, E4M3, E5M2 = range(5)
"""Kinds of keys in an engine's pages: bfloat16, float16, float32, and two of 8 bits."""
_CHUNK_BLOCKS = 64
_AHEAD_BLOCKS = 2
"""Blocks to prefetch ahead: the CPU's own prefetch stops at the end of a page of memory."""
_TRANSPOSED_RUNS = 2
"""With at most this many runs a block, sixteen blocks are transposed so that each lane sums one
block. Larger blocks are faster summed run by run, then across lanes."""
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

# ---------------------------------------------------------------------- operations on sixteen lanes


def _codes(builder: Any, bits: int, low: Any, high: Any, plane: int) -> Any:
    """Extracts the codes of four channels and sixteen tokens: their levels + `LEVEL_OFFSET`, 64
    unsigned bytes.

    bits: 2 or 3.
    low, high: lines as 16 ints: the lowest two bits, and for 3-bit codes the highest.
    plane: which four channels of the low line.
    """
    codes = builder.and_(builder.lshr(low, ints(2 * (plane % 4))), ints(0x03030303))
    if bits == 3:
        moved = (
            builder.shl(high, ints(2 - plane)) if plane < 2 else builder.lshr(high, ints(plane - 2))
        )
        codes = builder.or_(codes, builder.and_(moved, ints(0x04040404)))
    bytes_of = [level + LEVEL_OFFSET for level in FORMATS[f"rot{bits}u"].levels]
    if VNNI:
        table = ir.Constant(BYTES, (bytes_of * 16)[:16] * 4)
        looked_up = call(
            builder, "llvm.x86.avx512.pshuf.b.512", BYTES, [table, builder.bitcast(codes, BYTES)]
        )
        return builder.bitcast(looked_up, INTS)
    codes, looked_up = builder.bitcast(codes, BYTES), ir.Constant(BYTES, [bytes_of[0]] * LINE_BYTES)
    for code, value in enumerate(bytes_of[1:], 1):
        above = builder.icmp_unsigned(">=", codes, ir.Constant(BYTES, [code] * LINE_BYTES))
        looked_up = builder.select(above, ir.Constant(BYTES, [value] * LINE_BYTES), looked_up)
    return builder.bitcast(looked_up, INTS)


def _store_scores(
    builder: Any, totals: list[Any], sigma: Any, factor: Any, out: Any, out_stride: Any
) -> None:
    """out = total * sigma * factor for sixteen tokens of each head; MIN_SCORE without a token.

    totals: for each head, 16 ints.
    sigma: address of float16 [16]; negative without a token.
    factor: address of float32 [heads].
    out_stride: bytes from head to head.
    """
    halves = load(builder, sigma, ir.VectorType(ir.HalfType(), LANES))
    scales = builder.fpext(halves, FLOATS)
    absent = builder.fcmp_ordered("<", scales, floats(0.0))
    for h, total in enumerate(totals):
        unit = splat(builder, load(builder, offset(builder, factor, h, 4), F32), FLOATS)
        product = builder.fmul(builder.sitofp(total, FLOATS), builder.fmul(scales, unit))
        score = builder.select(absent, floats(MIN_SCORE), product)
        store(builder, score, builder.add(out, builder.mul(out_stride, I64(h))))


def _axes_operation(num_heads: int) -> Any:
    """Scores a run in mix2, as `_run_operation` does in other formats. The first half of its
    `num_lines` lines has 4-bit codes, the second 2-bit codes.

    A code c stands for 2 * c - offset half steps. Only 2 * c is multiplied, so no table of
    levels is needed; `bias` corrects for the offsets.
    """

    def emit(builder: Any, args: Any) -> None:
        run, num_lines, query, query_stride, bias, factor, out, out_stride = args
        totals = [
            variable(builder, splat(builder, load(builder, offset(builder, bias, h, 4), I32), INTS))
            for h in range(num_heads)
        ]
        num_fine = builder.lshr(num_lines, I64(1))
        num_coarse = builder.sub(num_lines, num_fine)
        lines, channels = run, query
        for count, width, mask in ((num_fine, 4, 0x1E1E1E1E), (num_coarse, 2, 0x06060606)):
            planes = 8 // width
            with cgutils.for_range(builder, count, intp=I64) as loop:
                line = load(builder, offset(builder, lines, loop.index, LINE_BYTES), INTS)
                for plane in range(planes):
                    moved = (
                        builder.lshr(line, ints(plane * width - 1))
                        if plane
                        else builder.shl(line, ints(1))
                    )
                    codes = builder.and_(moved, ints(mask))
                    place = offset(builder, channels, loop.index, 4 * planes)
                    for h, total in enumerate(totals):
                        own = builder.add(
                            offset(builder, place, plane, 4), builder.mul(query_stride, I64(h))
                        )
                        four = splat(builder, load(builder, own, I32), INTS)
                        builder.store(dot4(builder, builder.load(total), codes, four), total)
            lines = offset(builder, lines, count, LINE_BYTES)
            channels = offset(builder, channels, count, 4 * planes)
        sums = [builder.load(total) for total in totals]
        _store_scores(builder, sums, lines, factor, out, out_stride)

    return operation(8, emit)


def _run_operation(bits: int, num_heads: int) -> Any:
    """Scores a run of `bits`-bit codes for `num_heads` query heads. Operands:

    run: its codes, then its scales.
    num_steps: a step is one line; with 3 bits, two low lines and a high line.
    query: int8 [heads][query_stride].
    bias: int32 [heads], -`LEVEL_OFFSET` * sum(query).
    factor: float32 [heads].
    out: float32 [heads][out_stride bytes], 16 scores a head: (codes . query + bias) * sigma *
        factor.
    """
    planes, low_lines, high_lines = (4, 1, 0) if bits == 2 else (8, 2, 1)

    def emit(builder: Any, args: Any) -> None:
        run, num_steps, query, query_stride, bias, factor, out, out_stride = args
        heads = range(num_heads)
        sums = [
            [
                variable(
                    builder, splat(builder, load(builder, offset(builder, bias, h, 4), I32), INTS)
                )
                for h in heads
            ]
        ]
        sums.append([variable(builder, ints(0)) for h in heads])
        high_base = offset(builder, run, num_steps, low_lines * LINE_BYTES)
        with cgutils.for_range(builder, num_steps, intp=I64) as loop:
            low_address = offset(builder, run, loop.index, low_lines * LINE_BYTES)
            low = [
                load(builder, offset(builder, low_address, line, LINE_BYTES), INTS)
                for line in range(low_lines)
            ]
            high = (
                load(builder, offset(builder, high_base, loop.index, LINE_BYTES), INTS)
                if high_lines
                else None
            )
            for plane in range(planes):
                codes = _codes(builder, bits, low[plane // 4], high, plane)
                channel = offset(builder, offset(builder, query, loop.index, planes * 4), plane, 4)
                for h in heads:
                    channels = load(
                        builder, builder.add(channel, builder.mul(query_stride, I64(h))), I32
                    )
                    total = dot4(
                        builder,
                        builder.load(sums[plane % 2][h]),
                        codes,
                        splat(builder, channels, INTS),
                    )
                    builder.store(total, sums[plane % 2][h])
        sigma = offset(builder, high_base, num_steps, high_lines * LINE_BYTES)
        totals = [builder.add(*(builder.load(sums[chain][h]) for chain in (0, 1))) for h in heads]
        _store_scores(builder, totals, sigma, factor, out, out_stride)

    return operation(8, emit)


def _part_operation(num_heads: int) -> Any:
    """Scores a block in a summary format for `num_heads` query heads. Operands:

    parts: the block's parts, then their scales.
    num_steps: of a part; a step is 32 bytes.
    query: int8 [heads][query_stride], part after part.
    bias: int32 [heads][parts], -128 * sum(query part).
    factor: float32 [heads].
    out: float32 [heads][_CHUNK_BLOCKS]: the sum over parts of scale * (bytes . query + bias) *
        factor; MIN_SCORE for a block without tokens.
    """
    ints = ir.VectorType(I32, 8)

    def emit(builder: Any, args: Any) -> None:
        parts, num_parts, num_steps, query, query_stride, bias, factor, out = args
        totals = [variable(builder, F32(0.0)) for _ in range(num_heads)]
        scales = offset(builder, parts, builder.mul(num_parts, num_steps), 32)
        with cgutils.for_range(builder, num_parts, intp=I64) as outer:
            zero = ir.Constant(ints, [0] * 8)
            sums = [variable(builder, zero) for _ in range(num_heads)]
            first = builder.mul(outer.index, num_steps)
            with cgutils.for_range(builder, num_steps, intp=I64) as inner:
                step = builder.add(first, inner.index)
                codes = load(builder, offset(builder, parts, step, 32), ints)
                for h in range(num_heads):
                    address = builder.add(
                        offset(builder, query, step, 32), builder.mul(query_stride, I64(h))
                    )
                    builder.store(
                        dot4(builder, builder.load(sums[h]), codes, load(builder, address, ints)),
                        sums[h],
                    )
            scale = load(builder, offset(builder, scales, outer.index, 4), F32)
            for h in range(num_heads):
                total = call(builder, "llvm.vector.reduce.add.v8i32", I32, [builder.load(sums[h])])
                place = builder.add(builder.mul(I64(h), num_parts), outer.index)
                total = builder.add(total, load(builder, offset(builder, bias, place, 4), I32))
                product = builder.fmul(builder.sitofp(total, F32), scale)
                builder.store(builder.fadd(builder.load(totals[h]), product), totals[h])
        absent = builder.fcmp_ordered("<", load(builder, scales, F32), F32(0.0))
        for h in range(num_heads):
            score = builder.fmul(
                builder.load(totals[h]), load(builder, offset(builder, factor, h, 4), F32)
            )
            score = builder.select(absent, F32(float(np.float32(MIN_SCORE))), score)
            store(builder, score, offset(builder, out, h, 4 * _CHUNK_BLOCKS))

    return operation(8, emit)


def _key_operation(kind: int, pair: int, num_heads: int) -> Any:
    """Exact q . k of sixteen tokens for `num_heads` query heads, from keys in the engine's layout.
    `kind` as in `page_log_mass`. Operands:

    keys: a step has `pair` channels of each token side by side.
    step_bytes: between two steps.
    query: float32 [heads][query_stride bytes].
    out: float32 [heads][out_stride bytes], 16 products a head.
    """
    halves = ir.VectorType(ir.HalfType(), LANES)
    value_bits = {BF16: 16, F16: 16, F32_KEYS: 32, E4M3: 8, E5M2: 8}[kind]
    raw = ir.VectorType(ir.IntType(value_bits * pair), LANES)

    def channels(builder: Any, address: Any) -> list[Any]:
        """Float32 vectors, one for each of the `pair` channels."""
        loaded = load(builder, address, raw)
        if kind == F32_KEYS:
            return [builder.bitcast(loaded, FLOATS)]
        wide = loaded if raw == INTS else builder.zext(loaded, INTS)
        return [
            widened(builder, builder.lshr(wide, ints(value_bits * place))) for place in range(pair)
        ]

    def widened(builder: Any, bits: Any) -> Any:
        """From the low `value_bits` of each int."""
        if kind == BF16:
            return builder.bitcast(builder.shl(bits, ints(16)), FLOATS)
        if kind == F16:
            return builder.fpext(builder.bitcast(builder.trunc(bits, SHORTS), halves), FLOATS)
        if kind == E5M2:
            half = builder.shl(bits, ints(8))
        else:
            # The exponent's bias is 8 less than that of float16.
            sign = builder.and_(builder.shl(bits, ints(8)), ints(0x8000))
            half = builder.or_(sign, builder.shl(builder.and_(bits, ints(0x7F)), ints(7)))
        value = builder.fpext(builder.bitcast(builder.trunc(half, SHORTS), halves), FLOATS)
        return value if kind == E5M2 else builder.fmul(value, floats(256.0))

    def emit(builder: Any, args: Any) -> None:
        keys, num_steps, step_bytes, query, query_stride, out, out_stride = args
        sums = [[variable(builder, floats(0.0)) for _ in range(2)] for _ in range(num_heads)]

        def visit(step: Any, chain: int) -> None:
            for place, channel in enumerate(
                channels(builder, builder.add(keys, builder.mul(step, step_bytes)))
            ):
                at = offset(builder, offset(builder, query, step, 4 * pair), place, 4)
                for h in range(num_heads):
                    own = splat(
                        builder,
                        load(builder, builder.add(at, builder.mul(query_stride, I64(h))), F32),
                        FLOATS,
                    )
                    total = call(
                        builder,
                        "llvm.fma.v16f32",
                        FLOATS,
                        [channel, own, builder.load(sums[h][chain])],
                    )
                    builder.store(total, sums[h][chain])

        halves = builder.lshr(num_steps, I64(1))
        with cgutils.for_range(builder, halves, intp=I64) as loop:
            for chain in range(2):
                visit(builder.add(builder.shl(loop.index, I64(1)), I64(chain)), chain)
        with builder.if_then(builder.trunc(num_steps, ir.IntType(1))):
            visit(builder.sub(num_steps, I64(1)), 0)
        for h in range(num_heads):
            total = builder.fadd(builder.load(sums[h][0]), builder.load(sums[h][1]))
            store(builder, total, builder.add(out, builder.mul(out_stride, I64(h))))

    return operation(7, emit)


def _emit_exp_sum(builder: Any, args: Any) -> None:
    """For a block's scores, float32 [num_runs][16]: their maximum, and the sum of 2^(score -
    maximum)."""
    scores, num_runs, largest, total = args
    peaks = variable(builder, floats(MIN_SCORE))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        values = load(builder, offset(builder, scores, loop.index, 4 * LANES), FLOATS)
        builder.store(larger(builder, values, builder.load(peaks)), peaks)
    peak = call(
        builder, "llvm.vector.reduce.fmax.v16f32", F32, [builder.load(peaks)], ("nnan", "nsz")
    )
    sums = variable(builder, floats(0.0))
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        values = load(builder, offset(builder, scores, loop.index, 4 * LANES), FLOATS)
        builder.store(
            builder.fadd(
                builder.load(sums),
                exp2(builder, builder.fsub(values, splat(builder, peak, FLOATS))),
            ),
            sums,
        )
    summed = call(
        builder, "llvm.vector.reduce.fadd.v16f32", F32, [F32(0.0), builder.load(sums)], ("reassoc",)
    )
    store(builder, peak, largest)
    store(builder, summed, total)


def _emit_exp_sums(builder: Any, args: Any) -> None:
    """`_emit_exp_sum` for sixteen blocks at once: rows `stride` bytes apart with `num_runs` * 16
    scores; float32 [16] to `largest` and `totals`. Transposes the rows in place, so that nothing
    is summed across lanes."""
    scores, stride, num_runs, largest, totals = args
    peaks, sums = variable(builder, floats(MIN_SCORE)), variable(builder, floats(0.0))
    places = [builder.add(scores, builder.mul(stride, I64(row))) for row in range(LANES)]
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        at = builder.mul(loop.index, I64(4 * LANES))
        rows = transposed(
            builder, [load(builder, builder.add(place, at), FLOATS) for place in places]
        )
        for place, row in zip(places, rows, strict=True):
            builder.store(larger(builder, row, builder.load(peaks)), peaks)
            store(builder, row, builder.add(place, at))
    peak = builder.load(peaks)
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        at = builder.mul(loop.index, I64(4 * LANES))
        for place in places:
            difference = builder.fsub(load(builder, builder.add(place, at), FLOATS), peak)
            builder.store(builder.fadd(builder.load(sums), exp2(builder, difference)), sums)
    store(builder, peak, largest)
    store(builder, builder.load(sums), totals)


def _emit_finish(builder: Any, args: Any) -> None:
    """out = ln 2 * (largest + log2 totals) + shift, the log mass in nats; -inf for a block
    without tokens. Float32 [num_runs][16], a number per block; `shift` is one float32; `out` may
    be `largest`."""
    largest, totals, shift, out, num_runs = args
    added = splat(builder, load(builder, shift, F32), FLOATS)
    with cgutils.for_range(builder, num_runs, intp=I64) as loop:
        at = builder.mul(loop.index, I64(4 * LANES))
        peak = load(builder, builder.add(largest, at), FLOATS)
        log_mass = builder.fadd(peak, log2(builder, load(builder, builder.add(totals, at), FLOATS)))
        log_mass = call(builder, "llvm.fma.v16f32", FLOATS, [log_mass, floats(LN2), added])
        absent = builder.fcmp_ordered("<=", peak, floats(MIN_SCORE))
        store(
            builder, builder.select(absent, floats(float("-inf")), log_mass), builder.add(out, at)
        )


RUN_2_1, RUN_2_2, RUN_2_3, RUN_2_4 = (_run_operation(2, heads) for heads in (1, 2, 3, 4))
AXES_1, AXES_2, AXES_3, AXES_4 = (_axes_operation(heads) for heads in (1, 2, 3, 4))
RUN_3_1, RUN_3_2, RUN_3_3, RUN_3_4 = (_run_operation(3, heads) for heads in (1, 2, 3, 4))
_BF16_1, _BF16_4 = (_key_operation(BF16, 1, h) for h in (1, 4))
_F16_1, _F16_4 = (_key_operation(F16, 1, h) for h in (1, 4))
_BF16_PAIR_1, _BF16_PAIR_4 = (_key_operation(BF16, 2, h) for h in (1, 4))
_F16_PAIR_1, _F16_PAIR_4 = (_key_operation(F16, 2, h) for h in (1, 4))
_F32_KEYS_1, _F32_KEYS_4 = (_key_operation(F32_KEYS, 1, h) for h in (1, 4))
_E4M3_1, _E4M3_4 = (_key_operation(E4M3, 1, h) for h in (1, 4))
_E5M2_1, _E5M2_4 = (_key_operation(E5M2, 1, h) for h in (1, 4))
PART_1, PART_2, PART_3, PART_4 = (_part_operation(heads) for heads in (1, 2, 3, 4))
EXP_SUM, FINISH = operation(4, _emit_exp_sum), operation(5, _emit_finish)
EXP_SUMS = operation(5, _emit_exp_sums)


# ------------------------------------------------------------------------------------------ kernels


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
            RUN_2_4(run, steps, query, stride, bias, factor, out, width)
        elif heads == 3:
            RUN_2_3(run, steps, query, stride, bias, factor, out, width)
        elif heads == 2:
            RUN_2_2(run, steps, query, stride, bias, factor, out, width)
        else:
            RUN_2_1(run, steps, query, stride, bias, factor, out, width)
    elif bits == 3:
        if heads == 4:
            RUN_3_4(run, steps, query, stride, bias, factor, out, width)
        elif heads == 3:
            RUN_3_3(run, steps, query, stride, bias, factor, out, width)
        elif heads == 2:
            RUN_3_2(run, steps, query, stride, bias, factor, out, width)
        else:
            RUN_3_1(run, steps, query, stride, bias, factor, out, width)
    elif heads == 4:
        AXES_4(run, steps, query, stride, bias, factor, out, width)
    elif heads == 3:
        AXES_3(run, steps, query, stride, bias, factor, out, width)
    elif heads == 2:
        AXES_2(run, steps, query, stride, bias, factor, out, width)
    else:
        AXES_1(run, steps, query, stride, bias, factor, out, width)


@numba.njit(nogil=True, cache=True)
def _finish(scores: Any, runs: Any, shift: Any, out: Any, start: Any, count: Any) -> None:
    """Scores of up to sixteen blocks, out[:, start : start + count], from their tokens' scores.

    scores: [Q, 16 blocks, runs * 16 tokens] in base 2; overwritten.
    runs: of a block.
    shift: float32 [Q], added.
    """
    peaks, totals, stride = np.empty(16, np.float32), np.ones(16, np.float32), runs * 64
    for head in range(scores.shape[0]):
        # Taken here: numba frees an array after the last line that names it.
        peaks_at, totals_at = peaks.ctypes.data, totals.ctypes.data
        rows = scores.ctypes.data + head * 16 * stride
        if runs <= _TRANSPOSED_RUNS:
            EXP_SUMS(rows, stride, runs, peaks_at, totals_at)
        else:
            for i in range(count):
                EXP_SUM(rows + i * stride, runs, peaks_at + 4 * i, totals_at + 4 * i)
        FINISH(peaks_at, totals_at, shift.ctypes.data + head * 4, peaks_at, 1)
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
    """Scores in a token format, out [Q, len(rows)]: the logsumexp of a block's tokens' scores, plus
    `shift` [Q].

    packed: uint8 [B, H, N].
    rows: int32, of `packed`.
    bits: of a code, or `AXES_KERNEL` for mix2.
    run_bytes: of a run.
    query: int8 [Q, C].
    bias: int32 [Q], added to each sum of products (`scores.Query.offsets`).
    factor: float32 [Q], from this sum to a token's score in base 2.
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
        PART_4(parts, count, steps, query, stride, bias, factor, out)
    elif heads == 3:
        PART_3(parts, count, steps, query, stride, bias, factor, out)
    elif heads == 2:
        PART_2(parts, count, steps, query, stride, bias, factor, out)
    else:
        PART_1(parts, count, steps, query, stride, bias, factor, out)


@numba.njit(
    types.void(_PACKED, _I32_1, types.int64, _I8_2, _I32_2, _F32_1, _F32_1, types.float32[:, ::1]),
    nogil=True,
    cache=True,
)
def score_parts(
    packed: Any, rows: Any, num_parts: Any, query: Any, bias: Any, factor: Any, shift: Any, out: Any
) -> None:
    """Scores in a summary format, out [Q, len(rows)].

    packed: uint8 [B, H, N].
    rows: int32, of `packed`.
    num_parts: P.
    query: int8 [Q, P * C].
    bias: int32 [Q, P], -128 * sum of the part's codes, added to the sum of products.
    factor: float32 [Q], from such a sum to a score.
    shift: float32 [Q], added to each score.
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
        if kind == BF16:
            if pair == 1:
                _BF16_4(keys, steps, step_bytes, query, stride, out, width)
            else:
                _BF16_PAIR_4(keys, steps, step_bytes, query, stride, out, width)
        elif kind == F16:
            if pair == 1:
                _F16_4(keys, steps, step_bytes, query, stride, out, width)
            else:
                _F16_PAIR_4(keys, steps, step_bytes, query, stride, out, width)
        elif kind == F32_KEYS:
            _F32_KEYS_4(keys, steps, step_bytes, query, stride, out, width)
        elif kind == E4M3:
            _E4M3_4(keys, steps, step_bytes, query, stride, out, width)
        else:
            _E5M2_4(keys, steps, step_bytes, query, stride, out, width)
    elif kind == BF16:
        if pair == 1:
            _BF16_1(keys, steps, step_bytes, query, stride, out, width)
        else:
            _BF16_PAIR_1(keys, steps, step_bytes, query, stride, out, width)
    elif kind == F16:
        if pair == 1:
            _F16_1(keys, steps, step_bytes, query, stride, out, width)
        else:
            _F16_PAIR_1(keys, steps, step_bytes, query, stride, out, width)
    elif kind == F32_KEYS:
        _F32_KEYS_1(keys, steps, step_bytes, query, stride, out, width)
    elif kind == E4M3:
        _E4M3_1(keys, steps, step_bytes, query, stride, out, width)
    else:
        _E5M2_1(keys, steps, step_bytes, query, stride, out, width)


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
    """Exact log mass of the first `num_tokens` tokens of the blocks `rows`, from the keys: ln(sum
    of exp(scale * q . k)), out float32 [Q]. For always kept blocks.

    pages: uint8 [blocks, H, bytes] in the engine's layout: groups of `run` tokens, ordered [D /
        pair][run][pair], so that `pair` channels of a token lie side by side.
    rows: int32, in `pages`.
    num_tokens: of all `rows`, above 0; only the last block may be partly filled.
    kind: of the keys: BF16 and so on.
    query: [Q, D], multiplied by the scale of attention and by log2(e): the kernel computes in
        base 2.
    """
    num_heads, head_size = query.shape
    group = num_heads // pages.shape[1]
    value_bytes = 4 if kind == F32_KEYS else 2 if kind < F32_KEYS else 1
    num_runs = (num_tokens + 15) // 16
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
            head, end = kv_head * group, (kv_head + 1) * group
            while head < end:
                has_four = head + 4 <= end
                heads = 4 if has_four else 1
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
        EXP_SUM(scores.ctypes.data + head * width, num_runs, peak.ctypes.data, total.ctypes.data)
        FINISH(peak.ctypes.data, total.ctypes.data, shift.ctypes.data, peak.ctypes.data, 1)
        out[head] = peak[0]
