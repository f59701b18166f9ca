"""Real engines share an adapter's KV only under one name, path and bytes. Each keeps one
adapter."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.adapters import LORA, adapter, write_adapter
from tests.vllm.feature_runs import Starter, clean
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import NOISE, difference, settled
from tests.vllm.tiny import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH, HIT = 333, 320


class Three(NamedTuple):
    one: EngineProcess
    other: EngineProcess
    plain: EngineProcess
    folder: Path


@pytest.fixture(scope="module")
def three(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    starter = Starter(shared_daemon, tmp_path_factory.mktemp("lora"))
    model = write_model(starter.folder / "model")
    yield Three(*(starter(model, **more) for more in (LORA, LORA, {})), starter.folder)
    starter.stop()


def prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(LENGTH)]


def ask(engine: EngineProcess, tokens: list[int], path: Path | None = None) -> dict[str, Any]:
    answer = engine.ask(
        "generate", prompts=[tokens], max_tokens=8, adapter=None if path is None else adapter(path)
    )
    settled(engine)
    assert clean(engine)
    return answer


def test_adapter_alone_is_found_in_another_engine(three: Three) -> None:
    a, b = (write_adapter(three.folder / name, seed) for seed, name in enumerate("ab"))
    cold = ask(three.one, prompt(1), a)
    base = ask(three.plain, prompt(1))
    other = ask(three.one, prompt(1), b)
    assert cold["cached"] == base["cached"] == other["cached"] == [0]
    # So the test can fail.
    assert (
        min(difference(cold, base), difference(other, base), difference(cold, other)) > 100 * NOISE
    )
    for path, expected in ((a, cold), (b, other), (None, base), (a, cold)):
        three.other.ask("reset")
        warm = ask(three.other, prompt(1), path)
        assert warm["cached"] == [HIT]
        assert warm["tokens"] == expected["tokens"] and difference(warm, expected) < NOISE


def test_adapter_added_before_first_request_is_found(three: Three) -> None:
    path = write_adapter(three.folder / "added", 3)
    for engine in three[:2]:
        assert engine.ask("add_adapter", adapter=adapter(path))["added"]
    cold = ask(three.one, prompt(3), path)
    warm = ask(three.other, prompt(3), path)
    assert (cold["cached"], warm["cached"]) == ([0], [HIT])
    assert difference(warm, cold) < NOISE


def test_rewritten_adapter_is_another_one_next_time(
    three: Three,
) -> None:
    path = write_adapter(three.folder / "rewritten", 4)
    before = ask(three.one, prompt(4), path)
    write_adapter(path, 5)
    after = ask(three.other, prompt(4), path)
    assert after["cached"] == [0] and difference(before, after) > 100 * NOISE
    own = ask(three.one, prompt(4), write_adapter(three.folder / "copy", 5))
    assert own["cached"] == [0] and difference(own, after) < NOISE
