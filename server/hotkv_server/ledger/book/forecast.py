"""Forecasts the hits of larger caches: of an endless cache, and of a cache with some more memory.

Engines report the block keys of each request. The forecast uses a sample of the keys. It records
which sampled keys have been seen. It also simulates two shadow caches (`shadow`): a cache of the
arena's size, and a cache that is a step larger. The sizes of both are multiplied by the sample's
share of all keys. Source of the sampling: Waldspurger et al., "Efficient MRC construction with
SHARDS", FAST 2015, and "Cache modeling and optimization using miniature simulations", USENIX ATC
2017.

The number of missed blocks is estimated as the missed blocks of the sample divided by the sample's
share. Hits are all tokens of full blocks minus these misses. Estimating the misses instead of the
hits has an advantage: a prompt that many requests share misses only once, so it hardly matters
whether its blocks are in the sample.

The sample consists of blocks, not of requests. A key depends on its block and all blocks before it,
and blocks at the ends of prompts are evicted first. So if a block of a prompt misses, the sampled
blocks after it miss too, and the estimate has no bias.

Always true: memory is fixed. The seen keys and the shadow caches each have a sample. A sample's
share of all keys only falls: it is halved when the sample grows too large. A restart empties the
shadow caches, but the seen keys survive it.
"""

from dataclasses import dataclass, replace

import numpy as np

from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.room.policies.shared import GhostTable, spread
from hotkv_server.ledger.book.accounts import Buckets
from hotkv_server.ledger.book.shadow import MakePolicy, Shadow

