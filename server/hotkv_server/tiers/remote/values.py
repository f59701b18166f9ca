"""The layout of a block as a value of a key-value store. The value begins with a description of the
block, the head, which has HEAD_BYTES bytes. The block's bytes follow.

Always true: a value is accepted only if its head is right. The head must have the magic number, the
version of this format, the size of the block, and a seal (checksum) that matches key and bytes.
So bytes that hotkv has not written, and values of other keys, are refused.
"""

import struct

from hotkv_server.tiers.protocol import Read
from hotkv_server.tiers.seals import seal

_HEAD = struct.Struct("<4sIqQ")
"""The head of a value: magic number, version of the format, size of the block in bytes, seal
(checksum). Little endian."""
MAGIC = b"hkvb"
VERSION = 1
HEAD_BYTES = _HEAD.size


def head(key: bytes, content: memoryview) -> bytes:
    """Returns the head of a block's value in the store: the bytes that describe the block and
    precede the block's own bytes. `content`: the bytes of the block."""
    return _HEAD.pack(MAGIC, VERSION, len(content), seal(key, content))


def judge_head(head: memoryview, value_bytes: int, num_bytes: int) -> Read:
    """Checks the head of a value: the bytes that describe the block and precede the block's own
    bytes. Does not check the seal (checksum of the bytes); `is_sound` does.

    Returns FOUND if the head is right. Returns ABSENT if the value has another version of the
    format. Returns CORRUPT if the head is damaged or was not written by hotkv, or if the size of
    the block differs from `num_bytes`.

    `value_bytes`: length of the whole value: head and block.
    `num_bytes`: size that the block must have.
    """
    magic, version, size_bytes, _ = _HEAD.unpack(head)
    if magic != MAGIC:
        return Read.CORRUPT
    if version != VERSION:
        return Read.ABSENT
    fits = size_bytes == num_bytes == value_bytes - HEAD_BYTES
    return Read.FOUND if fits else Read.CORRUPT


def is_sound(key: bytes, head: memoryview, content: memoryview) -> bool:
    """Returns True if the seal (checksum) in `head` matches the key and the bytes of the block.
    `content`: the bytes of the block."""
    return bool(seal(key, content) == _HEAD.unpack(head)[-1])
