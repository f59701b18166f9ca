"""Tests the hit rule, which finds the longest prefix that can be loaded, against a reference
that goes token by token, and counts its lookups."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto.groups import (
    PROBES_PER_ROUND,
    WINDOWED,
    BoolMask,
    GroupKind,
    GroupSpec,
    Int64s,
    alignment_tokens,
    check_context_parallel,
    longest_hit,
    longest_prefix,
    needed_blocks,
)

MAX_TOKENS = 96


@st.composite
def group_specs(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from(GroupKind))
    window_tokens = draw(st.integers(1, 40)) if kind in WINDOWED else 0
    return GroupSpec(kind, draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])), (4096,), window_tokens)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[GroupSpec], list[BoolMask], int]:
    """(Groups, masks of ready blocks, limit in tokens); masks may end before or after the limit."""
    groups = draw(st.lists(group_specs(), min_size=1, max_size=6))
    masks = []
    for group in groups:
        num_blocks = draw(st.integers(0, MAX_TOKENS // group.block_tokens))
        holes = draw(st.sets(st.integers(0, max(0, num_blocks - 1)), max_size=3))
        mask = np.ones(num_blocks, np.bool_)
        mask[[hole for hole in holes if hole < num_blocks]] = False
        masks.append(mask)
    return groups, masks, draw(st.integers(0, MAX_TOKENS + 5))


def needed_tokens(group: GroupSpec, hit_tokens: int) -> range:
    """By the definition of the kind. Mamba's last token stands for the state after it."""
    match group.kind:
        case GroupKind.FULL_ATTENTION | GroupKind.MLA:
            return range(hit_tokens)
        case GroupKind.SLIDING_WINDOW:
            return range(max(0, hit_tokens - group.window_tokens + 1), hit_tokens)
        case GroupKind.CHUNKED_LOCAL:
            return range(hit_tokens - hit_tokens % group.window_tokens, hit_tokens)
        case GroupKind.MAMBA:
            return range(hit_tokens - 1, hit_tokens)


