"""How a step of vLLM's scheduler is read."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hotkv_vllm.compat import NULL_BLOCK, steps
from tests.vllm.harness import prompt
from tests.vllm.specs import window_spec
from tests.vllm.tiny import BLOCK_TOKENS

TOKENS = 16
GROUPS = (TOKENS, 2 * TOKENS, 0)
"""Tokens of a block by group; 0: recurrent states."""


def fresh(
    *,
    new: Sequence[tuple[int, Any]] = (),
    cached: Sequence[tuple[int, Any]] = (),
    resumed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] | None = None,
    zeroed: Sequence[int] | None = None,
) -> set[int]:
    """new, cached: computed tokens and block ids.
    resumed: indices in `cached`.
    copies: source and target.
    """
    told: Any = SimpleNamespace(
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
    return steps.fresh_block_ids(told, GROUPS)


TABLE = ([1, 2, 3], [11, 12], [21])


@pytest.mark.parametrize(
    "told, blocks",
    [
        ({}, set()),
        ({"copies": [], "zeroed": []}, set()),
        ({"cached": [(64, None)]}, set()),
        # A new request writes all blocks behind its hit; of states all.
        ({"new": [(0, TABLE)]}, {1, 2, 3, 11, 12, 21}),
        ({"new": [(1, TABLE)]}, {1, 2, 3, 11, 12, 21}),
        ({"new": [(16, TABLE)]}, {2, 3, 11, 12, 21}),
        ({"new": [(31, TABLE)]}, {2, 3, 11, 12, 21}),
        ({"new": [(32, TABLE)]}, {3, 12, 21}),
        # A running request writes its new blocks, a resumed one as a new one.
        ({"cached": [(32, ([3], [13], [23]))]}, {3, 13, 23}),
        ({"cached": [(32, TABLE)], "resumed": [0]}, {3, 12, 21}),
        (
            {"cached": [(32, None), (32, TABLE), (32, ([4], [], []))], "resumed": [1]},
            {3, 4, 12, 21},
        ),
        ({"copies": [(1, 2), (3, 4)]}, {2, 4}),
        ({"zeroed": [5, 6]}, {5, 6}),
        # The blocks are in no table, as after a preemption in the same call.
        ({"new": [(0, ([1], [], []))], "copies": [(7, 8)], "zeroed": [9]}, {1, 8, 9}),
        # The null block is nobody's.
        (
            {
                "new": [(0, ([NULL_BLOCK, 1], [], []))],
                "copies": [(1, NULL_BLOCK)],
                "zeroed": [NULL_BLOCK, 2],
            },
            {1, 2},
        ),
    ],
)
def test_blocks_that_a_step_writes_anew(told: dict[str, Any], blocks: set[int]) -> None:
    assert fresh(**told) == blocks


def image(name: str, offset: int, length: int) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=position)


def test_prompts_mixing_ids_and_embeddings_hash_right() -> None:
    """If hashes are equal and inputs not, `covers_embeddings` excludes one."""
    init_none_hash(sha256)
    masks = list(itertools.product((True, False), repeat=2))
    prompts = [(list(ids), list(mask)) for ids in masks for mask in masks]
    seen: dict[bytes, set[Any]] = {}
    excluded = 0
    for ids, mask in [*(([7 * one for one in ids], mask) for ids, mask in prompts), (None, None)]:
        request = Request(
            "r",
            ids,
            SamplingParams(max_tokens=1),
            None,
            prompt_embeds=torch.ones(2, 4),
            prompt_is_token_ids=mask,
            block_hasher=get_request_block_hasher(2, sha256),
        )
        if not steps.covers_embeddings(request):
            excluded += 1
            continue
        pairs = zip(ids or (0, 0), mask or (False, False), strict=True)
        inputs = tuple(token if is_token else None for token, is_token in pairs)
        seen.setdefault(request.block_hashes[0], set()).add(inputs)
    assert excluded == 7 and all(len(inputs) == 1 for inputs in seen.values()) and len(seen) == 4


VECTORS = torch.arange(2 * TOKENS * 4, dtype=torch.float32).reshape(2 * TOKENS, 4)


def test_extra_keys_of_blocks() -> None:
    plain: dict[str, Any] = dict.fromkeys(("cache_salt", "prompt_embeds", "lora_request"))
    plain["mm_features"] = []

    def keys(blocks: range, **parts: Any) -> Any:
        return steps.event_extra_keys(SimpleNamespace(**plain | parts), blocks, TOKENS)

    assert keys(range(4)) == ()
    # vLLM hashes a salt into the first block only.
    assert keys(range(2), cache_salt="s") == (("s",), None)
    assert keys(range(1, 3), cache_salt="s") == ()
    adapter = SimpleNamespace(lora_name="a", lora_path="/a")
    assert keys(range(2), lora_request=adapter, cache_salt="s") == (("a", "s"), ("a",))
    assert keys(range(1, 2), lora_request=adapter) == (("a",),)
    # The second block has the first image's end and the second's beginning.
    images = [image("a", 4, 16), image("b", 30, 4)]
    wanted = ((("a", 4),), (("a", -12), ("b", 14)), (("b", -2),), None)
    assert keys(range(4), mm_features=images) == wanted
    assert keys(range(2, 4), mm_features=images) == wanted[2:]
    assert keys(range(3, 5), mm_features=images) == ()
    # vLLM hashes hashes of the embeddings.
    found = keys(range(2), prompt_embeds=VECTORS, _prompt_embeds_per_block_hashes={})
    assert len(found) == 2 and found[0] and found[1] and found[0] != found[1]


ENDS = st.integers(-5, 5) | st.none()


@given(st.lists(st.integers(0, 99)), ENDS, ENDS)
def test_table_read_in_place_equals_a_list(
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
def test_decode_reads_constant_ids_per_step(
    engine: Any, monkeypatch: pytest.MonkeyPatch, watching: bool
) -> None:
    """watching: all blocks are inexact, which is tracked."""
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
        assert len(one.outputs["a"]) == 100 and "callback_errors" not in one.counters
        most.append(max(counts))
    assert most[0] == most[1] <= 4, "blocks that the step fills, or writes"


@pytest.mark.parametrize(
    ("window", "ids", "stored"),
    [
        (80, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        (80, [0, 2, 3, 4, 5, 6, 7, 8], [0, 2, 3, 4, 5, 6, 7, 8]),
        pytest.param(80, [1, 0, 3, 4, 5], [1, 0, 3, 0, 5], id="a hit at its end needs more"),
        pytest.param(40, [1, 0, 3, 4, 5], [0, 0, 3, 4, 5], id="no block before a hole"),
        pytest.param(40, [1, 2, 3, 4, 0, 6, 7, 8], [1, 2, 3, 4, 0, 6, 7, 0], id="no later hole"),
        pytest.param(40, [0, 0, 0, 0, 0, 0, 7, 8], [0, 0, 0, 0, 0, 0, 7, 8], id="none before it"),
    ],
)
def test_window_chunks_keep_blocks_in_place(window: int, ids: list[int], stored: list[int]) -> None:
    assert without_holes(window, ids) == stored


def without_holes(
    window: int, ids: list[int], first: int = 0, aligned_chunks: int = 1, ended: bool = False
) -> list[int]:
    """vLLM stores chunks of four blocks whose last is there. So blocks are marked as missing: the
    last of a chunk that must not be stored, or those before the last hole.

    ids: 0: missing.
    first: first chunk not stored yet.
    aligned_chunks: hits end at multiples of so many.
    """
    group = SimpleNamespace(
        kv_cache_spec=replace(window_spec(), sliding_window=window),
        tokens_per_block=BLOCK_TOKENS,
        tokens_per_chunk=4 * BLOCK_TOKENS,
    )
    config = SimpleNamespace(
        blocks_per_chunk=4,
        kv_group_configs=(group,),
        alignment_tokens=aligned_chunks * 4 * BLOCK_TOKENS,
    )
    state = SimpleNamespace(block_ids=[*ids], next_stored_chunk_idx=first)
    offloading = SimpleNamespace(
        config=config,
        _sliding_window_groups=(0,),
        _req_status={"a": SimpleNamespace(group_states=[state])},
    )
    scheduled, finished = ({}, {"a"}) if ended else ({"a": 1}, set())
    step = SimpleNamespace(num_scheduled_tokens=scheduled, finished_req_ids=finished)
    steps.leave_out_holes(offloading, step)
    return state.block_ids


def test_final_chunks_have_no_holes() -> None:
    """At the end vLLM also considers chunks behind the last possible hit."""
    ids, rest = [1, 0, 3, 4, 5, 0, 7, 8], [9, 10, 11, 12]
    for aligned_chunks, ended, stored in (
        (2, False, ids),
        (1, True, ids),
        (2, True, [1, 0, 3, 4, 0, 0, 7, 8]),
        (8, True, [0, 0, 3, 4, 5, 0, 7, 0]),
    ):
        assert without_holes(40, ids + rest, 2, aligned_chunks, ended) == stored + rest
