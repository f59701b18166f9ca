"""The hit rule against a twin that goes token by token."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv.groups import WINDOWED, BoolMask, GroupKind, GroupSpec, alignment_tokens, longest_hit, needed_blocks

MAX_TOKENS = 96


@st.composite
def group_specs(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from(GroupKind))
    window_tokens = draw(st.integers(1, 40)) if kind in WINDOWED else 0
    return GroupSpec(kind, draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])), (4096,), window_tokens)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[GroupSpec], list[BoolMask], int]:
    """Groups, which of their blocks are ready, and the limit. Masks may end before or after the limit."""
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
    """Tokens whose KV (for Mamba: the state after them) is read to go on at `hit_tokens`, from the definition of each kind."""
    match group.kind:
        case GroupKind.FULL_ATTENTION | GroupKind.MLA:
            return range(hit_tokens)
        case GroupKind.SLIDING_WINDOW:
            return range(max(0, hit_tokens - group.window_tokens + 1), hit_tokens)
        case GroupKind.CHUNKED_LOCAL:
            return range(hit_tokens - hit_tokens % group.window_tokens, hit_tokens)
        case GroupKind.MAMBA:
            return range(hit_tokens - 1, hit_tokens)


def blocks_twin(group: GroupSpec, hit_tokens: int) -> list[int]:
    return sorted({token // group.block_tokens for token in needed_tokens(group, hit_tokens)}) if hit_tokens else []


def servable(group: GroupSpec, ready: BoolMask, hit_tokens: int) -> bool:
    return all(block < len(ready) and bool(ready[block]) for block in blocks_twin(group, hit_tokens))


def in_reach(group: GroupSpec, ready: BoolMask, hit_tokens: int) -> bool:
    """A prompt has no hits beyond its last block, even for a group that needs nothing of its past."""
    return hit_tokens <= len(ready) * group.block_tokens


def longest_hit_twin(groups: list[GroupSpec], ready: list[BoolMask], limit_tokens: int, step: int) -> int:
    for hit in range(limit_tokens // step * step, 0, -step):
        if all(in_reach(g, mask, hit) and servable(g, mask, hit) for g, mask in zip(groups, ready, strict=True)):
            return hit
    return 0


@settings(max_examples=600)
@given(prompt=prompts(), multiple=st.integers(0, 3))
def test_longest_hit_equals_its_twin(prompt: tuple[list[GroupSpec], list[BoolMask], int], multiple: int) -> None:
    groups, ready, limit_tokens = prompt
    lcm = alignment_tokens(groups)
    assert longest_hit(groups, ready, limit_tokens, multiple * lcm) == longest_hit_twin(groups, ready, limit_tokens, max(1, multiple) * lcm)


@settings(max_examples=300)
@given(prompt=prompts())
def test_needed_blocks_are_those_that_the_hit_reads_and_are_all_ready(prompt: tuple[list[GroupSpec], list[BoolMask], int]) -> None:
    groups, ready, limit_tokens = prompt
    hit = longest_hit(groups, ready, limit_tokens)
    needed = needed_blocks(groups, hit)
    for group, mask, blocks in zip(groups, ready, needed, strict=True):
        assert list(blocks) == blocks_twin(group, hit)
        assert mask[blocks.start : blocks.stop].all()


@given(group=group_specs(), blocks=st.integers(0, 40))
def test_needed_blocks_of_any_boundary(group: GroupSpec, blocks: int) -> None:
    hit = blocks * group.block_tokens
    assert list(needed_blocks([group], hit)[0]) == blocks_twin(group, hit)


@given(prompt=prompts(), more=st.integers(0, 5))
def test_more_ready_blocks_never_shorten_a_hit(prompt: tuple[list[GroupSpec], list[BoolMask], int], more: int) -> None:
    groups, ready, limit_tokens = prompt
    before = longest_hit(groups, ready, limit_tokens)
    fuller = [np.concatenate((mask | (np.arange(len(mask)) == more), np.ones(more, np.bool_))) for mask in ready]
    assert longest_hit(groups, fuller, limit_tokens) >= before
    assert before <= limit_tokens and before % alignment_tokens(groups) == 0


@pytest.mark.parametrize(
    ("kind", "block_tokens", "shard_bytes", "window_tokens", "field"),
    [
        (GroupKind.FULL_ATTENTION, 0, (1,), 0, "block_tokens"),
        (GroupKind.FULL_ATTENTION, -16, (1,), 0, "block_tokens"),
        (GroupKind.MAMBA, 16, (), 0, "shard_bytes"),
        (GroupKind.MAMBA, 16, (4096, 0), 0, "shard_bytes"),
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
