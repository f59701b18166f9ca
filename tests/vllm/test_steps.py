"""What is read from a step of vLLM's scheduler: blocks it may write anew, and what blocks are
hashed with besides tokens."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.compat import NULL_BLOCK, steps
from tests.vllm.harness import prompt

TOKENS = 16
GROUPS = (TOKENS, 2 * TOKENS, 0)
"""Blocks of two sizes, and states."""


def step(
    *,
    new: Sequence[tuple[int, Any]] = (),
    cached: Sequence[tuple[int, Any]] = (),
    resumed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] | None = None,
    zeroed: Sequence[int] | None = None,
) -> Any:
    """`new`, `cached`: computed tokens and block ids of each request; `resumed`: which of `cached`
    were preempted; `copies`: from block, to block."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(num_computed_tokens=tokens, block_ids=ids) for tokens, ids in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"r{at}" for at in range(len(cached))],
            num_computed_tokens=[tokens for tokens, _ in cached],
            new_block_ids=[ids for _, ids in cached],
            resumed_req_ids={f"r{at}" for at in resumed},
        ),
        kv_cache_block_copies=None
        if copies is None
        else [SimpleNamespace(src_block_id=a, dst_block_id=b) for a, b in copies],
        new_block_ids_to_zero=zeroed,
    )


def fresh(**parts: Any) -> set[int]:
    return steps.fresh_block_ids(step(**parts), GROUPS)


def test_a_step_without_anything_new_writes_nothing_anew() -> None:
    assert fresh() == fresh(copies=[], zeroed=[]) == fresh(cached=[(64, None)]) == set()


@pytest.mark.parametrize("computed", [0, 1, TOKENS, 2 * TOKENS - 1, 2 * TOKENS])
def test_a_new_request_writes_all_but_the_blocks_it_hit(computed: int) -> None:
    found = fresh(new=[(computed, ([1, 2, 3], [11, 12], [21, 22]))])
    assert found == {*[1, 2, 3][computed // TOKENS :], *[11, 12][computed // (2 * TOKENS) :]} | {
        # Which of the states are hit their order does not say.
        21,
        22,
    }


def test_a_running_request_writes_the_blocks_it_is_given() -> None:
    assert fresh(cached=[(32, ([3], [13], [23]))]) == {3, 13, 23}


def test_a_resumed_request_writes_all_but_the_blocks_it_hit() -> None:
    ids = ([1, 2, 3], [11, 12], [21])
    assert fresh(cached=[(32, ids)], resumed=[0]) == {3, 12, 21}
    # Beside one that only runs on, and one that gets nothing.
    assert fresh(cached=[(32, None), (32, ids), (32, ([4], [], []))], resumed=[1]) == {3, 4, 12, 21}


def test_copies_and_zeroed_blocks_are_written_and_the_source_of_a_copy_is_not() -> None:
    assert fresh(copies=[(1, 2), (3, 4)]) == {2, 4}
    assert fresh(zeroed=[5, 6]) == {5, 6}
    # Blocks of a request that was preempted in the same call are in no other list.
    assert fresh(new=[(0, ([1], [], []))], copies=[(7, 8)], zeroed=[9]) == {1, 8, 9}


def test_the_null_block_is_nobodys() -> None:
    found = fresh(
        new=[(0, ([NULL_BLOCK, 1], [], []))], copies=[(1, NULL_BLOCK)], zeroed=[NULL_BLOCK, 2]
    )
    assert found == {1, 2}


# --------------------------------------------------------------------------------------- extra keys


def request(**parts: Any) -> Any:
    plain: dict[str, Any] = {
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "lora_request": None,
    }
    return SimpleNamespace(**plain | parts)


def image(name: str, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def keys(one: Any, blocks: range) -> Any:
    return steps.event_extra_keys(one, blocks, TOKENS)


def test_text_alone_has_no_extra_keys() -> None:
    assert keys(request(), range(4)) == ()


def test_a_salt_is_in_the_first_block_only() -> None:
    salted = request(cache_salt="s")
    assert keys(salted, range(2)) == (("s",), None)
    assert keys(salted, range(1, 3)) == ()


def test_images_are_in_the_blocks_that_they_lie_in() -> None:
    """The second block holds the end of the first image and the begin of the second."""
    two = request(mm_features=[image("a", 4, 16), image("b", 30, 4)])
    assert keys(two, range(4)) == ((("a", 4),), (("a", -12), ("b", 14)), (("b", -2),), None)
    assert keys(two, range(2, 4)) == ((("b", -2),), None)
    assert keys(two, range(3, 5)) == ()


def test_embedded_prompts_are_named_by_their_content() -> None:
    import torch

    vectors = torch.arange(2 * TOKENS * 4, dtype=torch.float32).reshape(2 * TOKENS, 4)
    found = keys(request(prompt_embeds=vectors, _prompt_embeds_per_block_hashes={}), range(2))
    assert len(found) == 2 and found[0] and found[1] and found[0] != found[1]


@pytest.mark.parametrize("given, tokens", [({}, 0), ({"shared_prefix_boundary": 48}, 48)])
def test_the_boundary_of_a_shared_prefix_is_none_where_vllm_names_none(
    given: dict[str, int], tokens: int
) -> None:
    assert steps.shared_prefix_boundary(SimpleNamespace(**given)) == tokens


# ------------------------------------------------------------------------------------ block tables


@given(
    st.lists(st.integers(0, 99)),
    st.integers(-5, 5) | st.none(),
    st.integers(-5, 5) | st.none(),
)
def test_a_table_that_is_read_in_place_reads_as_a_list(
    ids: list[int], first: int | None, stop: int | None
) -> None:
    table = steps.BlockIds([SimpleNamespace(block_id=one) for one in ids])
    assert len(table) == len(ids) and list(table) == ids
    assert table[first:stop] == ids[first:stop] and np.asarray(table[:]).tolist() == ids
    if ids:
        assert (table[0], table[-1]) == (ids[0], ids[-1])
    else:
        with pytest.raises(IndexError):
            table[0]


@pytest.mark.parametrize("watching", [False, True])
def test_a_decode_step_reads_as_many_block_ids_however_long_the_context(
    engine: Any, monkeypatch: pytest.MonkeyPatch, watching: bool
) -> None:
    """`watching`: something on the device is inexact, so that each row's blocks are marked."""
    read = [0]
    original = steps.BlockIds.__getitem__

    def counted(self: Any, at: Any) -> Any:
        found = original(self, at)
        read[0] += len(found) if isinstance(found, list) else 1
        return found

    monkeypatch.setattr(steps.BlockIds, "__getitem__", counted)
    most = []
    for length in (200, 3000):
        one = engine(blocks=128, max_model_len=3400, max_tokens_per_step=4096)
        if watching:
            one.connector._scheduler.requests._exactness.distrust_all()
        one.add("a", prompt(1, length), 100)
        while not one.outputs["a"]:
            one.step()
        counts = []
        for _ in range(64):
            before = read[0]
            one.step()
            counts.append(read[0] - before)
        one.run()
        assert len(one.outputs["a"]) == 100 and "hook_errors" not in one.counters
        most.append(max(counts))
    assert most[0] == most[1] <= 4, "blocks that the step fills, or writes"
