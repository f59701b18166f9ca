"""Tests `explain`: at which block a hit ends, and why."""

import numpy as np
import pytest

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.v1 import admin_pb2
from hotkv_server.cache.inspect import PromptBlocks
from hotkv_server.cache.values import BoolMask
from hotkv_server.node.capability import TierHolding
from hotkv_server.wire.admin_service import _explain
from tests.server.support import FULL, WIDE, WINDOW

STATE = GroupSpec(GroupKind.MAMBA, 16, (4096,))
UNEVEN = GroupSpec(GroupKind.FULL_ATTENTION, 48, (4096,))
HERE = "block 2 of group 0 is"


@pytest.mark.parametrize(
    ("groups", "ready", "in_tier", "hit", "words"),
    [
        # Of a window, only the blocks within it are needed: here 2 and 3.
        (
            (FULL, WINDOW),
            ("11111111", "00110000"),
            "",
            64,
            "block 4 of group 1 is never stored: new",
        ),
        ((WIDE, WINDOW), ("1111", "00110000"), "", 64, "block 4 of group 1 is never stored: new"),
        # With blocks of 32 and 48 tokens, a hit ends at a multiple of 96.
        ((WIDE, UNEVEN), ("11111111", "11100"), "", 96, "block 3 of group 1 is never stored: new"),
        ((FULL,), ("11000000",), "00100000", 32, f"{HERE} in far; but that is down"),
        ((FULL,), ("11111111",), "", 128, "all 128 of 128"),
        ((WIDE, UNEVEN), ("1", "1"), "", 0, "0 of 48 tokens hit; a longer hit would need a"),
    ],
)
def test_summary_names_the_hits_ending_block(
    groups: tuple[GroupSpec, ...], ready: tuple[str, ...], in_tier: str, hit: int, words: str
) -> None:
    locations = [TierHolding("far", [mask(in_tier)], False, 0.0)] if in_tier else []
    answer = explained(groups, ready, locations)
    assert answer.hit_token_count == hit and words in answer.summary


def test_block_that_engines_skip_is_not_new() -> None:
    """Engines store states only every `hotkv.state_interval_tokens`, and no blocks before a
    window."""
    for group in (STATE, WINDOW):
        answer = explained((FULL, group), ("1110", "0100"), [])
        details = {(one.group_index, one.depth): one.detail for one in answer.blocks}
        assert details[0, 3] == "new, or removed long ago"
        assert "engines store some blocks of this group only" in details[1, 0]


@pytest.mark.parametrize("up", ["near", "far"])
def test_block_in_two_tiers_hits_through_one(up: str) -> None:
    locations = [TierHolding(name, [mask("0011")], name == up, 1e9) for name in ("near", "far")]
    answer = explained((FULL,), ("1100",), locations)
    assert answer.hit_token_count == 64 and answer.summary.startswith("all 64 of 64")
    assert [block.tier for block in answer.blocks] == ["host", "host", up, up]
    assert [(load.tier, load.block_count) for load in answer.loads] == [(up, 2)]


def mask(text: str) -> BoolMask:
    return np.array([one == "1" for one in text])


def explained(
    groups: tuple[GroupSpec, ...], ready: tuple[str, ...], locations: list[TierHolding]
) -> admin_pb2.KeySpaceExplanation:
    """`ready`: for each group a digit for each block; 1: host memory has it."""
    found = [
        PromptBlocks(
            np.arange(8 * len(text), dtype=np.uint32).reshape(-1, 8),
            mask(text).astype(np.uint32),
            np.zeros(len(text), np.uint8),
            np.zeros(len(text), np.bool_),
        )
        for text in ready
    ]
    answer = admin_pb2.KeySpaceExplanation()
    num_tokens = max(len(t) * g.block_tokens for t, g in zip(ready, groups, strict=True))
    space = KeySpace("m", "m", "bfloat16", groups, 16)
    _explain(answer, space, 1, found, locations, num_tokens, num_tokens)
    return answer
