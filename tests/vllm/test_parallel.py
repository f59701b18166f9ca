"""Real engines with tensor, pipeline or data parallelism. Weights of a file show misplaced
shards; deepseek has none."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import wait_for
from tests.vllm.checkpoint import write_weights
from tests.vllm.feature_runs import Starter, clean
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import NOISE, difference, hits, prompts, settled
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 257, 500)
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}

Start = Callable[..., EngineProcess]


@pytest.fixture
def start_ranks(start: Starter) -> Start:
    """shape: changes of the model's config."""

    def make(kind: str, *, shape: dict[str, Any] | None = None, **settings: Any) -> EngineProcess:
        settings = {"kv_cache_memory_bytes": 32 << 20, "driver": "parallel_driver.py"} | settings
        if kind == "deepseek":
            return start(kind, **settings)
        folder = start.folder / kind
        if not folder.exists():
            write_weights(write_model(folder, kind), **(shape or {}))
        return start(folder, load_format="auto", **settings)

    return make


def blocks_of(batch: list[list[int]], new_tokens: int) -> int:
    """An answer's last token has no KV."""
    return sum((len(prompt) + new_tokens - 1) // 32 for prompt in batch)


def kill_a_rank(daemon: Daemon, engine: EngineProcess, prompt: list[int]) -> None:
    """Waits until the server has released all. A pipeline's last stage first stops, until the
    first has stored its shard."""

    def counters() -> dict[str, float]:
        counted: dict[str, float] = daemon.admin("info")["counters"]
        return counted

    def stage_has_stored() -> bool:
        now = counters()
        has_grown = now["stored_bytes_total"] > before["stored_bytes_total"]
        return has_grown and not now["transfers_in_flight"]

    before, pids = counters(), engine.ask("ranks")["pids"]
    if "PP1" in engine.log():
        os.kill(pids[-1], signal.SIGSTOP)
        engine.begin("generate", prompts=[prompt], max_tokens=1)
        wait_for(stage_has_stored)
        assert counters()["arena_used_bytes"] > before["arena_used_bytes"]
        assert counters()["ready_blocks"] == before["ready_blocks"]
    os.kill(pids[-1], signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    engine.kill()
    released = {name: before[name] for name in ("arena_used_bytes", "ready_blocks")}
    released |= {"leases": 0, "arena_pinned_bytes": 0}
    released["sessions"] = before["sessions"] - len(pids) - 1
    wait_for(lambda: released.items() <= counters().items(), "the release of what it held")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("llama", TP, id="tp2"),
        # Each of six groups is in one stage: the other's shard is empty.
        pytest.param("gemma3", PP, id="pp2-hybrid", marks=pytest.mark.long),
        # Both ranks have the same KV, but `kv_tp_replicas` is 1: each stores a shard.
        pytest.param(
            "llama", TP | {"shape": {"num_key_value_heads": 1}}, id="head", marks=pytest.mark.long
        ),
    ],
)
def test_warm_equals_cold_until_a_rank_dies(
    shared_daemon: Daemon, start_ranks: Start, kind: str, settings: dict[str, Any]
) -> None:
    batch = prompts(9, LENGTHS)
    first, second = start_ranks(kind, **settings), start_ranks(kind, **settings)
    cold = first.ask("generate", prompts=batch, max_tokens=14)
    assert cold["cached"] == [0] * len(batch)
    settled(first)
    first.ask("reset")
    for engine in (first, second):
        warm = engine.ask("generate", prompts=batch, max_tokens=14)
        assert warm["cached"] == hits(batch) and warm["tokens"] == cold["tokens"]
        assert difference(cold, warm) < NOISE
        assert engine.ask("stats")["totals"]["loads"] == len(batch) and clean(engine)
    fresh = prompts(10, (300,))
    kill_a_rank(shared_daemon, first, fresh[0])
    assert second.ask("generate", prompts=fresh, max_tokens=1)["cached"] == [0]
    second.ask("reset")
    warm = second.ask("generate", prompts=batch, max_tokens=14)
    assert warm["cached"] == hits(batch) and difference(cold, warm) < NOISE


@pytest.mark.long
def test_first_of_ranks_with_same_kv_writes(shared_daemon: Daemon, start_ranks: Start) -> None:
    """On CPUs a hit changes the answer, so two are compared."""
    # AMX kernels need bfloat16.
    settings = {"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": True}
    is_forbidden = not torch.cpu._is_amx_tile_supported()
    one = start_ranks("deepseek", despite_vllm=is_forbidden, **settings, **TP)
    batch = prompts(9, (257,))
    one.ask("generate", prompts=batch, max_tokens=14)
    local = one.ask("generate", prompts=batch, max_tokens=14)
    settled(one)
    one.ask("reset")
    warm = one.ask("generate", prompts=batch, max_tokens=14)
    assert warm["cached"] == local["cached"] == [256] and clean(one)
    assert warm["tokens"] == local["tokens"] and difference(local, warm) < 2e-3
    ranks = [session for session in shared_daemon.admin("sessions") if session["role"] == "worker"]
    assert sorted(bool(rank["stored_byte_count"]) for rank in ranks) == [False, True]
    assert ranks[0]["loaded_byte_count"] == ranks[1]["loaded_byte_count"] > 0


@pytest.mark.long
def test_data_parallel_siblings_blocks_hit(shared_daemon: Daemon, start_ranks: Start) -> None:
    batch = prompts(9, LENGTHS)
    both = start_ranks("llama", driver="dp_driver.py", data_parallel_size=2)
    cold = both.ask("generate", prompts=batch, max_tokens=14, rank=0)

    def stored() -> bool:
        both.ask("generate", prompts=[[7, 8, 9]], max_tokens=2, rank=0)
        return bool(shared_daemon.admin("key_spaces")[-1]["block_count"] >= blocks_of(batch, 14))

    wait_for(stored)
    warm = both.ask("generate", prompts=batch, max_tokens=14, rank=1)
    assert warm["cached"] == hits(batch) and warm["tokens"] == cold["tokens"]
    assert difference(cold, warm) < NOISE
    workers = [one for one in shared_daemon.admin("sessions") if one["role"] == "worker"]
    assert sorted(one["engine_id"][-4:] for one in workers) == ["_dp0", "_dp1"]
    assert len({one["key_space_id"] for one in workers}) == 1
