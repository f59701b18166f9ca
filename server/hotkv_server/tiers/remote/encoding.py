"""A `Client` that encodes (compresses) bfloat16 blocks to 12 bits per value for an inner client.

Blocks that don't shrink (fp8, float32, noise, small slots) are stored plain under their own key,
encoded ones under `encoded_key` in `room_bytes`, so a reader knows the size. It asks for the
encoded form first, then for the plain one. Encoding is deterministic: all nodes use the same key.

Blocks larger than the staging memory move plain, directly between store and slot. Always true:
for all others the inner client uses only staging memory, which is freed only when it can't write
there any more.
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
    """`connect` with an `EncodingClient`, or as it is without `staged`."""
    if staged is None:
        return connect
    return lambda until_s: EncodingClient(connect(until_s), staged)


class EncodingClient:
    """See the module. Without staging memory in time, a block's code is not set. Seals cover the
    stored bytes."""

    def __init__(self, inner: Client, staged: Staged) -> None:
        self._inner = inner
        self._staged = staged
        # When it last got staging memory; infinity while it waits for some.
        self._staged_s = 0.0

    def __repr__(self) -> str:
        return f"EncodingClient({self._inner!r}, {self._staged!r})"

    @property
    def moved_s(self) -> float:
        """Infinity during a wait for staging memory, which is none for the store."""
        return max(self._inner.moved_s, self._staged_s)

    def is_fresh(self) -> bool:
        return self._inner.is_fresh()

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
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
        """What can't be decoded is CORRUPT, and deleted. Each inner read checks the generations
        after its blocks, so the last check holds for all."""
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
        self._inner.forget([*map(encoded_key, keys), *keys], until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        return self._inner.generations(fingerprints, until_s)

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        return self._inner.raise_generation(fingerprint, floor, until_s, is_retry)

    def close(self) -> None:
        self._inner.close()

    def _is_too_large(self, slots: Sequence[memoryview]) -> bool:
        return not self._staged.fits(sum(map(len, slots)), is_write=False)

    @contextlib.contextmanager
    def _part(
        self, keys: Sequence[bytes], slots: Sequence[memoryview], until_s: float, *, is_write: bool
    ) -> Iterator["_Part | None"]:
        """None if the blocks have no bytes, or no staging memory gets free by `until_s`."""
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
            # Before the memory is freed: late bytes must not reach another part.
            self._inner.close()
            raise
        finally:
            self._staged.give(place, num_bytes, is_write=is_write)

    def _read(
        self, part: "_Part", expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks for each block, encoded if it may be; then for the plain form of those absent."""
        is_encoded = part.may_be_encoded
        # Not yet in `codes`: if this raises, found blocks are only in staging memory.
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
    """A request's n blocks with staging memory of their slots' sizes, which either form fits.

    `place`: offset of the first.
    `may_be_encoded` [n]: encoding is useful and possible.
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
        """Keys and memory of the stored forms of the blocks `rows`. `is_encoded`: over all
        blocks."""
        keys = [encoded_key(self.keys[n]) if is_encoded[n] else self.keys[n] for n in rows.tolist()]
        begins = self._at[rows]
        ends = begins + np.where(is_encoded, self._rooms, self._sizes)[rows]
        places = zip(begins.tolist(), ends.tolist(), strict=True)
        return keys, [self._memory[begin:end] for begin, end in places]

    def encode(self) -> BoolMask:
        """Encodes or copies each block to staging memory. Mask of the encoded ones."""
        tried, is_encoded = np.flatnonzero(self.may_be_encoded), self.may_be_encoded.copy()
        is_encoded[tried] = self._staged.encode(*self._columns(tried)) > 0
        for row in np.flatnonzero(~is_encoded).tolist():
            self._plain(row)[:] = self._slots[row]
        return is_encoded

    def decode(self, rows: Int64s) -> Int64s:
        """Decodes `rows` to their slots. Returns those that can't be decoded."""
        damaged: Int64s = rows[self._staged.decode(*self._columns(rows)) == 0]
        return damaged

    def copy_out(self, rows: Int64s) -> None:
        """Copies plain `rows` to their slots."""
        for row in rows.tolist():
            self._slots[row][:] = self._plain(row)

    def _plain(self, row: int) -> memoryview:
        at = int(self._at[row])
        return self._memory[at : at + int(self._sizes[row])]

    def _columns(self, rows: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        return self._begins[rows], self._sizes[rows], self._at[rows], self._rooms[rows]


def _sizes(slots: Sequence[memoryview]) -> Int64s:
    return np.array([len(slot) for slot in slots], np.int64)
