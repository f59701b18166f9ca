# mypy: disable-error-code="untyped-decorator"
"""Numba kernels for `form`, without the GIL. Load them with `hotkv_proto.native.require`.
`tests/oracles/compression.py` has them in numpy.

Always true: they touch only block and room, even if the room has arbitrary bytes. Numba
recompiles only if this file changes: whoever changes `form` must change it too.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotkv_server.tiers.compression.form import (
    ESCAPE_BYTES,
    GROUP_VALUES,
    HEAD,
    HEAD_BYTES,
    PLANE_ALIGN,
    SAMPLE_STEP,
    TABLE_EXPONENTS,
    TILE_BYTES,
    TILE_VALUES,
    VALUE_BYTES,
)

LANES = GROUP_VALUES // 2
NO_INDEX = 255
_BYTE, _WORD, _LONG = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_BYTES, _WORDS = ir.VectorType(_BYTE, LANES), ir.VectorType(_WORD, LANES)
_U64 = np.uint64
_COLUMN = types.Array(types.int64, 1, "C", readonly=True)
_INPUT = types.Array(types.uint8, 1, "C", readonly=True)
_OUTPUT = types.uint8[::1]
_MANY = types.void(_INPUT, _COLUMN, _COLUMN, _OUTPUT, _COLUMN, _COLUMN, types.int64[::1])


def _all(vector: Any, number: int) -> Any:
    return ir.Constant(vector, [number] * LANES)


def _load(builder: Any, address: Any, vector: Any) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)


def _store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=1)


def _entries(builder: Any, low: Any, high: Any) -> list[Any]:
    """A vector per exponent of a table. `low`, `high`: its 16 bytes, kept in registers: memory
    would be loaded for each group."""
    int32 = ir.IntType(32)
    nothing = ir.Constant(_BYTES, ir.Undefined)
    first = ir.Constant(ir.VectorType(int32, LANES), [0] * LANES)
    entries = []
    for number in range(TABLE_EXPONENTS):
        word = low if number < 8 else high
        entry = builder.trunc(builder.lshr(word, _LONG(number % 8 * 8)), _BYTE)
        single = builder.insert_element(nothing, entry, int32(0))
        entries.append(builder.shuffle_vector(single, nothing, first))
    return entries


def _emit_encode(builder: Any, source: Any, rests: Any, entries: list[Any]) -> tuple[Any, Any]:
    """Encodes the vector at `source`, its signs and mantissas to `rests`. Returns its indices
    and a mask of escapes."""
    values = _load(builder, source, _WORDS)
    exponents = builder.trunc(builder.lshr(values, _all(_WORDS, 7)), _BYTES)
    signs = builder.trunc(builder.lshr(values, _all(_WORDS, 8)), _BYTES)
    rest = builder.or_(
        builder.and_(builder.trunc(values, _BYTES), _all(_BYTES, 0x7F)),
        builder.and_(signs, _all(_BYTES, 0x80)),
    )
    _store(builder, rest, rests)
    indices = _all(_BYTES, NO_INDEX)
    for number, entry in enumerate(entries):
        is_it = builder.icmp_unsigned("==", exponents, entry)
        indices = builder.select(is_it, _all(_BYTES, number), indices)
    is_missing = builder.icmp_unsigned("==", indices, _all(_BYTES, NO_INDEX))
    indices = builder.select(is_missing, _all(_BYTES, 0), indices)
    return indices, builder.bitcast(is_missing, _LONG)


@intrinsic
def _encode_group(
    typingctx: Any, source: Any, rests: Any, indices: Any, low: Any, high: Any
) -> Any:
    """Encodes GROUP_VALUES values; all positions are addresses. Returns two words with a bit per
    escape. `low`, `high`: the table's 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, rests, place, low, high = args
        entries = _entries(builder, low, high)
        one, missing = _emit_encode(builder, source, rests, entries)
        other, more = _emit_encode(
            builder,
            builder.add(source, _LONG(LANES * VALUE_BYTES)),
            builder.add(rests, _LONG(LANES)),
            entries,
        )
        _store(builder, builder.or_(one, builder.shl(other, _all(_BYTES, 4))), place)
        return context.make_tuple(builder, signature.return_type, (missing, more))

    pair = types.UniTuple(types.uint64, 2)
    return pair(types.intp, types.intp, types.intp, types.uint64, types.uint64), codegen


