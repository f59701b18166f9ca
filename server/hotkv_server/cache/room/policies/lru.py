"""The policy `LRU` (least recently used), and two classes that other policies use too: `Stamps`,
the time stamps of entries (blocks), and `StampedPolicy`, the base class of policies with such
stamps."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.shared import ColdQueues, DemotedEntries, Highest, others

STEP_S = 1e-7
"""Distance, in seconds, between the time stamps of two blocks of the same call. It is larger than
the spacing of float64 numbers near 2e8 (DEMOTED_S), so the stamps of demoted blocks differ too."""
DEMOTED_S = 2e8
"""Subtracted, in seconds, from the time stamp of a demoted entry (block), so that the entry is
evicted before all others. Larger than any stamp."""


class Stamps:
    """A time stamp for each entry; the entry with the earliest stamp is evicted first. The stamp is
    0 if the entry has none, and negative if the entry is demoted (marked to be evicted first).

    A use sets the stamp to the time of the use plus the time to live (`ttl_s`). Of two uses without
    a time to live, the later use gives the later stamp. Within a call, a block gets a later stamp
    than the blocks after it in its prompt.
    """

    def __init__(self, capacity: int) -> None:
        self.highest = Highest()
        self.stamp_s = np.zeros(capacity + 1, np.float64)
        self._latest_s = 0.0
        self.demoted = DemotedEntries(self.state)

    @property
    def state(self) -> NDArray[np.uint64]:
        """The bits of the time stamps as integers: a view of `stamp_s`. A `ColdQueue` (queue of the
        next blocks to evict) compares them to find out whether an entry (block) was used since it
        was queued."""
        return self.stamp_s.view(np.uint64)

    def use(self, entries: Entries, now_s: float, ttl_s: float = 0.0) -> None:
        """Stamps entries (blocks), given in the order of their prompt, with the time `now_s` plus
        `ttl_s`. The stamp of an entry never falls."""
        self.highest.add(entries)
        start_s = max(now_s, self._latest_s)
        stamps = start_s + np.arange(len(entries), 0, -1) * STEP_S
        self._latest_s = start_s + (len(entries) + 1) * STEP_S
        self.stamp_s[entries] = np.maximum(self.stamp_s[entries], stamps + ttl_s)

    def demote(self, entries: Entries) -> None:
        """Marks entries (blocks) that have a stamp as demoted: they are evicted before all others.
        `entries`: in the order of their prompt; the last of them will be evicted first."""
        entries = entries[self.stamp_s[entries] > 0]
        self.stamp_s[entries] -= DEMOTED_S
        self.demoted.add(entries[::-1])

    def restore(self, entries: Entries) -> None:
        """Undoes the demotion of entries (a mark by which they are evicted first): they get the
        stamp back that they had before. A policy whose `touch` does not call `use` calls this
        method instead, since a use ends a demotion."""
        demoted = entries[self.stamp_s[entries] < 0]
        self.stamp_s[demoted] += DEMOTED_S

    def used_s(self, entries: Entries) -> NDArray[np.float64]:
        """Returns the time stamp of each entry (block); for a demoted entry (marked to be evicted
        first), the stamp that it had before its demotion."""
        stamp_s = self.stamp_s[entries]
        return np.where(stamp_s < 0, stamp_s + DEMOTED_S, stamp_s)

    def clear(self, entries: Entries) -> None:
        self.stamp_s[entries] = 0.0

    def members(self, first: int, stop: int) -> Entries:
        """Returns the entries (blocks) numbered `first` to `stop` - 1 that have a stamp."""
        return (self.stamp_s[first:stop].nonzero()[0] + first).astype(np.uint32)


class StampedPolicy:
    """Base class of the policies with `Stamps`: the methods that are the same in all of them. These
    policies evict demoted entries (marked by `demote`) first; `_victims` chooses among the other
    entries (blocks). Entry numbers go from 1 to `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._stamps = Stamps(capacity)

    def refresh(self, entries: Entries, now_s: float) -> None:
        self._stamps.use(entries, now_s)

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        self._stamps.demote(entries)

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Does nothing. A policy that refuses to evict some blocks learns here which new blocks
        found no room; LRU, ARC and S3-FIFO never refuse to evict a block."""

    def allow_keeping(self, allowed: bool) -> None:
        """Does nothing. The method allows or forbids a policy to refuse to evict blocks; LRU, ARC
        and S3-FIFO never do so."""

    def hold(self, entries: Entries, until_s: float) -> None:
        """Does nothing. The method asks a policy not to evict blocks before a time; LRU, ARC and
        S3-FIFO never refuse to evict a block."""

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Prepares nothing, because `victims` decides from which of several queues it evicts
        blocks. LRU, which has one queue, overrides this method."""
        return iter(())

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        first = self._stamps.demoted.take(count, evictable)
        rest = self._victims(slot_bytes, count - len(first), others(evictable, first))
        return np.concatenate((first, rest))

    def _victims(self, slot_bytes: int, count: int, evictable: Evictable) -> Entries:
        raise NotImplementedError

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        return self._stamps.stamp_s[entries]

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        return self._stamps.used_s(entries)


class LRU(StampedPolicy):
    """Evicts the least recently used entry (block) first. Ignores priorities. An entry with a time
    to live (`Retention.ttl_s`) counts as in use until that time ends."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queues = ColdQueues(
            self._stamps.state, self._stamps.highest, self._stamps.members, self.heat
        )

    def __repr__(self) -> str:
        return f"LRU(queued={len(self._queues)})"

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        self._stamps.use(entries, now_s, retention.ttl_s)

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        self._stamps.use(entries, now_s, retention.ttl_s)

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        self._stamps.clear(entries)

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        return self._queues.of(slot_bytes).sweep(count, evictable)

    def _victims(self, slot_bytes: int, count: int, evictable: Evictable) -> Entries:
        return self._queues.of(slot_bytes).take(count, evictable)

    def figures(self) -> dict[str, float]:
        return {}

    def check_invariants(self) -> None:
        """Does nothing: there are no counts that could disagree with the stamps."""
