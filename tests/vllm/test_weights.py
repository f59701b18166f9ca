"""Weights that change in place, in real vLLM: an engine that reloads them shares KV with engines
that have the same, and with no others."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from tests.vllm.checkpoint import write_weights
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, settled
from tests.vllm.sparse_runs import NOISE, prompts
from tests.vllm.tiny import write_model


def await_sharing(engine: EngineProcess) -> None:
    """Runs steps until the engine, whose weights have changed, shares KV of those that it has."""

    def shares() -> bool:
        engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=8)
        return bool(engine.ask("stats")["shares"])

    wait_for(shares)
    engine.ask("reset")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reloaded_weights(daemon: Daemon, engines: Engines, tmp_path: Path) -> None:
    """Without any reset of hotkv's: `reload_weights` by itself is enough."""
    old, new = (
        write_weights(write_model(tmp_path / name, "llama"), seed=seed)
        for seed, name in enumerate(("old", "new"))
    )
    target, batch = daemon.start().target, prompts(3, (700, 330))
    settings = {"load_format": "auto", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}

    def ask(engine: EngineProcess) -> dict[str, Any]:
        return engine.ask("generate", prompts=batch, max_tokens=8)

    one, two = (engines.start(old, target, **settings) for _ in range(2))
    of_old = ask(one)
    settled(one)
    assert ask(two)["cached"] == [672, 320]
    two.ask("reset")
    two.ask("reload", path=str(new))
    of_new = ask(two)
    await_sharing(two)
    ask(two)
    settled(two)
    two.ask("reset")
    again = ask(two)
    assert of_new["cached"] == [0, 0] and again["cached"] == [672, 320]
    assert difference(of_new, again) < NOISE < 0.1 < difference(of_new, of_old)
    # Nobody else has got it wrong.
    one.ask("reset")
    assert difference(ask(one), of_old) < NOISE
    fresh = ask(engines.start(new, target, **settings))
    assert fresh["cached"] == [0, 0] and difference(fresh, of_new) < NOISE
    # Reloaded alike, another engine finds what the second has stored. And back again.
    for engine, model, expected in ((one, new, of_new), (two, old, of_old)):
        engine.ask("reload", path=str(model))
        await_sharing(engine)
        alike = ask(engine)
        assert alike["cached"] == [672, 320] and difference(alike, expected) < NOISE
        assert "hook_errors" not in engine.ask("stats")["totals"]
