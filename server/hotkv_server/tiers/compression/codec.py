"""Encodes and decodes blocks between two memories, by kernels without the GIL."""

import numpy as np

from hotkv_proto import native
from hotkv_server.tiers.protocol import Codes, Int64s


class Codec:
    """`blocks` and `rooms`: all bytes of the memory in which blocks lie, and of that in which
    encoded forms do, uint8. Loads kernels, which takes seconds the first time. Thread-safe for
    blocks and rooms that do not overlap.
    """

    def __init__(self, blocks: Codes, rooms: Codes) -> None:
        self._blocks, self._rooms = blocks, rooms
        self._kernels = native.require("hotkv_server.tiers.compression.kernels")

    def __repr__(self) -> str:
        return f"Codec({len(self._blocks)} bytes of blocks, {len(self._rooms)} of rooms)"

    def encode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """Bytes of each encoded form, int64 [n], 0 for blocks that do not fit their rooms; as
        `kernels.encode_many`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.encode_many(
            self._blocks, begins, sizes, self._rooms, places, room_sizes, results
        )
        return results

    def decode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """1 for each block that was decoded, int64 [n], 0 for others; as
        `kernels.decode_many`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.decode_many(
            self._rooms, places, room_sizes, self._blocks, begins, sizes, results
        )
        return results
