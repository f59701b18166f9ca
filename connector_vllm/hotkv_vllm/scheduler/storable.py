"""Which blocks a hit could ever use, and so are worth storing.

Hits end at multiples of the hit alignment. A block is reachable where some such boundary at or
behind its end needs it; what a boundary needs reaches further back the later it is at most, so the
first boundary behind the block decides. Reachability repeats along the prompt, so each group has a
pattern of one period.
"""

import math

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupKind, GroupSpec

BoolMask = NDArray[np.bool_]


class StorableBlocks:
    """Reachable blocks of one group. `alignment_tokens`: of hits, a multiple of the group's block
    size.

    `state_interval_tokens` (recurrent states only): states at multiples of it, rounded up to whole
    alignments, are kept; 0 for all. `is_draft`: a hit also needs to know the block behind it
    (`hotkv_proto.groups.longest_hit`).
    """

    def __init__(
        self,
        spec: GroupSpec,
        alignment_tokens: int,
        state_interval_tokens: int = 0,
        is_draft: bool = False,
    ) -> None:
        self._spec = spec
        self._is_draft = is_draft
        self._alignment = alignment_tokens
        self._interval = (
            -(-state_interval_tokens // alignment_tokens) * alignment_tokens
            if spec.kind is GroupKind.MAMBA
            else 0
        )
        period_tokens = math.lcm(
            self._interval or alignment_tokens,
            spec.window_tokens if spec.kind is GroupKind.CHUNKED_LOCAL else 1,
        )
        self._pattern: BoolMask = np.array(
            [self._at(block) for block in range(period_tokens // spec.block_tokens)], np.bool_
        )
        self.is_everything = bool(self._pattern.all())

    def __repr__(self) -> str:
        return (
            f"Reach({self._spec.kind.name}, {int(self._pattern.sum())} of "
            f"{len(self._pattern)} blocks)"
        )

    def _at(self, block: int) -> bool:
        end_tokens = (block + 1) * self._spec.block_tokens
        if self._interval:
            return end_tokens % self._interval == 0
        if self._is_draft and block * self._spec.block_tokens % self._alignment == 0:
            return True
        boundary = -(-end_tokens // self._alignment) * self._alignment
        return self._spec.first_needed_block(boundary) <= block

    def mask(self, first: int, stop: int, kept_boundaries: tuple[int, ...] = ()) -> BoolMask:
        """Which of blocks [first, stop) to store. `kept_boundaries`: tokens at which a state is
        kept whatever the interval."""
        mask = np.take(self._pattern, np.arange(first, stop) % len(self._pattern))
        if self._interval:
            for boundary in kept_boundaries:
                block = boundary // self._spec.block_tokens - 1
                if boundary % self._alignment == 0 and first <= block < stop:
                    mask[block - first] = True
        return mask


def prompt_boundaries(
    prompt_tokens: int, alignment_tokens: int, drops_last_block: bool
) -> tuple[int, ...]:
    """Where a later request can go on that repeats this prompt, or extends it; one alignment
    earlier too where a drafter has the last block of a hit recomputed.
    """
    ends = {(prompt_tokens - 1) // alignment_tokens, prompt_tokens // alignment_tokens}
    if drops_last_block:
        ends |= {end - 1 for end in ends}
    return tuple(sorted(end * alignment_tokens for end in ends if end > 0))
