"""The duel: finds out while serving which of several ways to weigh frequency against recency would
hit most.

Each contender is a setting of the hotness formula. A small sample of keys has one shadow cache per
contender, scaled down as the sample is, which keeps track of what that contender would hold. Every
epoch the contender with the most hits, older epochs counting less, becomes the setting of the
cache. Shadows hold keys and no bytes. Source of the sampling: Waldspurger et al., "Cache modeling
and optimization using miniature simulations", USENIX ATC 2017.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.cache.room.policies.ghosts import spread
from hotkv_server.cache.room.policies.protocol import Keys

EPOCH_S = 60.0
KEEP = 0.5
"""What an epoch's hits count for one epoch later."""
MARGIN = 1.01
"""By how much a contender must win to take over."""
HOLD_MARGIN = 1.04
"""By how much a contender that holds blocks back must win over those that do not, besides: its
shadow has no prefixes, so its hits are the least sure."""
SAMPLE_SHARE = 1 / 32
"""Share of keys that are sampled; more while the cache holds so few blocks that a shadow would have
less than MIN_SHADOW_BLOCKS."""
MIN_SHADOW_BLOCKS = 128
MAX_SHADOW_BLOCKS = 2048
REGROW = 8
"""The sample begins anew if so few blocks are left that they ask for a share this many times as
large."""
WAYS = 8
KEYS_PER_BLOCK = 8
"""Keys that the sample remembers for each block of a shadow: what the shadows hold, and ghosts."""


LEAK = 1e-3
"""Weight of doublings above the most that count: enough to keep an order among such blocks, and the
heads of chains above their tails."""


@dataclass(frozen=True, slots=True)
class Contender:
    """heat = recency · (time of last use) + half_life_s · (min(c, most_doublings) + LEAK · c), in
    seconds.

    c is log2 of the uses, each counting half as much after `memory_s`.

    Small half-lives order by recency, large ones by frequency. With most_doublings 1 it matters
    only whether a block was used again, and with a short memory whether that was soon. With recency
    -1 frequency decides and, of equals, the older stay: a loop that is larger than the cache needs
    this. With hold_s a block is not evicted so soon after its use: what finds no other room is not
    stored. Sessions whose next turn comes within that time keep their blocks, and others wait.
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
"""At most sixteen. The first holds until another has won."""


class Duel:
    """Shadow caches of all contenders over one sample."""

    def __init__(self, capacity: int, contenders: tuple[Contender, ...] = CONTENDERS) -> None:
        self.contenders = contenders
        self.current = 0
        self._may_hold = True
        self.share = 1.0
        self._too_few, self._too_many = 0, 2 * MIN_SHADOW_BLOCKS
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
        self._epoch_ends_s = -np.inf
        self._kernels = native.require("hotkv_server.cache.room.policies.kernels")

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
        """For how long blocks are held: what the winner asks for, 0 while none may hold."""
        return self.winner.hold_s if self._may_hold else 0.0

    @property
    def scores(self) -> NDArray[np.float64]:
        """Hits of each contender, older epochs counting less."""
        return self._scores

    def observe(self, keys: Keys, now_s: float, num_resident: int) -> bool:
        """Notes that blocks of a chain were asked for, hit or not, while the cache held
        `num_resident` blocks. Returns True if the winner changed."""
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
        if now_s < self._epoch_ends_s:
            return False
        return self._end_epoch(now_s)

    def allow_holding(self, allowed: bool) -> bool:
        """Whether contenders that hold blocks may win from now on; one that has won and may not is
        left at once. Returns True if the winner changed."""
        self._may_hold = allowed
        if allowed or not self.winner.hold_s:
            return False
        before, self.current = self.current, int(np.argmax(self._worth()))
        return self.current != before

    def _worth(self) -> NDArray[np.float64]:
        """Scores [contenders] by which the winner is chosen."""
        holding = self._scores / HOLD_MARGIN if self._may_hold else -np.inf
        return np.where(self._rules[:, 3] > 0, holding, self._scores)

    def _resample(self, num_resident: int) -> None:
        """Brings the share of sampled keys to what so many blocks ask for.

        Keys that are not in a smaller sample leave all shadows; a larger one begins with empty
        shadows.
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
        """Takes keys that are not in the sample out of all shadows."""
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

    def _end_epoch(self, now_s: float) -> bool:
        started = self._epoch_ends_s > -np.inf
        self._epoch_ends_s = now_s + EPOCH_S
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
        """Raises AssertionError if holders, counts and trees disagree."""
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
    """Share of the keys to sample while the cache holds so many blocks; never rises with them."""
    blocks = max(1, num_resident)
    return min(1.0, max(SAMPLE_SHARE, MIN_SHADOW_BLOCKS / blocks), MAX_SHADOW_BLOCKS / blocks)
