"""Measures how long the reads of a tier take, and decides from these times which tiers a lookup
uses. Also counts the blocks that lookups asked a tier for.

Always true: memory is fixed. Quantiles and speeds cover the last RECENT reads, counts cover all
reads. Runs on the event loop only.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_proto.costs import fitted
from hotkv_proto.groups import GroupSpec, longest_hit, needed_blocks
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.values import BoolMask

RECENT = 1024
"""Number of recent reads over which quantiles and speeds are computed."""
COSTED = 16
"""Number of recent reads to which the costs of a read (`TierReads.costs`) are fitted. The number is
small, so that the costs follow the load of the tier."""
READ_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of the buckets in the histogram of read times."""

TRIED_S = 5.0
"""If the last read of a tier ended longer ago than this, a lookup uses the tier even if its last
reads were slow, so that its speed is measured again."""


# --------------------------------------------------------------------------------------- The choice

# Chooses the tiers that a lookup uses: loading the tiers' blocks must be faster than computing
# them.
#
# Pure: no clock, no I/O, no state.


@dataclass(frozen=True, slots=True)
class Listed:
    """The blocks of a KV cache group in a lookup, in the order of the sequence.

    `spec`: the description of the group.
    `ready`: mask of the blocks that are in host memory or being moved there.
    """

    spec: GroupSpec
    ready: BoolMask


@dataclass(frozen=True, slots=True)
class Offer:
    """The blocks that a tier could load for a lookup, and the time to load them. Loading n bytes
    takes wait_s + n * s_per_byte seconds.

    `masks`: for each list of the lookup, a mask of the blocks that the tier has.
    """

    masks: Sequence[BoolMask]
    wait_s: float
    s_per_byte: float


