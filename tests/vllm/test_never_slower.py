"""Real vLLM over a daemon that becomes slow: its hits are left, and taken again once it is well."""

import subprocess
import time
from pathlib import Path

import pytest

from hotkv_server.testing import faults
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import prompts, settled, usable
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOW_ENOUGH = {"hf_overrides": {"num_hidden_layers": 12}}
"""A model that takes longer to compute a prompt than a server that is well takes to load it."""
MOST_REQUESTS = 300


@pytest.mark.long
def test_hits_of_a_slow_server_are_left_and_taken_again(
    daemon: Daemon, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"

    def start(*flags: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*faults.command("slow-down", slow, 200.0, 0.05), *flags])

    monkeypatch.setattr("tests.vllm.processes.start_server", start)
    daemon.start()
    model = write_model(tmp_path / "model", "llama")
    engine = engines.start(model, daemon.target, connector={"load": "auto"}, **SLOW_ENOUGH)
    (prompt,) = prompts(1, (901,))
    cold = engine.ask("generate", prompts=[prompt], max_tokens=4)
    settled(engine)

    def hit_tokens() -> int:
        """What a request hits that the engine's own cache does not have."""
        engine.ask("reset")
        answer = engine.ask("generate", prompts=[prompt], max_tokens=4)
        assert answer["tokens"] == cold["tokens"]
        return int(answer["cached"][0])

    def until(expected: int) -> None:
        """Asks until so many tokens hit three times in a row."""
        last = [-1]
        while last[-3:] != [expected] * 3:
            assert len(last) <= MOST_REQUESTS, f"requests hit {last} tokens, and not {expected}"
            last.append(hit_tokens())
            time.sleep(0.01)

    until(usable(prompt))
    (speed,) = {s["prefill_tokens_per_s"] for s in daemon.admin("sessions")} - {0.0}
    assert 10 < speed < 1e7, "the engine has said how fast it computes prompts"
    slow.touch()
    until(0)
    totals = engine.ask("stats")["totals"]
    assert totals["left_requests"] > 0 and totals["late_requests"] > 0
    slow.unlink()
    until(usable(prompt))
    # By trials, or without one where the machine computes so much slower now that loading wins.
    totals = engine.ask("stats")["totals"]
    assert "hook_errors" not in totals
    assert totals["right_choices"] <= totals["judged_choices"]
