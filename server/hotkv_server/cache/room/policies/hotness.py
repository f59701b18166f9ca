"""The eviction policy Hotness: evicts the block with the lowest heat first.

For each block it stores t, the time of the last use, and c, the log2 of its uses, of which each
counts half after `memory_s`. Heat is ±t + H·c, in seconds: twice as many uses count as a use H
seconds later. It is not stored, so new parameters apply at once. Ghosts have t and c too.

Which parameters get the most hits depends on the traffic. A `Duel` compares *contenders*, sets
of parameters, by *shadow caches*, which hold keys without bytes; the one with the most hits is
used.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.policies.shared import (
    ColdQueues,
    DemotedEntries,
    GhostTable,
    Highest,
    others,
    spread,
)

# The duel. Shadow caches see a small sample of all keys, and are smaller in the same proportion:
# Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX ATC
# 2017. After every ROUND_S the contender with the most hits wins; hits of older rounds count
# less.


ROUND_S = 60.0
KEEP = 0.5
"""Factor of the old scores at the end of a round."""
MARGIN = 1.01
"""A contender must have more than this many times the winner's hits."""
HOLD_MARGIN = 1.04
"""Divides the score of a contender that holds back: its shadow cache counts hits of sampled
blocks without knowing whether the blocks before them would be there."""
SAMPLE_SHARE = 1 / 32
"""Of all keys; more while a shadow cache would hold less than MIN_SHADOW_BLOCKS."""
MIN_SHADOW_BLOCKS = 128
MAX_SHADOW_BLOCKS = 2048
REGROW = 8
"""When the sample must grow by this factor, all shadow caches start empty."""
WAYS = 8
KEYS_PER_BLOCK = 8
"""Places in the common table for each block of a shadow cache: keys that some hold, or all have
evicted."""


LEAK = 1e-3
"""Weight of an unbounded c: orders blocks used more often than the bound, and the first blocks
of a chain above the last."""


@dataclass(frozen=True, slots=True)
class Contender:
    """heat = recency · (time of last use) + half_life_s · (min(c, most_doublings) + LEAK · c), in
    seconds.

    half_life_s: small values order by recency, large ones by frequency.
    memory_s: after which a use counts half in c.
    most_doublings: with 1, only blocks used again stand out; with a short `memory_s` too, only
        recent reuse.
    recency: 1 or -1. With -1, of equally frequent blocks the most recently used goes first, for
        traffic that cycles through more blocks than fit.
    hold_s: a block stays so long after its last use; new ones are refused instead, so that a
        conversation's next turn finds its blocks.
    """

    half_life_s: float
    memory_s: float = 900.0
    most_doublings: float = 64.0
    recency: float = 1.0
    hold_s: float = 0.0


CONTENDERS = (
    Contender(120.0),
    Contender(1.0),
    Contender(30.0),
    Contender(300.0),
    Contender(900.0),
    Contender(1000.0, most_doublings=1.0),
    Contender(1000.0, memory_s=100.0, most_doublings=1.0),
    Contender(10_000.0, recency=-1.0),
    Contender(0.1, hold_s=2.0),
    Contender(0.1, hold_s=5.0),
    Contender(0.1, hold_s=20.0),
    Contender(0.1, hold_s=80.0),
)
"""At most 16, the bits of `Duel._holders`. The first is used until another wins."""


