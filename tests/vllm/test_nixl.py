"""Disaggregated prefill with NIXL and hotkv in one MultiConnector."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.vllm.processes import Daemon, EngineProcess, Engines, own_daemon
from tests.vllm.runs import RANDOM, hits, prompts, settled
from tests.vllm.tiny import transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def beside_nixl(engines: Engines, model: Path, target: str) -> EngineProcess:
    ours = transfer_config(target=target, lookup_timeout_s=30.0, weights_identity="random")
    several: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [ours, NIXL]}
    port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return engines.start(model, None, kv_transfer_config=several, environment=port, **RANDOM)


def test_a_prefill_that_nixl_hands_over(daemon: Daemon, engines: Engines, tmp_path: Path) -> None:
    """What NIXL brings must be stored in the decode engine's server."""
    model = write_model(tmp_path / "model")
    batch = prompts(1, (333,))
    with own_daemon() as far:
        prefiller = beside_nixl(engines, model, far.start().target)
        decoder = beside_nixl(engines, model, daemon.start().target)
        alone = engines.start(model, None, **RANDOM)
        expected = alone.ask("generate", prompts=batch, max_tokens=8)["tokens"]
        first = prefiller.ask("generate", prompts=batch, max_tokens=1, transfer=PREFILL)
        assert first["tokens"] == [expected[0][:1]]
        answer = decoder.ask("generate", prompts=batch, max_tokens=8, transfer=first["transfer"][0])
        assert answer["tokens"] == expected
        log = decoder.log()
        assert "NIXL compatibility check passed" in log and "transfer failure" not in log
        totals = settled(decoder)
        assert not totals.get("hit_requests") and "callback_errors" not in totals
        decoder.ask("reset")
        again = decoder.ask("generate", prompts=batch, max_tokens=8)
        assert again["tokens"] == expected and again["cached"] == hits(batch)
        assert decoder.ask("stats")["totals"]["hit_requests"] == 1
        engines.stop()
