"""Remembers the keys that were removed last, and why each was removed.

Always true: a key that was removed several times has the cause of its last removal. Keys beyond the
last REMEMBERED_KEYS removals may be forgotten.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import Cause

REMEMBERED_KEYS = 1 << 16
"""Removed keys that are remembered."""
MAX_FRESH = 1 << 12
"""Number of removals after which the next call of `causes` rebuilds the sorted copy."""

CAUSE_BITS = 3
CAUSE = np.uint64((1 << CAUSE_BITS) - 1)
LOWER = np.uint64((REMEMBERED_KEYS << CAUSE_BITS) - 1)
"""Bits of a key that are not compared, because the sorted copy stores place and cause in them. So
about 2 of 1e9 keys that were not removed are mistaken for removed keys."""

Causes = NDArray[np.uint8]
"""Values of `Cause`."""


class RemovedKeys:
    """The keys that were removed last, in a ring."""

    def __init__(self) -> None:
        # `_next` is the place of the oldest key. The keys and causes of the ring's free places
        # are 0.
        self._keys: Keys = np.zeros(REMEMBERED_KEYS, np.uint64)
        self._causes: Causes = np.zeros(REMEMBERED_KEYS, np.uint8)
        self._next = 0
        # A sorted copy, `_num_fresh` removals old. Each report of a request searches it, and
        # sorting all keys takes milliseconds.
        self._sorted = _sorted(self._keys, self._causes)
        self._num_fresh = 0

    def __repr__(self) -> str:
        return f"RemovedKeys({int(np.count_nonzero(self._causes))} of {REMEMBERED_KEYS})"

    def add(self, keys: Keys, cause: Cause) -> None:
        """Remembers keys that were removed."""
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
        """Returns why each key [n] was removed; `Cause.NONE` for a key that is not remembered. May
        remember up to MAX_FRESH older keys than REMEMBERED_KEYS."""
        if self._num_fresh > MAX_FRESH:
            # From the oldest to the newest.
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
    them sorted; of equal keys, the one that was removed last comes last."""
    places = np.arange(len(keys), dtype=np.uint64)
    return np.sort((keys & ~LOWER) | places << np.uint64(CAUSE_BITS) | causes)


def _found(keys: Keys, packed: Keys) -> Causes:
    """Returns the cause of the last removal of each key [n]; `Cause.NONE` for a key that is not in
    `packed` (the result of `_sorted`, not empty)."""
    last = packed[np.searchsorted(packed, keys | LOWER, side="right") - 1]
    causes = np.where((last ^ keys) & ~LOWER == 0, last & CAUSE, 0)
    return causes.astype(np.uint8)
