"""The policy `LRU`, and what other policies use too: `Stamps`, and `StampedPolicy`, the base
class of policies with stamps."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.shared import ColdQueues, DemotedEntries, Highest, others

STEP_S = 1e-7
"""Between the stamps of two blocks of a call. Above the spacing of float64 near 2e8 (DEMOTED_S),
so that demoted stamps differ too."""
DEMOTED_S = 2e8
"""Subtracted from the stamp of a demoted entry; larger than any stamp."""


class Stamps:
    """By entry; the earliest is evicted first. 0 for none, negative if demoted.

    A use sets it to its time plus `ttl_s`; earlier blocks of a call get later stamps.
    """

    def __init__(self, capacity: int) -> None:
        self.highest = Highest()
        self.stamp_s = np.zeros(capacity + 1, np.float64)
        self._latest_s = 0.0
        self.demoted = DemotedEntries(self.state)

    @property
    def state(self) -> NDArray[np.uint64]:
        """The stamps' bits, by which a `ColdQueue` sees that an entry was used since it was
        queued."""
        return self.stamp_s.view(np.uint64)

    def use(self, entries: Entries, now_s: float, ttl_s: float = 0.0) -> None:
        """In prompt order. A stamp never falls."""
        self.highest.add(entries)
        start_s = max(now_s, self._latest_s)
        stamps = start_s + np.arange(len(entries), 0, -1) * STEP_S
        self._latest_s = start_s + (len(entries) + 1) * STEP_S
        self.stamp_s[entries] = np.maximum(self.stamp_s[entries], stamps + ttl_s)

    def demote(self, entries: Entries) -> None:
        """In prompt order; the last goes first. Skips entries without a stamp."""
        entries = entries[self.stamp_s[entries] > 0]
        self.stamp_s[entries] -= DEMOTED_S
        self.demoted.add(entries[::-1])

    def restore(self, entries: Entries) -> None:
        """Undoes demotions without a use, for a policy whose `touch` does not call `use`."""
        demoted = entries[self.stamp_s[entries] < 0]
        self.stamp_s[demoted] += DEMOTED_S

    def used_s(self, entries: Entries) -> NDArray[np.float64]:
        """Stamps, as if not demoted."""
        stamp_s = self.stamp_s[entries]
        return np.where(stamp_s < 0, stamp_s + DEMOTED_S, stamp_s)

    def clear(self, entries: Entries) -> None:
        self.stamp_s[entries] = 0.0

    def members(self, first: int, stop: int) -> Entries:
        """Entries from `first` to `stop` - 1 with a stamp."""
        return (self.stamp_s[first:stop].nonzero()[0] + first).astype(np.uint32)


class StampedPolicy:
    """Base class of policies that never hold back. Demoted entries go first; `_victims` chooses
    among the others."""

    def __init__(self, capacity: int) -> None:
        self._stamps = Stamps(capacity)

    def refresh(self, entries: Entries, now_s: float) -> None:
        self._stamps.use(entries, now_s)

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        self._stamps.demote(entries)

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None: ...

    def allow_keeping(self, allowed: bool) -> None: ...

    def hold(self, entries: Entries, until_s: float) -> None: ...

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Not for `victims` that decide from which of several queues they evict; LRU has one."""
        return iter(())

    def victims(
        self,
        slot_bytes: int,
        count: int,
        evictable: Evictable,
        *,
        refusable_at_s: float | None = None,
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
    """Evicts the least recently used block first; ignores priorities."""

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

    def check_invariants(self) -> None: ...
