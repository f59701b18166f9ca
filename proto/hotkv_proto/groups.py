"""KV cache groups and the hit rule.

A group is a set of layers whose blocks are managed alike, as in vLLM. A request hits n tokens only
if *every* group can serve a hit of n tokens. To serve it, a group needs certain blocks before token
n to be ready; the kind of the group decides which (`GroupSpec.first_needed_block`). Full attention
needs all blocks before n, so a group that can serve n can serve any smaller n. The other kinds need
only a range of blocks that ends at n, so they may serve n but not a smaller n. `longest_hit`
returns the greatest n that all groups can serve.

All functions are pure and work on numpy masks, without Python code per block. Groups may have any
order; equal specs are evaluated once.
"""

import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BoolMask = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Probe = Callable[[Int64s], BoolMask]
"""A function that looks up k blocks of a prompt. Takes their positions (int64 [k], ascending) and
returns a mask [k] of the blocks that are ready."""

PROBES_PER_ROUND = 32
"""Number of blocks that `longest_prefix` probes in one call. The CPU waits for the cache misses of
a call at the same time, so a call with many blocks takes little longer than a call with a single
block."""
_SPREAD = np.arange(PROBES_PER_ROUND)


class GroupKind(enum.IntEnum):
    """The way in which a group uses earlier tokens; numbered as `hotkv.v1.KvGroupKind`."""

    FULL_ATTENTION = 1
    MLA = 2
    SLIDING_WINDOW = 3
    CHUNKED_LOCAL = 4
    MAMBA = 5