GIB = 1 << 30
STEP_SHARE = 8
"""The larger cache has 1 / STEP_SHARE more memory than the arena, but at least one GiB more. With a
large arena, the gain of a smaller step could not be distinguished from the sampling error."""
MAX_SHADOW_KEYS = 4096
"""Most keys of blocks in a shadow cache (simulated cache)."""
MAX_SEEN = 1 << 16
"""Most keys in the sample of seen keys (keys of blocks that requests have used)."""
SEEN_ROOM = 2
"""Number of keys for which the table of seen keys (keys of blocks that requests have used) is
built, as a multiple of MAX_SEEN. With this reserve, the table's buckets do not overflow."""
LOW_32 = np.uint64(0xFFFF_FFFF)
NAMES = ("prompt_tokens", "block_tokens", "endless_missed", "now_missed", "more_missed")
"""Columns of `Forecast.sums`: tokens of prompts; tokens in full blocks of prompts; and how many of
the tokens in full blocks would miss in an endless cache, in a cache of the arena's size, and in a
cache that is a step larger."""


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """The blocks of one request.

    keys: keys of the request's full blocks in the order of the prompt, uint64 [n]. A block has the
        same key after a restart.
    block_tokens: tokens of a block.
    block_bytes: bytes of the arena that a block takes.
    num_hits: number of blocks that did hit. They do not count as misses of an endless cache, even
        if their keys have not been seen.
    may_keep: True if the policy may keep other blocks instead of storing blocks of this request.
    """

    keys: Keys
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    num_hits: int
    may_keep: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast. Ratios are shares of all tokens of prompts.

    prompt_tokens: number of tokens from which the forecast was made; if 0, the ratios are 0.
    ceiling_ratio: share of tokens that an endless cache would hit.
    step_bytes: additional memory for which `gain_ratio` is forecast.
    gain_ratio: increase of the share of hit tokens if the arena had `step_bytes` more.
    gib_gain_ratio: `gain_ratio` per GiB of additional memory.
    """

    prompt_tokens: int
    ceiling_ratio: float
    step_bytes: int
    gain_ratio: float
    gib_gain_ratio: float


class Forecast:
    """Forecasts the hits of larger caches from the blocks of observed requests (see the module).

    make_policy: makes the eviction policy of a simulated cache.
    sums: the counted and estimated tokens over time, in the columns NAMES.
    seen_share: share of all keys in the sample of seen keys.
    shadow_share: share of all keys in the sample of the shadow caches (simulated caches).
    """

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

    def observe(
        self, demand: RequestDemand, capacity_bytes: int, now_s: float, minute: int
    ) -> None:
        """Records a request that arrived while the arena had `capacity_bytes` of memory. A key that
        the engine reports several times counts once."""
        keys, at = np.unique(demand.keys, return_index=True)
        if len(keys) < len(demand.keys):
            demand = replace(demand, keys=demand.keys[np.sort(at)])
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

    def _see(self, demand: RequestDemand, low: Keys) -> float:
        """Marks the request's blocks as seen. Returns an estimate of the misses of an endless
        cache: the number of blocks that did not hit and were not seen before.

        low: low 32 bits of each key after `spread` has mixed its bits [n]. They decide whether the
            key is in the sample.
        """
        chosen = np.flatnonzero(low < _threshold(self.seen_share))
        keys = demand.keys[chosen]
        was_seen, _ = self._seen.take(keys)
        self._seen.remember(keys, np.zeros(len(keys), np.uint64))
        num_fresh = int(np.count_nonzero(~was_seen))
        missed = np.count_nonzero(~was_seen & (chosen >= demand.num_hits)) / self.seen_share
        self._num_seen += num_fresh
        while self._num_seen > self._max_seen:
            self.seen_share /= 2
            # A key is in the sample if the low half of its mixed key is below the threshold. The
            # table's tag is this half without its last bit, so the table can drop keys by their
            # tags.
            self._seen.drop_from(_threshold(self.seen_share))
            self._num_seen = len(self._seen)
        return float(missed)

    def _serve(
        self, demand: RequestDemand, low: Keys, capacity_bytes: int, now_s: float
    ) -> tuple[float, float]:
        """Estimates how many of the request's blocks miss in a cache of the arena's size, and in a
        cache that is a step larger. Returns the two estimates.

        low: low 32 bits of each key after `spread` has mixed its bits [n]. They decide whether the
            key is in the sample.
        """
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
        """Halves the sample of the shadow caches (simulated caches): halves the sample's share of
        all keys, and drops keys that are not in the smaller sample."""
        self.shadow_share /= 2
        for shadow in self._shadows:
            keys = shadow.keys
            shadow.drop(keys[(spread(keys) & LOW_32) >= _threshold(self.shadow_share)])

    def outlook(self, seconds: float, capacity_bytes: int, minute: int) -> Outlook:
        """Returns the forecast from the requests of the last `seconds`. Rounds `seconds` up to
        whole minutes, or to whole hours if it is above two hours. 0 means all requests.

        capacity_bytes: present size of the arena.
        """
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
        """Returns the sampled keys of blocks that requests have used (seen keys), for the ledger's
        file, uint64 [n]. The high 32 bits are the key's place in the table, the low 32 bits its tag
        (a part of the key's hash)."""
        flat = self._seen.tags.reshape(-1)
        at = np.flatnonzero(flat)
        return at.astype(np.uint64) << np.uint64(32) | flat[at]

    def put_back(self, seen: Keys, seen_share: float) -> None:
        """Restores the seen keys of an earlier server, and their share. Ignores keys whose place is
        not in this table, which happens only if the size of the table has changed."""
        places = (seen >> np.uint64(32)).astype(np.int64)
        self._seen.put_back(places, (seen & LOW_32).astype(np.uint32))
        self._num_seen, self.seen_share = len(self._seen), seen_share

    def check_invariants(self) -> None:
        """Raises AssertionError if a sample is too large or miscounted."""
        assert self._num_seen <= self._max_seen, "too many keys were kept"
        self._seen.check_invariants()
        for shadow in self._shadows:
            shadow.check_invariants()
            low = spread(shadow.keys) & LOW_32
            assert (low < _threshold(self.shadow_share)).all(), "a key is not in the sample"


def step_bytes(capacity_bytes: int) -> int:
    """Returns by how many bytes the larger simulated cache is larger than the arena: a share of the
    arena, at least 1 GiB."""
    return max(GIB, capacity_bytes // STEP_SHARE)


def _threshold(share: float) -> int:
    return int(share * (1 << 32))
