"""Contexts beyond device memory in real vLLM on CPU, with a real server: the tokens of sparse
decode with everything on the device, and prefix hits that load next to nothing."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.test_end_to_end import difference
from tests.vllm.tiny import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., EngineProcess]
SPARSE: dict[str, Any] = {
    "sparse_topk": 256,
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}
RESIDENT = SPARSE | {"residency": "host"}
CHUNK = 128
POOL_BLOCKS = 64
"""2,048 tokens on the device."""
CONTEXT = 8192


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    def make(
        sparse: dict[str, Any] | None,
        *,
        target: str | None = None,
        connector_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> EngineProcess:
        """An engine with the connector; its server is absent unless `target` names one."""
        layers = {"num_hidden_layers": 4, "max_position_embeddings": 2 * CONTEXT}
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": CONTEXT,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 4,
            "hf_overrides": layers,
        } | settings
        connector = {"weights_identity": tmp_path.name, "sparse_recall_steps": 0}
        connector |= {"tenant": "own"} if target is None else {}
        connector |= {} if target else {"startup_wait_s": 0.0}
        connector |= {} if sparse is None else {"sparse": sparse}
        connector |= connector_settings or {}
        return engines.start(
            write_model(tmp_path / "llama", "llama"),
            target or f"unix:{tmp_path}/none.sock",
            connector=connector,
            driver="sparse_driver.py",
            **settings,
        )

    return make


@pytest.mark.parametrize(
    "is_async",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.long)],
)
def test_tokens_are_those_of_a_device_that_holds_everything(
    start: Start, daemon: Daemon, is_async: bool
) -> None:
    """Two requests in turns of prefill and decode, three times as long as the pool together."""
    target = daemon.start().target
    reference = start(SPARSE)
    one = start(
        RESIDENT,
        target=target,
        num_gpu_blocks_override=POOL_BLOCKS + 41,
        async_scheduling=is_async,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(1, 4001, 2503)
    expected = reference.ask("generate", prompts=batch, max_tokens=40)
    found = one.ask("generate", prompts=batch, max_tokens=40)
    # A request that waits for its room has other chunks, so sums are rounded in another order.
    assert found["tokens"] == expected["tokens"] and difference(found, expected) < 1e-4
    state = one.ask("sparse")
    assert state["preemptions"] == 0
    print(one.ask("stats")["totals"])


def test_a_prefix_hit_moves_next_to_nothing(start: Start, daemon: Daemon) -> None:
    """Sinks and recent window are loaded, representations copied; the rest stays where it is."""
    target = daemon.start().target
    reference = start(SPARSE)
    first, second = (
        start(RESIDENT, target=target, num_gpu_blocks_override=POOL_BLOCKS) for _ in range(2)
    )
    for engine in (first, second):
        engine.ask("wait", connected=True, timeout_s=60.0)
    (base, tail) = prompts(2, 4000, 97)
    expected = reference.ask("generate", prompts=[base + tail], max_tokens=30)
    first.ask("generate", prompts=[base], max_tokens=30)
    found = second.ask("generate", prompts=[base + tail], max_tokens=30)
    assert found["cached"] == [4000]
    # Chunks of the prompt begin elsewhere, so sums are rounded in another order.
    assert found["tokens"] == expected["tokens"] and difference(found, expected) < 1e-4
    totals = second.ask("stats")["totals"]
    print(totals)
    # 4 layers, 2 heads of 32: 2 KiB a token.
    assert totals["load_bytes"] < 0.05 * 4000 * 2048
    assert totals["loads"] == 1 and "failed_loads" not in totals
    # Those of the blocks that were hit are in the arena; the tail and the answer have four.
    assert totals["sparse_built_blocks"] <= 4 * 5


@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "sparse"])
def test_the_rows_that_attend_sparsely_are_those_that_the_scheduler_counts(
    start: Start, daemon: Daemon, is_resident: bool
) -> None:
    """Prompts whose last chunk is one token, of one token, with a hit that leaves one, and requests
    that are preempted, in steps that decode as well."""
    one = start(
        RESIDENT if is_resident else SPARSE,
        target=daemon.start().target,
        num_gpu_blocks_override=POOL_BLOCKS if is_resident else 80,
        scheduler_reserve_full_isl=False,
        max_model_len=2048 if is_resident else 1200,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("compare_rows")
    batch = prompts(4, 1025, 1, 897, 600)
    one.ask("generate", prompts=batch, max_tokens=40)
    one.ask("generate", prompts=[[*batch[0][:1024], 9], batch[3]], max_tokens=40)
    found = one.ask("rows")
    assert found["wrong"] == [] and found["rows"] > 150
    print(found, one.ask("sparse"), one.ask("stats")["totals"])


@pytest.mark.long
def test_a_request_is_preempted_and_resumes(start: Start, daemon: Daemon) -> None:
    """A pool for one and a half requests, which admission lets two into: one is preempted in
    decode, and resumes with what the server keeps."""
    target = daemon.start().target
    reference = start(SPARSE)
    one = start(
        RESIDENT,
        target=target,
        num_gpu_blocks_override=POOL_BLOCKS,
        scheduler_reserve_full_isl=False,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(3, 2000, 2100)
    expected = reference.ask("generate", prompts=batch, max_tokens=60)
    found = one.ask("generate", prompts=batch, max_tokens=60)
    print(one.ask("sparse"), one.ask("stats")["totals"])
    assert [len(tokens) for tokens in found["tokens"]] == [60, 60]
    same = sum(a == b for a, b in zip(found["tokens"], expected["tokens"], strict=True))
    assert same >= 1
