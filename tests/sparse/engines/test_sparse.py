"""Sparse decode in real vLLM on CPU: exact if the budget covers the context, else within it."""

from typing import Any

import pytest

from tests.sparse.engines.sparse_runs import (
    COVERING,
    LENGTHS,
    SELECTING,
    SMALL,
    References,
    Start,
    check_counters,
    dense,
    start,
    totals,
)
from tests.vllm.processes import Daemon
from tests.vllm.runs import NGRAM, NOISE, difference, prompts, same, settled
from tests.vllm.tiny import BLOCK_TOKENS

__all__ = ["dense", "start"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# -------------------------------------------------------------------------------------------- exact


@pytest.mark.long
@pytest.mark.parametrize(
    "sparse", [pytest.param(COVERING, id="covering"), pytest.param(SELECTING, id="selecting")]
)
def test_a_covering_budget_is_exact_in_mixed_batches(
    start: Start, dense: References, sparse: dict[str, Any]
) -> None:
    """Some requests prefill while others decode, sparsely or not."""
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 6}
    one = start(sparse, **settings)
    batch = prompts(1, LENGTHS)
    if sparse is SELECTING:
        one.ask("rewrite_always")
    found = one.ask("generate", prompts=batch, max_tokens=35)
    assert same(found, dense.ask(engine=settings, prompts=batch, max_tokens=35))
    assert one.ask("sparse")["layers"] == [0, 1, 2, 3] and one.ask("sparse")["sequences"] <= 6
    counted = totals(one)
    if sparse is SELECTING:
        check_counters(counted, 4)
        assert counted["sparse_attended_blocks"] == counted["sparse_context_blocks"]
    else:
        assert "sparse_selects" not in counted and "sparse_faults" not in counted
    assert one.ask("sparse")["sequences"] == 0


@pytest.mark.long
def test_local_prefix_hits_and_preemption(start: Start, dense: References) -> None:
    """A preempted request resumes in other blocks."""
    settings = {
        "num_gpu_blocks_override": 61,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
    }
    one = start(SELECTING, **settings)
    batch = prompts(3, (920, 930))
    one.ask("rewrite_always")
    for asked, max_tokens in (([batch[0][:400]], 1), (batch, 40), (batch, 20)):
        found = one.ask("generate", prompts=asked, max_tokens=max_tokens)
        expected = dense.ask(engine=settings, prompts=asked, max_tokens=max_tokens)
        assert same(found, expected) and found["cached"] == expected["cached"]
        if max_tokens == 40:
            assert found["cached"][0] >= 384
    assert one.ask("sparse")["preemptions"] > 0
    counted = totals(one)
    check_counters(counted, 4)
    assert counted["sparse_attended_blocks"] == counted["sparse_context_blocks"]


@pytest.mark.parametrize(
    ("settings", "layers", "lengths", "noise"),
    [
        pytest.param({"kind": "gemma3"}, [5], (500, 900), NOISE, id="windows"),
        pytest.param({"kind": "gpt_oss", "dtype": "bfloat16"}, [1, 3], (500,), 2e-3, id="sinks"),
        pytest.param({"kv_cache_dtype": "fp8_e5m2"}, [0, 1, 2, 3], (500,), NOISE, id="fp8"),
        pytest.param({"speculative_config": NGRAM}, [0, 1, 2, 3], (500, 900), NOISE, id="drafts"),
    ],
)
def test_other_layers_and_caches_stay_exact(
    start: Start,
    dense: References,
    settings: dict[str, Any],
    layers: list[int],
    lengths: tuple[int, ...],
    noise: float,
) -> None:
    """The first model has windows in all but one layer, the second's softmax has learned sinks.

    layers: that decode sparsely.
    noise: tolerance of log probabilities.
    """
    one = start(SELECTING | {"max_correction_blocks": 3}, **settings)
    one.ask("rewrite_always")
    batch = prompts(6, lengths)
    found = one.ask("generate", prompts=batch, max_tokens=40)
    assert one.ask("sparse")["layers"] == layers
    assert difference(found, dense.ask(engine=settings, prompts=batch, max_tokens=40)) < noise
    check_counters(totals(one), 3)


