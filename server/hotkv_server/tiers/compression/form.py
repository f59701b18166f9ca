"""The encoded form of a block of bfloat16 values, and the room (number of bytes) that it needs.

Each value is split. Its sign and 7 mantissa bits, which hardly compress, are kept as a byte. Its 8
exponent bits become an index of 4 bits into a table of 16 exponents. Each tile of TILE_VALUES
values has a table. A value whose exponent is not in its tile's table is an escape: a list at the
end of the form gives its exponent. Always true:

- decoding returns the block's bytes bit for bit, NaNs, zeros and denormals included;
- the room of a block depends only on its size, so a reader knows it before it reads;
- equal blocks have equal encoded forms.

The layout, little endian, for n values in t tiles. A plane (an array of a part of all values)
begins at a multiple of PLANE_ALIGN bytes:

    0               HEAD, int64: magic number, version, type of the values
    8               n, int64
    16              number of escapes, int64
    HEAD_BYTES      tables, uint8 [t, 16]
                    number of escapes of each tile, int32 [t]
    rests_at        sign and mantissa, uint8 [n]
    indices_at      indices, two in a byte, uint8 [n / 2]: of each GROUP_VALUES values the low bits
                    have the first half, the high bits the second; 0 for an escape
    escapes_at      escapes, tile by tile, uint8 [escapes, 3]: the value's place in its tile
                    (uint16) and its exponent; then zeros to the end of the room
"""

from hotkv_proto.table import SLOT_ALIGN

MAGIC, VERSION, BFLOAT16 = b"hkvc", 1, 1
HEAD = int.from_bytes(MAGIC + bytes((VERSION, BFLOAT16, 0, 0)), "little")
HEAD_BYTES = 64
PLANE_ALIGN = 64
VALUE_BYTES = 2
ENCODED_SUFFIX = b"~%d" % VERSION
TILE_VALUES = 1 << 14
"""Values in a tile. Tiles are so small that keys, values and layers have separate tables, and so
large that the tables take little room. A place in a tile must fit 16 bits."""
TABLE_EXPONENTS = 16
TILE_BYTES = TABLE_EXPONENTS + 4
GROUP_VALUES = 128
"""Values that the kernels code at once, as two vectors of 64. Only blocks of a multiple of this
are encoded."""
GROUP_BYTES = GROUP_VALUES * VALUE_BYTES
SAMPLE_STEP = 7
"""The table of a tile is chosen by counting the exponent of every 7th value; counting all would
take 2.5 times as long. The step is odd, so that the sample has values of all channels."""
ESCAPE_BYTES = 3
VALUES_PER_ESCAPE = 128
"""The encoded form has space for one escape (value whose exponent is not in its tile's table) in
every 128 values. SmolLM2 has one in 1,200."""


def rests_at(num_values: int) -> int:
    """Returns the byte offset of the plane (array of a part of all values) of signs and mantissas
    in the encoded form."""
    num_tiles = -(-num_values // TILE_VALUES)
    return -(-(HEAD_BYTES + num_tiles * TILE_BYTES) // PLANE_ALIGN) * PLANE_ALIGN


def indices_at(num_values: int) -> int:
    """Returns the byte offset of the plane (array of a part of all values) of exponent indices in
    the encoded form."""
    return rests_at(num_values) + num_values


def escapes_at(num_values: int) -> int:
    """Returns the byte offset, in the encoded form, of the list of escapes (values whose exponent
    is not in their tile's table)."""
    return indices_at(num_values) + num_values // 2


def room_bytes(num_bytes: int) -> int:
    """Returns the bytes reserved for the encoded form of a block of `num_bytes`, a multiple of
    SLOT_ALIGN. For a small block this may be as much as `num_bytes` or more; then encoding is
    useless."""
    num_values = num_bytes // VALUE_BYTES
    needed = escapes_at(num_values) + num_values // VALUES_PER_ESCAPE * ESCAPE_BYTES
    return -(-needed // SLOT_ALIGN) * SLOT_ALIGN


def encoded_key(key: bytes) -> bytes:
    """Returns the key under which the encoded form of a block is stored. The key differs between
    versions of the form."""
    return key + ENCODED_SUFFIX
