"""The encoded form of a block of bfloat16 values, and what room it takes.

A value is split: its sign and 7 mantissa bits, which hardly compress, are kept as a byte; its 8
exponent bits become an index of 4 bits into a table of 16 exponents. Each tile of TILE_VALUES
values has a table of its own. An exponent that its table lacks is an escape: a row in a list at the
end. Always true: decoding gives the block's bytes back bit for bit, NaNs, zeros and denormals
included; the room a block takes follows from its size alone, so a reader knows it before it reads;
equal blocks have equal encoded forms.

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
"""Few enough that keys and values, and layers, have tables of their own; so many that tables take
next to nothing. A place in a tile has 16 bits."""
TABLE_EXPONENTS = 16
TILE_BYTES = TABLE_EXPONENTS + 4
GROUP_VALUES = 128
"""Blocks are multiples of this: two vectors of 64."""
GROUP_BYTES = GROUP_VALUES * VALUE_BYTES
SAMPLE_STEP = 7
"""A table is chosen by every 7th exponent of its tile: all are 2.5 times as slow. Odd, so that all
channels count."""
ESCAPE_BYTES = 3
VALUES_PER_ESCAPE = 128
"""There is room for one escape in so many values. SmolLM2 has one in 1,200."""


def rests_at(num_values: int) -> int:
    """Where the plane of signs and mantissas begins."""
    num_tiles = -(-num_values // TILE_VALUES)
    return -(-(HEAD_BYTES + num_tiles * TILE_BYTES) // PLANE_ALIGN) * PLANE_ALIGN


def indices_at(num_values: int) -> int:
    """Where the plane of indices begins."""
    return rests_at(num_values) + num_values


def escapes_at(num_values: int) -> int:
    """Where the list of escapes begins."""
    return indices_at(num_values) + num_values // 2


def room_bytes(num_bytes: int) -> int:
    """Returns the room of an encoded block of `num_bytes`, a multiple of SLOT_ALIGN. Small blocks
    may take as much as they have, or more: nothing is won then."""
    num_values = num_bytes // VALUE_BYTES
    needed = escapes_at(num_values) + num_values // VALUES_PER_ESCAPE * ESCAPE_BYTES
    return -(-needed // SLOT_ALIGN) * SLOT_ALIGN


def encoded_key(key: bytes) -> bytes:
    """Where the encoded form of a block is. Another version of the form is another key."""
    return key + ENCODED_SUFFIX
