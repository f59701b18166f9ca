"""Real vLLM, real daemon, each in a process of its own; a model with random weights."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import NOISE, RANDOM, _state, difference, prompts, settled, usable
from tests.vllm.tiny import BLOCK_TOKENS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def start(model: Path, engines: Engines) -> Callable[..., EngineProcess]:
    def make(
        target: str | None, *, connector: dict[str, Any] | None = None, **settings: Any
    ) -> EngineProcess:
        connector = {"weights_identity": "random"} | (connector or {})
        return engines.start(model, target, connector=connector, **RANDOM | settings)

    return make


def test_parity_and_sharing_between_processes(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    """Cold, warm from vLLM's own prefix cache, warm from hotkv in the same and in another
    engine."""
    daemon.start()
    first, second = start(daemon.target), start(daemon.target)
    batch = prompts(1)
    cold = first.ask("generate", prompts=batch, max_tokens=40)
    local = first.ask("generate", prompts=batch, max_tokens=40)
    settled(first)
    first.ask("reset")
    warm = first.ask("generate", prompts=batch, max_tokens=40)
    other = second.ask("generate", prompts=batch, max_tokens=40)
    assert cold["cached"] == [0] * len(batch)
    expected = [usable(p) for p in batch]
    assert (
        local["cached"] == expected and warm["cached"] == expected and other["cached"] == expected
    )
    for answer in (local, warm, other):
        assert answer["tokens"] == cold["tokens"] and difference(cold, answer) < NOISE
    # Blocks that filled while decoding were stored as well: one engine's answer is the other's
    # prompt.
    longer = [p + t[:-1] for p, t in zip(batch, cold["tokens"], strict=True)]
    answer = second.ask("generate", prompts=longer, max_tokens=1)
    assert answer["cached"] == [usable(p) for p in longer]
    totals = second.ask("stats")["totals"]
    assert (
        totals["hit_requests"] > 0 and "failed_loads" not in totals and "hook_errors" not in totals
    )


@pytest.mark.parametrize("call", ["load", "store"])
def test_server_killed_in_the_middle(
    daemon: Daemon, start: Callable[..., EngineProcess], call: str
) -> None:
    daemon.start()
    engine = start(daemon.target)
    batch = prompts(2, (300, 333))
    fresh = prompts(3, (310,))
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    engine.ask("reset")
    engine.ask("freeze", call=call, pid=daemon.pid)
    engine.begin("generate", prompts=batch if call == "load" else batch + fresh, max_tokens=8)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and _state(daemon.pid) != "T":
        time.sleep(0.01)
    time.sleep(0.2)
    daemon.kill()
    answer = engine.answer()
    assert answer["tokens"][:2] == cold["tokens"]
    # The engine goes on without a server.
    engine.ask("reset")
    assert engine.ask("generate", prompts=batch, max_tokens=8)["tokens"] == cold["tokens"]
    daemon.start()
    assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
    engine.ask("reset")
    engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    engine.ask("reset")
    again = engine.ask("generate", prompts=batch, max_tokens=8)
    assert again["tokens"] == cold["tokens"] and again["cached"] == [usable(p) for p in batch]


def test_killed_engine_leaves_nothing_behind(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    engine = start(daemon.target)
    batch = prompts(4, (300, 333, 400))
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    assert len(daemon.admin("sessions")) == 2
    engine.ask("reset")
    engine.begin("generate", prompts=batch * 4, max_tokens=400)
    time.sleep(0.3)
    engine.kill()
    until_s = time.monotonic() + 60
    while daemon.admin("sessions") and time.monotonic() < until_s:
        time.sleep(0.02)
    assert daemon.admin("sessions") == []
    second = start(daemon.target)
    answer = second.ask("generate", prompts=batch, max_tokens=8)
    assert answer["tokens"] == cold["tokens"] and answer["cached"] == [usable(p) for p in batch]


def test_server_absent_at_the_start_then_there(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    engine = start(daemon.target)
    batch = prompts(5, (300, 333))
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    until_s = time.monotonic() + 60
    while "no KV cache server" not in engine.log() and time.monotonic() < until_s:
        time.sleep(0.05)
    daemon.start()
    assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
    engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("generate", prompts=batch, max_tokens=8)
    assert warm["tokens"] == cold["tokens"] and warm["cached"] == [usable(p) for p in batch]
    lines = [line for line in engine.log().splitlines() if "hotkv scheduler:" in line]
    assert len(lines) == 2, lines


def test_hung_server_does_not_hang_the_engine(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    engine = start(
        daemon.target, blocks=80, connector={"lookup_timeout_s": 0.2}, max_model_len=1024
    ).ready()
    batch = prompts(7, (300, 333, 400, 411, 500, 511))
    os.kill(daemon.pid, signal.SIGSTOP)
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    engine.ask("reset")
    again = engine.ask("generate", prompts=batch[:2], max_tokens=8)
    assert again["tokens"] == cold["tokens"][:2] and again["seconds"] < 30
    os.kill(daemon.pid, signal.SIGCONT)
    assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
    engine.ask("reset")
    assert engine.ask("generate", prompts=batch, max_tokens=8)["tokens"] == cold["tokens"]
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("generate", prompts=batch[:2], max_tokens=8)
    assert warm["tokens"] == cold["tokens"][:2] and warm["cached"] == [usable(p) for p in batch[:2]]


def test_hints_and_resets_reach_the_server(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    engine = start(daemon.target)
    batch = prompts(9, (300, 333))
    hints = {
        "hotkv.pin": True,
        "hotkv.ttl_s": 600,
        "hotkv.priority": "high",
        "remote_engine_id": "another connector's",
    }
    cold = engine.ask("generate", prompts=batch, max_tokens=8, transfer=hints)
    counted = settled(engine)
    assert (
        counted["wrong_hints"] == 2
        and counted["reported_requests"] == 5
        and "hotkv.priority = 'high'" in engine.log()
    )
    block_bytes = 2 * 2 * 2 * 32 * BLOCK_TOKENS * 4
    assert (
        daemon.admin("tiers")[0]["pinned_byte_count"]
        == sum(usable(p) for p in batch) // BLOCK_TOKENS * block_bytes
    )
    assert engine.ask("reset", connector=True)["done"]
    assert (
        daemon.admin("blocks")["blocks"] == []
        and daemon.admin("tiers")[0]["pinned_byte_count"] == 0
    )
    again = engine.ask("generate", prompts=batch, max_tokens=8)
    assert again["tokens"] == cold["tokens"] and again["cached"] == [0, 0]
    settled(engine)
    engine.ask("reset")
    assert engine.ask("generate", prompts=batch, max_tokens=8)["cached"] == [
        usable(p) for p in batch
    ]
    totals = engine.ask("stats")["totals"]
    assert totals["resets"] == 1 and not {"failed_loads", "hook_errors"} & totals.keys()
