"""The encoded (compressed) form of a block of bfloat16 values, and its room: the number of bytes
that are reserved for the form.

Each value is split in two. The first part, its sign and 7 mantissa bits, hardly compresses and is
stored as a byte. The second part, its 8 exponent bits, becomes an index of 4 bits into a table of
16 exponents. Each tile of TILE_VALUES values has its own table. A value whose exponent is not in
the table of its tile is an *escape*: a list at the end of the form has its exponent. Always true:

- decoding returns the block's bytes bit for bit, including NaNs, zeros and denormals;
- the room depends only on the size of the block, so a reader knows it before it reads;
- equal blocks have equal encoded forms.

The layout, little endian, for n values in t tiles. A plane is an array with one of the two parts of
all values; it begins at a multiple of PLANE_ALIGN bytes:

    0               HEAD, int64: magic number, version, type of the values
    8               n, int64
    16              number of escapes, int64
    HEAD_BYTES      tables, uint8 [t, 16]
                    number of escapes of each tile, int32 [t]
    rests_at        sign and mantissa, uint8 [n]
    indices_at      indices, two in a byte, uint8 [n / 2]: for each GROUP_VALUES values, the low 4
                    bits of the bytes have the indices of the first half of the values, the high 4
                    bits the indices of the second half; 0 for an escape
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
"""Number of values in a tile. Tiles are small enough that keys, values and layers have separate
tables, and large enough that the tables need little space. The index of a value in its tile must
fit 16 bits."""
TABLE_EXPONENTS = 16
TILE_BYTES = TABLE_EXPONENTS + 4
GROUP_VALUES = 128
"""Number of values that the kernels process at once, as two vectors of 64. A slot has a multiple of
this number of values."""
SAMPLE_STEP = 7
"""The table of a tile has the most common exponents in a sample of every 7th value. Counting all
values would make encoding take 2.5 times as long. The step is odd, so that the sample has values of
all channels."""
ESCAPE_BYTES = 3
VALUES_PER_ESCAPE = 128
"""The room has space for one escape (value whose exponent is not in its tile's table) in every 128
values. SmolLM2 has one escape in 1,200 values."""


def rests_at(num_values: int) -> int:
    """Returns the byte offset, in the encoded form, of the array with the signs and mantissas."""
    num_tiles = -(-num_values // TILE_VALUES)
    return -(-(HEAD_BYTES + num_tiles * TILE_BYTES) // PLANE_ALIGN) * PLANE_ALIGN


def indices_at(num_values: int) -> int:
    """Returns the byte offset, in the encoded form, of the array with the exponent indices."""
    return rests_at(num_values) + num_values


def escapes_at(num_values: int) -> int:
    """Returns the byte offset, in the encoded form, of the list of escapes (values whose exponent
    is not in the table of their tile)."""
    return indices_at(num_values) + num_values // 2


def room_bytes(num_bytes: int) -> int:
    """Returns the room for a block of `num_bytes`: the bytes reserved for its encoded form, a
    multiple of SLOT_ALIGN. For a small block the result may be `num_bytes` or more; then encoding
    is useless."""
    num_values = num_bytes // VALUE_BYTES
    needed = escapes_at(num_values) + num_values // VALUES_PER_ESCAPE * ESCAPE_BYTES
    return -(-needed // SLOT_ALIGN) * SLOT_ALIGN


def encoded_key(key: bytes) -> bytes:
    """Returns the key under which the encoded form of a block is stored. It consists of the block's
    key and the version of the form."""
    return key + ENCODED_SUFFIX
