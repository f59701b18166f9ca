"""Real engines with sparse decode."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import PATIENT, EngineProcess, Engines
from tests.vllm.tiny import write_model

Start = Callable[..., EngineProcess]
COVERING = {
    "scorer": "rot2u",
    "sparse_topk": 1.0,
    "min_context_tokens": 256,
    "dense_layers": [],
}
# With `select_always` all of the selection runs; a lost block would change the answers.
SELECTING = COVERING | {"min_context_tokens": 320}
SMALL = {
    "scorer": "rot2u",
    "sparse_topk": 512,
    "min_context_tokens": 512,
    "dense_layers": [0],
    "max_correction_blocks": 2,
}
LENGTHS = (600, 300, 1200, 31, 257, 901)


def begin(
    engines: Engines,
    folder: Path,
    sparse: dict[str, Any] | None = None,
    *,
    kind: str = "llama",
    target: str | None = None,
    connector_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> EngineProcess:
    """target: None: no server."""
    layers = {"hf_overrides": {"num_hidden_layers": 4}} if kind == "llama" else {}
    settings = {
        "load_format": "random",
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        **layers,
    } | settings
    connector: dict[str, Any] = {"weights_identity": folder.name}
    connector |= {} if target else {"startup_wait_s": 0.0}
    connector |= {} if sparse is None else {"sparse": sparse}
    return engines.start(
        write_model(folder / kind, kind),
        target or f"unix:{folder}/none.sock",
        connector=connector | (connector_settings or {}),
        driver="sparse_driver.py",
        **settings,
    )


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    return functools.partial(begin, engines, tmp_path, constants=PATIENT)


class References:
    """Answers of engines with all blocks on the device, each computed once."""

    def __init__(self, begin: Callable[..., EngineProcess]) -> None:
        self._begin = begin
        self._made: dict[str, EngineProcess] = {}
        self._answers: dict[str, dict[str, Any]] = {}

    def ask(
        self, operation: str = "generate", *, engine: dict[str, Any] | None = None, **asked: Any
    ) -> dict[str, Any]:
        which = json.dumps(engine, default=str)
        if which not in self._made:
            self._made[which] = self._begin(**engine or {})
        question = json.dumps([which, operation, asked])
        if question not in self._answers:
            self._answers[question] = self._made[which].ask(operation, **asked)
        return self._answers[question]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """Engines with full attention."""
    folder = tmp_path_factory.mktemp("dense")
    engines = Engines(folder)
    yield References(functools.partial(begin, engines, folder, None))
    engines.stop()


def totals(engine: EngineProcess) -> dict[str, float]:
    """Counters come with a later step."""
    engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
    counted: dict[str, float] = engine.ask("stats")["totals"]
    return counted


def check_counters(counted: dict[str, float], most_corrections: int) -> None:
    """most_corrections: `max_correction_blocks`."""
    assert (
        counted["sparse_selects"] > 0
        and "sparse_faults" not in counted
        and "callback_errors" not in counted
    )
    assert counted.get("sparse_corrected_blocks", 0) <= most_corrections * counted["sparse_selects"]
    assert (
        counted["sparse_hit_blocks"]
        <= counted["sparse_wanted_blocks"]
        <= counted["sparse_selected_blocks"]
    )
    assert counted["sparse_attended_blocks"] <= counted["sparse_context_blocks"]
    assert 0 < counted["sparse_estimated_mass"] <= counted["sparse_selects"]
    assert 0 < counted["sparse_recall"] <= counted["sparse_recall_samples"]
    assert 0 < counted["sparse_true_mass"] <= counted["sparse_recall_samples"] * (1 + 1e-6)
