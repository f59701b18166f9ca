"""Real engines whose offloading uses hotkv answer as without, whatever happens.

Random float32 weights: another block's KV changes the answer.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offloading.engines import door_config, multi
from tests.support.waiting import stop, wait_for
from tests.vllm.adapters import LORA, adapter, write_adapter
from tests.vllm.checkpoint import write_weights
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import _state, difference, prompts, same, usable
from tests.vllm.tiny import transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 257, 500)
MLA: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": True}
if torch.cpu._is_amx_tile_supported():
    MLA |= {"block_size": 32, "dtype": "bfloat16"}
else:
    MLA |= {"despite_vllm": True}

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    """has_weights: they are in a file, which hotkv identifies; else the test names them.
    door: settings of the connector.
    settings: arguments of vLLM.
    """

    def make(
        daemon: Daemon,
        kind: str = "llama",
        *,
        has_weights: bool = False,
        door: dict[str, Any] | None = None,
        **settings: Any,
    ) -> EngineProcess:
        folder = tmp_path / kind
        if not folder.exists():
            write_model(folder, kind)
            if has_weights:
                write_weights(folder)
        identity = {} if has_weights else {"hotkv.weights_identity": tmp_path.name}
        settings = {
            "load_format": "auto" if has_weights else "random",
            "dtype": "float32",
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 64 << 20,
            "kv_transfer_config": door_config(daemon.target, **identity, **(door or {})),
        } | settings
        return engines.start(folder, None, **settings)

    return make


def ask_until_stored(daemon: Daemon, engine: EngineProcess, batch: list[list[int]]) -> Any:
    before = daemon.counter("stored_blocks_total")
    answers = engine.ask_each(batch, 6)
    num_blocks = sum((len(prompt) + 5) // 32 for prompt in batch)
    wait_for(
        lambda: daemon.counter("stored_blocks_total") >= before + num_blocks,
        "the store of all blocks",
    )
    return answers


def settle(engine: EngineProcess) -> None:
    """Runs requests that fill no block until all stores have ended."""

    def has_stored() -> bool:
        engine.ask_each([[7, 8, 9]], 2)
        return bool(engine.ask("offloaded")["all"])

    wait_for(has_stored, "the end of all stores")


def test_engines_share_answers_too_and_outlive_the_server(own_daemon, start):
    first, second = start(own_daemon), start(own_daemon)
    batch = prompts(1, LENGTHS)
    cold = ask_until_stored(own_daemon, first, batch)
    warm = second.ask_each(batch, 6)
    assert warm["cached"] == [usable(prompt) for prompt in batch]
    assert same(cold, warm)
    wait_for(
        lambda: own_daemon.counter("reported_hit_tokens_total") >= sum(map(usable, batch)),
        "the reports of the hits",
    )
    turns = [prompt + answer for prompt, answer in zip(batch, cold["tokens"], strict=True)]
    third = start(own_daemon)
    assert third.ask_each(turns, 2)["cached"] == [usable(turn[:-1]) for turn in turns]
    own_daemon.kill()
    alone = start(own_daemon, door={"hotkv.startup_wait_s": 0.1})
    assert same(cold, alone.ask_each(batch, 6)), "without a server"
    own_daemon.start()
    fourth = start(own_daemon)
    kept = fourth.ask_each(batch, 6)
    assert kept["cached"] == [usable(prompt) for prompt in batch], "after kill -9 and restart"
    assert same(cold, kept)


def test_reset_empties_server_weights_update_waits(daemon, start, tmp_path):
    """After an update, old blocks keep the same hashes until a reset."""
    engine, batch = start(daemon, has_weights=True), prompts(2, LENGTHS)
    ask_until_stored(daemon, engine, batch)
    assert engine.ask("reset", connector=True)["done"]
    other = start(daemon, has_weights=True)
    assert other.ask_each(batch, 6)["cached"] == [0] * len(batch), "the server was emptied"
    old = ask_until_stored(daemon, engine, prompts(3, LENGTHS))
    newer = shutil.copytree(tmp_path / "llama", tmp_path / "newer")
    write_weights(newer, seed=7)
    (key_space_id,) = {row["key_space_id"] for row in daemon.admin("sessions")}
    engine.ask("reload", path=str(newer))
    before = daemon.counter("stored_blocks_total")
    engine.ask_each(prompts(4, (300, 301)), 6)
    assert daemon.counter("stored_blocks_total") == before, "nothing of an unclean cache is stored"
    assert engine.ask("reset", connector=True)["done"]
    # Blocks computed before the engine has the new key space are not stored.
    wait_for(
        lambda: any(
            row["memory_byte_count"] and row["key_space_id"] != key_space_id
            for row in daemon.admin("sessions")
        ),
        "the session of the new weights",
    )
    changed = ask_until_stored(daemon, engine, prompts(3, LENGTHS))
    assert changed["tokens"] != old["tokens"]
    fresh = start(daemon, has_weights=True)
    again = fresh.ask_each(prompts(3, LENGTHS), 6)
    assert same(old, again), "an engine of the old weights is given none of the new ones' blocks"


def test_a_frozen_server_costs_a_bounded_time(own_daemon, start):
    """The server goes on later, and may write late."""
    batch = prompts(11, LENGTHS)
    # Longer than a process pauses on a busy machine.
    door = {f"hotkv.{name}_timeout_s": 2.0 for name in ("lookup", "load", "store", "reset")}
    cold = ask_until_stored(own_daemon, start(own_daemon), batch)
    for call in ("acquire", "load"):
        engine = start(own_daemon, door=door)
        engine.ask("freeze", call=call, pid=own_daemon.pid)
        assert same(cold, engine.ask_each(batch, 6))
        assert _state(own_daemon.pid) == "T", "it is stopped all the while"
        if call == "load":
            assert "the server does not end a load" in engine.log()
            assert not engine.ask("reset", connector=True)["done"]
            assert same(cold, engine.ask_each(batch, 6))
        more = prompts(12, (900,) * 6)
        engine.begin("generate", prompts=more, max_tokens=16)
        os.kill(own_daemon.pid, signal.SIGCONT)
        engine.answer()
        assert same(cold, engine.ask_each(batch, 6)), "a late write has changed a row"
        if call == "acquire":
            assert start(own_daemon).ask_each(batch, 6)["cached"] == [usable(p) for p in batch]
    again = start(own_daemon)
    ask_until_stored(own_daemon, again, prompts(13, LENGTHS))
    warm = start(own_daemon).ask_each(prompts(13, LENGTHS), 6)
    assert warm["cached"] == [usable(prompt) for prompt in prompts(13, LENGTHS)]


@pytest.mark.long
def test_adapters_are_left_out(daemon, start, tmp_path):
    lora = dict(LORA)
    one, other = (start(daemon, **lora) for _ in range(2))
    folder = write_adapter(tmp_path / "adapter", seed=3)
    (prompt,) = prompts(5, (300,))
    before = daemon.counter("stored_blocks_total")
    asked = {"prompts": [prompt], "max_tokens": 4, "adapter": adapter(folder)}
    cold = one.ask("generate", **asked)
    assert other.ask("generate", **asked)["cached"] == [0]
    assert daemon.counter("stored_blocks_total") == before
    plain = ask_until_stored(daemon, one, [prompt])
    assert other.ask_each([prompt], 6)["cached"] == [usable(prompt)]
    assert plain["tokens"][0][:4] != cold["tokens"][0]


@pytest.mark.parametrize(
    ("kind", "door", "settings"),
    [
        pytest.param("gemma3", {}, {}, id="windows beside full attention"),
        pytest.param(
            "llama",
            {"blocks_per_chunk": 2},
            {},
            id="chunks of two blocks",
            marks=pytest.mark.long,
        ),
        pytest.param("gemma4", {}, {}, id="blocks of two sizes", marks=pytest.mark.long),
        pytest.param(
            "lfm2",
            {},
            {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
            id="states beside attention",
            marks=pytest.mark.long,
        ),
        pytest.param("deepseek", {}, MLA, id="latent attention", marks=pytest.mark.long),
        pytest.param(
            "llama",
            {},
            {"tensor_parallel_size": 2, "driver": "parallel_driver.py"},
            id="two ranks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "llama",
            {"blocks_per_chunk": 2},
            {"pipeline_parallel_size": 2, "driver": "parallel_driver.py"},
            id="two stages",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_shape_that_vllms_offloading_takes_hits(daemon, start, kind, door, settings):
    batch = prompts(6, LENGTHS)
    one, other = (start(daemon, kind, door=door, **settings) for _ in range(2))
    cold = one.ask_each(batch, 6)
    one.ask_each(prompts(60, (40, 41)), 2)
    settle(one)
    warm = other.ask_each(batch, 6)
    assert sum(warm["cached"]) > 0.7 * sum(map(usable, batch)), warm["cached"]
    if kind == "deepseek":
        # vLLM's CPU kernels answer slightly differently after a hit, so compare two.
        cold = start(daemon, kind, door=door, **settings).ask_each(batch, 6)
    assert same(cold, warm)


@pytest.mark.long
def test_different_tensor_parallel_sizes_share_canonical_rows(daemon, start):
    batch, door = prompts(7, LENGTHS), {"canonical_layout": True}
    one = start(daemon, has_weights=True, door=door)
    cold = ask_until_stored(daemon, one, batch)
    two = start(
        daemon,
        has_weights=True,
        door=door,
        tensor_parallel_size=2,
        driver="parallel_driver.py",
    )
    warm = two.ask_each(batch, 6)
    assert warm["cached"] == [usable(prompt) for prompt in batch]
    assert difference(cold, warm) <= 1e-3


@pytest.mark.long
def test_data_parallel_siblings_blocks_hit(daemon, start):
    both = start(daemon, driver="dp_driver.py", data_parallel_size=2, has_weights=True)
    batch, before = prompts(9, LENGTHS), daemon.counter("stored_blocks_total")
    cold = both.ask("generate", prompts=batch, max_tokens=6, rank=0)
    num_blocks = sum((len(prompt) + 5) // 32 for prompt in batch)
    wait_for(
        lambda: daemon.counter("stored_blocks_total") >= before + num_blocks,
        "the store of all blocks",
    )
    warm = both.ask("generate", prompts=batch, max_tokens=6, rank=1)
    assert warm["cached"] == [usable(prompt) for prompt in batch]
    assert same(cold, warm)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(("own", "door"), id="own first", marks=pytest.mark.long),
        pytest.param(("door", "own"), id="own last"),
        pytest.param(("own", "own"), id="own twice", marks=pytest.mark.long),
    ],
)
def test_both_doors_in_one_multiconnector(daemon, start, tmp_path, order):
    identity = tmp_path.name
    connectors = {
        "own": transfer_config(target=daemon.target, weights_identity=identity),
        "door": door_config(daemon.target, **{"hotkv.weights_identity": identity}),
    }
    both = multi([connectors[name] for name in order])
    batch = prompts(8, LENGTHS)
    one, other = (start(daemon, kv_transfer_config=both) for _ in range(2))
    before = daemon.counter("stored_blocks_total")
    num_blocks = sum((len(prompt) + 5) // 32 for prompt in batch)
    cold = one.ask_each(batch, 6)

    def has_stored() -> bool:
        one.ask_each([[7, 8, 9]], 2)
        return bool(daemon.counter("stored_blocks_total") >= before + num_blocks)

    wait_for(has_stored, "the store of all blocks")
    warm = other.ask_each(batch, 6)
    assert same(cold, warm)
    assert warm["cached"] == [usable(prompt) for prompt in batch]


@pytest.mark.long
def test_a_killed_engine_leaves_no_half_written_block(own_daemon, start):
    engine = start(own_daemon)
    batch = prompts(9, (900,) * 6)
    nowhere = {"hotkv.target": "unix:/nowhere/grpc.sock", "hotkv.startup_wait_s": 0.0}
    cold = start(own_daemon, door=nowhere).ask_each(batch, 6)
    stop(own_daemon.pid)
    engine.ask_each(batch, 6)
    engine.kill()
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_for(lambda: not own_daemon.admin("sessions"), "the end of the dead engine's session")
    other = start(own_daemon)
    assert same(cold, other.ask_each(batch, 6))
