# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that move blocks between memory and a file, without the GIL. Load by
`hotkv.native.load`; `reference` has the same functions in Python.

Always true: a block's result is its own. One that fails does not keep the next from being moved.
"""

import errno
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotkv.table import SLOT_ALIGN

EINTR = errno.EINTR
_INPUTS = types.Array(types.int64, 1, "C", readonly=True)
_MOVE_MANY = types.void(types.int64, _INPUTS, _INPUTS, _INPUTS, types.int64[::1])


def _emit_call(name: str, builder: Any, args: Any) -> Any:
    """Calls pread or pwrite (fd, address, num_bytes, offset), int64 each; gives bytes, or -errno.

    errno is read right behind the call, in the same thread: nothing can change it in between.
    """
    int32, int64, byte_pointer = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
    move_type = ir.FunctionType(int64, [int32, byte_pointer, int64, int64])
    move = cgutils.get_or_insert_function(builder.module, move_type, name)
    where_type = ir.FunctionType(int32.as_pointer(), [])
    where = cgutils.get_or_insert_function(builder.module, where_type, "__errno_location")
    fd, address, num_bytes, offset = args
    moved = builder.call(
        move,
        [builder.trunc(fd, int32), builder.inttoptr(address, byte_pointer), num_bytes, offset],
    )
    code = builder.sext(builder.load(builder.call(where, [])), int64)
    failed = builder.icmp_signed("<", moved, int64(0))
    return builder.select(failed, builder.neg(code), moved)


@intrinsic
def _pread(typingctx: Any, fd: Any, address: Any, num_bytes: Any, offset: Any) -> Any:
    """Bytes read, or -errno."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_call("pread", builder, args)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _pwrite(typingctx: Any, fd: Any, address: Any, num_bytes: Any, offset: Any) -> Any:
    """Bytes written, or -errno."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_call("pwrite", builder, args)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@numba.njit(_MOVE_MANY, nogil=True, cache=True)
def read_many(fd: Any, addresses: Any, offsets: Any, sizes: Any, results: Any) -> None:
    """See `reference.read_many`."""
    for i in range(sizes.shape[0]):
        done = 0
        while done < sizes[i]:
            moved = _pread(fd, addresses[i] + done, sizes[i] - done, offsets[i] + done)
            if moved == -EINTR:
                continue
            if moved < 0:
                done = moved
                break
            done += moved
            if moved == 0 or done % SLOT_ALIGN:
                break
        results[i] = done


@numba.njit(_MOVE_MANY, nogil=True, cache=True)
def write_many(fd: Any, addresses: Any, offsets: Any, sizes: Any, results: Any) -> None:
    """See `reference.write_many`."""
    for i in range(sizes.shape[0]):
        done = 0
        while done < sizes[i]:
            moved = _pwrite(fd, addresses[i] + done, sizes[i] - done, offsets[i] + done)
            if moved == -EINTR:
                continue
            if moved < 0:
                done = moved
                break
            done += moved
            if moved == 0:
                break
        results[i] = done
