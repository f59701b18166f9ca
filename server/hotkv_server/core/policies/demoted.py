"""Entries that were demoted: evicted before all others until they are used again.

A policy marks a demoted entry in its state, so that a use undoes the demotion by writing the state
anew, and hands the entry to a `DemotedEntries`, which its `victims` asks first. Always true: an
entry whose state has changed since is never taken from here; memory is bounded by the capacity,
whatever is demoted and used in turn.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from hotkv_server.core.policies.protocol import Entries, Evictable

LOOKED_ENTRIES = 1 << 14
"""Entries that one `take` looks at, at most. Those of another slot size, and pinned ones, are
passed over; they wait behind the others then."""
PART_ENTRIES = 1 << 12


class DemotedEntries:
    """Demoted entries with their states, the first demoted first. `state` [capacity + 1]: changes
    whenever an entry is used or removed."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state
        self._parts: deque[tuple[Entries, NDArray[np.uint64]]] = deque()
        self._most = LOOKED_ENTRIES

    def __len__(self) -> int:
        return sum(len(entries) for entries, _ in self._parts)

    def add(self, entries: Entries) -> None:
        """Adds entries whose state says that they are demoted, in the order of their eviction."""
        for start in range(0, len(entries), PART_ENTRIES):
            part = entries[start : start + PART_ENTRIES]
            self._parts.append((part, self._state[part]))
        if len(self._parts) * PART_ENTRIES > self._most:
            self._drop_changed()

    def _drop_changed(self) -> None:
        """Forgets entries that were used or removed since, and those that are listed twice."""
        entries = np.concatenate([entries for entries, _ in self._parts])
        states = np.concatenate([states for _, states in self._parts])
        entries = entries[self._state[entries] == states]
        entries = entries[np.sort(np.unique(entries, return_index=True)[1])]
        self._parts.clear()
        for start in range(0, len(entries), PART_ENTRIES):
            part = entries[start : start + PART_ENTRIES]
            self._parts.append((part, self._state[part]))
        self._most = max(LOOKED_ENTRIES, 2 * len(self._parts) * PART_ENTRIES)

    def take(self, count: int, evictable: Evictable) -> Entries:
        """Up to `count` evictable entries that are still demoted. What is taken is known here no
        more, evicted or not."""
        chosen: Entries = np.empty(0, np.uint32)
        passed: list[tuple[Entries, NDArray[np.uint64]]] = []
        num_looked = 0
        while self._parts and len(chosen) < count and num_looked < LOOKED_ENTRIES:
            entries, states = self._parts.popleft()
            num_looked += len(entries)
            current = self._state[entries] == states
            if len(chosen):
                current &= ~np.isin(entries, chosen)
            entries, states = entries[current], states[current]
            places = np.flatnonzero(evictable(entries))[: count - len(chosen)]
            chosen = np.concatenate((chosen, entries[places]))
            left = np.ones(len(entries), np.bool_)
            left[places] = False
            if left.any():
                passed.append((entries[left], states[left]))
        if num_looked < LOOKED_ENTRIES:
            self._parts.extendleft(reversed(passed))
        else:
            self._parts.extend(passed)
        return chosen


def others(evictable: Evictable, chosen: Entries) -> Evictable:
    """What may be evicted besides those that are chosen already."""
    if not len(chosen):
        return evictable
    return lambda entries: evictable(entries) & ~np.isin(entries, chosen)