# ------------------------------------------------------------------------------------------ bounded


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"scorer": "quest"}, marks=pytest.mark.long),
        pytest.param({"adaptive_p": 0.6}, marks=pytest.mark.long),
        pytest.param({"fusion": {"rot2u": 0.5, "mean": 0.5}}, marks=pytest.mark.long),
        pytest.param({"scorer": "rot3u", "cache_policy": "none"}, marks=pytest.mark.long),
    ],
    ids=["default", "quest", "adaptive", "fusion", "rot3u-none"],
)
def test_a_small_budget_is_kept(start: Start, more: dict[str, Any]) -> None:
    one = start(SMALL | more, max_num_batched_tokens=256)
    one.ask("generate", prompts=prompts(8, (1400, 300, 800)), max_tokens=40)
    counted = totals(one)
    check_counters(counted, 2)
    assert one.ask("sparse")["layers"] == [1, 2, 3]
    # Two prompts, 39 decode steps, three layers.
    assert counted["sparse_selects"] == 3 * 39 * 2
    # A step selects half of 16 blocks, the first step all.
    selected = 16 if more.get("cache_policy") == "none" else 8
    assert counted["sparse_selected_blocks"] <= (selected * counted["sparse_selects"]) + 3 * 2 * 8
    assert counted["sparse_attended_blocks"] <= 16 * counted["sparse_selects"]
    assert counted["sparse_seeded_blocks"] > 0 and counted["sparse_corrected_blocks"] > 0
    # Once for each complete block in each of three layers.
    assert counted["sparse_built_blocks"] == 3 * sum(
        (length + 39) // BLOCK_TOKENS for length in (1400, 800)
    )


# ------------------------------------------------------------------------------------------- shared


@pytest.mark.long
def test_hit_brings_sketches_builds_nothing_again(start: Start, daemon: Daemon) -> None:
    target = daemon.start().target
    batch = prompts(4, (700, 1100))
    num_hit = sum((length - 1) // BLOCK_TOKENS for length in (700, 1100))
    first, second, other = (
        start(sparse, target=target) for sparse in (SMALL, SMALL, SMALL | {"scorer": "quest"})
    )
    for engine in (first, second, other):
        engine.ask("wait", connected=True, timeout_s=60.0)
    first.ask("generate", prompts=batch, max_tokens=40)
    settled(first)
    first.ask("reset")
    expected, found, apart = (
        engine.ask("generate", prompts=batch, max_tokens=40) for engine in (first, second, other)
    )
    assert found["cached"] == expected["cached"] == apart["cached"] == [672, 1088]
    assert same(found, expected)
    counted = totals(second)
    # Three layers.
    assert counted["sparse_loaded_blocks"] == 3 * num_hit
    assert counted["sparse_built_blocks"] == 3 * (
        739 // BLOCK_TOKENS + 1139 // BLOCK_TOKENS - num_hit
    )
    assert "sparse_loaded_blocks" not in totals(other)
    assert all(engine.ask("pool")["wrong"] == 0 for engine in (first, second, other))
    assert not {"failed_loads", "callback_errors", "sparse_faults"} & counted.keys()


# -------------------------------------------------------------------------------------------- fails


def test_a_fault_falls_back_to_dense_attention(start: Start, dense: References) -> None:
    one = start(SMALL)
    batch = prompts(10, (700, 900))
    one.ask("break_from_now")
    found = one.ask("generate", prompts=batch, max_tokens=30)
    assert same(found, dense.ask(prompts=batch, max_tokens=30))
    counted = totals(one)
    # Three faults, 16 dense steps and a fourth fault, by layer.
    assert counted["sparse_faults"] == 3 * 4 and "sparse_selects" not in counted
    assert (
        one.log().count("RuntimeError: injected") == 3
        and one.log().count("broke 3 times in a row; it rests for 16 steps") == 3
    )
