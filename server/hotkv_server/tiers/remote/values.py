"""The layout of a block as a value of a key-value store: a head of HEAD_BYTES, then the block's
bytes.

Always true: a value is accepted only if its head has the magic number, this version, the block's
size, and a seal (check value) that matches key and bytes. So foreign bytes and values of other keys
are refused.
"""

import struct

from hotkv_server.tiers.protocol import Read
from hotkv_server.tiers.seals import seal

_HEAD = struct.Struct("<4sIqQ")
"""Magic number, version of the format, size of the block in bytes, seal. Little endian."""
MAGIC = b"hkvb"
VERSION = 1
HEAD_BYTES = _HEAD.size


def head(key: bytes, content: memoryview) -> tuple[bytes, int]:
    """Returns the head (first bytes) of a block's value, and the block's seal (check value)."""
    sealed = seal(key, content)
    return _HEAD.pack(MAGIC, VERSION, len(content), sealed), sealed


def judge_head(head: memoryview, value_bytes: int, num_bytes: int) -> Read:
    """Checks the head (first bytes) of a value that should hold a block of `num_bytes`. Does not
    check the seal (check value).

    Returns FOUND if the head is right. Returns ABSENT if the value has another version of the
    format, and CORRUPT if it is damaged, foreign or of another size. `value_bytes`: the value's
    length, head included.
    """
    if value_bytes < HEAD_BYTES:
        return Read.CORRUPT
    magic, version, size_bytes, _ = _HEAD.unpack(head)
    if magic != MAGIC:
        return Read.CORRUPT
    if version != VERSION:
        return Read.ABSENT
    fits = size_bytes == num_bytes == value_bytes - HEAD_BYTES
    return Read.FOUND if fits else Read.CORRUPT


def is_sound(key: bytes, head: memoryview, content: memoryview) -> bool:
    """Returns True if the seal (check value) in `head` matches the key and `content`, the block's
    bytes."""
    return bool(seal(key, content) == _HEAD.unpack(head)[-1])
