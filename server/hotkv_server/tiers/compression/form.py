"""The encoded form of a block of bfloat16 values.

A value's sign and 7 mantissa bits hardly compress: a byte. Its 8 exponent bits become a 4-bit index
into its tile's table of 16 exponents; an exponent not in the table is an *escape*, in a list at the
end. The *room* is what is reserved for the form. Always true:

- decoding is exact, with NaNs, zeros and denormals;
- the room depends only on the block's size, so a reader knows it;
- equal blocks have equal forms.

For n values in t tiles, little endian, planes at multiples of PLANE_ALIGN:

    0               HEAD, int64: magic number, version, type of values
    8               n, int64
    16              escapes, int64
    HEAD_BYTES      tables, uint8 [t, 16]; escapes per tile, int32 [t]
    rests_at        sign and mantissa, uint8 [n]
    indices_at      uint8 [n / 2]: of GROUP_VALUES values the first half in the low 4 bits,
                    the second in the high ones; 0 for an escape
    escapes_at      by tile, uint8 [escapes, 3]: place in tile (uint16), exponent; then zeros
"""

from hotkv_proto.table import SLOT_ALIGN

MAGIC, VERSION, BFLOAT16 = b"hkvc", 1, 1
HEAD = int.from_bytes(MAGIC + bytes((VERSION, BFLOAT16, 0, 0)), "little")
HEAD_BYTES = 64
PLANE_ALIGN = 64
VALUE_BYTES = 2
ENCODED_SUFFIX = b"~%d" % VERSION
TILE_VALUES = 1 << 14
"""Small enough that keys, values and layers have their own tables; a place in a tile must fit 16
bits."""
TABLE_EXPONENTS = 16
TILE_BYTES = TABLE_EXPONENTS + 4
GROUP_VALUES = 128
"""Values that the kernels process at once, in two vectors. Slots have a multiple of it."""
SAMPLE_STEP = 7
"""A table is from every 7th value; counting all takes 2.5 times as long. Odd, to meet all
channels."""
ESCAPE_BYTES = 3
VALUES_PER_ESCAPE = 128
"""The room has space for an escape in 128 values. SmolLM2 has one in 1,200."""


def rests_at(num_values: int) -> int:
    num_tiles = -(-num_values // TILE_VALUES)
    return -(-(HEAD_BYTES + num_tiles * TILE_BYTES) // PLANE_ALIGN) * PLANE_ALIGN


def indices_at(num_values: int) -> int:
    return rests_at(num_values) + num_values


def escapes_at(num_values: int) -> int:
    return indices_at(num_values) + num_values // 2


def room_bytes(num_bytes: int) -> int:
    """A multiple of SLOT_ALIGN. Not below `num_bytes` for small blocks: encoding is then
    useless."""
    num_values = num_bytes // VALUE_BYTES
    needed = escapes_at(num_values) + num_values // VALUES_PER_ESCAPE * ESCAPE_BYTES
    return -(-needed // SLOT_ALIGN) * SLOT_ALIGN


def encoded_key(key: bytes) -> bytes:
    return key + ENCODED_SUFFIX
