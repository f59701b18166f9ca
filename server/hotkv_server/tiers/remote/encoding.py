"""A connection (`Client`) that encodes (compresses) bfloat16 blocks to 12 bits per value, and
passes them to another connection, the inner connection.

Blocks that don't shrink (fp8, float32, noise, small slots) are stored plain. The key shows the form
of a block: a plain block is stored under its own key, as without encoding; an encoded block is
stored under the key that `encoded_key` returns, in the size that `room_bytes` returns. So a reader
knows the stored size before it reads. A reader asks for the encoded form first and, if the encoded
form is absent, for the plain form. Encoding is deterministic, so all nodes that encode store a
block under the same key.

A block that is larger than all of the staging memory is stored plain, directly from and to its slot
(place in the arena). Always true: for all other blocks the inner connection uses only staging
memory, which is freed only when the inner connection can no longer write to it.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.tiers.compression.form import encoded_key, room_bytes
from hotkv_server.tiers.compression.staged import Staged, packed
from hotkv_server.tiers.protocol import MAX_KEY_BYTES, Codes, Generations, Int64s, Read, Shown
from hotkv_server.tiers.remote.client import Client, Connect

BoolMask = NDArray[np.bool_]


def encoding(connect: Connect, staged: Staged | None) -> Connect:
    """Returns a function that connects as `connect` does and returns an `EncodingClient`, which
    encodes blocks in the staging memory `staged`. Returns `connect` itself if `staged` is None."""
    if staged is None:
        return connect
    return lambda until_s: EncodingClient(connect(until_s), staged)


class EncodingClient:
    """Encodes (compresses) and decodes blocks for another client; see the module and `Client`.

    If no staging memory gets free for a block before the time limit, the block's code (its result,
    a value of `Read` or `Write`) is not set. A block's seal (checksum) covers the stored bytes,
    encoded or not.

    `inner`: the client that stores the blocks. It gets ranges of `staged` in place of slots (places
        in the arena). Only blocks that are larger than all of `staged` keep their slots.
    """

    def __init__(self, inner: Client, staged: Staged) -> None:
        self._inner = inner
        self._staged = staged
        # When the client last got staging memory. While it waits for memory, this is infinity.
        self._staged_s = 0.0

    def __repr__(self) -> str:
        return f"EncodingClient({self._inner!r}, {self._staged!r})"

    @property
    def moved_s(self) -> float:
        """The time at which bytes last moved or the client last got staging memory; infinity while
        it waits for memory, because then it does not wait for the store. See `Client.moved_s`."""
        return max(self._inner.moved_s, self._staged_s)

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended; see `Client.is_fresh`."""
        return self._inner.is_fresh()

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks the store which blocks exist, in encoded or in plain form; see `Client.probe`."""
        both = np.full(2 * len(keys), Read.FAILED, np.uint8)
        asked = [*map(encoded_key, keys), *keys]
        if changed := self._inner.probe(asked, expected, both, until_s):
            return changed
        of_form = both.reshape(2, -1)
        codes[:] = Read.ABSENT
        codes[(of_form == Read.FAILED).any(0)] = Read.FAILED
        codes[(of_form == Read.FOUND).any(0)] = Read.FOUND
        return {}

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        """Reads blocks into their slots (places in the arena); see `Client.read`. A block whose
        value can't be decoded is CORRUPT, and its value is deleted. Each request to the inner
        client also checks the generations (numbers that each flush raises) after it has read. So
        the check in the last request is valid for all blocks."""
        for rows in self._staged.parts(_sizes(slots), is_write=False):
            if self._is_too_large(slots[rows]):
                asked = keys[rows], slots[rows], expected, codes[rows], until_s
                if changed := self._inner.read(*asked):
                    return changed
                continue
            with self._part(keys[rows], slots[rows], until_s, is_write=False) as part:
                if part is None:
                    continue
                if changed := self._read(part, expected, codes[rows], until_s):
                    return changed
        return {}

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """Writes blocks in encoded form if they shrink, else in plain form; see `Client.write`."""
        for rows in self._staged.parts(_sizes(slots), is_write=True):
            results = depths[rows], codes[rows], until_s
            if self._is_too_large(slots[rows]):
                self._inner.write(keys[rows], slots[rows], *results)
                continue
            with self._part(keys[rows], slots[rows], until_s, is_write=True) as part:
                if part is None:
                    continue
                asked, places = part.stored(part.all, part.encode())
                self._inner.write(asked, places, *results)

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes the values of the keys; see `Client.forget`."""
        self._inner.forget([*map(encoded_key, keys), *keys], until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the key spaces' generations (numbers that each flush raises); see
        `Client.generations`."""
        return self._inner.generations(fingerprints, until_s)

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Raises the generation (number that each flush raises) of a key space (a model in a
        configuration), which flushes its blocks in the store; see `Client.raise_generation`."""
        return self._inner.raise_generation(fingerprint, floor, until_s, is_retry)

    def close(self) -> None:
        """Closes the connection; see `Client.close`."""
        self._inner.close()

    def _is_too_large(self, slots: Sequence[memoryview]) -> bool:
        return not self._staged.fits(sum(map(len, slots)), is_write=False)

    @contextlib.contextmanager
    def _part(
        self, keys: Sequence[bytes], slots: Sequence[memoryview], until_s: float, *, is_write: bool
    ) -> Iterator["_Part | None"]:
        """Allocates staging memory for blocks, yields a `_Part` with the blocks and this memory,
        and frees the memory at the end. Yields None if the blocks have no bytes, or if not enough
        memory gets free before `until_s`."""
        num_bytes = sum(map(len, slots))
        self._staged_s = math.inf
        place = self._staged.take(num_bytes, until_s, is_write=is_write) if num_bytes else None
        self._staged_s = time.monotonic()
        if place is None:
            yield None
            return
        try:
            yield _Part(self._staged, place, keys, slots)
        except BaseException:
            # Close the connection before the memory is freed: bytes that arrive late must not be
            # written to memory that another part has got.
            self._inner.close()
            raise
        finally:
            self._staged.give(place, num_bytes, is_write=is_write)

    def _read(
        self, part: "_Part", expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Reads the blocks of a part, in one or two requests. The first request asks for the
        encoded form of the blocks that may be encoded, and for the plain form of the other blocks.
        The second asks for the plain form of the blocks whose encoded form is absent. The arguments
        and the result are those of `read`."""
        is_encoded = part.may_be_encoded
        # The codes of the first request go to `first`, not yet to the caller's `codes`. If the
        # request raises, the blocks that it has found are only in the staging memory, so `codes`
        # must not say that their slots have them.
        first = np.full(len(codes), Read.FAILED, np.uint8)
        asked, places = part.stored(part.all, is_encoded)
        if changed := self._inner.read(asked, places, expected, first, until_s):
            return changed
        is_found, is_absent = first == Read.FOUND, first == Read.ABSENT
        part.copy_out(np.flatnonzero(is_found & ~is_encoded))
        damaged = part.decode(np.flatnonzero(is_found & is_encoded))
        first[damaged] = Read.CORRUPT
        left = np.flatnonzero(is_absent & is_encoded)
        first[left] = Read.FAILED
        codes[:] = first
        if len(damaged):
            self._inner.forget([encoded_key(part.keys[row]) for row in damaged.tolist()], until_s)
        if not len(left):
            return {}
        plain = codes[left]
        asked, places = part.stored(left, np.zeros(len(codes), np.bool_))
        if not (changed := self._inner.read(asked, places, expected, plain, until_s)):
            part.copy_out(left[plain == Read.FOUND])
            codes[left] = plain
        return changed


class _Part:
    """The n blocks of a request, with their staging memory. Each block has as many bytes of staging
    memory as its slot (place in the arena) has bytes, so both its encoded and its plain form fit.

    `place`: offset, in `staged`, of the memory of the request's first block.
    `may_be_encoded`: mask [n] of the blocks for which encoding is useful and possible.
    """

    def __init__(
        self, staged: Staged, place: int, keys: Sequence[bytes], slots: Sequence[memoryview]
    ) -> None:
        self.keys = keys
        self.all: Int64s = np.arange(len(keys))
        self._staged = staged
        self._memory = staged.memory.array().data
        self._slots = slots
        self._begins = np.array([staged.arena.offset_of(slot) for slot in slots], np.int64)
        self._sizes = _sizes(slots)
        self._rooms = np.array([room_bytes(size) for size in self._sizes.tolist()], np.int64)
        self._at = packed(self._sizes, place)
        has_key = [len(encoded_key(key)) <= MAX_KEY_BYTES for key in keys]
        self.may_be_encoded: BoolMask = (self._rooms < self._sizes) & np.array(has_key, np.bool_)

    def stored(self, rows: Int64s, is_encoded: BoolMask) -> tuple[list[bytes], list[memoryview]]:
        """Returns the keys under which some of the blocks are stored, and the staging memory of
        their stored forms.

        `rows`: indices of these blocks, among all blocks of the part.
        `is_encoded`: mask of all blocks of the part: True for a block whose stored form is the
            encoded form.
        """
        keys = [encoded_key(self.keys[n]) if is_encoded[n] else self.keys[n] for n in rows.tolist()]
        begins = self._at[rows]
        ends = begins + np.where(is_encoded, self._rooms, self._sizes)[rows]
        places = zip(begins.tolist(), ends.tolist(), strict=True)
        return keys, [self._memory[begin:end] for begin, end in places]

    def encode(self) -> BoolMask:
        """Encodes each block to its staging memory, or copies it there if it can't be encoded.
        Returns a mask of the part's blocks: True for each block that was encoded."""
        tried, is_encoded = np.flatnonzero(self.may_be_encoded), self.may_be_encoded.copy()
        is_encoded[tried] = self._staged.encode(*self._columns(tried)) > 0
        for row in np.flatnonzero(~is_encoded).tolist():
            self._plain(row)[:] = self._slots[row]
        return is_encoded

    def decode(self, rows: Int64s) -> Int64s:
        """Decodes the blocks with the indices `rows` from their staging memory to their slots
        (places in the arena). Returns the indices of the blocks that can't be decoded."""
        damaged: Int64s = rows[self._staged.decode(*self._columns(rows)) == 0]
        return damaged

    def copy_out(self, rows: Int64s) -> None:
        """Copies the plain blocks in `rows` from their staging memory to their slots (places in the
        arena)."""
        for row in rows.tolist():
            self._slots[row][:] = self._plain(row)

    def _plain(self, row: int) -> memoryview:
        at = int(self._at[row])
        return self._memory[at : at + int(self._sizes[row])]

    def _columns(self, rows: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        return self._begins[rows], self._sizes[rows], self._at[rows], self._rooms[rows]


def _sizes(slots: Sequence[memoryview]) -> Int64s:
    return np.array([len(slot) for slot in slots], np.int64)
