"""Forecasts the hits of an endless cache, and of one a step larger than the arena.

A sample of the keys records which were seen, and drives two `Shadow` caches, of the arena's size
and a step larger, scaled by the sample's share. Misses are the sample's misses / share; hits are
all tokens of full blocks minus these. (A shared prefix misses only once, so whether it is sampled
hardly matters.) Sampling blocks, not requests, has no bias: prompts are evicted from their ends, so
if a block misses, the blocks behind it miss too. Source: Waldspurger et al., SHARDS, FAST 2015;
miniature simulations, USENIX ATC 2017.

Always true: memory is fixed. A sample's share only falls: it is halved when the sample is too
large. A restart empties the shadows; seen keys survive.
"""

from dataclasses import dataclass, replace

import numpy as np

from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.room.policies.shared import GhostTable, spread
from hotkv_server.ledger.book.accounts import Buckets
from hotkv_server.ledger.book.shadow import MakePolicy, Shadow

GIB = 1 << 30
STEP_SHARE = 8
"""The step is 1 / STEP_SHARE of the arena, at least a GiB: less drowns in sampling error."""
MAX_SHADOW_KEYS = 4096
MAX_SEEN = 1 << 16
SEEN_ROOM = 2
"""Size of the seen keys' table in MAX_SEEN; with this reserve its buckets don't overflow."""
LOW_32 = np.uint64(0xFFFF_FFFF)
NAMES = ("prompt_tokens", "block_tokens", "endless_missed", "now_missed", "more_missed")
"""Columns of `Forecast.sums`, in tokens: prompts; full blocks; and of the latter, misses of an
endless cache, of the arena's size, and of a step more."""


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """A request's blocks.

    keys: of full blocks, in order, uint64 [n]; the same after a restart.
    block_bytes: in the arena.
    num_hits: blocks that did hit, no misses of an endless cache even if their keys are new.
    may_refuse: see `Shadow.serve`.
    """

    keys: Keys
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    num_hits: int
    may_refuse: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast. Ratios are shares of all prompt tokens.

    prompt_tokens: behind the forecast; 0: all ratios are 0.
    ceiling_ratio: hits of an endless cache.
    gain_ratio: more hits with `step_bytes` more.
    gib_gain_ratio: `gain_ratio` per GiB.
    """

    prompt_tokens: int
    ceiling_ratio: float
    step_bytes: int
    gain_ratio: float
    gib_gain_ratio: float


class Forecast:
    """The samples, and the sums that they gave.

    sums: columns NAMES over time.
    seen_share, shadow_share: of all keys, in the seen keys' and the shadows' sample.
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
        """Repeated keys count once. `capacity_bytes`: the arena's size at that time."""
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
        """Marks the blocks as seen. Returns the estimated misses of an endless cache.

        low: low 32 bits of the `spread` keys [n], which choose the sample.
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
            # The table's tag is `low` without its last bit, so keys can be dropped by their
            # tags.
            self._seen.drop_from(_threshold(self.seen_share))
            self._num_seen = len(self._seen)
        return float(missed)

    def _serve(
        self, demand: RequestDemand, low: Keys, capacity_bytes: int, now_s: float
    ) -> tuple[float, float]:
        """Estimated misses at the arena's size and a step more. `low`: see `_see`."""
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
                keys, demand.block_bytes, int(size * share), now_s, may_refuse=demand.may_refuse
            )
            for shadow, size in zip(self._shadows, sizes, strict=True)
        ]
        return (len(keys) - hits[0]) / share, (len(keys) - hits[1]) / share

    def _thin_out(self) -> None:
        """Halves the shadows' sample."""
        self.shadow_share /= 2
        for shadow in self._shadows:
            keys = shadow.keys
            shadow.drop(keys[(spread(keys) & LOW_32) >= _threshold(self.shadow_share)])

    def outlook(self, seconds: float, capacity_bytes: int, minute: int) -> Outlook:
        """Over `Buckets.since`'s window. `capacity_bytes`: the arena's size now."""
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
        """For the file, uint64 [n]: place in the table << 32 | tag."""
        flat = self._seen.tags.reshape(-1)
        at = np.flatnonzero(flat)
        return at.astype(np.uint64) << np.uint64(32) | flat[at]

    def put_back(self, seen: Keys, seen_share: float) -> None:
        """Ignores keys whose place the table lacks, as after a change of its size."""
        places = (seen >> np.uint64(32)).astype(np.int64)
        self._seen.put_back(places, (seen & LOW_32).astype(np.uint32))
        self._num_seen, self.seen_share = len(self._seen), seen_share

    def check_invariants(self) -> None:
        assert self._num_seen <= self._max_seen, "too many keys were kept"
        self._seen.check_invariants()
        for shadow in self._shadows:
            shadow.check_invariants()
            low = spread(shadow.keys) & LOW_32
            assert (low < _threshold(self.shadow_share)).all(), "a key is not in the sample"


def step_bytes(capacity_bytes: int) -> int:
    return max(GIB, capacity_bytes // STEP_SHARE)


def _threshold(share: float) -> int:
    return int(share * (1 << 32))
