# mypy: disable-error-code="untyped-decorator"
"""The Numba kernel that sums over bytes. Load it with `hotkv_proto.native.require`, never at
import time. `tests/oracles/sums.py` has the same in numpy."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotkv_proto.table_reading import copy_bytes, prefetch_address

LINE_BYTES, LINE_WORDS = 64, 16
LOW_HALF = 0xFFFF_FFFF
PHASE_STEP = 37
AHEAD_LINES = 24
_U64 = np.uint64


@intrinsic
def _products(typingctx: Any, line: Any, salts: Any) -> Any:
    """Adds a salt to each of the 16 words at `line`, and adds up the products of neighbours.
    Uses vectors: word by word it would take as long as reading the line from memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, pairs = (
            ir.VectorType(ir.IntType(32), LINE_WORDS),
            ir.VectorType(ir.IntType(64), LINE_WORDS // 2),
        )
        loaded, added = (
            builder.load(builder.inttoptr(address, words.as_pointer()), align=1) for address in args
        )
        salted = builder.bitcast(builder.add(loaded, added), pairs)
        low, high = (
            builder.and_(salted, pairs([LOW_HALF] * (LINE_WORDS // 2))),
            builder.lshr(salted, pairs([32] * (LINE_WORDS // 2))),
        )
        reduce = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.IntType(64), [pairs]),
            f"llvm.vector.reduce.add.v{LINE_WORDS // 2}i64",
        )
        return builder.call(reduce, [builder.mul(low, high)])

    return types.uint64(types.intp, types.intp), codegen


@numba.njit(nogil=True, cache=True, inline="always")
def _mixed(address: Any, salts: Any, line: Any, seed: Any) -> Any:
    """Sum of a line, mixed with its number and the shard's seed, so that equal bytes elsewhere
    differ."""
    total = _products(address, salts.ctypes.data)
    total = (total ^ ((_U64(line) + _U64(1)) * _U64(0x9E37_79B9_7F4A_7C15)) ^ seed) * _U64(
        0xD6E8_FEB8_6659_FD93
    )
    return (total ^ (total >> _U64(32))) * _U64(0xD6E8_FEB8_6659_FD93)


@numba.njit(
    "void(int64, int64[::1], int64, uint64, int64[::1], uint32[::1], uint64[::1])",
    nogil=True,
    cache=True,
)
def add_sums(
    base: Any, offsets: Any, num_bytes: Any, seed: Any, strides: Any, salts: Any, out: Any
) -> None:
    """Adds to `out[i]` the sum of the lines of `base` + `offsets[i]`: one in each `strides[i]`,
    and the last."""
    words = np.zeros(LINE_WORDS, np.uint32)
    num_lines = (num_bytes + LINE_BYTES - 1) // LINE_BYTES
    for i in range(offsets.shape[0]):
        start, stride, last, total = base + offsets[i], strides[i], num_lines - 1, _U64(0)
        following = base + offsets[min(i + 1, offsets.shape[0] - 1)]
        # The line shifts by PHASE_STEP from group to group, without divisions, which would take
        # longer than the sums.
        place, step, further = 0, PHASE_STEP % stride, AHEAD_LINES * PHASE_STEP % stride
        for first in range(0, num_lines, stride):
            line, ahead = first + place, first + AHEAD_LINES * stride
            if ahead <= last:
                ahead_place = place + further - (stride if place + further >= stride else 0)
                prefetch_address(start + min(ahead + ahead_place, last) * LINE_BYTES)
            else:
                number = (ahead - num_lines) // stride
                prefetch_address(
                    following
                    + min(number * stride + number * PHASE_STEP % stride, last) * LINE_BYTES
                )
            place += step - (stride if place + step >= stride else 0)
            if line < last:
                total += _mixed(start + line * LINE_BYTES, salts, line, seed)
        if num_lines:
            words[:] = 0
            copy_bytes(words.ctypes.data, start + last * LINE_BYTES, num_bytes - last * LINE_BYTES)
            total += _mixed(words.ctypes.data, salts, last, seed)
        out[i] += total
