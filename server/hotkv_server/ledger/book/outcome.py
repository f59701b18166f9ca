"""Finds the outcome of a request's prompt: the tier of each hit, and the reason for each miss.

Only the blocks of a single KV cache group are counted, the counted group. It is the first group in
which a hit needs all blocks before the hit's end (full attention or MLA); if there is no such
group, the first group. A block of the counted group may have been ready and still missed, because a
block of another group was missing. Then its miss is counted under the reason why that other block
was missing.

A hash block is a range of `hash_block_tokens` tokens of a prompt: engines compute one hash for each
such range. A block of a group consists of one or several hash blocks.
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
"""Reasons of engines that do not explain the miss of each block. For these reasons the server looks
the blocks up. The value is the reason that is counted if a missed block is ready. The reasons from
COMPUTED_SOONER on are here because they explain only blocks that the server had: the other blocks
of such a prompt would have missed anyway."""

# Blocks that a hint demoted count as evicted, because with more room they would have stayed.
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
"""The reason of a miss, by the cause of the block's removal."""
OF_CAUSES = np.array([REASONS[cause] for cause in Cause])


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """The result of a request: the numbers of its prompt's tokens that hit, and that missed.

    hit_tokens: tokens that hit in hotkv, by number of the tier; 0 is host memory. Hits on the
        engine's device are not included.
    missed_tokens: tokens that missed, by reason.
    """

    hit_tokens: dict[int, int]
    missed_tokens: dict[Miss, int]


def counted_group(key_space: KeySpace) -> int:
    """Returns the index of the KV cache group whose blocks are counted: the first group in which a
    hit needs all blocks before it; 0 if there is no such group."""
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
    """Returns how many tokens of a request that was just scheduled hit in each tier, and missed for
    each reason.

    A block that was promoted from a tier is credited to that tier once, for the first request that
    hits it; later hits are credited to host memory. This call looks missed blocks up a moment after
    the engine asked for them, so a block may have become ready in the meantime.

    hashes: hashes of the request's prompt, uint32 words [n, 8], one for each full hash block.
    device_hit_tokens: tokens at the prompt's start that hit on the engine's device.
    hit_tokens: tokens at the prompt's start that hit, on the device or in the cache.
    reason: the miss reason that the engine reports.
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
    # The last token of a prompt is always computed, together with its block.
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
            # Count missed blocks as UNKNOWN if the engine's report lacks their hashes.
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
    """Counts the blocks of `hashes` that were promoted from a tier and are not credited to the tier
    yet. (The first hit of a promoted block is credited to its tier.) Returns a pair for each tier:
    the tier's number and the number of its blocks. Marks these blocks as credited."""
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
    """Returns how many of the missed `blocks` of the counted group missed for each reason. Leaves
    out blocks for which `hashes` has no hash.

    A block that is ready missed because another block was missing. It is counted under the first of
    these reasons that exists:

    - the reason of a missing block before it
    - the reason of a missing block of another group
    - `if_ready`

    Exception: if `if_ready` is IN_FLIGHT and only the first block is ready, it is counted under the
    reason of the block after it. The engine may use speculative decoding: with a draft model, it
    hits a block only if the next block is ready too.

    hashes: hashes of the prompt's hash blocks, uint32 words [n, 8].
    device_hit_tokens: tokens whose blocks the engine has, so the server need not have them.
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
    # For each block: the index of the last block that is not ready, among this block and the blocks
    # before it; 0 if all of them are ready.
    at = np.maximum.accumulate(np.where(is_ready, 0, np.arange(len(codes))))
    counts = np.bincount(codes[at])
    return Counter({Miss(int(code)): int(counts[code]) for code in np.flatnonzero(counts)})


def _codes(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words, blocks: range
) -> Int64s:
    """Returns, for each of the prompt's `blocks` in a KV cache group, the number of the `Miss` (the
    reason) why the block is not ready; 0 if the block is ready. Leaves out blocks for which
    `hashes` has no hash."""
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
