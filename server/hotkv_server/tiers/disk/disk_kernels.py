# mypy: disable-error-code="untyped-decorator"
"""Numba kernels for block I/O and seals, without the GIL. Load them with
`hotkv_proto.native.require`.

Always true: if a block can't be copied, those after it are all the same. Seals are XXH3 with a
seed, only for more than 240 bytes; names and constants are those of xxHash's doc/xxhash_spec.md.
"""

import errno
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotkv_proto.table import SLOT_ALIGN

EINTR = errno.EINTR
STRIPE_BYTES, BLOCK_BYTES, SECRET_BYTES = 64, 1024, 192
_INPUTS = types.Array(types.int64, 1, "C", readonly=True)
_MOVE_MANY = types.void(types.int64, _INPUTS, _INPUTS, _INPUTS, types.int64[::1])


def _emit_call(name: str, builder: Any, args: Any) -> Any:
    """Emits pread or pwrite of int64 (fd, address, num_bytes, offset): bytes or -errno. errno is
    read directly after the call, on its thread."""
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
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_call("pread", builder, args)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _pwrite(typingctx: Any, fd: Any, address: Any, num_bytes: Any, offset: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_call("pwrite", builder, args)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@numba.njit(_MOVE_MANY, nogil=True, cache=True)
def read_many(fd: Any, addresses: Any, offsets: Any, sizes: Any, results: Any) -> None:
    """See `BlockIO.read_many`. Fewer bytes only at the file's end; -errno even after a part.

    A stop off SLOT_ALIGN counts as the end: direct I/O can't go on from there.
    """
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
    """See `BlockIO.write_many`. Fewer bytes only if pwrite returned 0; -errno even after a part."""
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


_INT64 = ir.IntType(64)
_LANES = ir.VectorType(_INT64, 8)
_LOW, _HIGH, _SCRAMBLED, _PRIME32_1 = (
    ir.Constant(_LANES, [value] * 8) for value in (0xFFFF_FFFF, 32, 47, 0x9E37_79B1)
)
_SWAPPED = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
_PRIME32_2, _PRIME32_3 = 0x85EB_CA77, 0xC2B2_AE3D
_PRIMES64 = (
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
)
_FIRST = np.array([_PRIME32_3, *_PRIMES64[:4], _PRIME32_2, _PRIMES64[4], 0x9E37_79B1], np.uint64)
_PRIME64_1, _PRIME_MX1 = np.uint64(_PRIMES64[0]), np.uint64(0x1656_6791_9E37_79F9)
_ONE, _STRIPE, _BLOCK = np.uint64(1), np.uint64(STRIPE_BYTES), np.uint64(BLOCK_BYTES)
_AFTER, _LAST, _MERGED = np.uint64(128), np.uint64(SECRET_BYTES - 64 - 7), np.uint64(11)
_WORD, _PAIR = np.uint64(8), np.uint64(16)
_SHIFTS = np.uint64(37), np.uint64(32)


def _lanes(builder: Any, address: Any) -> Any:
    """Eight 64-bit words from any address."""
    loaded = builder.load(builder.inttoptr(address, _LANES.as_pointer()))
    loaded.align = 1
    return loaded


def _keep(builder: Any, lanes: Any, address: Any) -> None:
    stored = builder.store(lanes, builder.inttoptr(address, _LANES.as_pointer()))
    stored.align = 1


@intrinsic
def _accumulate(typingctx: Any, sums: Any, address: Any, secret: Any, count: Any) -> Any:
    """Adds `count` stripes of 64 bytes to XXH3's accumulators, the words at `sums`. Stripe i
    uses the secret's eight words from word i."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, address, secret, count = args
        held = cgutils.alloca_once(builder, _LANES)
        builder.store(_lanes(builder, sums), held)
        with cgutils.for_range(builder, count, intp=_INT64) as loop:
            stripe = builder.mul(loop.index, ir.Constant(_INT64, STRIPE_BYTES))
            word = builder.mul(loop.index, ir.Constant(_INT64, 8))
            data = _lanes(builder, builder.add(address, stripe))
            keyed = builder.xor(data, _lanes(builder, builder.add(secret, word)))
            product = builder.mul(builder.and_(keyed, _LOW), builder.lshr(keyed, _HIGH))
            swapped = builder.shuffle_vector(data, data, _SWAPPED)
            total = builder.add(builder.load(held), builder.add(product, swapped))
            builder.store(total, held)
        _keep(builder, builder.load(held), sums)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.int64), codegen


@intrinsic
def _scramble(typingctx: Any, sums: Any, secret: Any) -> Any:
    """XXH3's step after each 1024 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, secret = args
        lanes = _lanes(builder, sums)
        mixed = builder.xor(lanes, builder.lshr(lanes, _SCRAMBLED))
        _keep(builder, builder.mul(builder.xor(mixed, _lanes(builder, secret)), _PRIME32_1), sums)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def _word(typingctx: Any, address: Any) -> Any:
    """From any address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(builder.inttoptr(args[0], _INT64.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(types.uint64), codegen


@intrinsic
def _folded(typingctx: Any, one: Any, other: Any) -> Any:
    """Xor of the halves of a 128-bit product."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(arg, wide) for arg in args))
        upper = builder.lshr(product, ir.Constant(wide, 64))
        return builder.xor(*(builder.trunc(part, _INT64) for part in (product, upper)))

    return types.uint64(types.uint64, types.uint64), codegen


@numba.njit(
    types.void(_INPUTS, _INPUTS, types.uint64[:, ::1], types.uint64[::1]), nogil=True, cache=True
)
def seal_many(addresses: Any, sizes: Any, secrets: Any, seals: Any) -> None:
    """`tiers.seals.seal` of n memory ranges into `seals`, uint64 [n]. Sizes above 240.
    `secrets`: uint64 [n, 24], `tiers.seals.secrets`.
    """
    sums = np.empty(8, np.uint64)
    at_sums = np.uint64(sums.ctypes.data)
    for i in range(sizes.shape[0]):
        secret = np.uint64(secrets[i].ctypes.data)
        begin, size = np.uint64(addresses[i]), np.uint64(sizes[i])
        sums[:] = _FIRST
        at, num_blocks = begin, (size - _ONE) // _BLOCK
        for _ in range(num_blocks):
            _accumulate(at_sums, at, secret, BLOCK_BYTES // STRIPE_BYTES)
            _scramble(at_sums, secret + _AFTER)
            at += _BLOCK
        rest = (size - _ONE - num_blocks * _BLOCK) // _STRIPE
        _accumulate(at_sums, at, secret, np.int64(rest))
        _accumulate(at_sums, begin + size - _STRIPE, secret + _LAST, 1)
        merged = size * _PRIME64_1
        for pair in range(4):
            key = secret + _MERGED + _PAIR * np.uint64(pair)
            merged += _folded(sums[2 * pair] ^ _word(key), sums[2 * pair + 1] ^ _word(key + _WORD))
        merged ^= merged >> _SHIFTS[0]
        merged *= _PRIME_MX1
        seals[i] = max(merged ^ (merged >> _SHIFTS[1]), _ONE)