def _emit_decode(builder: Any, indices: Any, rests: Any, target: Any, entries: list[Any]) -> None:
    """Decodes a vector to address `target`. `rests`: an address; `indices`: a vector."""
    left = entries
    for bit in range(4):
        is_set = builder.icmp_unsigned(
            "!=", builder.and_(indices, _all(_BYTES, 1 << bit)), _all(_BYTES, 0)
        )
        left = [
            builder.select(is_set, odd, even)
            for even, odd in zip(left[::2], left[1::2], strict=True)
        ]
    exponents = builder.shl(builder.zext(left[0], _WORDS), _all(_WORDS, 7))
    rest = builder.zext(_load(builder, rests, _BYTES), _WORDS)
    signs = builder.shl(builder.and_(rest, _all(_WORDS, 0x80)), _all(_WORDS, 8))
    mantissas = builder.and_(rest, _all(_WORDS, 0x7F))
    _store(builder, builder.or_(builder.or_(exponents, signs), mantissas), target)


@intrinsic
def _decode_group(
    typingctx: Any, rests: Any, indices: Any, target: Any, low: Any, high: Any
) -> Any:
    """Decodes GROUP_VALUES values; all positions are addresses. `low`, `high`: the table's 16
    bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rests, place, target, low, high = args
        entries = _entries(builder, low, high)
        both = _load(builder, place, _BYTES)
        _emit_decode(builder, builder.and_(both, _all(_BYTES, 15)), rests, target, entries)
        _emit_decode(
            builder,
            builder.lshr(both, _all(_BYTES, 4)),
            builder.add(rests, _LONG(LANES)),
            builder.add(target, _LONG(LANES * VALUE_BYTES)),
            entries,
        )
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.uint64, types.uint64), codegen


@intrinsic
def _first_bit(typingctx: Any, word: Any) -> Any:
    """Number of the lowest set bit; not for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@numba.njit(nogil=True, cache=True)
def _choose(values: Any, begin: Any, end: Any, counts: Any, table: Any) -> None:
    """Fills `table` from a sample of values `begin` to `end` - 1. `counts`: scratch, int64
    [256]."""
    counts[:] = 0
    for at in range(begin, end, SAMPLE_STEP):
        counts[(values[at] >> 7) & 255] += 1
    low, high = 0, 255
    while not counts[low]:
        low += 1
    while not counts[high]:
        high -= 1
    unused = 0
    for entry in range(TABLE_EXPONENTS):
        best, most = 0, 0
        for exponent in range(low, high + 1):
            if counts[exponent] > most:
                best, most = exponent, counts[exponent]
        if not most:
            # Fewer than 16 exponents: fill up with the lowest unused.
            while counts[unused] < 0:
                unused += 1
            best = unused
        counts[best] = -1
        table[entry] = best


@numba.njit(nogil=True, cache=True, inline="always")
def _word(room: Any, at: Any) -> Any:
    """8 bytes, little endian."""
    found = _U64(0)
    for i in range(8):
        found |= _U64(room[at + i]) << _U64(8 * i)
    return found


@numba.njit(nogil=True, cache=True, inline="always")
def _set_number(room: Any, at: Any, number: Any, num_bytes: Any) -> None:
    for i in range(num_bytes):
        room[at + i] = (number >> (8 * i)) & 255


@numba.njit(nogil=True, cache=True, inline="always")
def _count(room: Any, at: Any) -> Any:
    """A tile's escapes, int32; negative only in a damaged form."""
    found = _word(room, at - 4) >> _U64(32)
    return np.int64(found) - (np.int64(1) << 32 if found >> _U64(31) else 0)


@numba.njit(nogil=True, cache=True, inline="always")
def _rests_at(num_values: Any) -> Any:
    num_tiles = (num_values + TILE_VALUES - 1) // TILE_VALUES
    unaligned = HEAD_BYTES + num_tiles * TILE_BYTES
    return (unaligned + PLANE_ALIGN - 1) // PLANE_ALIGN * PLANE_ALIGN


