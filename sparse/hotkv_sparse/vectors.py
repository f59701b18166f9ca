# mypy: disable-error-code="untyped-decorator"
"""Emits LLVM code for vectors of sixteen lanes, for loops that numba does not vectorise well.

Functions emit with the IR builder that they take first; `operation` makes what kernels can call.
Runs on any machine; with AVX-512 VNNI (`VNNI`) `dot4` is one instruction.
"""

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

LANES = 16
MIN_SCORE = -1e30
"""Of a token that does not exist: far below any score, and differences are not NaN."""
_FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(
    ","
)
# From LLVM 22 on the intrinsics have other operand types.
VNNI = {"+avx512vnni", "+avx512bw", "+avx512vl"} <= set(
    _FEATURES
) and llvmlite.binding.llvm_version_info[0] < 22

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, INTS, FLOATS = ir.VectorType(I8, 64), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
LN2 = 0.6931471805599453
ROUNDING = 12582912.0


def splat(builder: Any, value: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        one, one, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    )


def ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def floats(value: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def offset(builder: Any, address: Any, count: Any, unit: int) -> Any:
    count = I64(count) if isinstance(count, int) else count
    return builder.add(address, builder.mul(count, I64(unit)))


def prefetch(builder: Any, address: Any) -> None:
    """Into all caches but the nearest. Any address is allowed."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [pointer, I32(0), I32(2), I32(1)])


def call(
    builder: Any, name: str, result: Any, args: list[Any], fastmath: tuple[str, ...] = ()
) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [arg.type for arg in args]), name
    )
    return builder.call(function, args, fastmath=fastmath)


def variable(builder: Any, initial: Any) -> Any:
    pointer = cgutils.alloca_once(builder, initial.type)
    builder.store(initial, pointer)
    return pointer


def larger(builder: Any, x: Any, y: Any) -> Any:
    """y where a value is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0, relative error 3e-6; 2^-126 for x < -126 or NaN. Taylor polynomial of
    degree 5 about the nearest integer."""
    x = larger(builder, x, floats(-126.0))
    # Adding 1.5 * 2^23 rounds x to an integer, in the low bits of the sum.
    shifted = builder.fadd(x, floats(ROUNDING))
    part = builder.fsub(x, builder.fsub(shifted, floats(ROUNDING)))
    result = floats(LN2**5 / 120)
    for coefficient in (LN2**4 / 24, LN2**3 / 6, LN2**2 / 2, LN2, 1.0):
        result = call(builder, "llvm.fma.v16f32", FLOATS, [result, part, floats(coefficient)])
    power = builder.shl(builder.bitcast(shifted, INTS), ints(23))
    return builder.bitcast(builder.add(builder.bitcast(result, INTS), power), FLOATS)


def log2(builder: Any, x: Any) -> Any:
    """For normal x > 0, absolute error 2e-7: the exponent, and 2 atanh((m - 1) / (m + 1)) of a
    mantissa in [.707, 1.414)."""
    bits = builder.sub(builder.bitcast(x, INTS), ints(0x3F3504F3))
    exponent = builder.ashr(bits, ints(23))
    mantissa = builder.bitcast(
        builder.add(builder.and_(bits, ints(0x7FFFFF)), ints(0x3F3504F3)), FLOATS
    )
    ratio = builder.fdiv(builder.fsub(mantissa, floats(1.0)), builder.fadd(mantissa, floats(1.0)))
    square = builder.fmul(ratio, ratio)
    series = floats(2 / LN2 / 7)
    for power in (5, 3, 1):
        series = call(builder, "llvm.fma.v16f32", FLOATS, [series, square, floats(2 / LN2 / power)])
    return builder.fadd(builder.sitofp(exponent, FLOATS), builder.fmul(series, ratio))


def operation(num_args: int, emit: Callable[[Any, Any], None]) -> Any:
    """Makes a function for kernels, of `num_args` integers, without result."""

    def operation(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, values)
            return context.get_dummy_value()

        return types.void(*([types.intp] * num_args)), codegen

    # numba binds arguments by the signature, and does not support `*args`.
    names = ["typingctx", *(f"operand_{index}" for index in range(num_args))]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
    ]
    operation.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(operation)


def dot4(builder: Any, total: Any, codes: Any, query: Any) -> Any:
    """In each lane: total + four products of an unsigned byte of `codes` and a signed byte of
    `query`. Vectors of 8 or 16 ints."""
    vector = total.type
    if VNNI:
        return call(
            builder, f"llvm.x86.avx512.vpdpbusd.{32 * vector.count}", vector, [total, codes, query]
        )

    def all_lanes(value: int) -> Any:
        return ir.Constant(vector, [value] * vector.count)

    for byte in range(4):
        code = builder.and_(builder.lshr(codes, all_lanes(8 * byte)), all_lanes(255))
        channel = builder.ashr(builder.shl(query, all_lanes(24 - 8 * byte)), all_lanes(24))
        total = builder.add(total, builder.mul(code, channel))
    return total


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen lanes. In stage 1, 2, 4, 8 each row exchanges lanes with the
    row that far away."""
    for apart in (1, 2, 4, 8):
        low = ir.Constant(
            INTS, [lane if not lane & apart else LANES + lane - apart for lane in range(LANES)]
        )
        high = ir.Constant(
            INTS, [lane + apart if not lane & apart else LANES + lane for lane in range(LANES)]
        )
        moved = list(rows)
        for first in (row for row in range(LANES) if not row & apart):
            pair = rows[first], rows[first + apart]
            moved[first], moved[first + apart] = (
                builder.shuffle_vector(*pair, low),
                builder.shuffle_vector(*pair, high),
            )
        rows = moved
    return rows