class Duel:
    """share: of keys in the sample.
    current: index of the winner.
    """

    def __init__(self, capacity: int, contenders: tuple[Contender, ...] = CONTENDERS) -> None:
        self.contenders = contenders
        self.current = 0
        self._may_hold = True
        self.share = 1.0
        # Real blocks for which `share` may stay. 0 makes the first use call `_resample`.
        self._too_few = self._too_many = 0
        num_buckets = max(8, -(-int(KEYS_PER_BLOCK * 2 * capacity * _share_for(capacity)) // WAYS))
        leaves = 1 << (num_buckets * WAYS - 1).bit_length()
        self._rules = np.array(
            [(c.half_life_s, c.most_doublings, c.recency, c.hold_s) for c in contenders]
        )
        memories_s = sorted({c.memory_s for c in contenders})
        self._memories_s = np.array(memories_s)
        self._memory_of = np.array([memories_s.index(c.memory_s) for c in contenders])
        self._keys = np.zeros((num_buckets, WAYS), np.uint64)
        self._used_s = np.zeros((num_buckets, WAYS), np.float64)
        self._uses = np.zeros((len(memories_s), num_buckets, WAYS), np.float64)
        self._holders = np.zeros((num_buckets, WAYS), np.uint16)
        self._trees = np.full((len(contenders), 2 * leaves), np.inf)
        self._held = np.zeros(len(contenders), np.int64)
        self._hits = np.zeros(len(contenders), np.int64)
        self._scores = np.zeros(len(contenders))
        self._round_ends_s = -np.inf
        self._kernels = native.require("hotkv_server.cache.room.policies.queue_kernels")

    def __repr__(self) -> str:
        return (
            f"Duel({self.contenders[self.current]}, sample of {self.share:.2g}, "
            f"scores={self._scores.round(1).tolist()})"
        )

    @property
    def winner(self) -> Contender:
        return self.contenders[self.current]

    @property
    def hold_s(self) -> float:
        """0 while the policy may not hold back."""
        return self.winner.hold_s if self._may_hold else 0.0

    @property
    def scores(self) -> NDArray[np.float64]:
        """Hits up to the last round's end; older ones count less."""
        return self._scores

    def observe(self, keys: Keys, now_s: float, num_resident: int) -> bool:
        """A request used these keys, in prompt order, whether or not the real cache has them.
        Ends a round that is over; True if the winner changed. `num_resident`: real blocks."""
        if not self._too_few <= num_resident < self._too_many:
            self._resample(num_resident)
        limit = max(1, round(num_resident * self.share))
        self._kernels.observe(
            self._keys,
            self._used_s,
            self._uses,
            self._holders,
            self._trees,
            self._held,
            self._hits,
            self._rules,
            self._memories_s,
            self._memory_of,
            keys,
            int(self.share * (1 << 32)),
            limit,
            now_s,
        )
        if now_s < self._round_ends_s:
            return False
        return self._end_round(now_s)

    def allow_holding(self, allowed: bool) -> bool:
        """True if the winner changed."""
        self._may_hold = allowed
        if allowed or not self.winner.hold_s:
            return False
        before, self.current = self.current, int(np.argmax(self._worth()))
        return self.current != before

    def _worth(self) -> NDArray[np.float64]:
        """-inf for a contender that may not win."""
        holding = self._scores / HOLD_MARGIN if self._may_hold else -np.inf
        return np.where(self._rules[:, 3] > 0, holding, self._scores)

    def _resample(self, num_resident: int) -> None:
        """Adapts `share`. When it rises, all shadow caches are emptied: they have not seen the
        new keys' uses."""
        if num_resident < self._too_few:
            self.share = 1.0
            self._keys[:], self._holders[:] = 0, 0
        while _share_for(num_resident) <= self.share / 2:
            self.share /= 2
        half, regrown = self.share / 2, REGROW * self.share
        self._too_many = math.ceil(
            (MIN_SHADOW_BLOCKS if half >= SAMPLE_SHARE else MAX_SHADOW_BLOCKS) / half
        )
        most = (MIN_SHADOW_BLOCKS if regrown > SAMPLE_SHARE else MAX_SHADOW_BLOCKS) / regrown
        self._too_few = math.floor(most) + 1 if regrown <= 1.0 else 0
        self._thin_out()

    def _thin_out(self) -> None:
        """Removes the keys that have left the sample."""
        left_out = (
            (spread(self._keys) & np.uint64(0xFFFF_FFFF)) >= int(self.share * (1 << 32))
        ) | (self._keys == 0)
        self._keys[left_out], self._holders[left_out] = 0, 0
        leaves = self._trees.shape[1] // 2
        for number, tree in enumerate(self._trees):
            tree[leaves : leaves + left_out.size][left_out.reshape(-1)] = np.inf
            for level in range(leaves.bit_length() - 2, -1, -1):
                nodes = np.arange(1 << level, 2 << level)
                tree[nodes] = np.minimum(tree[2 * nodes], tree[2 * nodes + 1])
            self._held[number] = np.count_nonzero(self._holders >> number & 1)

    def _end_round(self, now_s: float) -> bool:
        started = self._round_ends_s > -np.inf
        self._round_ends_s = now_s + ROUND_S
        if not started:
            return False
        self._scores = KEEP * self._scores + self._hits
        self._hits[:] = 0
        worth = self._worth()
        best = int(np.argmax(worth))
        if worth[best] <= MARGIN * worth[self.current]:
            return False
        self.current = best
        return True

    def check_invariants(self) -> None:
        holders = self._holders.reshape(-1)
        leaves = self._trees.shape[1] // 2
        for number in range(len(self.contenders)):
            held = holders >> number & 1 == 1
            tree = self._trees[number]
            assert int(held.sum()) == self._held[number], "held keys miscounted"
            assert np.array_equal(np.isfinite(tree[leaves : leaves + len(held)]), held), (
                "a held key has no leaf, or a leaf no key"
            )
            inner = np.arange(1, leaves)
            assert np.array_equal(tree[inner], np.minimum(tree[2 * inner], tree[2 * inner + 1])), (
                "a node is not the least of its children"
            )


def _share_for(num_resident: int) -> float:
    """Never rises with more blocks."""
    blocks = max(1, num_resident)
    return min(1.0, max(SAMPLE_SHARE, MIN_SHADOW_BLOCKS / blocks), MAX_SHADOW_BLOCKS / blocks)


# The policy


TICKS_PER_S = 64
"""Resolution of t, which counts in 32 bits for two years."""
GHOSTS_PER_BLOCK = 4
MAX_GHOSTS = 1 << 24
"""They take 512 MiB. Large disks need the limit: capacities are for small blocks, so 1 TiB would
have ghosts of 8 GiB, most of them very old."""
KEPT_S = 1e9
"""More heat until `Retention.ttl_s` ends, so that such blocks go last."""
DEMOTED, DEMOTED_STEP = -1e9, -128.0
"""c of demoted entries, which go first with every contender: DEMOTED for the first of a chain,
DEMOTED_STEP more for each next, a step that float32 can represent."""
DEPTH_STEP = 4e-6
"""A block's c is at least so much above the next one's in its chain, so that the end goes first."""


class Hotness:
    """By entry number; times in ticks since the first use of any entry.

    _used: last use, uint32; the end of the time to live if later. 0 if unknown.
    _uses: c, float32.
    _held_until: of `hold`. Not reset when a number is reused: a new block may be held back for
        the rest.
    """

    def __init__(self, capacity: int) -> None:
        self._state = np.zeros(capacity + 1, np.uint64)
        halves = self._state.view(np.uint32).reshape(-1, 2)
        self._used = halves[:, 0]
        self._uses = halves.view(np.float32)[:, 1]
        self._ghosts = GhostTable(min(GHOSTS_PER_BLOCK * capacity, MAX_GHOSTS))
        self._highest = Highest()
        self._queues = ColdQueues(self._state, self._highest, self._members, self.heat)
        self._first_s = np.inf
        self._num_known = 0
        self._latest = 0
        self._held_until = np.zeros(capacity + 1, np.uint32)
        self._last_hold = 0
        self._may_keep = True
        self._demoted = DemotedEntries(self._state)
        self.duel = Duel(capacity)
        self._kernels = native.require("hotkv_server.cache.room.policies.queue_kernels")

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
        # A demotion ends a time to live, which lies in the future.
        self._used[known] = np.minimum(self._used[known], self._latest)
        self._demoted.add(known[::-1])

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        # Blocks beyond the size of the cache would not fit in any case: their misses say nothing
        # about holding back.
        keys = keys[: max(0, self._num_known - depth)]
        if not len(keys) or not self._holds(self._ticks(now_s)):
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
        """A new winner empties the queues, which its predecessor ordered."""
        if self.duel.observe(keys, now_s, self._num_known):
            self._queues.clear()

    def allow_keeping(self, allowed: bool) -> None:
        self._may_keep = allowed
        if self.duel.allow_holding(allowed):
            self._queues.clear()

    def hold(self, entries: Entries, until_s: float) -> None:
        if len(entries) and self._num_known:
            until = self._ticks(until_s)
            self._held_until[entries] = np.maximum(self._held_until[entries], until)
            self._last_hold = max(self._last_hold, until)

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
        return self._queues.of(slot_bytes).sweep(count, evictable)

    def victims(
        self,
        slot_bytes: int,
        count: int,
        evictable: Evictable,
        *,
        refusable_at_s: float | None = None,
    ) -> Entries:
        first = self._demoted.take(count, evictable)
        held = None
        if refusable_at_s is not None and self._num_known:
            now = self._ticks(refusable_at_s)
            held = partial(self._held, now) if self._holds(now) else None
        rest = self._queues.of(slot_bytes).take(count - len(first), others(evictable, first), held)
        return np.concatenate((first, rest))

    def _held(self, now: int, entries: Entries) -> NDArray[np.bool_]:
        """By `hold`, or used within the winner's `hold_s`."""
        used = self._used[entries].astype(np.int64)
        held_ticks = int(self.duel.hold_s * TICKS_PER_S)
        is_held = (used > now - held_ticks) | (self._held_until[entries] > now)
        # Without those in their time to live, which go last anyway.
        return is_held & (used <= self._latest)

    def _holds(self, now: int) -> bool:
        """True if any entry may be held back at tick `now`."""
        return self._may_keep and (self.duel.hold_s > 0 or self._last_hold > now)

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        rule = self.duel.winner
        heat = np.empty(len(entries), np.float64)
        # KEPT_S counts whatever weight the formula gives to recency.
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
        """Never goes back, even if `now_s` does."""
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
        assert self._num_known == int((self._used != 0).sum()), "known entries miscounted"
        self._ghosts.check_invariants()
        self.duel.check_invariants()
