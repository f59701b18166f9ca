# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that read the block table and copy memory, and machine operations that numpy lacks:
ordered loads and stores, prefetches, fences.

Import it through `hotkv_proto.native.load`. `hotkv_proto.table` defines buckets and records. A
bucket has one writer, the server:
1. It makes the bucket's sequence number odd.
2. It changes the bucket and its records.
3. It makes the number even. A reader uses its copy of a bucket only if the number was even
   before and is the same afterwards. `load32`, `reload32` and `store32` keep these accesses in
   order; compiler and CPU may reorder plain ones.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WAYS = 7
SEQ, OVERFLOW, TAGS, ENTRIES = 0, 1, 2, 9
RESERVED_FLAG = np.uint32(0x8000_0000)
MAX_PROBE_BUCKETS = 64
MAX_RETRIES = 1000
PREFETCH_AHEAD = 16
MIN_STREAMED_BYTES = 1024
STREAM_AHEAD_BYTES = 2048
"""How far ahead a streaming copy prefetches its source, into the nearest cache only."""
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)

# Of arrays that kernels only read: callers may pass read-only or writable ones.
READ_WORDS = types.Array(types.uint32, 2, "C", readonly=True)
_READ_PREFIXES = types.Array(types.uint64, 1, "A", readonly=True)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(
        context, builder, array_type, struct, [row, column], wraparound=False
    )


def _emit_prefetch(builder: Any, pointer: Any, locality: int = 3) -> None:
    """Any address is allowed.

    locality: 3 puts the line into all caches, 0 into as few as possible.
    """
    int32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, int32(0), int32(locality), int32(1)])


@intrinsic
def load32(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Later accesses stay behind this load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], args[2])
        value = builder.load_atomic(pointer, "acquire", 4)
        builder.fence("acquire")
        return value

    return types.uint32(array, types.intp, types.intp), codegen


@intrinsic
def reload32(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Earlier loads stay before this load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acquire")
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], args[2])
        return builder.load_atomic(pointer, "monotonic", 4)

    return types.uint32(array, types.intp, types.intp), codegen


@intrinsic
def store32(typingctx: Any, array: Any, row: Any, column: Any, value: Any) -> Any:
    """Other threads see earlier stores before this one, and later ones after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], args[2])
        builder.fence("release")
        builder.store_atomic(args[3], pointer, "monotonic", 4)
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.uint32), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, row: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = context.get_constant(types.intp, 0)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], zero)
        _emit_prefetch(builder, builder.bitcast(pointer, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def prefetch_address(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def copy_bytes(typingctx: Any, dst_address: Any, src_address: Any, num_bytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        dst = builder.inttoptr(args[0], byte_pointer)
        src = builder.inttoptr(args[1], byte_pointer)
        cgutils.raw_memcpy(builder, dst, src, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def stream_lines(
    typingctx: Any, dst_address: Any, src_address: Any, num_lines: Any, ahead_bytes: Any
) -> Any:
    """Copies lines of 64 bytes past the caches. `fence` must be called before other threads read
    the copy.

    dst_address: a multiple of 64.
    ahead_bytes: of the prefetch, which may lie outside the source.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int64, vector = ir.IntType(64), ir.VectorType(ir.IntType(64), 4)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, args[2], intp=int64) as loop:
            offset = builder.mul(loop.index, int64(64))
            ahead = builder.add(builder.add(args[1], offset), args[3])
            _emit_prefetch(builder, builder.inttoptr(ahead, ir.IntType(8).as_pointer()), locality=0)
            loaded = []
            for part in range(2):
                source = builder.inttoptr(
                    builder.add(builder.add(args[1], offset), int64(32 * part)), vector.as_pointer()
                )
                loaded.append(builder.load(source, align=1))
            for part in range(2):
                target = builder.inttoptr(
                    builder.add(builder.add(args[0], offset), int64(32 * part)), vector.as_pointer()
                )
                builder.store(loaded[part], target, align=32).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Other threads then see what `stream_lines` has copied."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@numba.njit(nogil=True, cache=True, inline="always")
def mix(prefix: np.uint64, salt: np.uint64) -> np.uint64:
    return (prefix ^ salt) * MULTIPLIER


