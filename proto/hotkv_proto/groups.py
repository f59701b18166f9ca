"""Groups and the hit rule.

A request hits n tokens only if *every* group can serve n: by its kind a group needs certain blocks
before token n (`GroupSpec.first_needed_block`). Full attention needs all, so it can serve any
smaller n too. Other kinds need a range that ends at n, so they may serve n but not a smaller n.
`longest_hit` is the greatest n.

All functions are pure and work on numpy masks, without Python code per block. Equal specs are
evaluated once.
"""

import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

BoolMask = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Probe = Callable[[Int64s], BoolMask]
"""Positions of blocks in a prompt, int64 [k], ascending, to a mask [k] of those that are ready."""

PROBES_PER_ROUND = 32
"""The CPU waits for a call's cache misses at once, so many blocks take little longer than one."""
_SPREAD = np.arange(PROBES_PER_ROUND)


class GroupKind(enum.IntEnum):
    """How a group uses earlier tokens; numbered as `hotkv.v1.KvGroupKind`."""

    FULL_ATTENTION = 1
    MLA = 2
    SLIDING_WINDOW = 3
    CHUNKED_LOCAL = 4
    MAMBA = 5


PREFIX_CLOSED = frozenset({GroupKind.FULL_ATTENTION, GroupKind.MLA})
"""A hit needs every block from the prompt's start. Who can serve a hit can serve any shorter
one."""
WINDOWED = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})
"""Need `GroupSpec.window_tokens`."""


