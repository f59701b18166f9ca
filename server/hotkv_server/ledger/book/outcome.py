"""Finds the tier of each hit and the reason of each miss of a prompt.

Only one group's blocks count, the *counted group*: the first in which a hit needs all blocks
before its end (full attention or MLA), else the first. One of its blocks may be ready and still
miss because another group lacks a block; then that block's reason counts. Engines hash every
`hash_block_tokens` tokens (a *hash block*); a block is one or several of them.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hotkv_proto import table
from hotkv_proto.groups import PREFIX_CLOSED, needed_blocks
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import Miss
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Cause, HashList, Int64s

ASKS_WHY = {
    Miss.ABSENT: Miss.IN_FLIGHT,
    Miss.UNKNOWN: Miss.IN_FLIGHT,
    Miss.COMPUTED_SOONER: Miss.COMPUTED_SOONER,
    Miss.FAILED_LOAD: Miss.FAILED_LOAD,
    Miss.REFUSED: Miss.REFUSED,
    Miss.LATE: Miss.LATE,
}
"""Reasons of engines for which blocks are looked up; the value counts if a missed block is
ready. From COMPUTED_SOONER on they explain only blocks that the server had: the others would
have missed anyway."""

# A block that a hint demoted counts as evicted: with more room it would have stayed.
REASONS = {
    Cause.NONE: Miss.NEVER_STORED,
    Cause.ROOM: Miss.EVICTED,
    Cause.OPERATOR: Miss.REMOVED,
    Cause.FLUSH: Miss.REMOVED,
    Cause.DAMAGE: Miss.REMOVED,
    Cause.HINT: Miss.EVICTED,
    Cause.EXPIRY: Miss.NEVER_STORED,
    Cause.NO_ROOM: Miss.NO_ROOM,
}
"""By cause of the block's removal."""
OF_CAUSES = np.array([REASONS[cause] for cause in Cause])


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Tokens of a prompt that hit and missed.

    hit_tokens: in hotkv, by number of the tier; 0 is host memory. Without device hits.
    missed_tokens: by reason.
    """

    hit_tokens: dict[int, int]
    missed_tokens: dict[Miss, int]


def counted_group(key_space: KeySpace) -> int:
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
    """Tokens of a request just scheduled, by tier of the hit and reason of the miss.

    The first hit of a promoted block is credited to its tier, later ones to host memory. Looks
    missed blocks up a moment after the engine did, so a block may have become ready meanwhile.

    hashes: uint32 words [n, 8], one per full hash block of the prompt.
    device_hit_tokens: at the prompt's start, on the device.
    hit_tokens: at the prompt's start, on the device or in the cache.
    reason: as the engine reports.
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
    # The last token is always computed, with its block.
    full = max(0, prompt_tokens - 1) // tokens
    missed = prompt_tokens - hit_tokens
    partial = min(missed, prompt_tokens - full * tokens)
    reasons = {Miss.PARTIAL_BLOCK: partial} if partial else {}
    if missed > partial:
        counts: Counter[Miss] = Counter()
        if reason in ASKS_WHY:
            counts = _why(
                core, key_space_id, hashes, device_hit_tokens, range(stop, full), ASKS_WHY[reason]
            )
            # Blocks whose hashes the report lacks.
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
    """(tier's number, count) of promoted blocks not yet credited; marks them as credited."""
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
    core: CacheCore,
    key_space_id: int,
    hashes: Words,
    device_hit_tokens: int,
    blocks: range,
    if_ready: Miss,
) -> Counter[Miss]:
    """Counts `blocks` of the counted group by reason; blocks without a hash are left out.

    A ready block missed because another did. Its reason is the first of: a missing block's before
    it, a missing block's of another group, `if_ready`. But if `if_ready` is IN_FLIGHT and only the
    first block is ready, it gets the reason of the block after it: with a draft model an engine
    hits a block only if the next is ready too.

    hashes: of hash blocks, words [n, 8].
    device_hit_tokens: their blocks need not be in the server.
    """
    space = core.key_space(key_space_id)
    counted = counted_group(space)
    codes = _codes(core, key_space_id, counted, hashes, blocks)
    is_ready = codes == 0
    if num_ready := int(np.append(is_ready, False).argmin()):
        longer_tokens = (blocks.start + num_ready) * space.groups[counted].block_tokens
        for index, needed in enumerate(needed_blocks(space.groups, longer_tokens)):
            start = max(needed.start, device_hit_tokens // space.groups[index].block_tokens)
            others = _codes(core, key_space_id, index, hashes, range(start, needed.stop))
            if others.any():
                if_ready = Miss(int(others[others != 0][0]))
                break
        else:
            if num_ready == 1 < len(codes) and if_ready is Miss.IN_FLIGHT:
                if_ready = Miss(int(codes[1]))
        codes[:num_ready] = if_ready
    # Index of the last block up to each that is not ready; 0 if all are.
    at = np.maximum.accumulate(np.where(is_ready, 0, np.arange(len(codes))))
    counts = np.bincount(codes[at])
    return Counter({Miss(int(code)): int(counts[code]) for code in np.flatnonzero(counts)})


def _codes(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words, blocks: range
) -> Int64s:
    """`Miss` numbers for a group's `blocks`, 0 if ready; blocks without a hash are left out."""
    space = core.key_space(key_space_id)
    step = space.groups[group_index].block_tokens // space.hash_block_tokens
    named = np.ascontiguousarray(hashes[step - 1 :: step][blocks.start : blocks.stop])
    words = core.space.index.find(key_space_id, group_index, named)
    causes = core.space.removal.causes(key_space_id, group_index, named)
    codes = OF_CAUSES[causes]
    for one in core.below:
        codes[one.find(key_space_id, HashList(group_index, named))] = int(Miss.LEFT_BELOW)
    codes[words >= table.RESERVED_FLAG] = int(Miss.IN_FLIGHT)
    codes[table.is_ready(words)] = 0
    return codes
