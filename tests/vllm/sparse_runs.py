"""Engines that attend to a selection of blocks in each step."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import EngineProcess, Engines
from tests.vllm.tiny import VOCAB, write_model

Start = Callable[..., EngineProcess]
COVERING = {"sparse_topk": 1.0, "min_context_tokens": 256, "dense_layers": []}
# The hot set holds twice the budget, so it covers all blocks. All code of the selection runs, and
# an answer shows any block that it loses.
HALF = {"sparse_topk": 0.5, "min_context_tokens": 320, "dense_layers": []}
SMALL = {
    "sparse_topk": 256,
    "min_context_tokens": 512,
    "dense_layers": [0],
    "max_correction_blocks": 2,
}
LENGTHS = (600, 300, 1200, 31, 257, 901)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    def make(
        sparse: dict[str, Any] | None,
        *,
        kind: str = "llama",
        target: str | None = None,
        **settings: Any,
    ) -> EngineProcess:
        """Returns an engine with the connector; its server is absent unless `target` names it."""
        layers = {"hf_overrides": {"num_hidden_layers": 4}} if kind == "llama" else {}
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            **layers,
        } | settings
        connector = {
            "weights_identity": tmp_path.name,
            "flush_timeout_s": 5.0,
            "sparse_recall_steps": 4,
        }
        connector |= {} if target else {"startup_wait_s": 0.0}
        connector |= {} if sparse is None else {"sparse": sparse}
        target = target or f"unix:{tmp_path}/none.sock"
        return engines.start(
            write_model(tmp_path / kind, kind),
            target,
            connector=connector,
            driver="sparse_driver.py",
            **settings,
        )

    return make


def totals(engine: EngineProcess) -> dict[str, float]:
    """Returns the counters, including the last request's, which come with the steps after it."""
    engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
    counted: dict[str, float] = engine.ask("stats")["totals"]
    return counted


def check_counters(counted: dict[str, float], most_corrections: int) -> None:
    """Checks counters that hold for any run of sparse decode."""
    assert (
        counted["sparse_selects"] > 0
        and "sparse_faults" not in counted
        and "hook_errors" not in counted
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