def blocks_reference(group: GroupSpec, hit_tokens: int) -> list[int]:
    tokens = needed_tokens(group, hit_tokens) if hit_tokens else ()
    return sorted({token // group.block_tokens for token in tokens})


def servable(group: GroupSpec, ready: BoolMask, hit_tokens: int, is_draft: bool) -> bool:
    """A hit can't exceed the mask, even if it needs none of the blocks."""
    needed = blocks_reference(group, hit_tokens)
    if is_draft and group.kind is not GroupKind.MAMBA:
        needed = [*needed, hit_tokens // group.block_tokens]
    return hit_tokens <= len(ready) * group.block_tokens and all(
        block < len(ready) and bool(ready[block]) for block in needed
    )


def longest_hit_reference(
    groups: list[GroupSpec], ready: list[BoolMask], limit_tokens: int, step: int, drafts: set[int]
) -> int:
    for hit in range(limit_tokens // step * step, 0, -step):
        if all(
            servable(g, mask, hit, i in drafts)
            for i, (g, mask) in enumerate(zip(groups, ready, strict=True))
        ):
            return hit
    return 0


@settings(max_examples=600)
@given(
    prompt=prompts(),
    multiple=st.integers(0, 3),
    drafts=st.just(set[int]()) | st.sets(st.integers(0, 5)),
)
def test_hits_and_read_blocks_equal_the_reference(
    prompt: tuple[list[GroupSpec], list[BoolMask], int], multiple: int, drafts: set[int]
) -> None:
    groups, ready, limit_tokens = prompt
    lcm = alignment_tokens(groups)
    expected = longest_hit_reference(groups, ready, limit_tokens, max(1, multiple) * lcm, drafts)
    assert longest_hit(groups, ready, limit_tokens, multiple * lcm, drafts) == expected
    hit = longest_hit(groups, ready, limit_tokens)
    needed = needed_blocks(groups, hit)
    for group, mask, blocks in zip(groups, ready, needed, strict=True):
        assert list(blocks) == blocks_reference(group, hit)
        assert mask[blocks.start : blocks.stop].all()


@pytest.mark.parametrize(
    ("kind", "block_tokens", "shard_bytes", "window_tokens", "field"),
    [
        (GroupKind.FULL_ATTENTION, 0, (1,), 0, "block_tokens"),
        (GroupKind.FULL_ATTENTION, -16, (1,), 0, "block_tokens"),
        (GroupKind.MAMBA, 16, (), 0, "shard_bytes"),
        (GroupKind.MAMBA, 16, (0, 0), 0, "shard_bytes"),
        (GroupKind.MLA, 16, (-1,), 0, "shard_bytes"),
        (GroupKind.MLA, 16, (1,), 8, "window_tokens"),
        (GroupKind.SLIDING_WINDOW, 16, (1,), 0, "window_tokens"),
        (GroupKind.CHUNKED_LOCAL, 16, (1,), -4, "window_tokens"),
        (GroupKind.FULL_ATTENTION, 16, (1,), -4, "window_tokens"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(
    kind: GroupKind, block_tokens: int, shard_bytes: tuple[int, ...], window_tokens: int, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        GroupSpec(kind, block_tokens, shard_bytes, window_tokens)


def test_alignment_not_divided_by_blocks_is_refused() -> None:
    groups = [GroupSpec(GroupKind.FULL_ATTENTION, 16, (1,)), GroupSpec(GroupKind.MAMBA, 24, (1,))]
    with pytest.raises(ValueError, match="alignment is 64 tokens; it must be a multiple of 48"):
        longest_hit(groups, [np.ones(9, np.bool_), np.ones(6, np.bool_)], 144, 64)


class Residency:
    """A fake lookup, which counts calls and positions."""

    def __init__(self, ready: BoolMask) -> None:
        self.ready = ready
        self.calls = 0
        self.num_asked = 0

    def __call__(self, positions: Int64s) -> BoolMask:
        self.calls += 1
        self.num_asked += len(positions)
        answer: BoolMask = self.ready[positions]
        return answer


def leading(ready: BoolMask) -> int:
    return int(np.concatenate((ready, [False])).argmin())


@settings(max_examples=300)
@given(num_blocks=st.integers(0, 10_000), data=st.data())
def test_closed_prefix_takes_few_exact_probes(num_blocks: int, data: st.DataObject) -> None:
    residency = Residency(np.arange(num_blocks) < data.draw(st.integers(0, num_blocks)))
    assert longest_prefix(residency, num_blocks) == leading(residency.ready)
    rounds = math.ceil(math.log(max(2, num_blocks), PROBES_PER_ROUND - 1)) + 1
    if leading(residency.ready) in (0, num_blocks):
        rounds = 1
    assert residency.calls <= rounds and residency.num_asked <= rounds * PROBES_PER_ROUND


@settings(max_examples=300)
@given(
    num_blocks=st.integers(1, 600),
    holes=st.sets(st.integers(0, 599), max_size=4),
    tail=st.booleans(),
)
def test_prefix_with_holes_is_found_right(num_blocks: int, holes: set[int], tail: bool) -> None:
    ready = np.ones(num_blocks, np.bool_)
    ready[[hole for hole in holes if hole < num_blocks]] = False
    ready[num_blocks // 2 :] &= tail
    residency = Residency(ready)
    found = longest_prefix(residency, num_blocks)
    assert leading(ready) <= found <= num_blocks
    assert found == 0 or ready[found - 1]
    assert found == num_blocks or not ready[found]
    if num_blocks <= PROBES_PER_ROUND:
        assert found == leading(ready)


def test_contradicting_answers_lead_to_looking_everywhere() -> None:
    """The first round of probes sees only the wide hole behind the narrow one."""
    ready = np.ones(8192, np.bool_)
    ready[100:130] = ready[400:900] = False
    residency = Residency(ready)
    assert longest_prefix(residency, 8192) == 100
    assert residency.calls == 2 and residency.num_asked == PROBES_PER_ROUND + 8192


@pytest.mark.parametrize(
    ("decode_ranks", "prefill_ranks", "error"),
    [(3, 1, "block_tokens is 16"), (0, 1, "decode_ranks is 0"), (1, -1, "prefill_ranks -1")],
)
def test_groups_that_ranks_cannot_share_are_refused(
    decode_ranks: int, prefill_ranks: int, error: str
) -> None:
    ranks = {"decode_ranks": decode_ranks, "prefill_ranks": prefill_ranks}
    with pytest.raises(ValueError, match=error):
        check_context_parallel(GroupKind.FULL_ATTENTION, 16, is_sharded=True, **ranks)
