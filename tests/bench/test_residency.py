"""Tests the arithmetic of `bench.residency` with made-up measurements."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.residency import TARGETS, Found, figures, report
from bench.resident_cases import (
    Exact,
    Held,
    Mixed,
    Model,
    Round,
    Shape,
    Together,
    largest_difference,
)
from demo.watched import Batch
from demo.watched_process import Engine

LLAMA = Model("llama", Path("/none"), "float32", 4, 2048, range(3, 10))
SMOLLM = Model("smollm2", Path("/none"), "bfloat16", 30, 23040, range(3, 10))


def made_up(context_tokens: int, resident_step_s: float) -> Round:
    return Round(
        context_tokens,
        dense_prefill_s=(10.0, 8.0),
        sparse_prefill_s=(11.0, 9.0),
        resident_prefill_s=(12.0, 10.0),
        build_s=0.24,
        hit_first_s=(0.6, 1.0),
        connector_hit_first_s=(0.7, 2.0),
        hit_tokens=context_tokens - 64,
        hit_load_bytes=(context_tokens - 64) * 2048 * 0.01,
        hit_staged_pages=(context_tokens - 64) // 32 * 4,
        hit_built_blocks=0.0 if context_tokens < 32768 else 4.0,
        dense_step_s=(0.030, 0.020),
        sparse_step_s=(0.012, 0.010),
        resident_step_s=(resident_step_s, resident_step_s),
        pulled_pages=128.0,
        num_steps=64,
    )


def batch(tokens: list[list[int]], logprobs: list[list[float]]) -> Batch:
    """Fields that don't matter are empty."""
    return Batch(tokens, logprobs, [0], ["length"], [(0.0, 0.0)], [], 0, 0, {}, 0.0, 0.0)


def found() -> Found:
    return Found(
        [
            Exact("small", "llama", 8192, 1024, 1.0, 0.0, 0.0, 0.0),
            Exact("wrong", "llama", 65536, 1024, 0.5, 0.25, 1.0, 2.0),
        ],
        {
            "llama 32768": (
                Shape(LLAMA, 32768, 1024, 256, 8192),
                [made_up(32768, 0.011), made_up(32768, 0.009), made_up(32768, 0.010)],
            ),
            "smollm2 6144": (Shape(SMOLLM, 6144, 256, 256, 1536), [made_up(6144, 0.012)]),
        },
        [Held(4096, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)],
        [
            Together("dense", 16416, 9, 16384, 128, 1, 0.0, 90.0, 30.0, 28.0, 50.0),
            Together("resident", 16416, 9, 16384, 128, 6, 3.0, 60.0, 10.0, 7.0, 300.0),
        ],
        [
            Mixed(way, number, 16416, 40960, (30.0, cold_s), (15.0, 10.0), 0.0, 0.0, 6)
            for number in range(3)
            for way, cold_s in (("dense", 20.0), ("host", 11.0 + number), ("auto", 10.0))
        ],
        [
            Mixed(way, 0, 65536, 40960, (30.0, 10.0), (15.0, warm_s), 0.0, 0.0, 6)
            for way, warm_s in (("dense", 10.0), ("auto", 6.0))
        ],
    )


FIGURES = {
    "step_over_resident_llama_32768": 1.0,
    "step_over_dense_32k": 0.5,
    "prefill_overhead_wall": 1.2,
    "hit_first_token_share": 0.1,
    "hit_over_connector": 0.5,
    "hit_bytes_share": 0.01,
    "hit_staged_share": 1.0,
    "representations_overhead_hit": 0.0,
    "representations_overhead": 0.02,
    "tokens_equal": 0.5,
    "max_logprob_diff": 0.25,
    "context_over_pool": 8.0,
    "preemptions": 4.0,
    "lost": 2.0,
    "concurrency_gain": 6.0,
    "throughput_gain": 4.0,
    "throughput_gain_cold": 1.5,
    "throughput_gain_decode": 6.0,
    "auto_over_dense": 1.5,
    "auto_over_dense_roomy": 1.25,
    "auto_over_host": 1.1,
    "auto_over_host_cold": 1.2,
    "auto_over_host_warm": 1.0,
    "auto_over_host_wall": 1.0,
}
"""Medians of the ratios in all rounds, and gains with block pools of equal size. A single
inexact run lowers `tokens_equal`."""


def test_figures_and_targets() -> None:
    named = figures(found())
    assert {name: named[name] for name in FIGURES} == pytest.approx(FIGURES)
    assert named.keys() >= TARGETS.keys()
    assert all(name in report(found(), named) for name in TARGETS)


def test_the_decode_rate_is_that_of_full_steps() -> None:
    steps = [(0.0, 0.0, 1), (0.5, 0.4, 1), (1.0, 0.6, 4), (1.5, 0.8, 4), (2.0, 1.3, 4)]
    full = replace(batch([], []), steps=steps)
    assert full.decode_rate(0) == pytest.approx(8.0)
    assert full.decode_rate(1) == pytest.approx(20.0)


def test_logprobs_are_compared_up_to_differing_token() -> None:
    mine = batch([[1, 2, 3], [4, 5]], [[-1.0, -2.0, -9.0], [-1.0, -1.0]])
    other = batch([[1, 7, 3], [4, 5]], [[-1.0, -2.5, -1.0], [-1.0, -1.25]])
    assert largest_difference(mine, other) == pytest.approx(0.5)


@pytest.mark.parametrize("is_in_process", [True, False])
def test_a_batch_has_the_seconds_of_the_connector(is_in_process: bool) -> None:
    """Out of process, vLLM's metrics have other names; the report must not. In process, counts
    since the last update of the totals are added."""
    engine = Engine.__new__(Engine)
    names = {"vllm:hotkv_sparse_build_seconds": 1.0, "vllm:num_preemptions": 2.0, "vllm:other": 3.0}
    metrics = [SimpleNamespace(name=name, value=value) for name, value in names.items()]
    engine.llm = SimpleNamespace(get_metrics=lambda: metrics)
    totals, growth = (SimpleNamespace(data={"sparse_build_s": value}) for value in (1.25, 0.5))
    side = SimpleNamespace(totals=totals, stats=growth)
    connector = SimpleNamespace(_scheduler=side)
    core = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    engine._core = core if is_in_process else None
    seconds = 1.75 if is_in_process else 1.0
    assert engine._counters() == {"sparse_build_s": seconds, "preemptions": 2.0}
