"""Real vLLM with a MultiConnector and a real daemon: hotkv as first and as second child."""

from pathlib import Path

import pytest

from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import RANDOM, difference, hits, prompts, settled
from tests.vllm.tiny import transfer_config, write_model


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ours_first",
    [pytest.param(True, id="first"), pytest.param(False, id="second", marks=pytest.mark.long)],
)
def test_beside_the_example_connector(
    daemon: Daemon, engines: Engines, tmp_path: Path, ours_first: bool
) -> None:
    """The one that comes first serves; the other's answers are the same, and hits are counted only
    where hotkv served."""
    (tmp_path / "example").mkdir()
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    ours = transfer_config(
        target=daemon.start().target, lookup_timeout_s=3.0, weights_identity="random"
    )
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other] if ours_first else [other, ours]},
    }
    model = write_model(tmp_path / "model")
    engine = engines.start(model, None, kv_transfer_config=several, **RANDOM)
    # Of 33 tokens ExampleConnector offers none, hotkv a block.
    batch = prompts(1, (300, 333, 33))
    cold = engine.ask("generate", prompts=batch, max_tokens=8)
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("generate", prompts=batch, max_tokens=8)
    assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < 1e-3
    totals = engine.ask("stats")["totals"]
    assert totals["offered_requests"] == 3 and warm["cached"] == hits(batch)
    assert totals.get("hit_requests", 0) == (3 if ours_first else 1)
    assert totals["hit_tokens"] == sum(hits(batch if ours_first else batch[2:]))
    assert not {"hook_errors", "failed_loads"} & totals.keys()
