"""What became of a request's blocks: from which tier those came that hit, and why the others
missed.

Of one group: the first in which a hit needs all blocks before it, or else the first of all.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hotkv_proto import table
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import Miss
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import HashList

ASKS_WHY = {
    Miss.ABSENT: Miss.IN_FLIGHT,
    Miss.UNKNOWN: Miss.IN_FLIGHT,
    Miss.COMPUTED_SOONER: Miss.COMPUTED_SOONER,
}
"""What engines say of misses whose blocks are looked up, and why one missed that is ready. An
engine that computes sooner need not have asked whether there is anything to load."""


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Of one request, in tokens: `hit_tokens` by the number of the tier (0 for host memory), and
    `missed_tokens` by reason."""

    hit_tokens: dict[int, int]
    missed_tokens: dict[Miss, int]


def counted_group(key_space: KeySpace) -> int:
    """The group whose blocks are counted."""
    closed = (at for at, group in enumerate(key_space.groups) if group.kind in PREFIX_CLOSED)
    return next(closed, 0)


def note_outcome(
    core: CacheCore,
    key_space_id: int,
    hashes: Words,
    prompt_tokens: int,
    device_hit_tokens: int,
    hit_tokens: int,
    reason: Miss,
) -> PromptOutcome:
    """What became of a request that has just been scheduled. `hashes` [n, 8]: of its prompt, one
    for each full hash block. `reason`: as its engine says.

    Blocks that came up from a tier are credited to it once: to the first request that hits them.
    Blocks that missed are looked up now, a moment after the engine has asked.
    """
    key_space = core.key_space(key_space_id)
    group_index = counted_group(key_space)
    tokens = key_space.groups[group_index].block_tokens
    step = tokens // key_space.hash_block_tokens
    blocks = np.ascontiguousarray(hashes[step - 1 :: step])
    first, stop = device_hit_tokens // tokens, hit_tokens // tokens
    by_tier = _by_origin(core, key_space_id, group_index, blocks[first:stop])
    hits, left = dict[int, int](), hit_tokens - device_hit_tokens
    for tier, count in by_tier:
        hits[tier] = min(count * tokens, left)
        left -= hits[tier]
    hits[0] = left
    # The last token of a prompt is always computed, and its block with it.
    full = max(0, prompt_tokens - 1) // tokens
    missed = prompt_tokens - hit_tokens
    partial = min(missed, prompt_tokens - full * tokens)
    reasons = {Miss.PARTIAL_BLOCK: partial} if partial else {}
    if missed > partial:
        counts: Counter[Miss] = Counter()
        if reason in ASKS_WHY:
            counts = _why(core, key_space_id, group_index, blocks[stop:full], ASKS_WHY[reason])
            # Blocks that the report did not name.
            counts[Miss.UNKNOWN] += full - stop - counts.total()
        else:
            counts[reason] = 1
        for why, count in counts.items():
            reasons[why] = (missed - partial) * count // counts.total()
        rest = missed - sum(reasons.values())
        largest = max(counts, key=lambda one: counts[one])
        reasons[largest] += rest
    return PromptOutcome(
        {tier: count for tier, count in hits.items() if count},
        {why: count for why, count in reasons.items() if count},
    )


def _by_origin(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words
) -> list[tuple[int, int]]:
    """How many of the blocks came up from each tier and were not credited to it yet; they are
    now."""
    origins = core.space.origins
    if not len(hashes):
        return []
    words = core.space.index.find(key_space_id, group_index, hashes)
    entries = words[table.is_ready(words)]
    came = entries[origins[entries] != 0]
    if not len(came):
        return []
    tiers, counts = np.unique(origins[came], return_counts=True)
    origins[came] = 0
    return list(zip(tiers.tolist(), counts.tolist(), strict=True))


def _why(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words, if_ready: Miss
) -> Counter[Miss]:
    """Why blocks missed: how many for each reason. A block that is ready missed for the reason of
    the one before it; `if_ready`: for what reason if all before it are ready, too."""
    if not len(hashes):
        return Counter()
    words = core.space.index.find(key_space_id, group_index, hashes)
    evicted = core.space.removal.was_evicted(key_space_id, group_index, hashes)
    codes = np.where(evicted, int(Miss.EVICTED), int(Miss.NEVER_STORED))
    for one in core.below:
        codes[one.find(key_space_id, HashList(group_index, hashes))] = int(Miss.LEFT_BELOW)
    codes[words >= table.RESERVED_FLAG] = int(Miss.IN_FLIGHT)
    is_ready = table.is_ready(words)
    codes[is_ready] = 0
    # The last block before each that was not ready.
    at = np.maximum.accumulate(np.where(is_ready, -1, np.arange(len(codes))))
    codes = np.where(at >= 0, codes[at], int(if_ready))
    counts = np.bincount(codes)
    return Counter({Miss(int(code)): int(counts[code]) for code in np.flatnonzero(counts)})
