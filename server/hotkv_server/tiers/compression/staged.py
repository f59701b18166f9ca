"""The staging memory of a tier that encodes (compresses) blocks. It holds blocks in encoded form
while they are copied between the arena and the store. For each request to the store, a thread of
the tier allocates a part of the staging memory, and frees the part afterwards.

Always true: only the thread that has allocated a part uses the part until it is freed. Writes use
at most half of the memory, so that reads still have memory while writes hang. Exception: a block
that is larger than half of the memory may use more. The memory is allocated at the first use, or by
`open`. A disk tier that neither encodes nor holds encoded blocks allocates no staging memory.
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

# Encodes blocks from one memory to another and decodes them back, with kernels that release the
# GIL.


class Codec:
    """Encodes blocks from the memory `blocks` to the memory `rooms`, and decodes them back. A room
    is the part of `rooms` that is reserved for the encoded form of a block. Thread-safe if the
    blocks and rooms of different calls do not overlap. The constructor loads compiled functions
    (numba), which takes seconds the first time.

    `blocks`: the memory with blocks, uint8 [bytes].
    `rooms`: the memory with encoded forms, uint8 [bytes].
    """

    def __init__(self, blocks: Codes, rooms: Codes) -> None:
        self._blocks, self._rooms = blocks, rooms
        self._kernels = native.require("hotkv_server.tiers.compression.codec_kernels")

    def __repr__(self) -> str:
        return f"Codec({len(self._blocks)} bytes of blocks, {len(self._rooms)} of rooms)"

    def encode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """Encodes n blocks, each to its room (the memory reserved for its encoded form). Returns,
        for each block, the size of its encoded form in bytes, int64 [n]; 0 if it was not encoded,
        for example because the form does not fit its room.

        `begins`, `sizes`: the blocks' offsets and sizes in `blocks`, in bytes.
        `places`, `room_sizes`: the rooms' offsets and sizes in `rooms`, in bytes.
        """
        results = np.empty(len(sizes), np.int64)
        self._kernels.encode_many(
            self._blocks, begins, sizes, self._rooms, places, room_sizes, results
        )
        return results

    def decode(self, begins: Int64s, sizes: Int64s, places: Int64s, room_sizes: Int64s) -> Int64s:
        """Decodes n blocks from their rooms (the memory with their encoded forms). Returns int64
        [n]: 1 if a block was decoded, 0 if its room does not hold the encoded form of a block of
        this size.

        `begins`, `sizes`: the blocks' offsets and sizes in `blocks`, in bytes.
        `places`, `room_sizes`: the rooms' offsets and sizes in `rooms`, in bytes.
        """
        results = np.empty(len(sizes), np.int64)
        self._kernels.decode_many(
            self._rooms, places, room_sizes, self._blocks, begins, sizes, results
        )
        return results


# --------------------------------------------------------------------------------------- The memory


class Staged:
    """Allocates parts of the staging memory, and encodes and decodes blocks there; see the module.
    Thread-safe.

    `arena`: the memory from which blocks are encoded, and to which they are decoded.
    `num_bytes`: size of the staging memory.
    """

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
        """Size of the staging memory in bytes; 0 while it is not allocated."""
        return 0 if self._memory is None else self.num_bytes

    def open(self) -> None:
        """Allocates the staging memory and loads compiled functions (numba), unless an earlier call
        has done so. May block for seconds. Raises OSError if memory is short."""
        with self._changed:
            if self._memory is not None or self._is_closed:
                return
            memory = open_staging(self.num_bytes)
            self._codec = Codec(self.arena.array(), memory.array())
            self._memory = memory

    def parts(self, rooms: Int64s, *, is_write: bool) -> Iterator[slice]:
        """Splits the blocks of a request into slices, each of which fits into one part of the
        staging memory (`fits`). Yields the slices. A block that is too large for any part is a
        slice by itself.

        `rooms`: for each block, the bytes of staging memory that it needs.
        `is_write`: True if the request writes blocks to the store.
        """
        begin = total_bytes = 0
        for at, room in enumerate(rooms.tolist()):
            if at > begin and not self.fits(total_bytes + room, is_write=is_write):
                yield slice(begin, at)
                begin, total_bytes = at, 0
            total_bytes += room
        if len(rooms):
            yield slice(begin, len(rooms))

    def fits(self, num_bytes: int, *, is_write: bool) -> bool:
        """Returns True if a part of `num_bytes` is not too large for the staging memory: for a
        write, at most half of the memory; for a read, at most all of it. Other parts may occupy the
        memory now.
        `is_write`: True for a write."""
        return num_bytes <= (self.num_bytes // 2 if is_write else self.num_bytes)

    def take(self, num_bytes: int, until_s: float, *, is_write: bool) -> int | None:
        """Allocates a part of the staging memory and returns its byte offset. Blocks until enough
        memory is free, at most until `until_s`, a time of time.monotonic.

        Returns None if not enough memory has become free, if the part is larger than the whole
        memory, or after `stop`. Raises OSError if the staging memory itself can't be allocated at
        its first use.

        `is_write`: True if the part is for a write, so that it counts in the half that writes use.
        """
        if num_bytes > self.num_bytes:
            return None
        self.open()
        # A block that is larger than half of the memory waits until no other block is written.
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
        """Frees the part of the staging memory at offset `place`. `num_bytes` and `is_write` must
        be the same as in the call of `take` that allocated the part."""
        with self._changed:
            self._extents.give(place, num_bytes)
            self._writing_bytes -= num_bytes if is_write else 0
            self._changed.notify_all()

    @property
    def memory(self) -> FileMapping:
        """The staging memory. A caller must have allocated it before (`take`, `open`)."""
        assert self._memory is not None, "staging memory that was not taken"
        return self._memory

    def encode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """Encodes n blocks from the arena to the staging memory. Returns, for each block, the size
        of its encoded form in bytes, int64 [n]; 0 if it was not encoded.

        `slots`, `sizes`: the blocks' offsets and sizes in the arena, in bytes.
        `at`, `rooms`: for each encoded form, the offset and the size of its range in the staging
            memory, in bytes.
        """
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.encode(slots, sizes, at, rooms)

    def decode(self, slots: Int64s, sizes: Int64s, at: Int64s, rooms: Int64s) -> Int64s:
        """Decodes n blocks from the staging memory to the arena. Returns, for each block, 1 if it
        was decoded, or 0 if the staging memory does not hold the encoded form of a block of this
        size, int64 [n].

        `slots`, `sizes`: the blocks' offsets and sizes in the arena, in bytes.
        `at`, `rooms`: for each encoded form, the offset and the size of its range in the staging
            memory, in bytes.
        """
        assert self._codec is not None, "staging memory that was not taken"
        return self._codec.decode(slots, sizes, at, rooms)

    def stop(self) -> None:
        """Refuses to allocate further parts of the staging memory: all callers that wait in `take`
        get None at once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Frees the staging memory. All threads must have stopped using it."""
        self.stop()
        with self._changed:
            if self._memory is not None:
                self._memory.close()
            self._memory = self._codec = None

    def check_invariants(self) -> None:
        """Raises AssertionError if a part of the staging memory was not freed. To be called only
        while no part is in use."""
        with self._changed:
            self._extents.check_invariants()
            assert self._extents.free_bytes == self.num_bytes, "a part is lost"
            assert not self._writing_bytes, "bytes of writes are counted wrong"


def packed(rooms: Int64s, place: int) -> Int64s:
    """Returns the offsets of byte ranges that follow each other without gaps, int64 [n].

    `rooms`: sizes of the n ranges in bytes.
    `place`: offset of the first range.
    """
    at: Int64s = place + np.cumsum(rooms) - rooms
    return at


HUGE_S = 0.5
"""Longest time that `open_staging` spends on getting huge pages. Afterwards the rest of the memory
gets small pages."""


def open_staging(num_bytes: int) -> FileMapping:
    """Allocates and prefaults memory, in huge pages if the kernel has them. Raises OSError if
    memory is short. `num_bytes`: a multiple of SLOT_ALIGN."""
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
    """Allocates extents (byte ranges) of the staging memory. Keeps the free bytes as sorted ranges
    that do not touch.

    Always true: an allocated extent overlaps no other allocated extent. Not thread-safe.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]

    def __repr__(self) -> str:
        return f"Extents({self.free_bytes} of {self.num_bytes} bytes free, {len(self._free)} runs)"

    @property
    def free_bytes(self) -> int:
        """Number of bytes of the staging memory that are not allocated."""
        return sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Allocates an extent (a byte range of the staging memory) at the beginning of the first
        free range that is long enough. Returns the extent's offset; None if all free ranges are too
        short."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                left = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                self._free[number : number + 1] = left
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        """Frees an extent (a byte range of the staging memory), which `take` must have allocated
        with this offset and size."""
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
        """Raises AssertionError if free ranges overlap, touch, or lie outside the memory."""
        ends = [0 if not number else self._free[number - 1][1] for number in range(len(self._free))]
        for number, (begin, end) in enumerate(self._free):
            assert begin < end <= self.num_bytes, "a free run lies outside"
            assert begin > ends[number] or not number, "free runs overlap or touch"
