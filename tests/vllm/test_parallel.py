"""Real engines of several ranks: tensor, pipeline and data parallel, each rank a process, over one
daemon.

Every engine answers cold, then warm from hotkv, and so does a second engine of the same shape; in
float32 the answers agree to the last digits. Weights come from a file, so that ranks hold shards of
one model and a shard in the wrong place shows.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import wait_for
from tests.vllm.adapters import LORA, adapter, write_adapter
from tests.vllm.checkpoint import write_weights
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts, usable
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 257, 500)
TOLERANCE = 1e-4
WITH_WEIGHTS = ("llama", "gemma3")
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(shared_daemon: Daemon, engines: Engines, tmp_path: Path) -> Start:
    """Starts engines of one model."""

    def make(
        kind: str,
        *,
        shape: dict[str, Any] | None = None,
        driver: str = "parallel_driver.py",
        **settings: Any,
    ) -> EngineProcess:
        folder = tmp_path / kind
        if not folder.exists():
            write_model(folder, kind)
            if kind in WITH_WEIGHTS:
                write_weights(folder, **(shape or {}))
        settings = {
            "load_format": "auto" if kind in WITH_WEIGHTS else "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 32 << 20,
            "max_model_len": 1024,
        } | settings
        connector = {
            "weights_identity": tmp_path.name,
            "flush_timeout_s": 5.0,
            "startup_wait_s": 20.0,
        }
        return engines.start(
            folder, shared_daemon.target, connector=connector, driver=driver, **settings
        )

    return make


def settled(engine: EngineProcess, num_blocks: int) -> dict[str, float]:
    """Counters once the ranks have reported so many blocks as stored; steps carry the reports."""
    until_s = time.monotonic() + 60
    while True:
        totals: dict[str, float] = engine.ask("stats")["totals"]
        if totals.get("stored_blocks", 0) >= num_blocks:
            return totals
        assert time.monotonic() < until_s, totals
        engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
        time.sleep(0.05)


def stores_again(engine: EngineProcess) -> None:
    """Asks until something is stored: all ranks and the scheduler have sessions of one key space
    then."""
    until_s, seed = time.monotonic() + 60, engine.process.pid
    before = engine.ask("stats")["totals"].get("stored_blocks", 0)
    while engine.ask("stats")["totals"].get("stored_blocks", 0) == before:
        assert time.monotonic() < until_s, "nothing is stored"
        seed += 1
        engine.ask("generate", prompts=prompts(seed, (70,)), max_tokens=4)


def clean(totals: dict[str, float]) -> bool:
    return not {"failed_loads", "hook_errors", "refused_blocks", "short_grants"} & totals.keys()


def blocks_of(batch: list[list[int]], new_tokens: int) -> int:
    """Full blocks of prompts and answers, the last token's slot left out."""
    return sum((len(prompt) + new_tokens - 1) // 32 for prompt in batch)


def kill_a_rank(daemon: Daemon, engine: EngineProcess, prompt: list[int]) -> None:
    """Kills the last rank, of a pipeline when the first stage has stored its shard of the prompt's
    blocks; then what is left of the engine. Returns when the server has nothing of the engine any
    more.
    """

    def counters() -> dict[str, float]:
        counted: dict[str, float] = daemon.admin("info")["counters"]
        return counted

    before, pids = counters(), engine.ask("ranks")["pids"]
    is_pipeline = "PP1" in engine.log()
    if is_pipeline:
        os.kill(pids[-1], signal.SIGSTOP)
        engine.begin("generate", prompts=[prompt], max_tokens=1)
        wait_for(
            lambda: (
                counters()["stored_bytes_total"] > before["stored_bytes_total"]
                and not counters()["transfers_in_flight"]
            )
        )
        assert (
            counters()["arena_used_bytes"] > before["arena_used_bytes"]
            and counters()["ready_blocks"] == before["ready_blocks"]
        )
    os.kill(pids[-1], signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    engine.kill()
    wait_for(lambda: counters()["sessions"] == before["sessions"] - len(pids) - 1)
    after = counters()
    assert after["leases"] == after["arena_pinned_bytes"] == 0
    assert (after["arena_used_bytes"], after["ready_blocks"]) == (
        before["arena_used_bytes"],
        before["ready_blocks"],
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("llama", TP, id="tp2"),
        # Six groups of one layer each: every group has an empty shard in one of the stages.
        pytest.param("gemma3", PP, id="pp2-hybrid", marks=pytest.mark.long),
    ],
)
def test_warm_is_as_good_as_cold_until_a_rank_is_killed(
    shared_daemon: Daemon, start: Start, kind: str, settings: dict[str, Any]
) -> None:
    batch = prompts(9, LENGTHS)
    first, second = start(kind, **settings), start(kind, **settings)
    cold = first.ask("generate", prompts=batch, max_tokens=20)
    assert cold["cached"] == [0] * len(batch)
    assert clean(settled(first, blocks_of(batch, 20)))
    first.ask("reset")
    for engine in (first, second):
        warm = engine.ask("generate", prompts=batch, max_tokens=20)
        assert warm["cached"] == [usable(prompt) for prompt in batch]
        assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < TOLERANCE
        totals = engine.ask("stats")["totals"]
        assert totals["loads"] == len(batch) and clean(totals)
    fresh = prompts(10, (300,))
    kill_a_rank(shared_daemon, first, fresh[0])
    assert second.ask("generate", prompts=fresh, max_tokens=1)["cached"] == [0]
    second.ask("reset")
    warm = second.ask("generate", prompts=batch, max_tokens=20)
    assert (
        warm["cached"] == [usable(prompt) for prompt in batch]
        and difference(cold, warm) < TOLERANCE
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TP, id="tp2", marks=pytest.mark.campaign),
        pytest.param(PP, id="pp2", marks=pytest.mark.long),
    ],
)
def test_adapters_and_weights_that_change_on_several_ranks(
    start: Start, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Each rank holds a part of an adapter and of the weights; only if all have the same do engines
    share."""
    one, other = start("llama", **settings, **LORA), start("llama", **settings, **LORA)
    (prompt,) = prompts(9, (257,))
    a, b = (write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab"))
    new = write_weights(write_model(tmp_path / "new", "llama"), seed=2)

    def ask(engine: EngineProcess, path: Path | None) -> dict[str, Any]:
        before = engine.ask("stats")["totals"].get("stored_blocks", 0)
        answer = engine.ask(
            "generate",
            prompts=[prompt],
            max_tokens=8,
            adapter=None if path is None else adapter(path),
        )
        totals = settled(
            engine, before + blocks_of([prompt], 8) if answer["cached"] == [0] else before
        )
        # Stores that were planned on the old weights fail.
        assert "hook_errors" not in totals, totals
        return answer

    for weights in (None, new):
        for engine in (one, other):
            engine.ask("reset")
            if weights is not None:
                engine.ask("reload", path=str(weights))
                stores_again(engine)
        cold = [ask(one, path) for path in (None, a, b)]
        assert [answer["cached"] for answer in cold] == [[0]] * 3
        assert min(difference(x, y) for x, y in itertools.combinations(cold, 2)) > 100 * TOLERANCE
        warm = [ask(other, path) for path in (None, a, b)]
        assert [answer["cached"] for answer in warm] == [[usable(prompt)]] * 3
        assert all(difference(x, y) < TOLERANCE for x, y in zip(cold, warm, strict=True))


@pytest.mark.long
def test_one_kv_head_on_two_ranks(shared_daemon: Daemon, start: Start) -> None:
    """vLLM does not say that both hold the same (`kv_tp_replicas` is 1), so each rank stores its
    own."""
    batch, one = prompts(9, LENGTHS), start("llama", shape={"num_key_value_heads": 1}, **TP)
    cold = one.ask("generate", prompts=batch, max_tokens=20)
    assert clean(settled(one, blocks_of(batch, 20)))
    one.ask("reset")
    warm = one.ask("generate", prompts=batch, max_tokens=20)
    assert (
        warm["cached"] == [usable(prompt) for prompt in batch]
        and difference(cold, warm) < TOLERANCE
    )


@pytest.mark.long
def test_of_ranks_with_the_same_kv_the_first_one_writes(
    shared_daemon: Daemon, start: Start
) -> None:
    """Latent attention: a slot has one shard, and both ranks load it. vLLM's CPU kernels answer
    otherwise after a hit, which vLLM allows with AMX only; between two hits nothing may differ."""
    # float32 would not do: where there is AMX its kernels want bfloat16.
    is_forbidden = not torch.cpu._is_amx_tile_supported()
    settings = {"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": True}
    one = start("deepseek", despite_vllm=is_forbidden, **settings, **TP)
    (prompt,) = prompts(9, (257,))
    one.ask("generate", prompts=[prompt], max_tokens=20)
    local = one.ask("generate", prompts=[prompt], max_tokens=20)
    assert clean(settled(one, 256 // 128))
    one.ask("reset")
    warm = one.ask("generate", prompts=[prompt], max_tokens=20)
    assert warm["cached"] == local["cached"] == [256]
    assert warm["tokens"] == local["tokens"] and difference(local, warm) < 2e-3
    ranks = [session for session in shared_daemon.admin("sessions") if session["role"] == "worker"]
    assert sorted(bool(rank["stored_byte_count"]) for rank in ranks) == [False, True]
    assert ranks[0]["loaded_byte_count"] == ranks[1]["loaded_byte_count"] > 0


@pytest.mark.long
def test_a_pipeline_whose_steps_overlap_on_a_device_too_small(start: Start) -> None:
    """Two steps are under way at a time. Blocks are taken back from stores, evicted, loaded again
    and preempted; nothing is wrong."""
    shape = {"num_hidden_layers": 3}
    batch = [
        prompt[:length] for prompt in prompts(9, (500, 500, 500)) for length in (130, 260, 400, 500)
    ]
    roomy = start("llama", shape=shape, **PP)
    tight = start(
        "llama",
        shape=shape,
        **PP,
        num_gpu_blocks_override=44,
        max_num_batched_tokens=96,
        max_num_seqs=6,
    )
    cold = {
        tuple(prompt): roomy.ask("generate", prompts=[prompt], max_tokens=16) for prompt in batch
    }
    # How much is loaded depends on what was stored in time: three turns at least, more until enough
    # was.
    for turn in range(len(batch)):
        asked = batch[turn:] + batch[:turn]
        answers = tight.ask("generate", prompts=asked, max_tokens=16)
        for index, prompt in enumerate(asked):
            one = {name: [answers[name][index]] for name in ("tokens", "logprobs")}
            assert (
                one["tokens"] == cold[tuple(prompt)]["tokens"]
                and difference(cold[tuple(prompt)], one) < TOLERANCE
            )
        totals = tight.ask("stats")["totals"]
        if turn >= 2 and totals["loads"] > 10:
            break
    assert totals["loads"] > 10 and not {"failed_loads", "hook_errors"} & totals.keys()


@pytest.mark.long
def test_a_data_parallel_engine_hits_what_its_sibling_stored(
    shared_daemon: Daemon, start: Start
) -> None:
    """Two engines, each with an id and sessions of its own, in one key space."""
    batch, both = prompts(9, LENGTHS), start("llama", driver="dp_driver.py", data_parallel_size=2)
    cold = both.ask("generate", prompts=batch, max_tokens=20, rank=0)

    def stored() -> bool:
        both.ask("generate", prompts=[[7, 8, 9]], max_tokens=2, rank=0)
        return bool(shared_daemon.admin("key_spaces")[-1]["block_count"] >= blocks_of(batch, 20))

    wait_for(stored)
    warm = both.ask("generate", prompts=batch, max_tokens=20, rank=1)
    assert warm["cached"] == [usable(prompt) for prompt in batch]
    assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < TOLERANCE
    workers = [
        session for session in shared_daemon.admin("sessions") if session["role"] == "worker"
    ]
    assert sorted(session["engine_id"][-4:] for session in workers) == ["_dp0", "_dp1"]
    assert len({session["key_space_id"] for session in workers}) == 1
