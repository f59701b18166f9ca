"""Counts the parts of a message before it is parsed: a parser makes an object of each, and two
bytes are enough for one.

Walks the wire format without making objects, counts those that a parser would make, and gives up
above a bound. Packed bytes (hashes, ids, tokens) are skipped in one step: they cost next to
nothing here, and the calls bound them.
"""

from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

MAX_PARTS = 1 << 15
"""Most fields, list entries and messages in one request: some 20 ms of the event loop. A layout of
100 layers has a tenth of it."""
FREE_BYTES = 8192
"""A message this short is not weighed: it can't have many parts."""
_WORD_KINDS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

Children = dict[int, "Descriptor | None"]
"""By field number: the message type, or None for numbers, whose lists are packed. Strings and bytes
are left out."""


@cache
def _children(kind: Descriptor) -> Children:
    return {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type is not None or field.type not in _WORD_KINDS
    }


def is_light(kind: Descriptor, data: bytes) -> bool:
    """Returns whether a message of this kind has at most MAX_PARTS parts. Raises DecodeError if it
    ends too soon."""
    if len(data) <= FREE_BYTES:
        return True
    try:
        return count(kind, data) <= MAX_PARTS
    except IndexError:
        raise DecodeError("the message ends too soon") from None


def count(kind: Descriptor, data: bytes) -> int:
    """Returns the number of parts; stops early above MAX_PARTS. Raises IndexError if the bytes end
    too soon."""
    parts = 0
    todo: list[tuple[Descriptor, int, int]] = [(kind, 0, len(data))]
    while todo and parts <= MAX_PARTS:
        message, at, end = todo.pop()
        children = _children(message)
        while at < end and parts <= MAX_PARTS:
            tag, at = _varint(data, at)
            parts += 1
            # The wire type: varint, 8 bytes, length and bytes, 4 bytes; groups are tags without
            # content.
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    if tag >> 3 in children:
                        child = children[tag >> 3]
                        if child is None:
                            parts += size
                        else:
                            todo.append((child, at, min(at + size, end)))
                    at += size
                case 5:
                    at += 4
    return parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number, and the position after it."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1
