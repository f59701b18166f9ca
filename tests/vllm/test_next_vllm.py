"""The newest supported vLLM with both doors, against the same without."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm.compat.uses import OWN, TESTED
from tests.offloading.engines import door_config
from tests.support.waiting import wait_for
from tests.vllm import next_vllm
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import RANDOM, prompts, same, usable
from tests.vllm.tiny import transfer_config, write_model

pytestmark = [pytest.mark.timeout(900), *next_vllm.MARKS]
BATCH = prompts(1, (33, 100, 257, 500, 901))
MANY = prompts(2, (300, 333, 400, 411, 500, 511)) * 4
Start = Callable[..., EngineProcess]


@pytest.fixture(params=["own", "offloading"])
def start(
    request: pytest.FixtureRequest, daemon: Daemon, engines: Engines, tmp_path: Path
) -> Start:
    """is_alone: without connector."""
    ours = transfer_config(target=daemon.target, weights_identity="random", lookup_timeout_s=30.0)
    identity: dict[str, Any] = {"hotkv.weights_identity": "random"}
    door = door_config(daemon.target, **identity)
    transfer = {"own": ours, "offloading": door}[request.param]

    def make(is_alone: bool = False) -> EngineProcess:
        more = {} if is_alone else {"kv_transfer_config": transfer}
        folder = write_model(tmp_path / "model")
        return engines.start(folder, None, vllm=next_vllm.FOLDER, blocks=256, **RANDOM, **more)

    return make


def kept(daemon: Daemon, engine: EngineProcess, batch: list[list[int]]) -> Any:
    """Returns once the server has stored them."""
    before = daemon.counter("stored_blocks_total")
    answers = engine.ask_each(batch, 6)
    num_blocks = sum((len(prompt) + 5) // 32 for prompt in batch)

    def has_stored() -> bool:
        engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
        return daemon.counter("stored_blocks_total") >= before + num_blocks

    wait_for(has_stored, "the store of all blocks")
    return answers


def loads(daemon: Daemon, before: float) -> bool:
    return daemon.counter("loaded_bytes_total") > before


def test_the_engine_is_of_the_newest_line(start: Start) -> None:
    major, minor = TESTED[OWN][1]
    assert start(is_alone=True).ask("version")["version"].startswith(f"{major}.{minor}.")


def test_a_second_life_hits_and_answers_alike(daemon: Daemon, start: Start) -> None:
    daemon.start()
    plain, first = start(is_alone=True), start()
    expected = plain.ask_each(BATCH, 6)
    assert same(expected, kept(daemon, first, BATCH))
    first.stop()
    second = start()
    warm = second.ask_each(BATCH, 6)
    assert warm["cached"] == [usable(prompt) for prompt in BATCH]
    assert same(expected, warm)
    assert second.ask("reset")["done"]
    again = second.ask_each(BATCH, 6)
    assert same(expected, again) and sum(again["cached"]) > 0
    assert second.ask("reset", connector=True)["done"]
    emptied = second.ask_each(BATCH, 6)
    assert emptied["cached"] == [0] * len(BATCH) and same(expected, emptied)
    assert " ERROR " not in second.log()


def test_a_kill_in_traffic_changes_no_answer(daemon: Daemon, start: Start) -> None:
    daemon.start()
    plain, first = start(is_alone=True), start()
    expected = plain.ask("generate", prompts=MANY, max_tokens=40)
    kept(daemon, first, MANY[:6])
    for _ in range(2):
        engine = start()
        before = daemon.counter("loaded_bytes_total")
        engine.begin("generate", prompts=MANY, max_tokens=40)
        wait_for(functools.partial(loads, daemon, before), "the traffic")
        daemon.kill()
        daemon.start()
        assert engine.answer()["tokens"] == expected["tokens"]
