"""Frames of the fast lane: each message stands behind its length, uint32, little-endian."""

import struct
from typing import Final

SOCKET_NAME: Final = "lane.sock"
LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = LENGTH.size


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message
