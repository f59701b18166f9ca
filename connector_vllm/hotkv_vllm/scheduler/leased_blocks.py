"""Arithmetic over the blocks of one hit: which of them its lease has pinned, which to load where,
and which need not be stored afterwards. Pure.

What is always true: nothing is loaded that the lease does not pin.
"""

from collections.abc import Sequence

import numpy as np

from hotkv_client.types import Int32s, LoadRun
from hotkv_proto.groups import needed_blocks
from hotkv_vllm.link import BoolMask
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.request import HitState, Masks


def leased_positions(blocks: range, left_out: range) -> Int32s:
    """The blocks of a group that a lease covers, rising: those of `blocks` but for `left_out`."""
    found = np.arange(blocks.start, blocks.stop, dtype=np.int32)
    return found[(found < left_out.start) | (found >= left_out.stop)]


def stored_blocks(groups: CachedGroups, hit: HitState) -> tuple[int, ...]:
    """Per group: leading blocks that need not be stored after a load, as the server has them."""
    found = []
    for index, spec in enumerate(groups.specs):
        num_blocks = hit.hit_tokens // spec.block_tokens
        mask = hit.represented.get(index)
        if mask is not None and not mask.all():
            # Blocks that came without a representation are looked at once more, so that they get
            # one.
            positions = leased_positions(hit.leased[index], hit.left_out)
            num_blocks = min(num_blocks, int(positions[np.argmin(mask)]))
        found.append(num_blocks)
    return tuple(found)


def pinned_masks(groups: CachedGroups, hit: HitState, pinned: Sequence[BoolMask]) -> Masks:
    """Which blocks a lease has pinned, per group; `pinned` is the grant's answer for the leased
    ones. What is left out counts as pinned: others see to that."""
    masks = []
    for index, (blocks, is_pinned) in enumerate(zip(hit.leased, pinned, strict=True)):
        # Of the block behind a drafter's hit only the hash matters, so it is not leased.
        mask = np.ones(groups.num_blocks(index, hit.hit_tokens), np.bool_)
        mask[: blocks.stop] = False
        mask[leased_positions(blocks, hit.left_out)] = is_pinned
        mask[hit.left_out.start : hit.left_out.stop] = True
        masks.append(mask)
    return tuple(masks)


def load_runs(
    groups: CachedGroups,
    hit: HitState,
    block_ids: Sequence[Sequence[int]],
    hit_tokens: int,
    null_block: int,
) -> list[LoadRun]:
    """What to load where for a hit of `hit_tokens`, per group; nothing if the lease does not cover
    all of it."""
    runs = []
    for index, (spec, blocks) in enumerate(
        zip(groups.specs, needed_blocks(groups.specs, hit_tokens), strict=True)
    ):
        first = max(blocks.start, hit.computed_tokens // spec.block_tokens)
        table = np.asarray(block_ids[index][first : blocks.stop], np.int32)
        if first + len(table) < blocks.stop:
            return []
        wanted = np.arange(first, first + len(table), dtype=np.int32)[table != null_block]
        table = table[table != null_block]
        if not len(table):
            continue
        leased = leased_positions(hit.leased[index], hit.left_out)
        at = np.searchsorted(leased, wanted).astype(np.int32)
        is_leased = at[-1] < len(leased) and np.array_equal(leased[at], wanted)
        if not is_leased or not hit.ready[index][wanted].all():
            return []
        runs.append(LoadRun(index, at, table))
    return runs
