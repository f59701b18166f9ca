"""Real engines share KV through a real server."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import NOISE, RANDOM, _state, difference, hits, prompts, settled
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def start(tmp_path: Path, daemon: Daemon, engines: Engines) -> Callable[..., EngineProcess]:
    def make(**settings: Any) -> EngineProcess:
        connector = {"weights_identity": "random"} | settings.pop("connector", {})
        model = write_model(tmp_path / "model")
        return engines.start(model, daemon.target, connector=connector, **RANDOM | settings)

    return make


def generate(engine: EngineProcess, batch: list[list[int]], max_tokens: int = 8) -> dict[str, Any]:
    return engine.ask("generate", prompts=batch, max_tokens=max_tokens)


def test_parity_and_sharing_between_processes(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    first, second = start(), start()
    batch = prompts(1)
    cold, local = generate(first, batch, 40), generate(first, batch, 40)
    settled(first)
    first.ask("reset")
    assert cold["cached"] == [0] * len(batch)
    for answer in (local, generate(first, batch, 40), generate(second, batch, 40)):
        assert answer["cached"] == hits(batch) and answer["tokens"] == cold["tokens"]
        assert difference(cold, answer) < NOISE
    # Blocks filled during decode are stored too.
    longer = [p + t[:-1] for p, t in zip(batch, cold["tokens"], strict=True)]
    assert generate(second, longer, 1)["cached"] == hits(longer)
    totals = second.ask("stats")["totals"]
    assert totals["hit_requests"] > 0 and not {"failed_loads", "callback_errors"} & totals.keys()


def test_engines_of_other_lengths_share(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    first, second = start(max_model_len=2048), start(max_model_len=1024)
    batch = prompts(1)
    cold = generate(first, batch, 40)
    settled(first)
    answer = generate(second, batch, 40)
    assert answer["cached"] == hits(batch) and answer["tokens"] == cold["tokens"]
    assert difference(cold, answer) < NOISE
    assert "failed_loads" not in second.ask("stats")["totals"]


def test_server_comes_hangs_and_is_killed_midway(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    # Longer than a process pauses, together shorter than gRPC's keepalive (10 s), so that the
    # stopped server keeps its connections.
    connector = {"lookup_timeout_s": 2.0, "load_timeout_s": 2.0}
    engine = start(blocks=80, connector=connector, max_model_len=1024)
    batch = prompts(7, (300, 333, 400, 411, 500, 511))
    asked = batch[:2]
    cold = generate(engine, batch)

    def answers_as_before(what: list[list[int]] = asked) -> dict[str, Any]:
        engine.ask("reset")
        answer = generate(engine, what)
        assert answer["tokens"] == cold["tokens"][: len(what)]
        return answer

    def hits_again() -> None:
        assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
        answers_as_before()
        settled(engine)
        assert answers_as_before()["cached"] == hits(asked)

    assert engine.log().count("no session with a KV cache server at hotkv.target") == 1
    daemon.start()
    hits_again()
    assert engine.log().count("hotkv scheduler: the KV cache server is there") == 1
    assert engine.log().count("hotkv on: 0 B of this model") == 1
    # The server writes late, while other requests run.
    engine.ask("reset")
    engine.ask("freeze", call="load", pid=daemon.pid)
    assert generate(engine, asked)["tokens"] == cold["tokens"][:2]
    assert _state(daemon.pid) == "T", "it is stopped all the while"
    totals = engine.ask("stats")["totals"]
    assert totals["hung_loads"] and totals["failed_loads"] and "callback_errors" not in totals
    assert answers_as_before()["seconds"] < 30
    engine.begin("generate", prompts=batch[2:] * 3, max_tokens=64)
    os.kill(daemon.pid, signal.SIGCONT)
    assert [tokens[:8] for tokens in engine.answer()["tokens"]] == cold["tokens"][2:] * 3
    hits_again()
    for call, more in (("load", []), ("store", prompts(3, (310,)))):
        engine.ask("reset")
        engine.ask("freeze", call=call, pid=daemon.pid)
        engine.begin("generate", prompts=asked + more, max_tokens=8)
        wait_for(lambda: _state(daemon.pid) == "T")
        time.sleep(0.2)
        daemon.kill()
        assert engine.answer()["tokens"][:2] == cold["tokens"][:2]
        answers_as_before()
        daemon.start()
        hits_again()


def test_killed_engine_leaves_nothing_behind(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    engine = start()
    batch = prompts(4, (300, 333, 400))
    cold = generate(engine, batch)
    settled(engine)
    sessions = daemon.admin("sessions")
    assert len(sessions) == 2
    for row in sessions:
        host, _, pid = row["engine_name"].rpartition(":")
        assert host == socket.gethostname() and Path("/proc", pid).exists()
        assert Path(row["model_name"]).name == "model" and row["model"] == "LlamaForCausalLM"
    engine.ask("reset")
    engine.ask("freeze", call="load", pid=engine.process.pid)
    engine.begin("generate", prompts=batch * 4, max_tokens=400)
    wait_for(lambda: _state(engine.process.pid) == "T")
    engine.kill()
    wait_for(lambda: not daemon.admin("sessions"), "the end of its sessions")
    answer = generate(start(), batch)
    assert answer["tokens"] == cold["tokens"] and answer["cached"] == hits(batch)
