"""Sparse engines that share a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import settled
from tests.vllm.tiny import transfer_config, write_model

Start = Callable[..., EngineProcess]
SPARSE_LAYERS = 3


@pytest.fixture
def start(tmp_path: Path, daemon: Daemon, engines: Engines) -> Start:
    daemon.start()

    def make(
        sparse: dict[str, Any] | None, *, beside: bool = False, **connector: Any
    ) -> EngineProcess:
        """Returns the only engine that runs: the one before is stopped. `beside`: the server is
        that of a second connector."""
        engines.stop()
        connector |= {
            "weights_identity": tmp_path.name,
            "flush_timeout_s": 5.0,
            "sparse_recall_steps": 4,
        }
        connector |= {} if sparse is None else {"sparse": sparse}
        settings: dict[str, Any] = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
        }
        settings |= {
            "hf_overrides": {"num_hidden_layers": 4},
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 90,
        }
        model = write_model(tmp_path / "llama", "llama")
        if beside:
            ours = transfer_config(
                **connector, target=f"unix:{tmp_path}/none.sock", startup_wait_s=0.0
            )
            other = transfer_config(
                target=daemon.target,
                weights_identity=tmp_path.name,
                lookup_timeout_s=3.0,
                startup_wait_s=30.0,
            )
            both = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [ours, other]},
            }
            return engines.start(
                model, None, driver="sparse_driver.py", kv_transfer_config=both, **settings
            )
        made = engines.start(
            model, daemon.target, connector=connector, driver="sparse_driver.py", **settings
        )
        made.ask("wait", connected=True, timeout_s=60.0)
        return made

    return make


def growth(engine: EngineProcess, act: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `act` gives, and how the counters have grown when its stores have ended."""
    before = settled(engine)
    result = act()
    after = settled(engine)
    while engine.ask("in_flight")["stores"]:
        after = settled(engine)
    return result, {name: value - before.get(name, 0) for name, value in after.items()}
