"""Outcome of a request's blocks: the tier of each hit, and the reason of each miss.

Covers a single group: the first in which a hit needs all blocks before it, or else the first of
all.
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
from hotkv_server.cache.values import Cause, HashList

ASKS_WHY = {
    Miss.ABSENT: Miss.IN_FLIGHT,
    Miss.UNKNOWN: Miss.IN_FLIGHT,
    Miss.COMPUTED_SOONER: Miss.COMPUTED_SOONER,
}
"""Miss reasons from engines that require a lookup of the blocks, each with the reason for a missed
block that is ready. An engine that reports COMPUTED_SOONER may not have asked whether there is
anything to load."""


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Outcome of a request in tokens.

    `hit_tokens`: by number of the tier, 0 for host memory.
    `missed_tokens`: by reason.
    """

    hit_tokens: dict[int, int]
    missed_tokens: dict[Miss, int]


def counted_group(key_space: KeySpace) -> int:
    """Returns the group whose blocks are counted."""
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
    """Returns the outcome of a request that was just scheduled, and credits its hits.

    hashes: hashes of its prompt, a hash for each full hash block [n, 8].
    reason: the miss reason that its engine reports.

    Blocks that were promoted from a tier are credited to it once: for the first request that hits
    them. This call looks up missed blocks, a moment after the engine asked for them.
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
            # Blocks whose hashes the report does not contain.
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
    """Returns how many of the blocks were promoted from each tier and not yet credited to it, and
    marks them as credited."""
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
    """Returns the number of missed blocks for each reason. A block that is ready has the reason of
    the block before it; `if_ready` is the reason if all blocks before it are ready too."""
    if not len(hashes):
        return Counter()
    words = core.space.index.find(key_space_id, group_index, hashes)
    causes = core.space.removal.causes(key_space_id, group_index, hashes)
    # More room would have kept the blocks that made room, here or in the tier to which a hint has
    # demoted them.
    made_room = (causes == Cause.ROOM) | (causes == Cause.HINT)
    codes = np.where(made_room, int(Miss.EVICTED), int(Miss.NEVER_STORED))
    for one in core.below:
        codes[one.find(key_space_id, HashList(group_index, hashes))] = int(Miss.LEFT_BELOW)
    codes[words >= table.RESERVED_FLAG] = int(Miss.IN_FLIGHT)
    is_ready = table.is_ready(words)
    codes[is_ready] = 0
    # The last block at or before each place that was not ready.
    at = np.maximum.accumulate(np.where(is_ready, -1, np.arange(len(codes))))
    codes = np.where(at >= 0, codes[at], int(if_ready))
    counts = np.bincount(codes)
    return Counter({Miss(int(code)): int(counts[code]) for code in np.flatnonzero(counts)})