@numba.njit(nogil=True, cache=True)
def _encode(
    values: Any, first: Any, num_values: Any, rooms: Any, place: Any, room: Any, counts: Any
) -> Any:
    """Size of a block's form, or 0 if it exceeds its room. `first`, `num_values`: in `values`.
    `place`, `room`: offset and bytes in `rooms`. `counts`: scratch, int64 [256].
    """
    num_tiles = (num_values + TILE_VALUES - 1) // TILE_VALUES
    rests = _rests_at(num_values)
    indices, escapes = rests + num_values, rests + num_values + num_values // 2
    if escapes > room:
        return 0
    rooms[place : place + rests] = 0
    source, target = values.ctypes.data, rooms.ctypes.data + place
    at = escapes
    for tile in range(num_tiles):
        begin, end = tile * TILE_VALUES, min((tile + 1) * TILE_VALUES, num_values)
        table = HEAD_BYTES + tile * TABLE_EXPONENTS
        _choose(values, first + begin, first + end, counts, rooms[place + table :])
        low, high = _word(rooms, place + table), _word(rooms, place + table + 8)
        before = at
        for group in range(begin, end, GROUP_VALUES):
            missing = _encode_group(
                source + (first + group) * VALUE_BYTES,
                target + rests + group,
                target + indices + group // 2,
                low,
                high,
            )
            if missing[0] | missing[1]:
                for half in range(2):
                    left = missing[half]
                    while left:
                        if at + ESCAPE_BYTES > room:
                            return 0
                        where = group + half * LANES + _first_bit(left)
                        _set_number(rooms, place + at, where - begin, 2)
                        rooms[place + at + 2] = (values[first + where] >> 7) & 255
                        at += ESCAPE_BYTES
                        left &= left - _U64(1)
        counted = HEAD_BYTES + num_tiles * TABLE_EXPONENTS + 4 * tile
        _set_number(rooms, place + counted, (at - before) // ESCAPE_BYTES, 4)
    _set_number(rooms, place, HEAD, 8)
    _set_number(rooms, place + 8, num_values, 8)
    _set_number(rooms, place + 16, (at - escapes) // ESCAPE_BYTES, 8)
    rooms[place + at : place + room] = 0
    return at


@numba.njit(nogil=True, cache=True)
def _decode(rooms: Any, place: Any, room: Any, values: Any, first: Any, num_values: Any) -> Any:
    """1, or 0 if the room has no form of `num_values` values. Arguments as of `_encode`."""
    num_tiles = (num_values + TILE_VALUES - 1) // TILE_VALUES
    rests = _rests_at(num_values)
    indices, escapes = rests + num_values, rests + num_values + num_values // 2
    if escapes > room or _word(rooms, place) != _U64(HEAD):
        return 0
    num_escapes = np.int64(_word(rooms, place + 16))
    if _word(rooms, place + 8) != _U64(num_values) or not (
        0 <= num_escapes <= (room - escapes) // ESCAPE_BYTES
    ):
        return 0
    source, target = rooms.ctypes.data + place, values.ctypes.data
    at, end_at = escapes, escapes + num_escapes * ESCAPE_BYTES
    for tile in range(num_tiles):
        begin, end = tile * TILE_VALUES, min((tile + 1) * TILE_VALUES, num_values)
        count = _count(rooms, place + HEAD_BYTES + num_tiles * TABLE_EXPONENTS + 4 * tile)
        if not 0 <= count <= min(end - begin, (end_at - at) // ESCAPE_BYTES):
            return 0
        table = place + HEAD_BYTES + tile * TABLE_EXPONENTS
        low, high = _word(rooms, table), _word(rooms, table + 8)
        for group in range(begin, end, GROUP_VALUES):
            _decode_group(
                source + rests + group,
                source + indices + group // 2,
                target + (first + group) * VALUE_BYTES,
                low,
                high,
            )
        for escape in range(place + at, place + at + count * ESCAPE_BYTES, ESCAPE_BYTES):
            where = np.int64(rooms[escape]) | np.int64(rooms[escape + 1]) << 8
            if where >= end - begin:
                return 0
            value = values[first + begin + where] & 0x807F
            values[first + begin + where] = value | np.int64(rooms[escape + 2]) << 7
        at += count * ESCAPE_BYTES
    return int(at == end_at)


@numba.njit(_MANY, nogil=True, cache=True)
def encode_many(
    blocks: Any, begins: Any, sizes: Any, rooms: Any, places: Any, room_sizes: Any, results: Any
) -> None:
    """Encodes n blocks, with zeros behind the forms. `results`: size of a form, or 0 if it exceeds
    its room, whose bytes are then undefined.

    `blocks`, at an even address, and `rooms` are uint8, the others int64 [n]. Blocks and rooms
    must lie inside the arrays, blocks at multiples of SLOT_ALIGN.
    """
    values, counts = blocks.view(np.uint16), np.empty(256, np.int64)
    for i in range(sizes.shape[0]):
        results[i] = _encode(
            values,
            begins[i] // VALUE_BYTES,
            sizes[i] // VALUE_BYTES,
            rooms,
            places[i],
            room_sizes[i],
            counts,
        )


@numba.njit(_MANY, nogil=True, cache=True)
def decode_many(
    rooms: Any, places: Any, room_sizes: Any, blocks: Any, begins: Any, sizes: Any, results: Any
) -> None:
    """Decodes n blocks. `results`: 1, or 0 if a room has no form of its block's size; the
    block's bytes are then undefined. Arguments as of `encode_many`."""
    values = blocks.view(np.uint16)
    for i in range(sizes.shape[0]):
        results[i] = _decode(
            rooms,
            places[i],
            room_sizes[i],
            values,
            begins[i] // VALUE_BYTES,
            sizes[i] // VALUE_BYTES,
        )