def both(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    """Returns, for each list of blocks, a mask of the blocks that are selected in both masks: in
    `some` and in `others`."""
    return [one & other for one, other in zip(some, others, strict=True)]


def either(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    """Returns, for each list of blocks, a mask of the blocks that are selected in `some`, in
    `others`, or in both."""
    return [one | other for one, other in zip(some, others, strict=True)]


def count(masks: Sequence[BoolMask]) -> int:
    """Returns the number of blocks that the masks select in all lists together."""
    return sum(int(mask.sum()) for mask in masks)


def hit_tokens(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> int:
    """Returns the number of tokens in the longest possible hit of a lookup; 0 for empty lists.

    `lists`: the blocks of the lookup, a list for each KV cache group.
    `masks`: for each list, a mask of the blocks that are available for the hit.
    """
    return longest_hit([one.spec for one in lists], masks, sys.maxsize) if lists else 0


def needed(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> list[BoolMask]:
    """Returns, for each list in `lists`, a mask of the blocks that the longest possible hit of a
    lookup needs.

    `lists`: the blocks of the lookup, a list for each KV cache group.
    `masks`: for each list, a mask of the blocks that are available for the hit.
    """
    ranges = needed_blocks([one.spec for one in lists], hit_tokens(lists, masks))
    found = []
    for one, blocks in zip(lists, ranges, strict=True):
        mask = np.zeros(len(one.ready), np.bool_)
        mask[blocks.start : blocks.stop] = True
        found.append(mask)
    return found


def worth(lists: Sequence[Listed], offers: Sequence[Offer], tokens_per_s: float) -> list[bool]:
    """Decides which offers a lookup takes (an offer is the blocks that a tier could load). Returns,
    for each offer, True if it is taken.

    Tiers are read at the same time, so a lookup waits for the slowest tier. The blocks of all
    offers together lengthen the hit by some tokens. If the engine would compute these tokens in
    less time than the wait, the slowest offer is dropped, and the remaining offers are judged in
    the same way. If several offers have the same block, the first of them loads it.

    `lists`: the blocks of the lookup, a list for each KV cache group.
    `offers`: for each tier, the blocks that it could load, and the time to load them.
    `tokens_per_s`: speed at which the engine computes prompts. 0 if unknown; then all offers are
        taken.
    """
    taken = [True] * len(offers)
    if not tokens_per_s:
        return taken
    ready = [one.ready for one in lists]
    here = hit_tokens(lists, ready)
    while any(taken):
        masks = ready
        for offer, is_taken in zip(offers, taken, strict=True):
            masks = either(masks, offer.masks) if is_taken else masks
        saved_s = (hit_tokens(lists, masks) - here) / tokens_per_s
        seconds = _seconds(lists, needed(lists, masks), offers, taken)
        slowest = max((s, index) for index, s in enumerate(seconds) if taken[index])
        if slowest[0] <= saved_s:
            break
        taken[slowest[1]] = False
    return taken


def _seconds(
    lists: Sequence[Listed],
    wanted: Sequence[BoolMask],
    offers: Sequence[Offer],
    taken: Sequence[bool],
) -> list[float]:
    """Returns how many seconds each tier takes to load its part of the wanted blocks; 0 if it loads
    no block.

    Each tier makes an offer: the blocks that it could load. If the lookup takes the offer, the tier
    loads the wanted blocks in it, except blocks that are in host memory or that an earlier taken
    offer loads. If the lookup does not take the offer, the tier loads no block.

    `lists`: the blocks of the lookup, a list for each KV cache group.
    `wanted`: for each list, a mask of the wanted blocks.
    `taken`: for each offer, True if the lookup takes it.
    """
    lacking = [mask & ~one.ready for one, mask in zip(lists, wanted, strict=True)]
    seconds = []
    for offer, is_taken in zip(offers, taken, strict=True):
        num_bytes = 0
        for one, lack, has in zip(lists, lacking, offer.masks, strict=True):
            if is_taken:
                num_bytes += int((lack & has).sum()) * one.spec.slot_bytes
                lack &= ~has
        seconds.append(offer.wait_s + num_bytes * offer.s_per_byte if num_bytes else 0.0)
    return seconds


# ------------------------------------------------------------------------------- How a tier answers


class TierReads:
    """Counts the lookups and reads of a tier, and estimates the cost of a read from recent reads. A
    read is one call of `Tier.read`.

    `asked_blocks`: number of blocks that lookups asked the tier for. Lookups ask a tier only for
        blocks that host memory and the tiers before it lack.
    `hit_blocks`: number of these blocks that the tier had.
    `left_blocks`: number of blocks that the tier had, but lookups did not load, because the engine
        computes them sooner.
    `num_reads`: number of all reads.
    `times_s`: histogram of the durations of all reads.
    `last_s`: when the last read ended, a time of time.monotonic.
    `queued_bytes`: bytes of the blocks in reads that have not ended.
    """

    def __init__(self) -> None:
        self.asked_blocks = self.hit_blocks = self.left_blocks = self.num_reads = 0
        self.queued_bytes = 0
        self.last_s = 0.0
        self._costs, self._costs_at = (0.0, 0.0), 0
        self.times_s = Histogram(READ_BOUNDS_S)
        self._seconds = np.zeros(RECENT)
        self._bytes = np.zeros(RECENT)

    def __repr__(self) -> str:
        return f"TierReads({self.num_reads} reads, {self.hit_blocks}/{self.asked_blocks} hit)"

    def add_lookup(self, num_asked: int, num_hit: int) -> None:
        """Counts a lookup that asked the tier for `num_asked` blocks. The tier had `num_hit` of
        them."""
        self.asked_blocks += num_asked
        self.hit_blocks += num_hit

    def add(self, seconds: float, num_bytes: int) -> None:
        """Counts a read of the tier that has just ended.

        `seconds`: duration of the read.
        `num_bytes`: bytes of the blocks that the read found.
        """
        at = self.num_reads % RECENT
        self._seconds[at], self._bytes[at] = seconds, num_bytes
        self.num_reads += 1
        self.times_s.add(seconds)
        self.last_s = time.monotonic()

    def quantile_s(self, share: float) -> float:
        """Returns a quantile of the durations of recent reads, in seconds; 0 before the first read.
        `share`: 0.5 for the median."""
        recent = self._seconds[: self.num_reads]
        return float(np.quantile(recent, share)) if len(recent) else 0.0

    def bytes_per_s(self) -> float:
        """Returns the mean speed of a read, in bytes per second, over the recent reads that found
        blocks; 0 if there are no such reads. A tier that executes several reads at the same time
        delivers more bytes per second than this mean."""
        has_some = self._bytes > 0
        seconds = float(self._seconds[has_some].sum())
        return float(self._bytes.sum()) / seconds if seconds > 0 else 0.0

    def offer(self, masks: Sequence[BoolMask], now_s: float) -> Offer:
        """Returns the tier's offer to a lookup: the blocks in `masks`, and the estimated time to
        load them. The time includes the wait for queued reads, but not for writes, because they
        don't delay reads.

        If the last read ended more than TRIED_S ago, the tier's speed is unknown. The estimate is
        then 0, so that the lookup uses the tier.
        """
        fixed_s, s_per_byte = self.costs()
        if now_s >= self.last_s + TRIED_S:
            fixed_s = s_per_byte = 0.0
        return Offer(masks, fixed_s + self.queued_bytes * s_per_byte, s_per_byte)

    def costs(self) -> tuple[float, float]:
        """Returns the estimated costs of a read: seconds per read, and seconds per byte. Both are
        fitted to the last COSTED reads by least squares, and are at least 0. Both are 0 if these
        reads found no blocks."""
        if self._costs_at != self.num_reads:
            last = np.arange(max(0, self.num_reads - COSTED), self.num_reads) % RECENT
            self._costs = fitted(self._bytes[last], self._seconds[last])
            self._costs_at = self.num_reads
        return self._costs
