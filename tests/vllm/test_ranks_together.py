"""What vLLM makes of several ranks' outputs and handshakes, and what the scheduler side makes of that: real workers, a real aggregator."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.testing import FakeServer
from tests.vllm.harness import full_model, hybrid_model, prompt
from tests.vllm.oracle import answer_of, audit
from tests.vllm.ranked import RankedEngine

PROMPT = prompt(1, 200)


@pytest.fixture
def ranked(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankedEngine]]:
    made: list[RankedEngine] = []

    def make(**settings: Any) -> RankedEngine:
        made.append(RankedEngine(server, tmp_path / "model", monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.mark.parametrize("stages", [False, True], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_basic(ranked: Callable[..., RankedEngine], server: FakeServer, model: Any, stages: bool) -> None:
    one, other = ranked(specs=model(), stages=stages), ranked(specs=model(), stages=stages)
    assert one.generate("a", PROMPT, 4) == (answer_of(PROMPT, 4), 0)
    assert other.generate("b", PROMPT, 4) == (answer_of(PROMPT, 4), 192)
    print(one.counters, audit(server, [one, other]))
