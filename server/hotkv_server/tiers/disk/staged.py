"""Encoded forms of blocks on their way between the arena and the slab file.

Owns the staging memory, through which they go, and who has which part of it. Always true: a piece
has its part of it from before it reads or encodes until its blocks are settled; writes have at most
half, so those that hang leave room for reads. The memory is taken when it is first needed: a server
that neither encodes nor finds encoded blocks has none.
"""

import threading
import time
from collections.abc import Iterator

import numpy as np

from hotkv_server.dataplane.plan import Region
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.tiers.compression.codec import Codec
from hotkv_server.tiers.compression.staging import Extents, open_staging
from hotkv_server.tiers.protocol import Int64s

STAGING_BYTES = 64 << 20


class Staged:
    """See the module. Thread-safe."""

    def __init__(self, arena: Region, num_bytes: int = STAGING_BYTES) -> None:
        self.num_bytes = num_bytes
        self._arena = arena
        self._extents = Extents(num_bytes)
        self._changed = threading.Condition()
        self._memory: FileMapping | None = None
        self._codec: Codec | None = None
        self._writing_bytes = 0
        self._is_closed = False

    def __repr__(self) -> str:
        state = "not needed yet" if self._memory is None else repr(self._extents)
        return f"Staged({state})"

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has taken."""
        return 0 if self._memory is None else self.num_bytes

    def open(self) -> None:
        """Takes the memory and loads kernels, if that has not been done. Blocks, the first time for
        seconds. Raises OSError if memory is short."""
        with self._changed:
            if self._memory is not None or self._is_closed:
                return
            memory = open_staging(self.num_bytes)
            self._codec = Codec(self._arena.array(), memory.array())
            self._memory = memory

    def parts(self, rooms: Int64s, *, is_write: bool) -> Iterator[slice]:
        """Cuts places of these sizes into parts for which there can be memory, if each fits."""
        begin = total_bytes = 0
        for at, room in enumerate(rooms.tolist()):
            if at > begin and not self.fits(total_bytes + room, is_write=is_write):
                yield slice(begin, at)
                begin, total_bytes = at, 0
            total_bytes += room
        if len(rooms):
            yield slice(begin, len(rooms))

    def fits(self, num_bytes: int, *, is_write: bool) -> bool:
        """Whether there can be memory for so much."""
        return num_bytes <= (self.num_bytes // 2 if is_write else self.num_bytes)

    def take(self, num_bytes: int, until_s: float, *, is_write: bool) -> int | None:
        """Where the caller's part of the memory begins. Blocks until there is one. None if it is
        too large, if it was not free until then (of time.monotonic), or once this is closed."""
        if not self.fits(num_bytes, is_write=is_write):
            return None
        self.open()
        with self._changed:
            while not self._is_closed:
                if not is_write or self.fits(self._writing_bytes + num_bytes, is_write=True):
                    place = self._extents.take(num_bytes)
                    if place is not None:
                        self._writing_bytes += num_bytes if is_write else 0
                        return place
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            return None

    def give(self, place: int, num_bytes: int, *, is_write: bool) -> None:
        """Gives a part back."""
        with self._changed:
            self._extents.give(place, num_bytes)
            self._writing_bytes -= num_bytes if is_write else 0
            self._changed.notify_all()

    @property
    def address(self) -> int:
        """Of the memory, which must have been taken."""
        assert self._memory is not None, "staging memory that was not taken"
        return self._memory.address

    def encode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """Encodes slots of the arena to places of the memory, as `Codec` does."""
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.encode(slots, sizes, at, rooms)

    def decode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """Decodes places of the memory to slots of the arena, as `Codec` does."""
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.decode(slots, sizes, at, rooms)

    def stop(self) -> None:
        """Nobody gets a part any more, and nobody waits for one."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Gives the memory back. No thread may touch it any more."""
        self.stop()
        with self._changed:
            if self._memory is not None:
                self._memory.close()
            self._memory = self._codec = None

    def check_invariants(self) -> None:
        """Raises AssertionError unless all parts are free. Not while a piece is under way."""
        with self._changed:
            self._extents.check_invariants()
            assert self._extents.free_bytes == self.num_bytes, "a part is lost"
            assert not self._writing_bytes, "bytes of writes are counted wrong"


def packed(rooms: Int64s, place: int) -> Int64s:
    """Where parts of these sizes lie one after the other."""
    at: Int64s = place + np.cumsum(rooms) - rooms
    return at
