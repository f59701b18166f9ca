"""Roles `kv_producer` and `kv_consumer`: a prefill engine and a decode engine of one node exchange
KV through hotkv."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts, settled, usable
from tests.vllm.tiny import transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(engines: Engines, tmp_path: Path, daemon: Daemon, role: str) -> EngineProcess:
    ours = transfer_config(
        target=daemon.target, weights_identity="roles", lookup_timeout_s=3.0, startup_wait_s=10.0
    )
    settings: dict[str, Any] = {
        "load_format": "random",
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
    }
    model = write_model(tmp_path / "model")
    return engines.start(model, None, kv_transfer_config=ours | {"kv_role": role}, **settings)


@pytest.mark.long
def test_prefill_engine_and_decode_engine(engines: Engines, tmp_path: Path, daemon: Daemon) -> None:
    """The consumer hits what the producer computed, decodes as the producer would, and stores
    nothing; the producer loads nothing."""
    daemon.start()
    producer, consumer = (
        start(engines, tmp_path, daemon, role) for role in ("kv_producer", "kv_consumer")
    )
    batch = prompts(1, (300, 333, 411))
    producer.ask("generate", prompts=batch, max_tokens=1)
    settled(producer)
    decoded = consumer.ask("generate", prompts=batch, max_tokens=40)
    assert decoded["cached"] == [usable(p) for p in batch]
    stored = len(daemon.admin("blocks")["blocks"])
    assert stored == sum(len(p) // 32 for p in batch)
    producer.ask("reset")
    alone = producer.ask("generate", prompts=batch, max_tokens=40)
    assert alone["cached"] == [0, 0, 0]
    assert alone["tokens"] == decoded["tokens"] and difference(alone, decoded) < 1e-3
    consumer.ask("generate", prompts=prompts(2, (300,)), max_tokens=40)
    consumed, produced = settled(consumer), settled(producer)
    assert (
        consumed["hit_requests"] == consumed["loads"] == 3
        and not {"stores", "hook_errors", "failed_loads"} & consumed.keys()
    )
    assert (
        not {"offered_requests", "loads", "hook_errors"} & produced.keys()
        and produced["stored_blocks"] > stored
    )
