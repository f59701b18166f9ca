"""A block as a value of a key-value store: a head, then the block's bytes. Always true: without
the right magic number, version, size and seal of key and bytes a value is refused."""

import struct

from hotkv_server.tiers.protocol import Read
from hotkv_server.tiers.seals import seal

_HEAD = struct.Struct("<4sIqQ")
"""Magic number, version, size in bytes, seal. Little endian."""
MAGIC = b"hkvb"
VERSION = 1
HEAD_BYTES = _HEAD.size


def head(key: bytes, content: memoryview) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, len(content), seal(key, content))


def judge_head(head: memoryview, value_bytes: int, num_bytes: int) -> Read:
    """Whether a head is right, apart from its seal: FOUND, ABSENT for another version, else
    CORRUPT.

    `value_bytes`: of head and block.
    """
    magic, version, size_bytes, _ = _HEAD.unpack(head)
    if magic != MAGIC:
        return Read.CORRUPT
    if version != VERSION:
        return Read.ABSENT
    fits = size_bytes == num_bytes == value_bytes - HEAD_BYTES
    return Read.FOUND if fits else Read.CORRUPT


def is_sound(key: bytes, head: memoryview, content: memoryview) -> bool:
    """The seal matches."""
    return bool(seal(key, content) == _HEAD.unpack(head)[-1])
