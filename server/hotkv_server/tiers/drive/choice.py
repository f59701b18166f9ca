"""Which tiers a lookup answers from: those whose blocks come sooner than the engine computes them.

Pure: values in, values out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_proto.groups import GroupSpec, longest_hit, needed_blocks
from hotkv_server.cache.values import BoolMask


@dataclass(frozen=True, slots=True)
class Listed:
    """One list of a lookup, in chain order: the spec of its group, and which blocks are in host
    memory or on their way there."""

    spec: GroupSpec
    ready: BoolMask


@dataclass(frozen=True, slots=True)
class Offer:
    """What a tier has of these lists, a mask each, and how long it takes to bring in: `wait_s` for
    any, `s_per_byte` beyond."""

    masks: Sequence[BoolMask]
    wait_s: float
    s_per_byte: float


def both(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    """Blocks of both, list by list."""
    return [one & other for one, other in zip(some, others, strict=True)]


def either(some: Sequence[BoolMask], others: Sequence[BoolMask]) -> list[BoolMask]:
    """Blocks of either, list by list."""
    return [one | other for one, other in zip(some, others, strict=True)]


def count(masks: Sequence[BoolMask]) -> int:
    """Blocks of all lists together."""
    return sum(int(mask.sum()) for mask in masks)


def hit_tokens(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> int:
    """Tokens of the longest hit of blocks of these masks; of lists of no block, 0."""
    limit = max((len(one.ready) * one.spec.block_tokens for one in lists), default=0)
    return longest_hit([one.spec for one in lists], masks, limit) if limit else 0


def needed(lists: Sequence[Listed], masks: Sequence[BoolMask]) -> list[BoolMask]:
    """Which blocks the longest hit of these masks needs, one mask a list."""
    ranges = needed_blocks([one.spec for one in lists], hit_tokens(lists, masks))
    found = []
    for one, blocks in zip(lists, ranges, strict=True):
        mask = np.zeros(len(one.ready), np.bool_)
        mask[blocks.start : blocks.stop] = True
        found.append(mask)
    return found


def worth(lists: Sequence[Listed], offers: Sequence[Offer], tokens_per_s: float) -> list[bool]:
    """Which offers are worth taking up, given the engine's prefill speed; all if that is not known.

    Tiers are read at the same time, so all take as long as the slowest. As long as that is longer
    than computing what they add to the hit, the slowest is left out. Earlier offers go first: what
    one has the later ones need not bring.
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
    """What each offer takes to bring in its part of the wanted blocks; 0 for one that has none, or
    is not taken."""
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