PREFIX_CLOSED = frozenset({GroupKind.FULL_ATTENTION, GroupKind.MLA})
"""Kinds of groups in which a hit needs every block from the prompt's start to the hit's end. If
such a group can serve a hit, it can serve any shorter hit."""
WINDOWED = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})
"""Kinds of groups for which `GroupSpec.window_tokens` must be set."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A KV cache group: layers whose blocks have the same size and the same hit rule.

    kind: decides which earlier blocks a hit needs.
    block_tokens: tokens in a block; under context parallelism the tokens of all ranks together.
    window_tokens: size of the window (sliding) or chunk (chunked local); 0 for other kinds.
    shard_bytes: bytes of a block in each shard; the slot holds the shards in order. A shard is
        empty if a pipeline stage has no layer of the group.

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

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes that a block takes in a slot of the server: the sum over all shards
        (parts of the ranks)."""
        return sum(self.shard_bytes)

    def first_needed_token(self, hit_tokens: int) -> int:
        """Returns the position of the first token whose KV a request still needs, in order to
        continue after a hit of its first `hit_tokens` tokens: 0 if the group uses all earlier
        tokens."""
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
        """Returns the first block that a request needs to continue after a hit of `hit_tokens`. The
        request needs the blocks from this block up to, but not including, block `hit_tokens //
        block_tokens`."""
        return min(
            self.first_needed_token(hit_tokens) // self.block_tokens,
            hit_tokens // self.block_tokens,
        )

    def reach_tokens(self, ready: BoolMask, blocks_after: int = 0) -> int:
        """Returns an upper bound of the hits that this group can serve, in tokens.

        If a hit in this kind of group needs every earlier block (`PREFIX_CLOSED`), counts the ready
        blocks before the first missing block. For other kinds, counts every block of the prompt,
        ready or not. Subtracts `blocks_after` from the count, because that many blocks must follow
        the hit.

        ready: which blocks of the prompt are ready [blocks].
        blocks_after: number of blocks directly after the hit that must be ready too.
        """
        blocks = _leading(ready) if self.kind in PREFIX_CLOSED else len(ready)
        return max(0, blocks - blocks_after) * self.block_tokens

    def serves(self, ready: BoolMask, hit_tokens: int, blocks_after: int = 0) -> bool:
        """Returns whether the group can serve a hit of `hit_tokens`.

        ready: which blocks of the prompt are ready [blocks].
        hit_tokens: a multiple of the block size, at most `reach_tokens`.
        blocks_after: number of blocks behind the hit that must be ready too.
        """
        return bool(
            ready[
                self.first_needed_block(hit_tokens) : hit_tokens // self.block_tokens + blocks_after
            ].all()
        )

    def serves_each(
        self, ready: BoolMask, alignment: int, count: int, blocks_after: int = 0
    ) -> BoolMask:
        """Checks several hits: of `alignment` tokens, 2 * `alignment` tokens, … `count` *
        `alignment` tokens. Returns a mask [count] of the hits that the group can serve.

        ready: which blocks of the prompt are ready [blocks].
        count: number of hits; none may exceed `reach_tokens`.
        blocks_after: number of blocks behind a hit that must be ready too.
        """
        if self.kind in PREFIX_CLOSED:
            return np.ones(count, np.bool_)
        step = alignment // self.block_tokens
        # Counts the missing blocks before each position. A range has no missing block exactly if
        # the counts at its start and at its end are equal.
        missing = np.zeros(step * count + blocks_after + 1, np.int32)
        np.cumsum(~ready[: len(missing) - 1], out=missing[1:])
        at_end = missing[step + blocks_after :: step]
        if self.kind is GroupKind.CHUNKED_LOCAL:
            hits = np.arange(1, count + 1) * alignment
            at_start = missing[hits // self.window_tokens * self.window_tokens // self.block_tokens]
        else:
            # Each hit needs the `span` blocks before its end, or all blocks before its end if there
            # are fewer.
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
    """Returns the step, in tokens, in which the length of a hit can grow: the least common multiple
    of the groups' block sizes, because a hit ends at a block boundary of each group."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_hit(
    groups: Sequence[GroupSpec],
    ready: Sequence[BoolMask],
    limit_tokens: int,
    alignment: int = 0,
    draft_groups: Collection[int] = (),
) -> int:
    """Returns the longest prefix that every group can serve, in tokens.

    ready: for each group a mask with a flag per block; blocks behind the end of a mask are not
        ready.
    limit_tokens: upper bound of the result, for instance prompt length - 1.
    alignment: the result is a multiple of `alignment`, which must be a multiple of all block sizes;
        0: the least common multiple of the block sizes.
    draft_groups: indices of the groups in which the KV of a token depends on the token after it
        (EAGLE, MTP). The KV of the hit's last token is then right only if the token behind the hit
        is the same. A ready block behind the hit proves that, so in these groups this block must be
        ready too. Has no effect on Mamba groups.

    Raises ValueError if `alignment` is not a multiple of all block sizes. Source: EAGLE's
    last-block drop in `HybridKVCacheCoordinator`, vLLM 0.32.
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
    """Merges groups that need the same blocks. In the merged mask a block is ready if it is ready
    in all of the merged groups.

    Returns for each merged group its spec, its mask, and the number of blocks behind a hit that
    must be ready too (`blocks_after`: 1 for a group in `draft_groups`; see `longest_hit`).
    """
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
    """Returns the number of leading blocks that are ready, as a hint.

    Assumes that no block behind a missing block is ready, so a few rounds of probes suffice. If an
    answer contradicts the assumption, probes every block. But a missing block between two probed
    ready blocks stays unnoticed. So the result may be too large, never too small. A lease gives the
    exact answer.

    probe: returns a mask of the blocks that are ready, given an array of block indices (int64).
    """
    low, high = 0, num_blocks
    while low < high:
        # The probed positions include the first and the last block in question. So if all blocks
        # are ready, or none, one round of probes suffices.
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
    """Counts the set flags before the first unset flag."""
    if not len(ready):
        return 0
    first = int(ready.argmin())
    return len(ready) if ready[first] else first


def needed_blocks(groups: Sequence[GroupSpec], hit_tokens: int) -> list[range]:
    """Returns for each group the range of block indices that a hit of `hit_tokens` needs. Returns
    empty ranges if `hit_tokens` is 0."""
    if hit_tokens <= 0:
        return [range(0) for _ in groups]
    return [
        range(group.first_needed_block(hit_tokens), hit_tokens // group.block_tokens)
        for group in groups
    ]


def check_context_parallel(
    kind: GroupKind, block_tokens: int, *, is_sharded: bool, decode_ranks: int, prefill_ranks: int
) -> None:
    """Raises ValueError if hotkv can't cache a KV cache group of this kind under context
    parallelism (a prompt's tokens are distributed over several ranks).

    block_tokens: tokens of a block; if `is_sharded`, the tokens of all decode ranks together.
    is_sharded: True if the group's tokens are distributed over the decode ranks.
    decode_ranks, prefill_ranks: number of ranks in decode and prefill context parallelism (DCP,
        PCP).

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
