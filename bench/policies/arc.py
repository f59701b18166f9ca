"""The ARC policy: one list of blocks used once, one of blocks used again. When a block with a ghost
is stored again, the list it was evicted from gets a larger share of the cache.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. The paper
handles one block at a time; here all blocks of a call use the shares as they were before it.
"""

from functools import partial

import numpy as np

from bench.policies.lru import StampedPolicy
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.shared import ColdQueues, GhostTable, others

ONCE, AGAIN = 1, 2


class ARC(StampedPolicy):
    """_list: ONCE, AGAIN, or 0 for an unknown entry; uint8 by entry number.
    _target: blocks that the list ONCE should hold.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._list = np.zeros(capacity + 1, np.uint8)
        self._num = {ONCE: 0, AGAIN: 0}
        self._ghosts = GhostTable(capacity)
        self._num_ghosts = {ONCE: 0, AGAIN: 0}
        self._target = 0.0
        self._queues = {
            number: ColdQueues(
                self._stamps.state, self._stamps.highest, partial(self._members, number), self.heat
            )
            for number in (ONCE, AGAIN)
        }

    def __repr__(self) -> str:
        return (
            f"ARC(once={self._num[ONCE]}, again={self._num[AGAIN]}, "
            f"target={self._target:.0f}, ghosts={self._num_ghosts})"
        )

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        found, values = self._ghosts.take(keys)
        once, again = int((values == ONCE).sum()), int((values == AGAIN).sum())
        if once:
            self._target += once * max(1.0, self._num_ghosts[AGAIN] / self._num_ghosts[ONCE])
        if again:
            self._target -= again * max(1.0, self._num_ghosts[ONCE] / self._num_ghosts[AGAIN])
        self._num_ghosts[ONCE] -= once
        self._num_ghosts[AGAIN] -= again
        self._num[AGAIN] += int(found.sum())
        self._num[ONCE] += int((~found).sum())
        self._target = min(max(self._target, 0.0), float(self._num[ONCE] + self._num[AGAIN]))
        self._list[entries] = np.where(found, AGAIN, ONCE)
        self._stamps.use(entries, now_s, retention.ttl_s)

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        promoted = int((self._list[np.unique(entries)] == ONCE).sum())
        self._num[ONCE] -= promoted
        self._num[AGAIN] += promoted
        self._list[entries] = AGAIN
        self._stamps.use(entries, now_s, retention.ttl_s)

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        lists = self._list[entries]
        for number in (ONCE, AGAIN):
            self._num[number] -= int((lists == number).sum())
        if evicted:
            gone = self._ghosts.remember(keys[lists != 0], lists[lists != 0].astype(np.uint64))
            for number in (ONCE, AGAIN):
                self._num_ghosts[number] += int((lists == number).sum()) - int(
                    (gone == number).sum()
                )
        self._list[entries] = 0
        self._stamps.clear(entries)

    def _victims(self, slot_bytes: int, count: int, evictable: Evictable) -> Entries:
        excess = max(0, self._num[ONCE] - int(self._target))
        chosen = self._take(slot_bytes, ONCE, min(count, excess), evictable)
        chosen = np.concatenate(
            (chosen, self._take(slot_bytes, AGAIN, count - len(chosen), evictable))
        )
        if len(chosen) == count:
            return chosen
        rest = self._take(
            slot_bytes,
            ONCE,
            count - len(chosen),
            others(evictable, chosen),
        )
        return np.concatenate((chosen, rest))

    def _take(self, slot_bytes: int, number: int, count: int, evictable: Evictable) -> Entries:
        return (
            self._queues[number]
            .of(slot_bytes)
            .take(count, lambda entries: evictable(entries) & (self._list[entries] == number))
        )

    def _members(self, number: int, first: int, stop: int) -> Entries:
        return (np.flatnonzero(self._list[first:stop] == number) + first).astype(np.uint32)

    def figures(self) -> dict[str, float]:
        return {
            "once_blocks": float(self._num[ONCE]),
            "again_blocks": float(self._num[AGAIN]),
            "once_target_blocks": self._target,
        }

    def check_invariants(self) -> None:
        values = self._ghosts.values[self._ghosts.tags != 0]
        for number in (ONCE, AGAIN):
            assert self._num[number] == int((self._list == number).sum()), "list miscounted"
            assert self._num_ghosts[number] == int((values == number).sum()), "ghosts miscounted"
