"""Full attention, windows, chunks and states, in the harness."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.groups import GroupKind, GroupSpec, needed_blocks
from hotkv_vllm.compat import kv_groups
from hotkv_vllm.scheduler.store.stores import StorableBlocks, prompt_boundaries
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import check_stored
from tests.vllm.specs import (
    HYBRIDS,
    checkpoints_model,
    full_model,
    hybrid_model,
    states_and_full_model,
    uneven_model,
)
from tests.vllm.speculation import SpeculatingEngine, speculating
from tests.vllm.tiny import BLOCK_TOKENS

LENGTH = 420
WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupSpec, int]:
    """A group, and the alignment of hits in tokens."""
    kind = draw(st.sampled_from(list(GroupKind)))
    block = draw(st.sampled_from([4, 8, 16]))
    window = draw(st.integers(1, 100)) if kind in WINDOWS else 0
    return GroupSpec(kind, block, (1,), window), block * draw(st.integers(1, 6))


@given(groups(), st.booleans(), st.integers(0, 60), st.integers(1, 120))
def test_reachable_blocks_are_those_that_some_hit_needs(
    case: tuple[GroupSpec, int], is_draft: bool, first: int, count: int
) -> None:
    spec, alignment = case
    end = (first + count + 2) * spec.block_tokens + alignment + 1
    boundaries = range(alignment, end, alignment)
    needed = {block for boundary in boundaries for block in needed_blocks([spec], boundary)[0]}
    if is_draft:
        needed |= {boundary // spec.block_tokens for boundary in (0, *boundaries)}
    mask = StorableBlocks(spec, alignment, 0, is_draft).mask(first, first + count)
    assert mask.tolist() == [block in needed for block in range(first, first + count)]


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 4),
    st.one_of(st.integers(1, 200), st.just((1 << 63) - 1)),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 300),
    st.integers(0, 50),
)
def test_stored_states_follow_a_plain_rule(
    block: int, blocks: int, interval: int, prompt_tokens: int, drops: bool, junction: int, cut: int
) -> None:
    """States at multiples of `interval`, at a junction of prompts, and where a repetition or
    continuation hits."""
    alignment = block * blocks
    reach = StorableBlocks(GroupSpec(GroupKind.MAMBA, block, (1,)), alignment, interval)
    ends = prompt_boundaries(prompt_tokens, alignment, drops)
    assert 0 not in ends
    parts = (0, cut), (cut, 400 // block)
    mask = np.concatenate([reach.mask(*part, (*ends, junction)) for part in parts])
    step = -(-interval // alignment) * alignment
    kept = {
        end
        for end in range(alignment, 401, alignment)
        if end % step == 0 or end in ends or end == junction
    }
    assert {(i + 1) * block for i in np.flatnonzero(mask).tolist()} == kept
    for tokens in (prompt_tokens - 1, prompt_tokens):
        hit = tokens // alignment * alignment
        assert not hit or hit in ends
        assert not hit or not drops or hit == alignment or hit - alignment in ends


@pytest.mark.parametrize("model", HYBRIDS)
def test_every_length_hits_all_it_can(engine: Any, server: Any, model: Any) -> None:
    one = engine(specs=model(), blocks=96, max_tokens_per_step=LENGTH)
    one.generate("long", prompt(1, LENGTH))
    one.generate("end", prompt(2, 10), 2)
    cached = one.connector._scheduler.cache.finder.groups
    for index, spec in enumerate(cached.specs):
        hashes = list(cached.hashes(one.requests["long"], index))
        found = {(group, block_hash) for _, group, block_hash in server.blocks}
        stored = {place for place, one in enumerate(hashes) if (index, one) in found}
        ends = range(0, 2 * LENGTH, cached.alignment_tokens)
        useful = {block for end in ends for block in needed_blocks([spec], end)[0]}
        assert stored == useful & set(range(LENGTH // spec.block_tokens))
    for length in random.Random(1).sample(range(2, LENGTH), 25):
        one.drop_local()
        server.calls.clear()
        _, hit = one.generate(f"p{length}", prompt(1, length) + [7] * 3, 2)
        assert hit == length // cached.alignment_tokens * cached.alignment_tokens
        loaded = [run for kind, runs in server.calls if kind == "load" for run in runs]
        wanted = [(at, len(blocks)) for at, blocks in enumerate(needed_blocks(cached.specs, hit))]
        assert [(run.group_index, len(run.block_ids)) for run in loaded] == [
            (at, count) for at, count in wanted if count
        ]
        assert all((run.block_ids != 0).all() for run in loaded)
    assert "failed_loads" not in one.counters and "callback_errors" not in one.counters


def test_window_blocks_between_boundaries_are_counted(engine: Any) -> None:
    one = engine(specs=uneven_model())
    one.fill(prompt(1, LENGTH), 2)
    # Hits end at every second block: 7 of 13 are never needed.
    assert one.counters["unreachable_blocks"] == 2 * 7


@pytest.mark.parametrize("model", [full_model, hybrid_model])
@pytest.mark.parametrize("table", [True, False], ids=["table", "rpc"])
def test_a_drafters_hit_knows_the_token_behind_it(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, model: Any, table: bool
) -> None:
    """KV of a block's last token depends on the next."""
    monkeypatch.setattr(kv_groups, "draft_groups", lambda *_: frozenset({0}))
    server.table = table
    one = engine(specs=model())
    one.fill(prompt(1, 200), 2)
    for tokens, hit in (
        (prompt(1, 160) + [7] * 40, 128),
        (prompt(1, 200), 160),
        (prompt(1, 200) + [7] * 40, 160),
    ):
        assert one.hit(tokens) == hit
    assert "short_grants" not in one.counters


@pytest.mark.parametrize("has_drafter", [False, True])
def test_state_before_prompt_end_stores_in_one(
    make: Any,
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_drafter: bool,
) -> None:
    """With a drafter, the state is in a later block of the table."""
    more = speculating(monkeypatch, tmp_path) if has_drafter else {}
    one = make(SpeculatingEngine if has_drafter else Engine, specs=checkpoints_model(), **more)
    for length in (129, 150, 160, 161):
        tokens = prompt(length, length)
        one.fill(tokens)
        longest = length // BLOCK_TOKENS - 1 if has_drafter else (length - 1) // BLOCK_TOKENS
        assert one.hit(tokens) == longest * BLOCK_TOKENS
    check_stored(server, [one])


def test_device_hit_revokes_no_store_of_state(engine: Any, server: Any) -> None:
    """The second request does not write the state."""
    one, tokens = engine(specs=states_and_full_model()), prompt(1, 200)
    server.hold = {"store"}
    one.generate("a", tokens)
    one.generate("b", tokens)
    assert one.local["b"] == 192
    server.resume()
    one.generate("end", prompt(2, 10), 2)
    assert "flushes" not in one.counters
    assert engine(specs=states_and_full_model()).hit(tokens) == 192


def test_device_hit_stores_state_the_server_lost(engine: Any, server: Any) -> None:
    one, tokens = engine(specs=states_and_full_model()), prompt(1, 200)
    one.fill(tokens)
    server.blocks.clear()
    one.fill(tokens)
    check_stored(server, [one])
    assert engine(specs=states_and_full_model()).hit(tokens) == 192
