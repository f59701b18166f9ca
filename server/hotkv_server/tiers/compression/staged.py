"""Staging memory: holds encoded blocks between the arena and the store.

Always true: only the thread that took a part uses it. Writes use at most half, so that reads go
on while writes hang; a block larger than half is the exception. The memory is allocated at the
first use or by `open`, so never by a disk tier without encoded blocks.
"""

import bisect
import os
import threading
import time
from collections.abc import Iterator

import numpy as np

from hotkv_proto import native
from hotkv_server.dataplane.plan import Region
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.settings.tiers import STAGING_BYTES
from hotkv_server.tiers.protocol import Codes, Int64s

# ---------------------------------------------------------------------------------------- The codec

# The kernels release the GIL.


class Codec:
    """Encodes blocks of one memory to rooms in another, and back. Thread-safe for separate blocks
    and rooms. Loads numba functions, which takes seconds the first time.

    `blocks`, `rooms`: uint8 [bytes].
    """

    def __init__(self, blocks: Codes, rooms: Codes) -> None:
        self._blocks, self._rooms = blocks, rooms
        self._kernels = native.require("hotkv_server.tiers.compression.codec_kernels")

    def __repr__(self) -> str:
        return f"Codec({len(self._blocks)} bytes of blocks, {len(self._rooms)} of rooms)"

    def encode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """Sizes of n forms, int64 [n]; 0 if one does not fit its room. Arguments: offsets and
        sizes of blocks and rooms, in bytes."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.encode_many(
            self._blocks, begins, sizes, self._rooms, places, room_sizes, results
        )
        return results

    def decode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """int64 [n]: 1, or 0 if the room has no form of a block of this size. Arguments as of
        `encode`."""
        results = np.empty(len(sizes), np.int64)
        self._kernels.decode_many(
            self._rooms, places, room_sizes, self._blocks, begins, sizes, results
        )
        return results


# --------------------------------------------------------------------------------------- The memory


class Staged:
    """See the module. Thread-safe. `arena`: has the blocks."""

    def __init__(self, arena: Region, num_bytes: int = STAGING_BYTES) -> None:
        self.num_bytes = num_bytes
        self.arena = arena
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
        """0 until it is allocated."""
        return 0 if self._memory is None else self.num_bytes

    def open(self) -> None:
        """Allocates memory and loads numba functions, once. May block for seconds. Raises
        OSError if memory is short."""
        with self._changed:
            if self._memory is not None or self._is_closed:
                return
            memory = open_staging(self.num_bytes)
            self._codec = Codec(self.arena.array(), memory.array())
            self._memory = memory

    def parts(self, rooms: Int64s, *, is_write: bool) -> Iterator[slice]:
        """Splits a request into slices of adjacent blocks, each of which `fits`. A block that is
        too large is a slice of its own. `rooms`: bytes that each block needs."""
        begin = total_bytes = 0
        for at, room in enumerate(rooms.tolist()):
            if at > begin and not self.fits(total_bytes + room, is_write=is_write):
                yield slice(begin, at)
                begin, total_bytes = at, 0
            total_bytes += room
        if len(rooms):
            yield slice(begin, len(rooms))

    def fits(self, num_bytes: int, *, is_write: bool) -> bool:
        """The memory, or a write's half of it, is large enough, even if it is in use now."""
        return num_bytes <= (self.num_bytes // 2 if is_write else self.num_bytes)

    def take(self, num_bytes: int, until_s: float, *, is_write: bool) -> int | None:
        """Offset of a part. Blocks until there is room; None at `until_s`, after `stop`, or if
        it is too large. Raises OSError if the memory can't be allocated."""
        if num_bytes > self.num_bytes:
            return None
        self.open()
        # A block larger than half waits until no other is written.
        most_writing = max(self.num_bytes // 2, num_bytes)
        with self._changed:
            while not self._is_closed:
                if not is_write or self._writing_bytes + num_bytes <= most_writing:
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
        """Frees a part, with the arguments of its `take`."""
        with self._changed:
            self._extents.give(place, num_bytes)
            self._writing_bytes -= num_bytes if is_write else 0
            self._changed.notify_all()

    @property
    def memory(self) -> FileMapping:
        """Only after `take` or `open`."""
        assert self._memory is not None, "staging memory that was not taken"
        return self._memory

    def encode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """`Codec.encode` from the arena."""
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.encode(slots, sizes, at, rooms)

    def decode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """`Codec.decode` to the arena."""
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.decode(slots, sizes, at, rooms)

    def stop(self) -> None:
        """Callers in `take` get None at once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """All threads must have stopped using the memory."""
        self.stop()
        with self._changed:
            if self._memory is not None:
                self._memory.close()
            self._memory = self._codec = None

    def check_invariants(self) -> None:
        """Only while no part is in use."""
        with self._changed:
            self._extents.check_invariants()
            assert self._extents.free_bytes == self.num_bytes, "a part is lost"
            assert not self._writing_bytes, "bytes of writes are counted wrong"


def packed(rooms: Int64s, place: int) -> Int64s:
    """Offsets, int64 [n], of ranges in a row from `place` on."""
    at: Int64s = place + np.cumsum(rooms) - rooms
    return at


HUGE_S = 0.5
"""Longest time for huge pages; the rest gets small ones."""


def open_staging(num_bytes: int) -> FileMapping:
    """Prefaulted, in huge pages if there are any. Raises OSError if memory is short.
    `num_bytes`: a multiple of SLOT_ALIGN.
    """
    fd = os.memfd_create("hotkv-staging", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    memory = FileMapping(fd, num_bytes, "staging", exclusive=True)
    try:
        memory.make_huge(0, HUGE_S)
        memory.populate()
    except BaseException:
        memory.close()
        raise
    return memory


class Extents:
    """Byte ranges of the staging memory. Free ones are sorted and do not touch. Not thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]

    def __repr__(self) -> str:
        return f"Extents({self.free_bytes} of {self.num_bytes} bytes free, {len(self._free)} runs)"

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> int | None:
        """First fit; None if there is none."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                left = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                self._free[number : number + 1] = left
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        """Frees a range that `take` returned, and joins it with free neighbours."""
        end = begin + num_bytes
        number = bisect.bisect(self._free, (begin, end))
        after = number
        if number and self._free[number - 1][1] == begin:
            number -= 1
            begin = self._free[number][0]
        if after < len(self._free) and self._free[after][0] == end:
            end = self._free[after][1]
            after += 1
        self._free[number:after] = [(begin, end)]

    def check_invariants(self) -> None:
        ends = [0 if not number else self._free[number - 1][1] for number in range(len(self._free))]
        for number, (begin, end) in enumerate(self._free):
            assert begin < end <= self.num_bytes, "a free run lies outside"
            assert begin > ends[number] or not number, "free runs overlap or touch"
