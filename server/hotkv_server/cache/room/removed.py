"""Keys of the blocks removed last, with the `Cause` of each, to tell why a request missed. Keys
beyond the last REMEMBERED_KEYS removals may be forgotten."""

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import Cause

REMEMBERED_KEYS = 1 << 16
MAX_FRESH = 1 << 12
"""The sorted copy of the ring is made anew after so many removals."""

CAUSE_BITS = 3
CAUSE = np.uint64((1 << CAUSE_BITS) - 1)
LOWER = np.uint64((REMEMBERED_KEYS << CAUSE_BITS) - 1)
"""Low bits of a key, which give way to position and cause in the sorted copy: about 2 of 1e9
other keys are taken for removed."""

Causes = NDArray[np.uint8]
"""Values of `Cause`, uint8."""


class RemovedKeys:
    def __init__(self) -> None:
        # A ring: the oldest key is at `_next`; unused positions are 0 in both arrays.
        self._keys: Keys = np.zeros(REMEMBERED_KEYS, np.uint64)
        self._causes: Causes = np.zeros(REMEMBERED_KEYS, np.uint8)
        self._next = 0
        # The ring as it was `_num_fresh` removals ago, sorted, which takes milliseconds. At
        # first one unused position.
        self._sorted = _sorted(self._keys[:1], self._causes[:1])
        self._num_fresh = 0

    def __repr__(self) -> str:
        return f"RemovedKeys({int(np.count_nonzero(self._causes))} of {REMEMBERED_KEYS})"

    def add(self, keys: Keys, cause: Cause) -> None:
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
        """NONE if not remembered. Up to MAX_FRESH keys that have left the ring may still be
        found."""
        if self._num_fresh > MAX_FRESH:
            # Rotated, so that the oldest key comes first.
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
    """Each key's upper bits, position and cause in 64 bits. Of equal keys, the one removed last
    is last."""
    places = np.arange(len(keys), dtype=np.uint64)
    return np.sort((keys & ~LOWER) | places << np.uint64(CAUSE_BITS) | causes)


def _found(keys: Keys, packed: Keys) -> Causes:
    """`packed`: from `_sorted`, not empty."""
    last = packed[np.searchsorted(packed, keys | LOWER, side="right") - 1]
    causes = np.where((last ^ keys) & ~LOWER == 0, last & CAUSE, 0)
    return causes.astype(np.uint8)
