"""Victims in rising order of heat, without keeping all entries in order.

A refill looks at entries by number from where the last one stopped, until it has seen enough that
may be evicted, and queues the coldest share, sorted; a victim costs amortised constant work. If one
slot size is rare among many entries a refill walks far: a tenth of a second over ten million, once
for many victims; `sweep` does it in parts before. An entry that was used since it was queued has
another state and is passed over, so a touch writes only its entry's state. An entry that came
since, or was used and is still the coldest, waits for the next refill.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.protocol import Entries, Evictable

SHARE = 16
"""A refill queues the coldest 1/16 of what it has seen."""
MIN_QUEUED = 4
"""A refill queues at least so many. Few: a colder block that comes later waits until these are
evicted."""
SWEEP_ENTRIES = 1 << 17
"""Entry numbers that are looked at in one part."""

Heat = Callable[[Entries], NDArray[np.float64]]
Members = Callable[[int, int], Entries]
"""Entries of the queue in a range of numbers."""


class Highest:
    """The highest entry number so far: sweeps end there."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def add(self, entries: Entries) -> None:
        if len(entries):
            self.number = max(self.number, int(entries.max()))


class ColdQueue:
    """One queue over the entries that `members(first, stop)` lists. `state` [capacity + 1]: changes
    whenever an entry is used or removed."""

    def __init__(
        self, state: NDArray[np.uint64], highest: Highest, members: Members, heat: Heat
    ) -> None:
        self._state = state
        self._highest = highest
        self._members = members
        self._heat = heat
        self._hand = 0
        self._entries: Entries = np.empty(0, np.uint32)
        self._states = np.empty(0, np.uint64)
        # True if a sweep has just found all there is to find.
        self._is_swept = False

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets the order: heat means something else from now on."""
        self._entries, self._states = self._entries[:0], self._states[:0]

    def sweep(self, count: int, evictable: Evictable) -> Iterator[None]:
        """Refills the queue in parts if it has too little for `take` with these arguments, which
        then need not."""
        head = self._entries[: 4 * count]
        if (
            np.count_nonzero((self._state[head] == self._states[: len(head)]) & evictable(head))
            < count
        ):
            yield from self._refill(count, evictable, [])
        # If it found enough, others may have taken or used some of it between two parts.
        self._is_swept = len(self._entries) < count

    def take(self, count: int, evictable: Evictable, held: Evictable | None = None) -> Entries:
        """The coldest evictable entries, at most `count`; pinned ones are passed over until the
        next refill.

        `held`: which of some entries are to stay; they keep their places, and the search for more
        ends at the first ones.
        """
        chosen: list[Entries] = []
        missing, refilled, self._is_swept = count, self._is_swept, False
        while missing > 0:
            if len(self._entries) < missing and not refilled:
                # The rest of the queue has the coldest again.
                for _ in self._refill(missing, evictable, chosen):
                    pass
                refilled = True
            head = self._entries[: 2 * missing]
            if not len(head):
                break
            usable = (self._state[head] == self._states[: len(head)]) & evictable(head)
            if held is not None and (staying := usable & held(head)).any():
                places = (usable & ~staying).nonzero()[0][:missing]
                chosen.append(head[places])
                usable[places] = False
                left = np.append(usable, np.ones(len(self._entries) - len(head), np.bool_))
                self._entries, self._states = self._entries[left], self._states[left]
                break
            places = usable.nonzero()[0][:missing]
            chosen.append(head[places])
            # An entry leaves the queue only if it was looked at and passed over, or taken.
            used = len(head) if len(places) < missing else int(places[-1]) + 1
            self._entries, self._states = self._entries[used:], self._states[used:]
            missing -= len(places)
        if len(chosen) == 1:
            return chosen[0]
        return np.concatenate(chosen) if chosen else np.empty(0, np.uint32)

    def _refill(self, count: int, evictable: Evictable, chosen: list[Entries]) -> Iterator[None]:
        end = self._highest.number + 1
        parts: list[Entries] = []
        # A hand of its own: another refill may run between two parts, and no entry may be seen
        # twice.
        num_seen, walked, hand = 0, 0, self._hand if self._hand < end else 0
        while walked < end and num_seen < SHARE * count:
            stop = min(hand + SWEEP_ENTRIES, end, hand + end - walked)
            seen, found = self._coldest_of(self._members(hand, stop), count, evictable)
            parts.append(found)
            num_seen += seen
            walked += stop - hand
            hand = stop if stop < end else 0
            yield
        self._hand = hand
        entries = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if chosen:
            entries = entries[~np.isin(entries, np.concatenate(chosen))]
        entries, heat = self._coldest(entries, _kept(num_seen, count))
        self._entries = entries[heat.argsort(kind="stable")]
        self._states = self._state[self._entries]

    def _coldest_of(
        self, entries: Entries, count: int, evictable: Evictable
    ) -> tuple[int, Entries]:
        """How many entries were compared, and the coldest of them that may be evicted."""
        keep = _kept(len(entries), count)
        if len(entries) > 4 * keep:
            # Warmer entries are asked about only if colder ones may not be evicted.
            coldest, _ = self._coldest(entries, 2 * keep)
            found = coldest[evictable(coldest)]
            if len(found) >= keep:
                return len(entries), found
        found = entries[evictable(entries)]
        return len(found), found

    def _coldest(self, entries: Entries, count: int) -> tuple[Entries, NDArray[np.float64]]:
        """The `count` coldest of the entries and their heat, in no order."""
        heat = self._heat(entries)
        if len(entries) <= count:
            return entries, heat
        places = heat.argpartition(count)[:count]
        return entries[places], heat[places]


def _kept(num_seen: int, count: int) -> int:
    return max(MIN_QUEUED, count, num_seen // SHARE)
