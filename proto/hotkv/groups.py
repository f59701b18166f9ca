"""KV cache groups and the hit rule.

A request hits n tokens only if *every* group can serve position n. What a group needs of the past is its kind's
business (`GroupSpec.first_needed_block`); the longest common hit is a fixed point (`longest_hit`): start from the longest
prefix, let each group shrink it to a boundary it can serve, repeat until none shrinks. Pure functions over numpy masks.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BoolMask = NDArray[np.bool_]


class GroupKind(enum.IntEnum):
    """What a group remembers; the numbers are those of `hotkv.v1.KvGroupKind`."""

    FULL_ATTENTION = 1
    MLA = 2
    SLIDING_WINDOW = 3
    CHUNKED_LOCAL = 4
    MAMBA = 5


WINDOWED = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})
"""Kinds that need `window_tokens`."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group.

    `block_tokens`: tokens in one block. `window_tokens`: window (sliding) or chunk (chunked local); 0 for other kinds.
    `shard_bytes`: bytes of one block in each shard; the slot holds the shards in order.
    Raises ValueError where the numbers contradict each other.
    """

    kind: GroupKind
    block_tokens: int
    shard_bytes: tuple[int, ...]
    window_tokens: int = 0
    layer_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens is {self.block_tokens}; it must be positive")
        if not self.shard_bytes or min(self.shard_bytes) <= 0:
            raise ValueError(f"shard_bytes is {self.shard_bytes}; every shard needs a positive size")
        if self.window_tokens < 0 or (self.kind in WINDOWED) != (self.window_tokens > 0):
            raise ValueError(f"window_tokens is {self.window_tokens}, which does not fit kind {self.kind.name}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: all shards."""
        return sum(self.shard_bytes)

    def first_needed_token(self, hit_tokens: int) -> int:
        """First token whose KV is needed to go on at position `hit_tokens`."""
        match self.kind:
            case GroupKind.FULL_ATTENTION | GroupKind.MLA:
                return 0
            case GroupKind.SLIDING_WINDOW:
                return max(0, hit_tokens - (self.window_tokens - 1))
            case GroupKind.CHUNKED_LOCAL:
                return hit_tokens // self.window_tokens * self.window_tokens
            case GroupKind.MAMBA:
                return max(0, hit_tokens - 1)

    def first_needed_block(self, hit_tokens: int) -> int:
        """Index of the first block needed to go on at `hit_tokens`; blocks up to `hit_tokens // block_tokens` are needed."""
        return min(self.first_needed_token(hit_tokens) // self.block_tokens, hit_tokens // self.block_tokens)

    def longest_servable(self, ready: BoolMask, limit_tokens: int, alignment_tokens: int) -> int:
        """Longest hit ≤ `limit_tokens` that this group can serve, a multiple of `alignment_tokens` (itself one of `block_tokens`).

        `ready` [blocks]: which blocks of the prompt are ready; blocks beyond its end are not.
        """
        hit = min(limit_tokens, len(ready) * self.block_tokens) // alignment_tokens * alignment_tokens
        if self.kind in (GroupKind.FULL_ATTENTION, GroupKind.MLA):
            holes = np.flatnonzero(~ready[: hit // self.block_tokens])
            prefix_blocks = int(holes[0]) if len(holes) else hit // self.block_tokens
            return prefix_blocks * self.block_tokens // alignment_tokens * alignment_tokens
        # Number of holes before each block, so that a range is complete exactly when the count does not change over it.
        holes_before = np.concatenate(([0], np.cumsum(~ready)))
        while hit > 0:
            first, end = self.first_needed_block(hit), hit // self.block_tokens
            if holes_before[end] == holes_before[first]:
                return hit
            hit -= alignment_tokens
        return 0


def alignment_tokens(groups: Sequence[GroupSpec]) -> int:
    """Least common multiple of the groups' block sizes in tokens."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_hit(groups: Sequence[GroupSpec], ready: Sequence[BoolMask], limit_tokens: int, alignment: int = 0) -> int:
    """Longest prefix in tokens that every group can serve: the fixed point of `GroupSpec.longest_servable`.

    `ready`: one mask a group, one flag a block of that group. `limit_tokens`: upper bound, for instance prompt length − 1.
    `alignment`: hits are multiples of it; 0 for the least common multiple of the block sizes.
    """
    step = alignment or alignment_tokens(groups)
    hit = limit_tokens // step * step
    while hit > 0:
        shrunk = hit
        for group, mask in zip(groups, ready, strict=True):
            shrunk = group.longest_servable(mask, shrunk, step)
        if shrunk == hit:
            return hit
        hit = shrunk
    return 0


def needed_blocks(groups: Sequence[GroupSpec], hit_tokens: int) -> list[range]:
    """Block indices that each group needs for a hit of `hit_tokens`; nothing for no hit."""
    if hit_tokens <= 0:
        return [range(0) for _ in groups]
    return [range(group.first_needed_block(hit_tokens), hit_tokens // group.block_tokens) for group in groups]
