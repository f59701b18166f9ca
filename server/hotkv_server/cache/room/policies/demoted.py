"""Entries that were demoted: evicted before all others until they are used again.

A policy marks a demoted entry in its state, so that a use undoes the demotion by writing the state
anew, and hands the entry to a `DemotedEntries`, which its `victims` asks first. Always true: an
entry whose state has changed since is never taken from here, and none is taken twice; memory is
bounded by the capacity, whatever is demoted and used in turn; no call looks at more entries than it
was given and some parts of PART_ENTRIES.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.protocol import Entries, Evictable

LOOKED_ENTRIES = 1 << 14
"""Entries that one `take` looks at, at most. Those of another slot size, and pinned ones, are
passed over; they wait behind the others then."""
PART_ENTRIES = 1 << 12
COMPACTED_PARTS = 2
"""Parts that are compacted for each one that begins: twice as many go as come."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries [n], at most PART_ENTRIES, with their states and numbers when they were added."""

    entries: Entries
    states: NDArray[np.uint64]
    numbers: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.entries)

    def at(self, chosen: NDArray[np.bool_]) -> "_Part":
        return _Part(self.entries[chosen], self.states[chosen], self.numbers[chosen])

    def __add__(self, other: "_Part") -> "_Part":
        return _Part(
            np.concatenate((self.entries, other.entries)),
            np.concatenate((self.states, other.states)),
            np.concatenate((self.numbers, other.numbers)),
        )


class DemotedEntries:
    """Demoted entries with their states, the first demoted first. `state` [capacity + 1]: changes
    whenever an entry is used or removed."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state
        # By entry: the number with which it was added last. Memory comes with the first demotion of
        # an entry nearby.
        self._last = np.zeros(len(state), np.uint32)
        self._num_added = 0
        self._parts: deque[_Part] = deque()
        # The part that is compacted next.
        self._next = 0

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, entries: Entries) -> None:
        """Adds entries whose state says that they are demoted, in the order of their eviction. One
        that is listed twice stands at its first place; one that was added before comes anew."""
        for start in range(0, len(entries), PART_ENTRIES):
            some = entries[start : start + PART_ENTRIES]
            numbers = np.arange(self._num_added, self._num_added + len(some)).astype(np.uint32)
            self._num_added += len(some)
            # Of an entry that is listed twice numpy keeps what is assigned last.
            self._last[some[::-1]] = numbers[::-1]
            self._append(self._valid(_Part(some, self._state[some], numbers)))

    def _append(self, part: _Part) -> None:
        if self._parts and len(self._parts[-1]) + len(part) <= PART_ENTRIES:
            self._parts[-1] += part
            return
        self._parts.append(part)
        for _ in range(COMPACTED_PARTS):
            self._compact_next()

    def _compact_next(self) -> None:
        """Drops from one part what was used, removed or added again since, and joins it with the
        part before if both fit into one."""
        at = self._next if self._next < len(self._parts) else 0
        part = self._parts[at] = self._valid(self._parts[at])
        if at and len(self._parts[at - 1]) + len(part) <= PART_ENTRIES:
            self._parts[at - 1] += part
            del self._parts[at]
            at -= 1
        self._next = at + 1

    def _valid(self, part: _Part) -> _Part:
        """What is still demoted, each entry where it was added last."""
        is_last = self._last[part.entries] == part.numbers
        return part.at(is_last & (self._state[part.entries] == part.states))

    def take(self, count: int, evictable: Evictable) -> Entries:
        """Up to `count` evictable entries that are still demoted. What is taken is known here no
        more, evicted or not."""
        chosen: list[Entries] = [np.empty(0, np.uint32)]
        passed: list[_Part] = []
        num_looked = 0
        while self._parts and count and num_looked < LOOKED_ENTRIES:
            part = self._parts.popleft()
            num_looked += len(part)
            part = self._valid(part)
            places = np.flatnonzero(evictable(part.entries))[:count]
            count -= len(places)
            chosen.append(part.entries[places])
            left = np.ones(len(part), np.bool_)
            left[places] = False
            if left.any():
                passed.append(part.at(left))
        if num_looked < LOOKED_ENTRIES:
            self._parts.extendleft(reversed(passed))
        else:
            self._parts.extend(passed)
        return np.concatenate(chosen)


def others(evictable: Evictable, chosen: Entries) -> Evictable:
    """What may be evicted besides those that are chosen already."""
    if not len(chosen):
        return evictable
    return lambda entries: evictable(entries) & ~np.isin(entries, chosen)
