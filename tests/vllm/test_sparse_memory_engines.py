"""The server shows what sparse decode does: real vLLM, a real daemon."""

import json
from typing import Any

import pytest

from hotkv_client.command import cli
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.sparse_runs import SMALL, prompts
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
