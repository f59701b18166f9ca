"""Weights that change in place, in real vLLM: an engine that reloads them shares KV with engines
that have the same, and with no others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import wait_for
from tests.vllm.checkpoint import write_weights
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, settled
from tests.vllm.sparse_runs import NOISE, prompts
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def start(daemon: Daemon, engines: Engines) -> Callable[[Path], EngineProcess]:
    daemon.start()

    def make(model: Path) -> EngineProcess:
        connector = {"flush_timeout_s": 5.0, "startup_wait_s": 30.0}
        settings = {"load_format": "auto", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
        return engines.start(model, daemon.target, connector=connector, **settings).ready()

    return make


def await_sharing(engine: EngineProcess) -> None:
    """Runs steps until the engine, whose weights have changed, shares KV of those that it has."""

    def shares() -> bool:
        engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=8)
        return bool(engine.ask("stats")["shares"])

    wait_for(shares)
    engine.ask("reset")


def reload(engine: EngineProcess, model: Path) -> None:
    engine.ask("reload", path=str(model))
    await_sharing(engine)


def test_reloaded_weights(start: Callable[[Path], EngineProcess], tmp_path: Path) -> None:
    """Without any reset of hotkv's: `reload_weights` by itself is enough."""
    old, new = (
        write_weights(write_model(tmp_path / name, "llama"), seed=seed)
        for name, seed in (("old", 1), ("new", 2))
    )
    batch = prompts(3, (700, 330))
    one, two = start(old), start(old)
    of_old = one.ask("generate", prompts=batch, max_tokens=8)
    settled(one)
    assert two.ask("generate", prompts=batch, max_tokens=8)["cached"] == [672, 320]
    two.ask("reset")
    two.ask("reload", path=str(new))
    of_new = two.ask("generate", prompts=batch, max_tokens=8)
    await_sharing(two)
    two.ask("generate", prompts=batch, max_tokens=8)
    settled(two)
    two.ask("reset")
    again = two.ask("generate", prompts=batch, max_tokens=8)
    assert of_new["cached"] == [0, 0] and again["cached"] == [672, 320]
    assert difference(of_new, again) < NOISE < 0.1 < difference(of_new, of_old)
    # Nobody else has got it wrong.
    one.ask("reset")
    assert difference(one.ask("generate", prompts=batch, max_tokens=8), of_old) < NOISE
    fresh = start(new).ask("generate", prompts=batch, max_tokens=8)
    assert fresh["cached"] == [0, 0] and difference(fresh, of_new) < NOISE
    # Reloaded alike, another engine finds what the second has stored. And back again.
    reload(one, new)
    alike = one.ask("generate", prompts=batch, max_tokens=8)
    assert alike["cached"] == [672, 320] and difference(alike, of_new) < NOISE
    reload(two, old)
    back = two.ask("generate", prompts=batch, max_tokens=8)
    assert back["cached"] == [672, 320] and difference(back, of_old) < NOISE
    for engine in (one, two):
        assert "hook_errors" not in engine.ask("stats")["totals"]
