"""Numpy references of `hotkv_server.tiers.compression.codec_kernels`, with the same arguments
and results."""

import numpy as np

from hotkv_server.tiers.compression.form import (
    ESCAPE_BYTES,
    GROUP_VALUES,
    HEAD,
    HEAD_BYTES,
    SAMPLE_STEP,
    TABLE_EXPONENTS,
    TILE_VALUES,
    VALUE_BYTES,
    escapes_at,
    indices_at,
    rests_at,
)
from hotkv_server.tiers.protocol import Codes, Int64s

HEAD_WORDS = 3


def encode_many(
    blocks: Codes, begins: Int64s, sizes: Int64s, rooms: Codes, places: Int64s,
    room_sizes: Int64s, results: Int64s,
) -> None:  # fmt: skip
    for i, (begin, size, place, room_size) in enumerate(
        zip(begins.tolist(), sizes.tolist(), places.tolist(), room_sizes.tolist(), strict=True)
    ):
        room = rooms[place : place + room_size]
        results[i] = _encode(blocks[begin : begin + size], room)


def decode_many(
    rooms: Codes, places: Int64s, room_sizes: Int64s, blocks: Codes, begins: Int64s,
    sizes: Int64s, results: Int64s,
) -> None:  # fmt: skip
    for i, (place, room_size, begin, size) in enumerate(
        zip(places.tolist(), room_sizes.tolist(), begins.tolist(), sizes.tolist(), strict=True)
    ):
        room = rooms[place : place + room_size]
        results[i] = _decode(room, blocks[begin : begin + size])


def _encode(block: Codes, room: Codes) -> int:
    values = block.view("<u2")
    num_values = len(values)
    at = escapes_at(num_values)
    if at > len(room):
        return 0
    exponents = (values >> 7).astype(np.uint8)
    rests = (values & 0x7F | values >> 8 & 0x80).astype(np.uint8)
    indices = np.zeros(num_values, np.uint8)
    num_tiles = -(-num_values // TILE_VALUES)
    tables = np.empty((num_tiles, TABLE_EXPONENTS), np.uint8)
    counts = np.empty(num_tiles, "<i4")
    escapes = []
    for tile in range(num_tiles):
        span = slice(tile * TILE_VALUES, (tile + 1) * TILE_VALUES)
        mine = exponents[span]
        tables[tile] = _table(mine)
        index_of = np.full(256, TABLE_EXPONENTS, np.uint8)
        index_of[tables[tile]] = np.arange(TABLE_EXPONENTS, dtype=np.uint8)
        found = index_of[mine]
        where = np.flatnonzero(found == TABLE_EXPONENTS)
        found[where] = 0
        indices[span], counts[tile] = found, len(where)
        escapes.append(
            np.column_stack((where & 0xFF, where >> 8, mine[where])).astype(np.uint8).reshape(-1)
        )
    listed = np.concatenate(escapes)
    if at + len(listed) > len(room):
        return 0
    room[:HEAD_BYTES] = 0
    room[: 8 * HEAD_WORDS].view("<i8")[:] = HEAD, num_values, len(listed) // ESCAPE_BYTES
    body = np.concatenate((tables.reshape(-1), counts.view(np.uint8)))
    room[HEAD_BYTES : rests_at(num_values)] = 0
    room[HEAD_BYTES : HEAD_BYTES + len(body)] = body
    room[rests_at(num_values) : indices_at(num_values)] = rests
    halves = indices.reshape(-1, 2, GROUP_VALUES // 2)
    room[indices_at(num_values) : at] = (halves[:, 0] | halves[:, 1] << 4).reshape(-1)
    room[at : at + len(listed)] = listed
    room[at + len(listed) :] = 0
    return at + len(listed)


def _decode(room: Codes, block: Codes) -> int:
    num_values = len(block) // VALUE_BYTES
    if escapes_at(num_values) > len(room):
        return 0
    head, of_values, num_escapes = room[: 8 * HEAD_WORDS].view("<i8").tolist()
    num_tiles = -(-num_values // TILE_VALUES)
    counts_at = HEAD_BYTES + num_tiles * TABLE_EXPONENTS
    counts = room[counts_at : counts_at + 4 * num_tiles].view("<i4")
    spans = np.minimum(num_values - np.arange(num_tiles) * TILE_VALUES, TILE_VALUES)
    most = (len(room) - escapes_at(num_values)) // ESCAPE_BYTES
    if (
        head != HEAD
        or of_values != num_values
        or not 0 <= num_escapes <= most
        or (counts < 0).any()
        or (counts > spans).any()
        or counts.sum(dtype=np.int64) != num_escapes
    ):
        return 0
    listed = room[escapes_at(num_values) :][: num_escapes * ESCAPE_BYTES]
    places, exponents = _listed(listed)
    tiles = np.repeat(np.arange(num_tiles), counts)
    if (places >= spans[tiles]).any():
        return 0
    packed = room[indices_at(num_values) : escapes_at(num_values)].reshape(-1, GROUP_VALUES // 2)
    indices = np.stack((packed & 15, packed >> 4), 1).reshape(-1)
    tables = room[HEAD_BYTES:counts_at].reshape(-1, TABLE_EXPONENTS)
    found = tables[np.arange(num_values) // TILE_VALUES, indices].astype("<u2")
    found[tiles * TILE_VALUES + places] = exponents
    rests = room[rests_at(num_values) : indices_at(num_values)].astype("<u2")
    block.view("<u2")[:] = (rests & 0x80) << 8 | found << 7 | rests & 0x7F
    return 1


def _table(exponents: Codes) -> Codes:
    """Most common exponents of a sample, the lower first among equals."""
    counts = np.bincount(exponents[::SAMPLE_STEP], minlength=256)
    return np.argsort(-counts, kind="stable")[:TABLE_EXPONENTS].astype(np.uint8)


def _listed(listed: Codes) -> tuple[Int64s, Codes]:
    table = listed.reshape(-1, ESCAPE_BYTES)
    return table[:, 0] | table[:, 1].astype(np.int64) << 8, table[:, 2]
