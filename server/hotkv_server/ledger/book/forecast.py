"""Forecasts the hits of larger caches: an endless cache, and a cache with some more memory.

Reports name each request's blocks. The forecast samples them by key. It stores which sampled keys
were ever seen, and runs two shadow caches that are scaled down as the sample is: a cache of the
arena's size, and a cache that is a step larger. Source of the sampling: Waldspurger et al.,
"Efficient MRC construction with SHARDS", FAST 2015, and "Cache modeling and optimization using
miniature simulations", USENIX ATC 2017.

Only misses are estimated: misses of the sample divided by its share. Hits are all tokens of full
blocks minus these misses. A prompt that every request contains then does not depend on luck: it
misses once, whether it is in the sample or not. Blocks are sampled, not requests. A key stands for
its block and all blocks before it, and leaves are evicted first. So the sampled blocks after the
first miss miss too, and the count of missed blocks has no bias.

Always true: memory is fixed. The shares only fall: they are halved when the sample grows too large.
A restart empties the shadows, but the seen keys survive.
"""

from dataclasses import dataclass

import numpy as np

from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.room.policies.shared import GhostTable, spread
from hotkv_server.ledger.book.accounts import Buckets
from hotkv_server.ledger.book.shadow import MakePolicy, Shadow

GIB = 1 << 30
STEP_SHARE = 8
"""The larger cache has an eighth more, and at least one GiB more. The gain of a smaller step would
be lost in the sampling error of a large arena."""
MAX_SHADOW_KEYS = 4096
MAX_SEEN = 1 << 16
SEEN_ROOM = 2
"""The table of seen keys has four places for each key, so that no bucket is full."""
LOW_32 = np.uint64(0xFFFF_FFFF)
NAMES = ("prompt_tokens", "block_tokens", "endless_missed", "now_missed", "more_missed")
"""Columns: tokens of prompts; tokens in their full blocks; and of these the tokens missed by an
endless cache, by a cache of the present size, and by a cache a step larger."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One request's blocks.

    keys: keys of its full blocks in chain order, uint64 [n]; the same for the same block after a
        restart.
    block_bytes: arena bytes of a block.
    num_hits: blocks that did hit, so that they count as reachable.
    may_keep: True if the node's policy may hold other blocks back and leave out some of these.
    """

    keys: Keys
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    num_hits: int
    may_keep: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecast as shares of the tokens of prompts.

    prompt_tokens: tokens that the forecast rests on; if 0, the shares are 0.
    ceiling_ratio: tokens that an endless cache would hit.
    step_bytes: size of the step for `gain_ratio`.
    gain_ratio: additional tokens that the arena would hit with `step_bytes` more.
    gib_gain_ratio: part of `gain_ratio` for one GiB.
    """

    prompt_tokens: int
    ceiling_ratio: float
    step_bytes: int
    gain_ratio: float
    gib_gain_ratio: float


class Forecast:
    """See the module. `sums`: the counts, in columns NAMES."""

    def __init__(
        self,
        make_policy: MakePolicy,
        minute: int,
        max_shadow_keys: int = MAX_SHADOW_KEYS,
        max_seen: int = MAX_SEEN,
    ) -> None:
        self.sums = Buckets(len(NAMES), minute)
        self.seen_share = self.shadow_share = 1.0
        self._max_seen, self._max_keys = max_seen, max_shadow_keys
        self._num_seen = 0
        self._seen = GhostTable(SEEN_ROOM * max_seen, is_lasting=True)
        self._shadows = tuple(Shadow(make_policy, max_shadow_keys) for _ in range(2))

    def __repr__(self) -> str:
        return (
            f"Forecast({self._num_seen} seen of {self.seen_share:.2g}, "
            f"{self._shadows} of {self.shadow_share:.2g})"
        )

    def observe(self, demand: Demand, capacity_bytes: int, now_s: float, minute: int) -> None:
        """Records a request that came while the arena had `capacity_bytes`."""
        low = spread(demand.keys) & LOW_32
        now_missed, more_missed = self._serve(demand, low, capacity_bytes, now_s)
        tokens = demand.block_tokens
        self.sums.add(
            np.array(
                (
                    demand.prompt_tokens,
                    len(demand.keys) * tokens,
                    self._see(demand, low) * tokens,
                    now_missed * tokens,
                    more_missed * tokens,
                ),
                np.float64,
            ),
            minute,
        )

    def _see(self, demand: Demand, low: Keys) -> float:
        """Marks blocks as seen. Returns an estimate of how many missed blocks were never seen
        before."""
        chosen = np.flatnonzero(low < _threshold(self.seen_share))
        keys = demand.keys[chosen]
        was_seen, _ = self._seen.take(keys)
        self._seen.remember(keys, np.zeros(len(keys), np.uint64))
        num_fresh = int(np.count_nonzero(~was_seen))
        missed = np.count_nonzero(~was_seen & (chosen >= demand.num_hits)) / self.seen_share
        self._num_seen += num_fresh
        while self._num_seen > self._max_seen:
            self.seen_share /= 2
            # A tag is the low half of the key's mix, except for its last bit.
            self._seen.drop_from(_threshold(self.seen_share))
            self._num_seen = len(self._seen)
        return float(missed)

    def _serve(
        self, demand: Demand, low: Keys, capacity_bytes: int, now_s: float
    ) -> tuple[float, float]:
        """Returns estimates of how many blocks the arena misses, and how many a larger arena
        misses."""
        sizes = (capacity_bytes, capacity_bytes + step_bytes(capacity_bytes))
        keys = demand.keys[low < _threshold(self.shadow_share)]
        while max(map(len, self._shadows)) + len(keys) > self._max_keys:
            self._thin_out()
            keys = demand.keys[low < _threshold(self.shadow_share)]
        share = self.shadow_share
        if not len(keys):
            return 0.0, 0.0
        hits = [
            shadow.serve(
                keys, demand.block_bytes, int(size * share), now_s, may_keep=demand.may_keep
            )
            for shadow, size in zip(self._shadows, sizes, strict=True)
        ]
        return (len(keys) - hits[0]) / share, (len(keys) - hits[1]) / share

    def _thin_out(self) -> None:
        """Halves the share of blocks that the shadows receive."""
        self.shadow_share /= 2
        for shadow in self._shadows:
            keys = shadow.keys
            shadow.drop(keys[(spread(keys) & LOW_32) >= _threshold(self.shadow_share)])

    def outlook(self, seconds: float, capacity_bytes: int, minute: int) -> Outlook:
        """Returns the forecast from the requests of the last `seconds`, as `Buckets.since`."""
        values = self.sums.since(seconds, minute)
        prompt, blocks, endless, now, more = values.tolist()
        step = step_bytes(capacity_bytes)
        if not prompt:
            return Outlook(0, 0.0, step, 0.0, 0.0)
        gain = max(0.0, now - more) / prompt
        ceiling = min(max(0.0, blocks - endless), blocks) / prompt
        return Outlook(int(prompt), ceiling, step, gain, gain * GIB / step)

    # Saving and restoring

    def seen(self) -> Keys:
        """Returns the seen keys, each as a number of its place in the table and its tag."""
        flat = self._seen.tags.reshape(-1)
        at = np.flatnonzero(flat)
        return at.astype(np.uint64) << np.uint64(32) | flat[at]

    def put_back(self, seen: Keys, seen_share: float) -> None:
        """Restores an earlier server's seen keys and their share. Ignores places that this table
        does not have, which occur only after a change of its size."""
        places = (seen >> np.uint64(32)).astype(np.int64)
        self._seen.put_back(places, (seen & LOW_32).astype(np.uint32))
        self._num_seen, self.seen_share = len(self._seen), seen_share

    def check_invariants(self) -> None:
        """Raises AssertionError if the sample is too large or miscounted."""
        assert self._num_seen <= self._max_seen, "too many keys were kept"
        self._seen.check_invariants()
        for shadow in self._shadows:
            shadow.check_invariants()
            low = spread(shadow.keys) & LOW_32
            assert (low < _threshold(self.shadow_share)).all(), "a key is not in the sample"


def step_bytes(capacity_bytes: int) -> int:
    """Returns by how many bytes the larger cache is larger."""
    return max(GIB, capacity_bytes // STEP_SHARE)


def _threshold(share: float) -> int:
    return int(share * (1 << 32))
