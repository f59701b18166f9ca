"""Models of several kinds of groups: what is stored and loaded of each, with vLLM's real scheduler
and the arithmetic model."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.groups import GroupKind, GroupSpec, needed_blocks
from hotkv_vllm.compat import kv_groups
from hotkv_vllm.scheduler.stores import StorableBlocks, prompt_boundaries
from tests.vllm.harness import prompt
from tests.vllm.specs import HYBRIDS, full_model, hybrid_model, uneven_model

LENGTH = 420


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupSpec, int]:
    """Returns a group and a hit alignment."""
    kind = draw(st.sampled_from(list(GroupKind)))
    block = draw(st.sampled_from([4, 8, 16]))
    window = (
        draw(st.integers(1, 100))
        if kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
        else 0
    )
    return GroupSpec(kind, block, (1,), window), block * draw(st.integers(1, 6))


@given(groups(), st.booleans(), st.integers(0, 60), st.integers(1, 120))
def test_reachable_blocks_are_those_that_some_hit_needs(
    case: tuple[GroupSpec, int], is_draft: bool, first: int, count: int
) -> None:
    spec, alignment = case
    boundaries = range(
        alignment, (first + count + 2) * spec.block_tokens + alignment + 1, alignment
    )
    needed = {block for boundary in boundaries for block in needed_blocks([spec], boundary)[0]}
    if is_draft:
        needed |= {boundary // spec.block_tokens for boundary in (0, *boundaries)}
    mask = StorableBlocks(spec, alignment, 0, is_draft).mask(first, first + count)
    assert mask.tolist() == [block in needed for block in range(first, first + count)]


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 4),
    st.integers(1, 200),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 300),
)
def test_kept_states(
    block: int, blocks: int, interval: int, prompt_tokens: int, drops: bool, junction: int
) -> None:
    """Every so often, and where a request that repeats or extends the prompt goes on."""
    alignment = block * blocks
    reach = StorableBlocks(GroupSpec(GroupKind.MAMBA, block, (1,)), alignment, interval)
    ends = prompt_boundaries(prompt_tokens, alignment, drops)
    mask = reach.mask(0, 400 // block, (*ends, junction))
    step = -(-interval // alignment) * alignment
    kept = {
        end
        for end in range(alignment, 401, alignment)
        if end % step == 0 or end in ends or end == junction
    }
    assert {(i + 1) * block for i in np.flatnonzero(mask).tolist()} == kept
    for hit in {
        (prompt_tokens - 1) // alignment * alignment,
        prompt_tokens // alignment * alignment,
    } - {0}:
        assert hit in ends and (not drops or hit == alignment or hit - alignment in ends)


@pytest.mark.parametrize("model", HYBRIDS)
def test_every_length_hits_all_that_it_can(engine: Any, model: Any) -> None:
    """Prompts that end anywhere in a stored one: the longest hit, and attention finds the right KV
    behind it."""
    one = engine(specs=model(), blocks=96)
    one.generate("long", prompt(1, LENGTH), 4)
    one.generate("end", prompt(2, 10), 2)
    alignment = one.connector._scheduler.cache.finder.groups.alignment_tokens
    for length in random.Random(1).sample(range(2, LENGTH), 25):
        one.drop_local()
        _, external = one.generate(f"p{length}", prompt(1, length) + [7] * 3, 2)
        assert external == (
            length if length % alignment == 0 else length // alignment * alignment
        ), length
    assert "failed_loads" not in one.counters and "hook_errors" not in one.counters


@pytest.mark.parametrize("model", HYBRIDS)
def test_only_blocks_that_a_hit_needs_are_stored_and_loaded(
    engine: Any, server: Any, model: Any
) -> None:
    one = engine(specs=model(), blocks=96, max_tokens_per_step=LENGTH)
    one.generate("a", prompt(1, LENGTH))
    one.generate("end", prompt(2, 10), 2)
    finder = one.connector._scheduler.cache.finder
    for index, spec in enumerate(finder.groups.specs):
        hashes = list(finder.groups.hashes(one.requests["a"], index))
        stored = {
            hashes.index(block_hash)
            for _, group, block_hash in server.blocks
            if group == index and block_hash in hashes
        }
        useful = {
            b
            for end in range(0, 2 * LENGTH, finder.groups.alignment_tokens)
            for b in needed_blocks([spec], end)[0]
        }
        assert stored == useful & set(range(LENGTH // spec.block_tokens))
    server.calls.clear()
    two = engine(specs=model())
    _, hit = two.generate("b", prompt(1, LENGTH))
    (loaded,) = [runs for kind, runs in server.calls if kind == "load"]
    wanted = {
        index: len(blocks)
        for index, blocks in enumerate(needed_blocks(finder.groups.specs, hit))
        if len(blocks)
    }
    assert {run.group_index: len(run.block_ids) for run in loaded} == wanted and all(
        (run.block_ids != 0).all() for run in loaded
    )


def test_window_blocks_between_boundaries_are_counted(engine: Any, server: Any) -> None:
    one = engine(specs=uneven_model())
    one.generate("a", prompt(1, LENGTH), 2)
    one.generate("end", prompt(2, 10), 2)
    # 13 full window blocks in each of two groups; boundaries are at every second.
    assert one.counters["unreachable_blocks"] == 2 * 7


@pytest.mark.parametrize("model", HYBRIDS)
def test_preemption_of_hybrid_models(engine: Any, server: Any, model: Any) -> None:
    alone = {
        n: engine(specs=model(), blocks=96).generate(n, prompt(i, 120), 100)[0]
        for i, n in enumerate("abc")
    }
    server.blocks.clear()
    tight = engine(specs=model(), blocks=40, max_tokens_per_step=64)
    for index, name in enumerate("abc"):
        tight.add(name, prompt(index, 120), 100)
    tight.run()
    for _ in range(2):
        assert {n: tight.outputs[n] for n in "abc"} == alone
        tight.generate("end", prompt(9, 40))
        tight.drop_local()
        for index, name in enumerate("abc"):
            tight.add(name, prompt(index, 120), 100)
        tight.run()
    assert tight.counters["hit_requests"] >= 6 and "failed_loads" not in tight.counters


@pytest.mark.parametrize("model", [full_model, hybrid_model])
@pytest.mark.parametrize("table", [True, False], ids=["table", "rpc"])
def test_a_drafters_hit_knows_the_token_behind_it(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, model: Any, table: bool
) -> None:
    """The drafter's KV of a block's last token depends on the next token, so a hit ends one block
    before a prompt parts."""
    monkeypatch.setattr(kv_groups, "draft_groups", lambda *_: frozenset({0}))
    server.table = table
    one = engine(specs=model())
    one.generate("a", prompt(1, 200), 2)
    one.generate("end", prompt(2, 10), 2)
    for name, tokens, hit in (
        ("parts", prompt(1, 160) + [7] * 40, 128),
        ("same", prompt(1, 200), 160),
        ("longer", prompt(1, 200) + [7] * 40, 160),
        ("whole blocks", prompt(1, 192), 160),
    ):
        one.drop_local()
        assert one.generate(name, tokens, 2)[1] == hit, name
    assert "short_grants" not in one.counters