@numba.njit(nogil=True, cache=True, inline="always")
def row_prefix(rows: Any, row: Any) -> np.uint64:
    """The hash's first 8 bytes."""
    return np.uint64(rows[row, 0]) | (np.uint64(rows[row, 1]) << np.uint64(32))


@numba.njit(nogil=True, cache=True, inline="always")
def home_bucket(mixed: np.uint64, num_buckets: int) -> int:
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32))


@numba.njit(
    types.void(READ_WORDS, _READ_PREFIXES, types.uint64, types.uint32[::1]), nogil=True, cache=True
)
def probe(buckets: Any, prefixes: Any, salt: Any, out: Any) -> None:
    """Looks hashes up by tag only: `BlockTable.probe`."""
    num_buckets = buckets.shape[0]
    count = prefixes.shape[0]
    for i in range(min(PREFETCH_AHEAD, count)):
        prefetch(buckets, home_bucket(mix(prefixes[i], salt), num_buckets))
    for i in range(count):
        if i + PREFETCH_AHEAD < count:
            prefetch(buckets, home_bucket(mix(prefixes[i + PREFETCH_AHEAD], salt), num_buckets))
        mixed = mix(prefixes[i], salt)
        tag = np.uint32(mixed & np.uint64(0xFFFF_FFFF))
        bucket = home_bucket(mixed, num_buckets)
        found = np.uint32(0)
        for _ in range(MAX_PROBE_BUCKETS):
            overflow = np.uint32(0)
            for _retry in range(MAX_RETRIES):
                before = load32(buckets, bucket, SEQ)
                found = np.uint32(0)
                for way in range(WAYS):
                    if buckets[bucket, TAGS + way] == tag:
                        found = max(found, buckets[bucket, ENTRIES + way])
                overflow = buckets[bucket, OVERFLOW]
                if not before & np.uint32(1) and reload32(buckets, bucket, SEQ) == before:
                    break
                found = np.uint32(0)
                overflow = np.uint32(0)
            if found != 0 or overflow == 0:
                break
            bucket = bucket + 1 if bucket + 1 < num_buckets else 0
        out[i] = found


@numba.njit(nogil=True, cache=True, inline="always")
def _same_key(records: Any, entry: int, hashes: Any, row: int, key_space: Any, group: Any) -> bool:
    if records[entry, 10] != key_space or (records[entry, 11] & np.uint32(0xFFFF)) != group:
        return False
    same = True
    for word in range(8):
        same &= records[entry, word] == hashes[row, word]
    return same


@numba.njit(
    types.void(
        READ_WORDS,
        READ_WORDS,
        READ_WORDS,
        types.uint64,
        types.uint32,
        types.uint32,
        types.uint32[::1],
    ),
    nogil=True,
    cache=True,
)
def find(
    buckets: Any,
    records: Any,
    hashes: Any,
    salt: Any,
    key_space: Any,
    group: Any,
    out: Any,
) -> None:
    """Looks hashes up in whole: `BlockTable.find`."""
    num_buckets = buckets.shape[0]
    capacity = records.shape[0]
    for i in range(hashes.shape[0]):
        if i + PREFETCH_AHEAD < hashes.shape[0]:
            ahead = row_prefix(hashes, i + PREFETCH_AHEAD)
            prefetch(buckets, home_bucket(mix(ahead, salt), num_buckets))
        mixed = mix(row_prefix(hashes, i), salt)
        tag = np.uint32(mixed & np.uint64(0xFFFF_FFFF))
        bucket = home_bucket(mixed, num_buckets)
        found = np.uint32(0)
        for _ in range(MAX_PROBE_BUCKETS):
            overflow = np.uint32(0)
            for _retry in range(MAX_RETRIES):
                before = load32(buckets, bucket, SEQ)
                found = np.uint32(0)
                for way in range(WAYS):
                    word = buckets[bucket, ENTRIES + way]
                    entry = np.int64(word & ~RESERVED_FLAG)
                    candidate = (
                        word != 0 and buckets[bucket, TAGS + way] == tag and entry < capacity
                    )
                    if candidate and _same_key(records, entry, hashes, i, key_space, group):
                        found = word
                overflow = buckets[bucket, OVERFLOW]
                if not before & np.uint32(1) and reload32(buckets, bucket, SEQ) == before:
                    break
                found = np.uint32(0)
                overflow = np.uint32(0)
            if found != 0 or overflow == 0:
                break
            bucket = bucket + 1 if bucket + 1 < num_buckets else 0
        out[i] = found


