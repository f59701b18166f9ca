"""S3-FIFO. New blocks enter the small queue, which gets a tenth of the room. At its front, a block
used at least USES_TO_STAY times moves to the main queue instead of being evicted; at the front of
the main queue, a used block moves to its end. A block with a ghost, left by the small queue, enters
the main queue.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.policies.lru import StampedPolicy
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.shared import ColdQueues, GhostTable

SMALL, MAIN = 1, 2
SMALL_SHARE = 0.1
MAX_USES = 3
USES_TO_STAY = 2


class S3FIFO(StampedPolicy):
    """`last_used_s` is when an entry entered its queue: later uses have no time here.

    _queue_of: SMALL, MAIN, or 0 for an unknown entry; uint8.
    _uses: uses that still count, at most MAX_USES; set to 0 by a move to the main queue or by
        `demote`, one less each time the entry is kept in the main queue.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue_of = np.zeros(capacity + 1, np.uint8)
        self._uses = np.zeros(capacity + 1, np.uint8)
        self._num = {SMALL: 0, MAIN: 0}
        self._ghosts = GhostTable(capacity)
        self._queues = {
            number: ColdQueues(
                self._stamps.state, self._stamps.highest, partial(self._members, number), self.heat
            )
            for number in (SMALL, MAIN)
        }
        self._now_s = 0.0

    def __repr__(self) -> str:
        return f"S3FIFO(small={self._num[SMALL]}, main={self._num[MAIN]}, {self._ghosts!r})"

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        found, _ = self._ghosts.take(keys)
        self._queue_of[entries] = np.where(found, MAIN, SMALL)
        self._num[MAIN] += int(found.sum())
        self._num[SMALL] += int((~found).sum())
        self._uses[entries] = 0
        self._now_s = now_s
        self._stamps.use(entries, now_s, retention.ttl_s)

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        self._now_s = now_s
        self._uses[entries] = np.minimum(MAX_USES, self._uses[entries] + 1)
        self._stamps.restore(entries)

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Only undoes demotions: the order is that of arrival."""
        self._stamps.restore(entries)

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        self._uses[entries] = 0
        super().demote(entries, keys, now_s)

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        queue_of = self._queue_of[entries]
        for number in (SMALL, MAIN):
            self._num[number] -= int((queue_of == number).sum())
        if evicted:
            leaving = keys[queue_of == SMALL]
            self._ghosts.remember(leaving, np.zeros(len(leaving), np.uint64))
        self._queue_of[entries] = 0
        self._stamps.clear(entries)

    def _victims(self, slot_bytes: int, count: int, evictable: Evictable) -> Entries:
        chosen: Entries = np.empty(0, np.uint32)
        exhausted = {SMALL: False, MAIN: False}
        while len(chosen) < count and not all(exhausted.values()):
            taken_small = int((self._queue_of[chosen] == SMALL).sum())
            crowded = self._num[SMALL] - taken_small > SMALL_SHARE * (
                self._num[SMALL] + self._num[MAIN] - len(chosen)
            )
            number = SMALL if (crowded and not exhausted[SMALL]) or exhausted[MAIN] else MAIN
            looked_at = self._take(slot_bytes, number, count - len(chosen), evictable, chosen)
            exhausted[number] = not len(looked_at)
            stay = self._uses[looked_at] >= (USES_TO_STAY if number == SMALL else 1)
            self._stay(looked_at[stay], number)
            if stay.any():
                exhausted[MAIN] = False
            chosen = np.concatenate((chosen, looked_at[~stay]))
        return chosen

    def _take(
        self, slot_bytes: int, number: int, count: int, evictable: Evictable, chosen: Entries
    ) -> Entries:
        def may_go(entries: Entries) -> NDArray[np.bool_]:
            here: NDArray[np.bool_] = self._queue_of[entries] == number
            return evictable(entries) & here & ~np.isin(entries, chosen)

        return self._queues[number].of(slot_bytes).take(count, may_go)

    def _stay(self, entries: Entries, number: int) -> None:
        """Moves entries from the queue `number` to the end of the main queue, in their order."""
        self._uses[entries] = 0 if number == SMALL else self._uses[entries] - 1
        self._num[number] -= len(entries)
        self._num[MAIN] += len(entries)
        self._queue_of[entries] = MAIN
        self._stamps.use(entries[::-1], self._now_s)

    def _members(self, number: int, first: int, stop: int) -> Entries:
        return (np.flatnonzero(self._queue_of[first:stop] == number) + first).astype(np.uint32)

    def figures(self) -> dict[str, float]:
        return {"small_blocks": float(self._num[SMALL]), "main_blocks": float(self._num[MAIN])}

    def check_invariants(self) -> None:
        for number in (SMALL, MAIN):
            assert self._num[number] == int((self._queue_of == number).sum()), "queue miscounted"
