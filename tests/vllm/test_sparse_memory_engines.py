"""The server shows what sparse decode does: real vLLM, a real daemon."""

import json
import time
from typing import Any

import pytest

from hotkv_client.command import cli
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import difference
from tests.vllm.sparse_runs import NOISE, SMALL, prompts
from tests.vllm.sparse_sharing import (
    SPARSE_LAYERS,
    Start,
    growth,
    start,
)

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 1100
ANSWER = 40


def asked(
    engine: EngineProcess, prompt: list[int], max_tokens: int = ANSWER
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns a request's answer, and what was counted until its sequence had ended."""
    return growth(engine, lambda: engine.ask("generate", prompts=[prompt], max_tokens=max_tokens))


def figures(one: Daemon, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `hotkv sparse --json` prints."""
    assert cli.main(["sparse", "--target", one.target, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.long
def test_the_server_shows_what_engines_count(
    start: Start,
    daemon: Daemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (prompt,) = prompts(9, (LENGTH,))
    engine = start(SMALL)
    _, counted = asked(engine, prompt)
    assert counted["sparse_selects"] == SPARSE_LAYERS * (ANSWER - 1)

    shown = figures(daemon, capsys)
    assert [row["layer_index"] for row in shown["layers"]] == [1, 2, 3]
    for row in shown["layers"]:
        assert (
            row["selects"] == ANSWER - 1
            and 0 < row["hit_ratio"] <= 1
            and 0 < row["mean_estimated_mass"] <= 1
        )
        assert row["swap_bytes"] > 0 and row["mean_select_s"] > 0 and row["faults"] == 0
    assert (
        shown["total"]["selects"] == counted["sparse_selects"]
        and 0 < shown["total"]["recall_ratio"] <= 1
    )
    for name in ("hit_blocks", "wanted_blocks", "swap_bytes", "estimated_mass", "true_mass"):
        assert shown["total"][name] == pytest.approx(counted[f"sparse_{name}"])


@pytest.mark.long
def test_a_server_that_dies_while_requests_decode(
    start: Start,
    daemon: Daemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer is that without a fault, and reports go on."""
    (prompt,) = prompts(12, (LENGTH,))
    engine = start(SMALL)
    expected = engine.ask("generate", prompts=[prompt], max_tokens=600)
    assert figures(daemon, capsys)["total"]["selects"] > 0, (
        "a report leaves while a request decodes"
    )
    engine.ask("reset", connector=True)
    engine.ask("pace", seconds=0.015)
    engine.begin("generate", prompts=[prompt], max_tokens=600)
    time.sleep(0.5)
    daemon.kill()
    daemon.start()
    answer = engine.answer()
    assert answer["tokens"] == expected["tokens"] and difference(answer, expected) < NOISE
    engine.ask("wait", connected=True, timeout_s=60)
    _, counted = asked(engine, prompt)
    assert "hook_errors" not in counted and "sparse_faults" not in counted
    shown = figures(daemon, capsys)["total"]
    assert shown["selects"] > SPARSE_LAYERS * ANSWER and shown["faults"] == 0
