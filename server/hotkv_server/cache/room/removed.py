"""Remembers why blocks were removed from the cache: the keys of the blocks that were removed last,
each with the cause of its removal.

Always true: a key that was removed several times has the cause of its last removal. Keys beyond the
last REMEMBERED_KEYS removals may be forgotten.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import Cause

REMEMBERED_KEYS = 1 << 16
"""Number of removed keys that are remembered."""
MAX_FRESH = 1 << 12
"""`RemovedKeys.causes` searches a sorted copy of the removed blocks' keys. If more keys than this
were added since the copy was made, it first makes a new copy."""

CAUSE_BITS = 3
CAUSE = np.uint64((1 << CAUSE_BITS) - 1)
LOWER = np.uint64((REMEMBERED_KEYS << CAUSE_BITS) - 1)
"""Mask of the low bits of a key. The sorted copy of the keys stores a key's position and cause in
place of these bits, so they are not compared. About 2 of 1e9 keys that were not removed are
therefore mistaken for removed keys."""

Causes = NDArray[np.uint8]
"""Values of `Cause` (why a block was removed), uint8."""


class RemovedKeys:
    """Remembers the keys of the blocks that were removed last, and why each was removed, in a ring
    buffer. So the server can later say why a request missed a block."""

    def __init__(self) -> None:
        # The ring. The oldest key is at position `_next`; unused positions hold 0 in both arrays.
        self._keys: Keys = np.zeros(REMEMBERED_KEYS, np.uint64)
        self._causes: Causes = np.zeros(REMEMBERED_KEYS, np.uint8)
        self._next = 0
        # A sorted copy of the ring, as it was `_num_fresh` removals ago. `causes` is called for
        # each reported request and searches the copy, because sorting all keys takes milliseconds.
        # At first the copy has a single unused position.
        self._sorted = _sorted(self._keys[:1], self._causes[:1])
        self._num_fresh = 0

    def __repr__(self) -> str:
        return f"RemovedKeys({int(np.count_nonzero(self._causes))} of {REMEMBERED_KEYS})"

    def add(self, keys: Keys, cause: Cause) -> None:
        """Remembers that the blocks with these keys were removed for this cause."""
        last = keys[-REMEMBERED_KEYS:]
        at = self._next
        self._next = (at + len(last)) % REMEMBERED_KEYS
        self._num_fresh = min(self._num_fresh + len(last), REMEMBERED_KEYS)
        fitting = min(len(last), REMEMBERED_KEYS - at)
        self._keys[at : at + fitting] = last[:fitting]
        self._keys[: len(last) - fitting] = last[fitting:]
        self._causes[at : at + fitting] = cause
        self._causes[: len(last) - fitting] = cause

    def causes(self, keys: Keys) -> Causes:
        """Returns the `Cause` of the last removal of each key; `Cause.NONE` for a key that is not
        remembered. Up to MAX_FRESH keys that are no longer in the ring may still be found: they are
        in the sorted copy of the ring, which is made anew only after MAX_FRESH removals."""
        if self._num_fresh > MAX_FRESH:
            # Sort a copy of the ring, rotated so that the oldest key comes first.
            self._sorted = _sorted(
                np.roll(self._keys, -self._next), np.roll(self._causes, -self._next)
            )
            self._num_fresh = 0
        found = _found(keys, self._sorted)
        if self._num_fresh:
            last = np.arange(self._next - self._num_fresh, self._next) % REMEMBERED_KEYS
            fresh = _found(keys, _sorted(self._keys[last], self._causes[last]))
            found = np.where(fresh != Cause.NONE, fresh, found)
        return found


def _sorted(keys: Keys, causes: Causes) -> Keys:
    """Packs the upper bits of each key, its position in `keys` and its cause into 64 bits. Returns
    the packed values sorted, for the binary search of `_found`. Of equal keys, the key with the
    highest position comes last: it was removed last."""
    places = np.arange(len(keys), dtype=np.uint64)
    return np.sort((keys & ~LOWER) | places << np.uint64(CAUSE_BITS) | causes)


def _found(keys: Keys, packed: Keys) -> Causes:
    """Returns the cause of the last removal of each key; `Cause.NONE` for a key that is not in
    `packed`. `packed`: sorted 64-bit values, each the upper bits of a removed key with its position
    and its cause in the low bits (`_sorted`); not empty."""
    last = packed[np.searchsorted(packed, keys | LOWER, side="right") - 1]
    causes = np.where((last ^ keys) & ~LOWER == 0, last & CAUSE, 0)
    return causes.astype(np.uint8)
