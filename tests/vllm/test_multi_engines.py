"""Real vLLM with a MultiConnector and a real daemon: hotkv as first and as second child."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts, settled, usable
from tests.vllm.tiny import transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path, shared_daemon: Daemon, engines: Engines) -> Start:
    """Engines whose MultiConnector holds hotkv (None in `children`) and others."""
    model = write_model(tmp_path / "model")

    def make(
        children: list[dict[str, Any] | None], role: str = "kv_both", **more: Any
    ) -> EngineProcess:
        ours = transfer_config(
            target=shared_daemon.target,
            weights_identity=tmp_path.name,
            lookup_timeout_s=3.0,
            startup_wait_s=10.0,
        )
        all_of_them = [{"kv_role": role, **ours} if child is None else child for child in children]
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": all_of_them},
        }
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            **more,
        }
        return engines.start(model, None, kv_transfer_config=several, **settings)

    return make


def example(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    extra = {"shared_storage_path": str(folder)}
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


CHECKING = {
    "kv_connector": "CheckingConnector",
    "kv_connector_module_path": "tests.vllm.other_connectors",
    "kv_role": "kv_both",
}


@pytest.mark.parametrize(
    "ours_first",
    [pytest.param(True, id="first"), pytest.param(False, id="second", marks=pytest.mark.long)],
)
def test_beside_the_example_connector(start: Start, tmp_path: Path, ours_first: bool) -> None:
    """The one that comes first serves; the other's answers are the same, and hits are counted only
    where hotkv served."""
    other = example(tmp_path / "example")
    engine = start([None, other] if ours_first else [other, None])
    # Of 33 tokens ExampleConnector offers none, hotkv a block.
    batch = prompts(1, (300, 333, 33))
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("generate", prompts=batch, max_tokens=8)
    assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < 1e-3
    totals = engine.ask("stats")["totals"]
    assert totals["offered_requests"] == 3 and warm["cached"] == [usable(p) for p in batch]
    assert totals.get("hit_requests", 0) == (3 if ours_first else 1)
    assert totals["hit_tokens"] == (
        sum(usable(p) for p in batch) if ours_first else usable(batch[2])
    )
    assert not {"hook_errors", "failed_loads"} & totals.keys()
