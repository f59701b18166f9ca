"""Hot sets are handed from request to request through the server, and it shows what sparse decode
does: real vLLM, a real daemon."""

import json
import time
from typing import Any

import pytest

from hotkv_client import cli
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.test_end_to_end import difference
from tests.vllm.test_sparse import NOISE, SMALL, prompts
from tests.vllm.test_sparse_sharing import SPARSE_LAYERS, Start, growth, start  # noqa: F401 - a fixture
from tests.vllm.tiny import BLOCK_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 1100
ANSWER = 40
CAPACITY_BLOCKS = 2 * SMALL["sparse_topk"] // BLOCK_TOKENS
"""Of a hot set."""

MAX_TRIES = 8


def asked(
    engine: EngineProcess, prompt: list[int], max_tokens: int = ANSWER
) -> tuple[dict[str, Any], dict[str, float]]:
    """A request's answer, and what was counted until its sequence had ended."""
    return growth(engine, lambda: engine.ask("generate", prompts=[prompt], max_tokens=max_tokens))


def figures(one: Daemon, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `hotkv sparse --json` prints."""
    assert cli.main(["sparse", "--target", one.target, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def remembering(
    engine: EngineProcess, prompt: list[int], *, is_loaded: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """As `asked`, until the request began with a remembered hot set: nothing waits for one that
    comes too late for the first step.

    `is_loaded`: the prompt comes from the server each time.
    """
    for _ in range(MAX_TRIES):
        answer, counted = asked(engine, prompt)
        if counted.get("sparse_remembered_blocks"):
            return answer, counted
        if is_loaded:
            engine.ask("reset")
    raise AssertionError(f"no hot set was remembered in {MAX_TRIES} tries")


@pytest.mark.long
def test_a_request_starts_from_what_another_ended_with(
    start: Start,  # noqa: F811 - a fixture
    daemon: Daemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (prompt,) = prompts(9, (LENGTH,))
    engine = start(SMALL)
    first, counted = asked(engine, prompt)
    assert (
        counted["sparse_selects"] == SPARSE_LAYERS * (ANSWER - 1)
        and "sparse_remembered_blocks" not in counted
    )

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

    # Another engine, whose prompt comes from the server: it starts with a full hot set, and answers
    # the same.
    engine = start(SMALL)
    second, with_memory = remembering(engine, prompt, is_loaded=True)
    assert (
        second["cached"] == [LENGTH // BLOCK_TOKENS * BLOCK_TOKENS]
        and second["tokens"] == first["tokens"]
    )
    assert difference(second, first) < NOISE
    remembered = with_memory["sparse_remembered_blocks"]
    assert (
        0 < remembered <= SPARSE_LAYERS * CAPACITY_BLOCKS
        and with_memory["sparse_hit_blocks"] > counted["sparse_hit_blocks"]
    )
    assert figures(daemon, capsys)["total"]["remembered_blocks"] == remembered

    # The same engine, its own cache; then a longer prompt and one that shares half.
    third, again = remembering(engine, prompt)
    assert third["tokens"] == first["tokens"] and difference(third, first) < NOISE
    remembering(engine, prompt + first["tokens"][0] + prompts(10, (60,))[0])
    _, half = remembering(engine, prompt[:600] + prompts(11, (400,))[0])
    assert half["sparse_remembered_blocks"] < remembered

    # A flush forgets them.
    engine.ask("reset", connector=True)
    fourth, flushed = asked(engine, prompt)
    assert (
        not flushed["sparse_remembered_blocks"]
        and flushed["sparse_selects"] == again["sparse_selects"]
    )
    assert fourth["tokens"] == first["tokens"] and difference(fourth, first) < NOISE
    assert flushed["sparse_hit_blocks"] < again["sparse_hit_blocks"]
    assert not any(
        name in one
        for one in (counted, with_memory, again, flushed)
        for name in ("sparse_faults", "hook_errors")
    )


@pytest.mark.long
def test_a_server_that_dies_while_requests_decode(
    start: Start,  # noqa: F811 - a fixture
    daemon: Daemon,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer is that without a fault; reports go on, and the sequences are known again: their
    hot sets reach the next request."""
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
    engine.ask("wait", connected=True, timeout_s=30)
    _, counted = remembering(engine, prompt)
    assert "hook_errors" not in counted and "sparse_faults" not in counted
    shown = figures(daemon, capsys)["total"]
    assert shown["selects"] > SPARSE_LAYERS * ANSWER and shown["faults"] == 0
