"""Measures a tier's reads, and decides from their times which tiers a lookup uses.

Always true: memory is fixed. Quantiles and speeds cover the last RECENT reads, counts cover all.
Runs on the event loop only.
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
COSTED = 16
"""Reads to which `TierReads.costs` is fitted; few, so that costs follow the tier's load."""
READ_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of the histogram's buckets."""

TRIED_S = 5.0
"""A tier not read for so long is used even if it was slow, to measure it again."""


# --------------------------------------------------------------------------------------- The choice

# Pure: no clock, no I/O, no state.


@dataclass(frozen=True, slots=True)
class Listed:
    """A group's blocks in a lookup, in the prompt's order. `ready`: in host memory or moving
    there."""

    spec: GroupSpec
    ready: BoolMask


@dataclass(frozen=True, slots=True)
class Offer:
    """What a tier could load: n bytes in wait_s + n * s_per_byte seconds. `masks`: one per list."""

    masks: Sequence[BoolMask]
    wait_s: float
    s_per_byte: float


def both(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    return [one & other for one, other in zip(some, others, strict=True)]


def either(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    return [one | other for one, other in zip(some, others, strict=True)]


def count(masks: Sequence[BoolMask]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def hit_tokens(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> int:
    """Length of the longest possible hit on the blocks in `masks`."""
    return longest_hit([one.spec for one in lists], masks, sys.maxsize) if lists else 0


def needed(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> list[BoolMask]:
    """For each list, the blocks that the longest possible hit needs."""
    ranges = needed_blocks([one.spec for one in lists], hit_tokens(lists, masks))
    found = []
    for one, blocks in zip(lists, ranges, strict=True):
        mask = np.zeros(len(one.ready), np.bool_)
        mask[blocks.start : blocks.stop] = True
        found.append(mask)
    return found


def worth(lists: Sequence[Listed], offers: Sequence[Offer], tokens_per_s: float) -> list[bool]:
    """For each offer, whether the lookup takes it.

    Tiers are read at once, so a lookup waits for the slowest. If the engine computes the tokens
    that all taken offers add in less time, the slowest is dropped, and the rest are judged again.
    The first offer that has a block loads it.

    `tokens_per_s`: speed of the engine's prompt processing; 0: unknown, all are taken.
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
    """Seconds that each tier takes for its part of `wanted`: blocks neither ready nor in an
    earlier taken offer."""
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
    """Counts a tier's lookups and reads, and estimates a read's cost.

    `asked_blocks`: asked for by lookups, as host memory and the tiers before lack them.
    `left_blocks`: there, but not loaded, as computing is faster.
    `last_s`: when the last read ended.
    `queued_bytes`: of reads that have not ended.
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
        self.asked_blocks += num_asked
        self.hit_blocks += num_hit

    def add(self, seconds: float, num_bytes: int) -> None:
        """`num_bytes`: of the found blocks."""
        at = self.num_reads % RECENT
        self._seconds[at], self._bytes[at] = seconds, num_bytes
        self.num_reads += 1
        self.times_s.add(seconds)
        self.last_s = time.monotonic()

    def quantile_s(self, share: float) -> float:
        """Of recent reads; 0 before the first."""
        recent = self._seconds[: self.num_reads]
        return float(np.quantile(recent, share)) if len(recent) else 0.0

    def bytes_per_s(self) -> float:
        """Mean speed of recent reads that found blocks, or 0. Reads that run at once deliver
        more together."""
        has_some = self._bytes > 0
        seconds = float(self._seconds[has_some].sum())
        return float(self._bytes.sum()) / seconds if seconds > 0 else 0.0

    def offer(self, masks: Sequence[BoolMask], now_s: float) -> Offer:
        """Loading `masks`, with the wait for queued reads (writes don't delay reads). 0 s if the
        last read ended more than TRIED_S ago."""
        fixed_s, s_per_byte = self.costs()
        if now_s >= self.last_s + TRIED_S:
            fixed_s = s_per_byte = 0.0
        return Offer(masks, fixed_s + self.queued_bytes * s_per_byte, s_per_byte)

    def costs(self) -> tuple[float, float]:
        """Seconds per read and per byte, least squares over COSTED reads, at least 0; both 0 if
        they found nothing."""
        if self._costs_at != self.num_reads:
            last = np.arange(max(0, self.num_reads - COSTED), self.num_reads) % RECENT
            self._costs = fitted(self._bytes[last], self._seconds[last])
            self._costs_at = self.num_reads
        return self._costs
