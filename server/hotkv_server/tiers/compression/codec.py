"""Encodes and decodes blocks between two memories, by the kernels or by their reference."""

from typing import Any

import numpy as np

from hotkv import native
from hotkv_server.tiers.compression import reference
from hotkv_server.tiers.protocol import Codes, Int64s


class Codec:
    """`blocks` and `rooms`: all bytes of the memory in which blocks lie, and of that in which
    encoded forms do, uint8. `functions`: a module with those of `reference`; the kernels, if numba
    is there. Their first use takes seconds. Thread-safe for blocks and rooms that do not overlap;
    the kernels give the GIL up.
    """

    def __init__(self, blocks: Codes, rooms: Codes, functions: Any = None) -> None:
        self._blocks, self._rooms = blocks, rooms
        self._functions = (
            functions or native.load("hotkv_server.tiers.compression.kernels") or reference
        )

    def __repr__(self) -> str:
        return f"Codec({self._functions.__name__})"

    def encode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """Bytes of each encoded form, int64 [n], 0 for blocks that do not fit their rooms; as
        `reference.encode_many`."""
        results = np.empty(len(sizes), np.int64)
        self._functions.encode_many(
            self._blocks, begins, sizes, self._rooms, places, room_sizes, results
        )
        return results

    def decode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """1 for each block that was decoded, int64 [n], 0 for others; as
        `reference.decode_many`."""
        results = np.empty(len(sizes), np.int64)
        self._functions.decode_many(
            self._rooms, places, room_sizes, self._blocks, begins, sizes, results
        )
        return results
