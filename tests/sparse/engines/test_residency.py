"""Residency in real vLLM on CPU: tokens equal those of sparse decode with all blocks on the
device."""

from typing import Any

import pytest

from tests.sparse.engines.resident_runs import (
    AUTO,
    CONTEXT,
    EXACT,
    EXACT_POOL,
    POOL_BLOCKS,
    REFERENCE,
    RESIDENT,
    SPARSE,
    Start,
    prompts,
    references,
    same,
    start,
)
from tests.sparse.engines.sparse_runs import References
from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon
from tests.vllm.runs import NGRAM, settled
from tests.vllm.tiny import BLOCK_TOKENS, VOCAB

__all__ = ["references", "start"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("is_async", "cache"),
    [
        pytest.param(True, {}, id="async"),
        pytest.param(False, {}, id="sync", marks=pytest.mark.long),
        pytest.param(True, {"kv_cache_dtype": "fp8_e4m3"}, id="fp8"),
        pytest.param(False, {"speculative_config": NGRAM}, id="drafts"),
    ],
)
def test_tokens_equal_a_device_that_holds_everything(
    start: Start, daemon: Daemon, references: References, is_async: bool, cache: dict[str, Any]
) -> None:
    """Contexts are together about twice the device."""
    one = start(
        RESIDENT,
        target=daemon.start().target,
        num_gpu_blocks_override=POOL_BLOCKS + 41,
        async_scheduling=is_async,
        **cache,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(1, 4001, 2503)
    found = one.ask("generate", prompts=batch, max_tokens=40)
    assert same(found, references.ask(engine=REFERENCE | cache, prompts=batch, max_tokens=40))
    assert one.ask("sparse")["preemptions"] == 0


WINDOWS = [
    pytest.param("gemma3", {"dtype": "float32"}, id="one-full-of-six"),
    pytest.param("gpt_oss", {"dtype": "bfloat16"}, id="sinks"),
    pytest.param("gemma4", {"dtype": "float32"}, id="larger-blocks", marks=pytest.mark.long),
    pytest.param("llama4", {"dtype": "float32"}, id="chunks", marks=pytest.mark.long),
]


@pytest.mark.parametrize("mode", [RESIDENT, AUTO], ids=["host", "auto"])
@pytest.mark.parametrize(("kind", "settings"), WINDOWS)
def test_windows_stay_beside_resident_layers(
    start: Start,
    daemon: Daemon,
    references: References,
    kind: str,
    settings: dict[str, Any],
    mode: dict[str, Any],
) -> None:
    """Contexts are together more than the device; the second round hits the first's blocks."""
    plain = settings | {"kind": kind, "hf_overrides": {"max_position_embeddings": 2 * CONTEXT}}
    one = start(
        mode, target=daemon.start().target, num_gpu_blocks_override=POOL_BLOCKS + 60, **plain
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(1, 3001, 2503)
    expected = references.ask(engine=REFERENCE | plain, prompts=batch, max_tokens=40)
    found = one.ask("generate", prompts=batch, max_tokens=40)
    assert same(found, expected)
    settled(one)
    again = one.ask("generate", prompts=batch, max_tokens=40)
    assert same(again, expected)
    assert min(again["cached"]) > 2000 and one.ask("sparse")["preemptions"] == 0
    counted = one.ask("stats")["totals"]
    assert counted["resident_pulled_pages"] > 0
    assert not {"failed_residencies", "lost_residencies", "callback_errors"} & counted.keys()


def test_a_prefix_hit_moves_next_to_nothing(
    start: Start, daemon: Daemon, references: References
) -> None:
    """Only first and latest blocks are loaded; of the others the sketches are copied."""
    target = daemon.start().target
    first, second = (
        start(RESIDENT, target=target, num_gpu_blocks_override=POOL_BLOCKS) for _ in range(2)
    )
    for engine in (first, second):
        engine.ask("wait", connected=True, timeout_s=60.0)
    (base, tail) = prompts(2, 4000, 97)
    first.ask("generate", prompts=[base], max_tokens=30)
    settled(first)
    found = second.ask("generate", prompts=[base + tail], max_tokens=30)
    assert found["cached"] == [4000]
    assert same(found, references.ask(engine=REFERENCE, prompts=[base + tail], max_tokens=30))
    totals = second.ask("stats")["totals"]
    # 2 KiB a token: 4 layers, 2 heads, 32 channels, keys and values, 4 bytes.
    assert totals["load_bytes"] < 0.05 * 4000 * 2048
    assert totals["loads"] == 1 and "failed_loads" not in totals
    # Sketches are built only behind the hit, at most five in each of four layers.
    assert totals["sparse_built_blocks"] <= 4 * 5


@pytest.mark.parametrize(
    ("is_resident", "more"),
    [
        pytest.param(True, {}, id="resident"),
        pytest.param(False, {}, id="sparse", marks=pytest.mark.long),
        pytest.param(True, {"speculative_config": NGRAM}, id="drafts", marks=pytest.mark.long),
    ],
)
def test_sparse_rows_are_those_the_scheduler_counts(
    start: Start, daemon: Daemon, is_resident: bool, more: dict[str, Any]
) -> None:
    one = start(
        RESIDENT if is_resident else SPARSE,
        target=daemon.start().target,
        num_gpu_blocks_override=POOL_BLOCKS if is_resident else 80,
        scheduler_reserve_full_isl=False,
        max_model_len=2048 if is_resident else 1200,
        **more,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("compare_rows")
    batch = prompts(4, 1025, 1, 897, 600)
    one.ask("generate", prompts=batch, max_tokens=40)
    one.ask("generate", prompts=[[*batch[0][:1024], 9], batch[3]], max_tokens=40)
    found = one.ask("rows")
    assert found["wrong"] == [] and found["rows"] > 150


@pytest.mark.parametrize(
    "is_async",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.long)],
)
def test_possibly_long_requests_run_and_finish(
    start: Start, daemon: Daemon, references: References, is_async: bool
) -> None:
    """Each needs 62 blocks; the server pins 98."""
    daemon.flags = ["--residency.share", "0.1"]
    params = {"max_tokens": 1300, "min_tokens": 200, "stop_token_ids": [*range(3, VOCAB, 4)]}
    requests = [{"tokens": tokens} for tokens in prompts(5, 660, 665, 670, 675)]
    one = start(
        EXACT,
        target=daemon.start().target,
        num_gpu_blocks_override=4 * EXACT_POOL,
        async_scheduling=is_async,
        quantum=64,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    found = one.ask("sample", requests=requests, params=params)
    assert same(found, references.ask("sample", requests=requests, params=params))
    assert found["ended"] == ["stop"] * 4
    counted = one.ask("stats")["totals"]
    assert counted["parked_residencies"] >= 1
    assert not {"failed_residencies", "lost_residencies", "callback_errors"} & counted.keys()


def test_context_within_hot_slots_is_not_staged(
    start: Start, daemon: Daemon, references: References
) -> None:
    """Answers of 1 and 30 tokens stage as many pages."""
    one = start(EXACT, target=daemon.start().target, num_gpu_blocks_override=2 * EXACT_POOL)
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(6, 1500)
    found = one.ask("generate", prompts=batch, max_tokens=40)
    assert same(found, references.ask(prompts=batch, max_tokens=40))
    staged, pulled = [], []

    def totals() -> dict[str, float]:
        """Counters come with a later step."""
        one.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
        found: dict[str, float] = one.ask("stats")["totals"]
        return found

    # On a busy machine perhaps after the answer.
    wait_for(lambda: totals().get("stored_blocks", 0) >= 1500 // BLOCK_TOKENS, "the prompt", 60.0)
    for max_tokens in (1, 30, 1):
        counted = totals()
        one.ask("generate", prompts=batch, max_tokens=max_tokens)
        more = totals()
        staged.append(more["resident_staged_pages"] - counted.get("resident_staged_pages", 0))
        pulled.append(more["resident_pulled_pages"] - counted.get("resident_pulled_pages", 0))
    assert staged[0] == staged[1] == staged[2] and pulled[0] == 0 < pulled[1]
    assert "with one request of 8192 tokens this rank takes" in one.log()
