"""The eviction policy Hotness. It evicts the block with the lowest heat first. A block's heat is
the time of its last use, plus a bonus for frequent use.

The policy stores two numbers for each block: t, the time of its last use, and c, the log2 of its
number of uses. (A use counts half as much after each `memory_s` seconds.) From these it computes
heat = ±t + H·c, in seconds: twice as many uses count as much as a last use H seconds later. The
sign of t is a parameter too (`Contender.recency`). The heat itself is not stored, so new parameters
apply to all blocks at once. Ghosts (records of evicted blocks) store t and c too; there are four
for each block of the capacity.

Which parameters get the most hits depends on the traffic. So a `Duel` compares contenders: sets of
H (`half_life_s`) and the other parameters. Each contender has a shadow cache, a simulated cache
that stores keys without bytes. The policy uses the parameters of the contender whose shadow cache
has the most hits.
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

# The duel measures, while the cache serves, which setting of the hotness formula would get the most
# hits.
#
# Each contender is a setting of the policy's formula and has a shadow cache, which stores keys
# without bytes: the keys that the real cache would hold with this setting. Shadow caches see only a
# small sample of all keys, and are smaller than the real cache in the same proportion. After every
# round (ROUND_S), the contender whose shadow cache had the most hits becomes the setting of the
# real cache; hits of older rounds count less. Source of the sampling: Waldspurger et al., "Cache
# modeling and optimization using miniature simulations", USENIX ATC 2017.


ROUND_S = 60.0
KEEP = 0.5
"""At the end of each round (ROUND_S seconds), the scores of a `Duel` are multiplied by this factor
before the hits of the round are added. So old hits count less."""
MARGIN = 1.01
"""A contender (setting of the policy's formula) replaces the current winner only if it has more
than this many times the winner's hits."""
HOLD_MARGIN = 1.04
"""The score of a contender (setting of the policy's formula) that holds blocks back (`hold_s`) is
divided by this factor before scores are compared. Such a score is less certain: the contender's
shadow cache (simulated cache of keys) holds only a sample of the keys, so it counts hits of blocks
without knowing whether the cache would hold the blocks before them."""
SAMPLE_SHARE = 1 / 32
"""Share of all keys that the shadow caches (simulated caches of keys without bytes) see. The share
is larger while the real cache holds so few blocks that a shadow cache would hold less than
MIN_SHADOW_BLOCKS."""
MIN_SHADOW_BLOCKS = 128
MAX_SHADOW_BLOCKS = 2048
REGROW = 8
"""If the real cache comes to hold so few blocks that the share of sampled keys must grow by this
factor, all shadow caches (simulated caches of keys without bytes) start empty with the larger
share."""
WAYS = 8
KEYS_PER_BLOCK = 8
"""All shadow caches (simulated caches) share one table of sampled keys. For each block that a
shadow cache may hold, the table has this many places. A place has a key that some shadow cache
holds, or a key that was evicted from all shadow caches."""


LEAK = 1e-3
"""Weight of the last term, LEAK · c, in the formula of `Contender` for a block's heat. c (log2 of
the block's uses) has an upper bound in the other term, but not in this one. So this term orders
blocks that were used more often than the bound, and makes the first blocks of a chain hotter than
the last."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A setting of the formula heat = recency · (time of last use) + half_life_s · (min(c,
    most_doublings) + LEAK · c), in seconds.

    c is log2 of the number of uses; each use counts half as much after `memory_s`.

    half_life_s: small values order by recency, large values by frequency.
    most_doublings: bounds c. With 1, the formula distinguishes only blocks that were used again
        from other blocks. With 1 and a short `memory_s`, it distinguishes only blocks that were
        used again recently.
    recency: 1 or -1. With -1, frequency decides; of blocks with equal frequency, the most recently
        used is evicted first. This suits traffic that uses, again and again in the same order, more
        blocks than the cache can hold.
    hold_s: a block is not evicted within this time after its last use. If room could be made only
        by evicting such blocks, a new block is not stored. So if a conversation's next turn comes
        within this time, its blocks are still there; blocks of further conversations are not
        stored meanwhile.
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
"""Settings of the heat formula that the `Duel` compares, at most 16 (the number of bits in an
element of `Duel._holders`). The policy uses the first setting until another setting wins."""


class Duel:
    """Compares contenders (settings of the formula of `Contender`) by the hits of their shadow
    caches, which hold keys without bytes. All shadow caches see the same sample of keys.

    share: share of keys that are in the sample.
    current: index of the winning contender in `contenders`.

    Argument `capacity` of the constructor: the most blocks that the real cache can hold.
    """

    def __init__(self, capacity: int, contenders: tuple[Contender, ...] = CONTENDERS) -> None:
        self.contenders = contenders
        self.current = 0
        self._may_hold = True
        self.share = 1.0
        # Bounds of the number of blocks in the real cache within which `share` (the share of
        # sampled keys) need not change. With the value 0, the first use calls `_resample`, which
        # sets the bounds.
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
        """Seconds after a block's last use in which the block is held back (not evicted): the
        `hold_s` of the winning contender (setting of the policy's formula). 0 while the policy may
        not hold blocks back (`allow_holding`)."""
        return self.winner.hold_s if self._may_hold else 0.0

    @property
    def scores(self) -> NDArray[np.float64]:
        """The score of each contender (setting of the policy's formula). It is the number of hits
        in the contender's shadow cache (simulated cache of keys) up to the end of the last round
        (period of ROUND_S). Hits of older rounds count less."""
        return self._scores

    def observe(self, keys: Keys, now_s: float, num_resident: int) -> bool:
        """Records in all shadow caches (simulated caches of keys without bytes) that a request used
        some blocks, whether or not the real cache has them. If the round (ROUND_S seconds) is over,
        updates the scores and chooses the winner. Returns True if the winner changed.

        keys: the keys of the blocks, in the order of the prompt.
        num_resident: number of blocks in the real cache.
        """
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
        """Sets whether a contender (setting of the policy's formula) with a `hold_s` may win. Such
        a contender holds recently used blocks back from eviction. If `allowed` is False and such a
        contender is the winner, chooses another winner at once. Returns True if the winner changed.
        """
        self._may_hold = allowed
        if allowed or not self.winner.hold_s:
            return False
        before, self.current = self.current, int(np.argmax(self._worth()))
        return self.current != before

    def _worth(self) -> NDArray[np.float64]:
        """Returns a score for each contender (setting of the policy's formula); the contender with
        the highest score wins. A contender that holds blocks back from eviction (`hold_s` is not 0)
        needs a clear lead, so its score is divided by HOLD_MARGIN. If holding back is not allowed
        (`allow_holding`), its score is -inf."""
        holding = self._scores / HOLD_MARGIN if self._may_hold else -np.inf
        return np.where(self._rules[:, 3] > 0, holding, self._scores)

    def _resample(self, num_resident: int) -> None:
        """Adapts the share of sampled keys to `num_resident`, the number of blocks in the real
        cache.

        If the share falls, keys that are no longer in the sample are removed from all shadow caches
        (simulated caches of keys without bytes). If the share rises, all shadow caches are emptied,
        because they have not seen the uses of the keys that are new in the sample.
        """
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
        """Removes from all shadow caches (simulated caches of keys without bytes) the keys that are
        no longer in the sample, because `share` has fallen."""
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
        """Raises AssertionError if the arrays of the shadow caches (simulated caches of keys
        without bytes) disagree."""
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
    """Returns the share of all keys that the shadow caches (simulated caches of keys without bytes)
    sample while the real cache holds `num_resident` blocks. With more blocks the share is equal or
    smaller."""
    blocks = max(1, num_resident)
    return min(1.0, max(SAMPLE_SHARE, MIN_SHADOW_BLOCKS / blocks), MAX_SHADOW_BLOCKS / blocks)


# The policy


TICKS_PER_S = 64
"""Resolution of t, the time of a block's last use: t counts ticks of 1/64 second in 32 bits, which
last two years."""
GHOSTS_PER_BLOCK = 4
MAX_GHOSTS = 1 << 24
"""Most ghosts (records of evicted blocks) that the policy remembers; this many take 512 MiB. The
limit is needed for large disks. Capacities are computed for small blocks, so a disk of 1 TiB would
have ghosts of 8 GiB, most of them for blocks that were evicted very long ago."""
KEPT_S = 1e9
"""Added to the heat of blocks whose time to live (`Retention.ttl_s`) has not ended, so that these
blocks are evicted after all others."""
DEMOTED, DEMOTED_STEP = -1e9, -128.0
"""Values of c (log2 of the uses) for demoted entries, which are not expected to be used again. The
values are so low that every setting of the formula evicts these entries before all others. The
first entry of a demoted chain gets DEMOTED; for each next entry, DEMOTED_STEP is added, a
difference that 32-bit floats can represent."""
DEPTH_STEP = 4e-6
"""The c (log2 of the uses) of a block is at least this much larger than the c of the next block in
its chain. So among blocks with equal uses, the last block of a chain is evicted first."""


class Hotness:
    """The policy Hotness: evicts the block with the lowest heat first. The heat is computed from
    the time of the last use and the number of uses (see the module). Entry numbers go from 1 to
    `capacity`.

    The arrays have a value for each entry number. A tick is 1/TICKS_PER_S seconds.

    _used: time of the last use, uint32, in ticks since the first use of any entry; the end of the
        entry's time to live if that is later. 0 for an entry that the policy does not know.
    _uses: c (log2 of the uses), float32.
    _held_until: time until which `hold` holds the entry back, in ticks, uint32. Not reset when an
        entry number is reused, so a new block may be held back for the few seconds that are left.
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
        # If the time of use lies in the future, because the entry had a time to live, set it to
        # now: a demotion ends the time to live.
        self._used[known] = np.minimum(self._used[known], self._latest)
        self._demoted.add(known[::-1])

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        # Ignore blocks beyond the size of the whole cache, counted from the beginning of their
        # chain. The cache could not have stored them in any case, so their misses do not show
        # whether holding other blocks back from eviction is right.
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
        """Passes the keys of a request to the `Duel`, which compares settings of the policy's
        formula. If another setting wins now, empties the queues of blocks to evict (`ColdQueue`),
        because they are ordered by the earlier setting."""
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
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        first = self._demoted.take(count, evictable)
        held = None
        if keep_at_s is not None and self._num_known:
            now = self._ticks(keep_at_s)
            held = partial(self._held, now) if self._holds(now) else None
        rest = self._queues.of(slot_bytes).take(count - len(first), others(evictable, first), held)
        return np.concatenate((first, rest))

    def _held(self, now: int, entries: Entries) -> NDArray[np.bool_]:
        """Returns a mask of the entries (blocks) that are held back from eviction. These are
        entries that `hold` named, and entries that were used in the last `hold_s` seconds (a
        parameter of the policy, which comes from the setting that would have had the most hits
        lately). `now`: the present time in ticks."""
        used = self._used[entries].astype(np.int64)
        held_ticks = int(self.duel.hold_s * TICKS_PER_S)
        is_held = (used > now - held_ticks) | (self._held_until[entries] > now)
        # Leave out entries whose time to live (`Retention.ttl_s`) has not ended. They need not be
        # held back from eviction, because they are hotter than all other entries and so are evicted
        # last.
        return is_held & (used <= self._latest)

    def _holds(self, now: int) -> bool:
        """Returns True if any entry (block) may be held back from eviction at the time `now`, in
        ticks."""
        return self._may_keep and (self.duel.hold_s > 0 or self._last_hold > now)

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        rule = self.duel.winner
        heat = np.empty(len(entries), np.float64)
        # Until its time to live ends, a block gets KEPT_S more heat, whatever weight the formula
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
        """Returns the time of a use in ticks (of 1/TICKS_PER_S seconds). It never goes back, even
        if `now_s` does."""
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
        """Raises AssertionError if entries, ghosts (records of evicted blocks) or shadow caches
        (simulated caches of keys without bytes) disagree."""
        assert self._num_known == int((self._used != 0).sum()), "known entries miscounted"
        self._ghosts.check_invariants()
        self.duel.check_invariants()
