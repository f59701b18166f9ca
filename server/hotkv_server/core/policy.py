"""Which blocks go first: a small protocol, and LRU.

A policy orders ready entries by coldness; it never decides whether an entry may be evicted (pins do) and never touches
the index. Entries of one touch are in chain order and are touched tail to head, so that leaves are the colder ones.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Entries = NDArray[np.uint32]
Candidates = Callable[[], Entries]
Evictable = Callable[[Entries], NDArray[np.bool_]]


class Policy(Protocol):
    """Order of eviction over entry numbers. No clock: `now_s` is passed in and never goes back."""

    def touch(self, entries: Entries, now_s: float) -> None:
        """Notes a use, or the arrival, of entries in chain order."""

    def forget(self, entries: Entries) -> None:
        """Drops what is known of entries that are gone."""

    def victims(self, slot_bytes: int, count: int, candidates: Candidates, evictable: Evictable) -> Entries:
        """Up to `count` evictable entries, coldest first.

        `slot_bytes`: names a queue of its own for each slot size. `evictable`: which of some entries may go, of that size.
        `candidates`: lists all ready entries of that size; it is slow.
        """

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        """When entries were last used, in seconds of `now_s`; orders entries by coldness."""


class LRU:
    """Least recently used, by time stamps in an array.

    Victims come from a queue of the coldest candidates, built by one partition over all and taken as long as their stamps still
    hold; so a victim costs amortised work, and a touch only writes stamps.
    """

    MIN_QUEUE = 1024
    QUEUE_SHARE = 16
    """A refill queues the coldest 1/16 of all candidates."""
    STEP_S = 1e-7
    """Between the stamps of two blocks of one touch; above the spacing of float64 near 1e8 seconds."""

    def __init__(self, capacity: int) -> None:
        self._stamp_s = np.zeros(capacity + 1, np.float64)
        self._latest_s = 0.0
        self._queues: dict[int, tuple[Entries, NDArray[np.float64]]] = {}

    def __repr__(self) -> str:
        return f"LRU(queued={sum(len(entries) for entries, _ in self._queues.values())})"

    def touch(self, entries: Entries, now_s: float) -> None:
        start_s = max(now_s, self._latest_s)
        self._stamp_s[entries] = start_s + np.arange(len(entries), 0, -1) * self.STEP_S
        self._latest_s = start_s + (len(entries) + 1) * self.STEP_S

    def forget(self, entries: Entries) -> None:
        self._stamp_s[entries] = 0.0

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        return self._stamp_s[entries]

    def victims(self, slot_bytes: int, count: int, candidates: Candidates, evictable: Evictable) -> Entries:
        chosen: list[Entries] = []
        missing = count
        refilled = False
        while missing > 0:
            entries, stamps = self._queues.get(slot_bytes, (np.empty(0, np.uint32), np.empty(0)))
            if not len(entries):
                if refilled:
                    break
                self._refill(slot_bytes, missing, candidates, evictable, chosen)
                refilled = True
                continue
            head, head_stamps = entries[: 2 * missing], stamps[: 2 * missing]
            good = head[(self._stamp_s[head] == head_stamps) & evictable(head)][:missing]
            # Only what was looked at and passed over, or taken, leaves the queue.
            used = len(head) if len(good) < missing else int(np.flatnonzero(head == good[-1])[0]) + 1
            self._queues[slot_bytes] = (entries[used:], stamps[used:])
            chosen.append(good)
            missing -= len(good)
        return np.concatenate(chosen) if chosen else np.empty(0, np.uint32)

    def _refill(self, slot_bytes: int, count: int, candidates: Candidates, evictable: Evictable, chosen: list[Entries]) -> None:
        """Queues the coldest entries; all candidates are asked for only where the coldest of any size hold too few."""
        entries = np.flatnonzero(self._stamp_s).astype(np.uint32)
        keep = max(self.MIN_QUEUE, 2 * count, len(entries) // self.QUEUE_SHARE)
        found = self._eligible(self._coldest(entries, keep), evictable, chosen)
        if len(found) < count:
            found = self._coldest(self._eligible(candidates(), evictable, chosen), keep)
        stamps = self._stamp_s[found]
        order = np.argsort(stamps, kind="stable")
        self._queues[slot_bytes] = (found[order], stamps[order])

    @staticmethod
    def _eligible(entries: Entries, evictable: Evictable, chosen: list[Entries]) -> Entries:
        """Entries that may go and are not chosen yet."""
        found = entries[evictable(entries)]
        return found[~np.isin(found, np.concatenate(chosen))] if chosen else found

    def _coldest(self, entries: Entries, count: int) -> Entries:
        """The `count` coldest of the entries, in no order."""
        if len(entries) <= count:
            return entries
        return entries[np.argpartition(self._stamp_s[entries], count)[:count]]
