"""The encoded form of a block of bfloat16 values, and the room that it needs.

A value is split. Its sign and 7 mantissa bits, which hardly compress, are kept as a byte. Its 8
exponent bits become an index of 4 bits into a table of 16 exponents. Each tile of TILE_VALUES
values has a table. An exponent that is not in its table is an escape: a row in a list at the end.
Always true:

- decoding returns the block's bytes bit for bit, NaNs, zeros and denormals included;
- the room of a block depends only on its size, so a reader knows it before it reads;
- equal blocks have equal encoded forms.

Little endian, n values in t tiles, a plane begins at a multiple of PLANE_ALIGN bytes:

    0               HEAD, int64: magic number, version, type of the values
    8               n, int64
    16              number of escapes, int64
    HEAD_BYTES      tables, uint8 [t, 16]
                    escapes of each tile, int32 [t]
    rests_at        sign and mantissa, uint8 [n]
    indices_at      two indices a byte, uint8 [n / 2]: of each GROUP_VALUES values the first half is
                    in the low bits; 0 for an escape
    escapes_at      uint8 [escapes, 3]: place in its tile, uint16, and exponent; tile by tile
                    zeros to the end of the room
"""

from hotkv_proto.table import SLOT_ALIGN

MAGIC, VERSION, BFLOAT16 = b"hkvc", 1, 1
HEAD = int.from_bytes(MAGIC + bytes((VERSION, BFLOAT16, 0, 0)), "little")
HEAD_BYTES = 64
PLANE_ALIGN = 64
VALUE_BYTES = 2
ENCODED_SUFFIX = b"~%d" % VERSION
TILE_VALUES = 1 << 14
"""Tiles are small enough that keys, values and layers have separate tables, and large enough that
the tables take hardly any room. A place in a tile has 16 bits."""
TABLE_EXPONENTS = 16
TILE_BYTES = TABLE_EXPONENTS + 4
GROUP_VALUES = 128
"""Blocks are multiples of this: two vectors of 64."""
GROUP_BYTES = GROUP_VALUES * VALUE_BYTES
SAMPLE_STEP = 7
"""The table of a tile is chosen from every 7th exponent; using all would take 2.5 times as long.
The step is odd, so that all channels count."""
ESCAPE_BYTES = 3
VALUES_PER_ESCAPE = 128
"""The room has space for 1 escape in so many values. SmolLM2 has 1 in 1,200."""


def rests_at(num_values: int) -> int:
    """Returns the offset of the plane of signs and mantissas."""
    num_tiles = -(-num_values // TILE_VALUES)
    return -(-(HEAD_BYTES + num_tiles * TILE_BYTES) // PLANE_ALIGN) * PLANE_ALIGN


def indices_at(num_values: int) -> int:
    """Returns the offset of the plane of indices."""
    return rests_at(num_values) + num_values


def escapes_at(num_values: int) -> int:
    """Returns the offset of the list of escapes."""
    return indices_at(num_values) + num_values // 2


def room_bytes(num_bytes: int) -> int:
    """Returns the room of an encoded block of `num_bytes`, a multiple of SLOT_ALIGN. For small
    blocks it may be as large as the block or larger; then encoding is useless."""
    num_values = num_bytes // VALUE_BYTES
    needed = escapes_at(num_values) + num_values // VALUES_PER_ESCAPE * ESCAPE_BYTES
    return -(-needed // SLOT_ALIGN) * SLOT_ALIGN


def encoded_key(key: bytes) -> bytes:
    """Returns the key under which the encoded form of a block is stored. It differs between
    versions of the form."""
    return key + ENCODED_SUFFIX