@numba.njit(nogil=True, cache=True, inline="always")
def _copy_run(dst: Any, src: Any, count: Any, following: Any, streaming: Any) -> None:
    """dst, src: addresses.
    streaming: bypasses the caches, from MIN_STREAMED_BYTES on.
    following: address of the next run, prefetched with the last lines of this one. The hardware
        can't predict it: each short run would wait for memory and page tables.
    """
    if streaming and count >= MIN_STREAMED_BYTES:
        head = -dst & 63
        lines = (count - head) >> 6
        copy_bytes(dst, src, head)
        near = max(lines - (STREAM_AHEAD_BYTES >> 6), 0)
        stream_lines(dst + head, src + head, near, STREAM_AHEAD_BYTES)
        at = head + (near << 6)
        stream_lines(dst + at, src + at, lines - near, following - src - at)
        done = head + (lines << 6)
        copy_bytes(dst + done, src + done, count - done)
    else:
        if streaming:
            prefetch_address(following)
        copy_bytes(dst, src, count)


@numba.njit(
    "void(intp, intp, int64[::1], int64[::1], int64[::1], int64, int64, boolean)",
    nogil=True,
    cache=True,
)
def copy_runs(
    dst_base: Any,
    src_base: Any,
    dst_offsets: Any,
    src_offsets: Any,
    num_bytes: Any,
    start: Any,
    end: Any,
    streaming: Any,
) -> None:
    """Copies runs `start` to `end` - 1 between two mappings.

    dst_base, src_base: addresses of the mappings.
    streaming: bypasses the caches, for amounts that do not fit into them.
    """
    for i in range(start, end):
        following = src_base + src_offsets[min(i + 1, end - 1)]
        _copy_run(
            dst_base + dst_offsets[i], src_base + src_offsets[i], num_bytes[i], following, streaming
        )
    if streaming:
        fence()


@numba.njit(
    "void(intp, intp, int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], "
    "boolean, boolean)",
    nogil=True,
    cache=True,
)
def copy_blocks(
    engine_base: Any,
    arena_base: Any,
    block_ids: Any,
    slot_offsets: Any,
    bases: Any,
    strides: Any,
    places: Any,
    num_bytes: Any,
    to_engine: Any,
    streaming: Any,
) -> None:
    """Copies by a `Recipe`. Runs that are adjacent on both sides are copied together.

    engine_base, arena_base: addresses of the mappings.
    block_ids, slot_offsets: [blocks].
    bases, strides, places, num_bytes: [runs] of the recipe; `places` are its `slot_offsets`.
    streaming: bypasses the caches, for amounts that do not fit into them.
    """
    dst = src = count = np.int64(0)
    for i in range(block_ids.shape[0]):
        for run in range(bases.shape[0]):
            engine, slot = (
                engine_base + block_ids[i] * strides[run] + bases[run],
                arena_base + slot_offsets[i] + places[run],
            )
            to, start = (engine, slot) if to_engine else (slot, engine)
            if to == dst + count and start == src + count:
                count += num_bytes[run]
            else:
                _copy_run(dst, src, count, start, streaming)
                dst, src, count = to, start, num_bytes[run]
    _copy_run(dst, src, count, src, streaming)
    if streaming:
        fence()


@numba.njit(
    "UniTuple(int64, 4)(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])",
    nogil=True,
    cache=True,
)
def extent_of_blocks(
    block_ids: Any, slot_offsets: Any, bases: Any, strides: Any, places: Any, num_bytes: Any
) -> tuple[int, int, int, int]:
    """What `copy_blocks` accesses: least block id, end in engine memory, least slot offset, end
    in the arena. Needs at least one block and one run."""
    low_id, high_id = block_ids.min(), block_ids.max()
    end, slot_end = np.int64(0), np.int64(0)
    for run in range(bases.shape[0]):
        end = max(end, high_id * strides[run] + bases[run] + num_bytes[run])
        slot_end = max(slot_end, places[run] + num_bytes[run])
    return low_id, end, slot_offsets.min(), slot_offsets.max() + slot_end