@dataclass(frozen=True)
class GroupSpec:
    """Layers whose blocks have the same size and hit rule.

    block_tokens: under context parallelism of all ranks together.
    window_tokens: window (sliding) or chunk (chunked local); 0 for other kinds.
    shard_bytes: of a block per shard, in the slot's order. 0 if a pipeline stage has no layer of
        the group.

    Raises ValueError if the numbers contradict each other.
    """

    kind: GroupKind
    block_tokens: int
    shard_bytes: tuple[int, ...]
    window_tokens: int = 0
    layer_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens is {self.block_tokens}; it must be positive")
        if not self.shard_bytes or min(self.shard_bytes) < 0 or sum(self.shard_bytes) == 0:
            raise ValueError(
                f"shard_bytes is {self.shard_bytes}; sizes can't be negative, and one shard at "
                "least holds bytes"
            )
        if self.window_tokens < 0 or (self.kind in WINDOWED) != (self.window_tokens > 0):
            raise ValueError(
                f"window_tokens is {self.window_tokens}, which does not fit kind {self.kind.name}"
            )

    @cached_property
    def slot_bytes(self) -> int:
        return sum(self.shard_bytes)

    def first_needed_token(self, hit_tokens: int) -> int:
        """The first token whose KV a request needs after a hit; 0 if the group uses all."""
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
        """A hit needs blocks from here to `hit_tokens // block_tokens`, exclusive."""
        return min(
            self.first_needed_token(hit_tokens) // self.block_tokens,
            hit_tokens // self.block_tokens,
        )

    def reach_tokens(self, ready: BoolMask, blocks_after: int = 0) -> int:
        """Upper bound of hits: of `PREFIX_CLOSED` kinds by the leading ready blocks, of others by
        all.

        blocks_after: behind the hit, ready too.
        """
        blocks = _leading(ready) if self.kind in PREFIX_CLOSED else len(ready)
        return max(0, blocks - blocks_after) * self.block_tokens

    def serves(self, ready: BoolMask, hit_tokens: int, blocks_after: int = 0) -> bool:
        """hit_tokens: a multiple of the block size, at most `reach_tokens`.
        blocks_after: behind the hit, ready too.
        """
        return bool(
            ready[
                self.first_needed_block(hit_tokens) : hit_tokens // self.block_tokens + blocks_after
            ].all()
        )

    def serves_each(
        self, ready: BoolMask, alignment: int, count: int, blocks_after: int = 0
    ) -> BoolMask:
        """Mask [count] of hits of 1, 2, … `count` times `alignment` tokens, none above
        `reach_tokens`.

        blocks_after: behind a hit, ready too.
        """
        if self.kind in PREFIX_CLOSED:
            return np.ones(count, np.bool_)
        step = alignment // self.block_tokens
        # Missing blocks before each position. A range has none exactly if the counts at its ends
        # are equal.
        missing = np.zeros(step * count + blocks_after + 1, np.int32)
        np.cumsum(~ready[: len(missing) - 1], out=missing[1:])
        at_end = missing[step + blocks_after :: step]
        if self.kind is GroupKind.CHUNKED_LOCAL:
            hits = np.arange(1, count + 1) * alignment
            at_start = missing[hits // self.window_tokens * self.window_tokens // self.block_tokens]
        else:
            # Each hit needs the `span` blocks before its end, or all if there are fewer.
            past_tokens = 1 if self.kind is GroupKind.MAMBA else self.window_tokens - 1
            span = -(-past_tokens // self.block_tokens)
            whole = min(count, span // step)
            at_start = np.concatenate(
                (
                    np.zeros(whole, np.int32),
                    missing[(whole + 1) * step - span :: step][: count - whole],
                )
            )
        fits: BoolMask = at_end == at_start
        return fits


def alignment_tokens(groups: Sequence[GroupSpec]) -> int:
    """A hit ends at a block boundary of each group."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_hit(
    groups: Sequence[GroupSpec],
    ready: Sequence[BoolMask],
    limit_tokens: int,
    alignment: int = 0,
    draft_groups: Collection[int] = (),
) -> int:
    """Tokens that all groups can serve.

    ready: a mask per group; blocks behind its end are not ready.
    limit_tokens: for instance prompt length - 1.
    alignment: of the result; a multiple of all block sizes (ValueError). 0: their least common
        multiple.
    draft_groups: groups in which a token's KV depends on the next token (EAGLE, MTP). That this is
        the same for a hit's last token is proved by a ready block behind the hit. No effect on
        Mamba groups.

    Source: EAGLE's last-block drop in `HybridKVCacheCoordinator`, vLLM 0.32.
    """
    least = alignment_tokens(groups)
    step = alignment or least
    if step % least:
        raise ValueError(
            f"alignment is {step} tokens; it must be a multiple of {least}, which all blocks divide"
        )
    rules = _distinct_rules(groups, ready, draft_groups)
    count = (
        min(limit_tokens, *(group.reach_tokens(mask, after) for group, mask, after in rules))
        // step
    )
    if count <= 0 or all(
        group.serves(mask, count * step, after)
        for group, mask, after in rules
        if group.kind not in PREFIX_CLOSED
    ):
        return max(0, count) * step
    fits = np.ones(count, np.bool_)
    for group, mask, after in rules:
        fits &= group.serves_each(mask, step, count, after)
    last = count - 1 - int(fits[::-1].argmax())
    return (last + 1) * step if fits[last] else 0


def _distinct_rules(
    groups: Sequence[GroupSpec], ready: Sequence[BoolMask], draft_groups: Collection[int]
) -> list[tuple[GroupSpec, BoolMask, int]]:
    """Merges groups that need the same blocks."""
    rules: dict[tuple[int, GroupKind, int, int], tuple[GroupSpec, BoolMask, int]] = {}
    for index, (group, mask) in enumerate(zip(groups, ready, strict=True)):
        blocks_after = int(index in draft_groups and group.kind is not GroupKind.MAMBA)
        key = (blocks_after, group.kind, group.block_tokens, group.window_tokens)
        if key in rules:
            other = rules[key][1]
            shared = min(len(mask), len(other))
            mask = mask[:shared] & other[:shared]
        rules[key] = (group, mask, blocks_after)
    return list(rules.values())


def longest_prefix(probe: Probe, num_blocks: int) -> int:
    """Leading ready blocks, as a hint.

    Assumes that no block behind a missing one is ready. An answer that contradicts this probes
    every block, but a gap between probed blocks stays unnoticed: the result may be too large,
    never too small.
    """
    low, high = 0, num_blocks
    while low < high:
        # The first and the last block are probed: if all or none are ready, one round suffices.
        asked = (
            np.arange(low, high)
            if high - low <= PROBES_PER_ROUND
            else low + _SPREAD * (high - 1 - low) // (PROBES_PER_ROUND - 1)
        )
        answers = probe(asked)
        known = _leading(answers)
        if answers[known:].any():
            return _leading(probe(np.arange(num_blocks)))
        if known < len(asked):
            high = int(asked[known])
        low = int(asked[known - 1]) + 1 if known else high
    return low


def _leading(ready: BoolMask) -> int:
    if not len(ready):
        return 0
    first = int(ready.argmin())
    return len(ready) if ready[first] else first


def needed_blocks(groups: Sequence[GroupSpec], hit_tokens: int) -> list[range]:
    """Block indices that a hit needs, per group."""
    if hit_tokens <= 0:
        return [range(0) for _ in groups]
    return [
        range(group.first_needed_block(hit_tokens), hit_tokens // group.block_tokens)
        for group in groups
    ]


def check_context_parallel(
    kind: GroupKind, block_tokens: int, *, is_sharded: bool, decode_ranks: int, prefill_ranks: int
) -> None:
    """Raises ValueError if hotkv can't cache such a group under context parallelism.

    block_tokens: if `is_sharded`, of all decode ranks together.
    is_sharded: tokens are distributed over the decode ranks.
    decode_ranks, prefill_ranks: of decode and prefill context parallelism (DCP, PCP).

    Source: the assertions of `HybridKVCacheCoordinator` and its managers in vLLM 0.32.
    """
    if decode_ranks < 1 or prefill_ranks < 1:
        raise ValueError(
            f"decode_ranks is {decode_ranks} and prefill_ranks {prefill_ranks}; both must be "
            "positive"
        )
    if is_sharded and block_tokens % decode_ranks:
        raise ValueError(
            f"block_tokens is {block_tokens}, which {decode_ranks} decode ranks can't share; "
            "give a multiple of them"
        )
    if kind in PREFIX_CLOSED:
        return
    if is_sharded and max(decode_ranks, prefill_ranks) > 1:
        raise ValueError(
            f"kind {kind.name} can't have its tokens dealt out over ranks; only FULL_ATTENTION "
            "and MLA can"
        )
    if kind is GroupKind.MAMBA and prefill_ranks > 1:
        raise ValueError(
            f"kind {kind.name} can't be used with {prefill_ranks} prefill ranks; set "
            "prefill_context_parallel_size to 1"
        )
