"""Hotness: recency plus the worth of frequency.

Per entry the time of its last use t and c = log2 of its uses, which count half as much after each
memory; heat = ±t + H·c, so that one doubling of uses is worth H seconds of recency. The duel
chooses H and the rest of the formula (`duel.Contender`) while serving; entries keep t and c, so a
change holds at once. Ghosts keep them for evicted blocks, four for each block of the capacity.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.demoted import DemotedEntries, others
from hotkv_server.cache.room.policies.duel import Duel
from hotkv_server.cache.room.policies.ghosts import GhostTable
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.queue import ColdQueue, Highest

TICKS_PER_S = 64
"""Resolution of t; 32 bits of it are two years."""
GHOSTS_PER_BLOCK = 4
KEPT_S = 1e9
"""Added to the heat of blocks whose time to live is not over."""
DEMOTED, DEMOTED_STEP = -1e9, -128.0
"""c of an entry that is demoted, and what each next one of its chain has besides: below any other
c, whatever a contender makes of it, and apart from each other in 32 bits."""
DEPTH_STEP = 4e-6
"""Each block of a chain has at least so much more in c than the one after it: of equals the leaf
is evicted first."""


class Hotness:
    """See the module. `_used` uint32 [capacity + 1]: ticks since the first use, 0 for an entry that
    it does not know; `_uses` float32: c."""

    def __init__(self, capacity: int) -> None:
        self._state = np.zeros(capacity + 1, np.uint64)
        halves = self._state.view(np.uint32).reshape(-1, 2)
        self._used = halves[:, 0]
        self._uses = halves.view(np.float32)[:, 1]
        self._ghosts = GhostTable(GHOSTS_PER_BLOCK * capacity)
        self._queues: dict[int, ColdQueue] = {}
        self._highest = Highest()
        self._first_s = np.inf
        self._num_known = 0
        self._latest = 0
        self._demoted = DemotedEntries(self._state)
        self.duel = Duel(capacity)
        self._kernels = native.require("hotkv_server.cache.room.policies.kernels")

    def __repr__(self) -> str:
        return f"Hotness({self._num_known} entries, {self._ghosts!r}, {self.duel!r})"

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        if not len(entries):
            return
        _, remembered = self._ghosts.take(keys)
        self._state[entries] = remembered
        self._num_known += len(entries)
        self._highest.add(entries)
        self._use(entries, keys, now_s, retention)

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        if len(entries):
            self._use(entries, keys, now_s, retention)

    def _use(self, entries: Entries, keys: Keys, now_s: float, retention: Retention) -> None:
        now = self._advance(now_s)
        until = max(now, self._ticks(now_s + retention.ttl_s))
        self._kernels.use(
            self._used,
            self._uses,
            entries,
            now,
            until,
            retention.priority,
            self._memory_ticks,
            DEPTH_STEP,
        )
        self._watch(keys, now_s)

    def refresh(self, entries: Entries, now_s: float) -> None:
        if len(entries):
            self._uses[entries[self._uses[entries] < DEMOTED / 2]] = 0.0
            now = self._advance(now_s)
            self._kernels.use(
                self._used, self._uses, entries, now, now, -np.inf, self._memory_ticks, DEPTH_STEP
            )

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        known = entries[self._used[entries] != 0]
        self._uses[known] = DEMOTED + DEMOTED_STEP * np.arange(len(known))
        # A time to live is over with this.
        self._used[known] = np.minimum(self._used[known], self._latest)
        self._demoted.add(known[::-1])

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        # What would not have fitted beside the blocks before it teaches nothing.
        keys = keys[: max(0, self._num_known - depth)]
        if not len(keys) or not self.duel.hold_s:
            return
        _, states = self._ghosts.take(keys)
        halves, now = states.view(np.uint32).reshape(-1, 2), self._advance(now_s)
        self._kernels.use(
            halves[:, 0],
            halves.view(np.float32)[:, 1],
            np.arange(len(keys), dtype=np.uint32),
            now,
            now,
            retention.priority,
            self._memory_ticks,
            DEPTH_STEP,
        )
        self._ghosts.remember(keys, states)
        self._watch(keys, now_s)

    def _watch(self, keys: Keys, now_s: float) -> None:
        """Shows keys that were asked for to the duel."""
        if self.duel.observe(keys, now_s, self._num_known):
            self._clear_queues()

    def allow_keeping(self, allowed: bool) -> None:
        if self.duel.allow_holding(allowed):
            self._clear_queues()

    def _clear_queues(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        gone_keys, gone_states = (
            np.empty(len(entries), np.uint64),
            np.empty(len(entries), np.uint64),
        )
        num_known = int(self._kernels.leave(self._state, entries, keys, gone_keys, gone_states))
        self._num_known -= num_known
        if evicted:
            self._ghosts.remember(gone_keys[:num_known], gone_states[:num_known])

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        return self._queue(slot_bytes).sweep(count, evictable)

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        first = self._demoted.take(count, evictable)
        held = None
        if keep_at_s is not None and self.duel.hold_s:
            held = partial(self._held, self._ticks(keep_at_s))
        rest = self._queue(slot_bytes).take(count - len(first), others(evictable, first), held)
        return np.concatenate((first, rest))

    def _held(self, now: int, entries: Entries) -> NDArray[np.bool_]:
        """Which entries were used so recently that the winner keeps them; `now` in ticks."""
        used = self._used[entries].astype(np.int64)
        held_ticks = int(self.duel.hold_s * TICKS_PER_S)
        # What was asked to be kept longer is warmer than these; it may go if all others have gone.
        return (used > now - held_ticks) & (used <= self._latest)

    def _queue(self, slot_bytes: int) -> ColdQueue:
        if slot_bytes not in self._queues:
            self._queues[slot_bytes] = ColdQueue(
                self._state, self._highest, self._members, self.heat
            )
        return self._queues[slot_bytes]

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        rule = self.duel.winner
        heat = np.empty(len(entries), np.float64)
        # Blocks that a request asked to keep are in use until then, whatever weight the formula
        # gives to recency.
        self._kernels.heat(
            self._used,
            self._uses,
            entries,
            rule.half_life_s,
            rule.most_doublings,
            rule.recency,
            1.0 / TICKS_PER_S,
            self._latest,
            KEPT_S,
            heat,
        )
        return heat

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        return self._used[entries] / TICKS_PER_S + self._first_s

    def _members(self, first: int, stop: int) -> Entries:
        return (self._used[first:stop].nonzero()[0] + first).astype(np.uint32)

    @property
    def _memory_ticks(self) -> float:
        return self.duel.winner.memory_s * TICKS_PER_S

    def _advance(self, now_s: float) -> int:
        """The time of a use, in ticks: not before another one."""
        if self._first_s == np.inf:
            self._first_s = now_s - 1.0
        self._latest = max(self._latest, self._ticks(now_s))
        return self._latest

    def _ticks(self, now_s: float) -> int:
        return max(1, min(int((now_s - self._first_s) * TICKS_PER_S), 0xFFFF_FFFF))

    def figures(self) -> dict[str, float]:
        winner = self.duel.winner
        return {
            "half_life_s": winner.half_life_s,
            "memory_s": winner.memory_s,
            "recency": winner.recency,
            "hold_s": self.duel.hold_s,
            "sample_ratio": self.duel.share,
        }

    def check_invariants(self) -> None:
        """Raises AssertionError if counts disagree."""
        assert self._num_known == int((self._used != 0).sum()), "known entries miscounted"
        self._ghosts.check_invariants()
        self.duel.check_invariants()
