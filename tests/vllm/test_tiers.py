"""Real vLLM over a daemon with tiers: prompts whose blocks lie on the disk only, or half there and
half in host memory, are answered as with vLLM's own cache. A Valkey that nodes share is in
`tests/pairs/test_nodes.py`."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.support import PATIENT
from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import NOISE, RANDOM, difference, prompts, settled, usable
from tests.vllm.tiny import write_model

LENGTHS = (33, 100, 257, 641, 901)
MODEL: dict[str, Any] = RANDOM | {"connector": {"weights_identity": "random"}}
DEEP = MODEL | {"dtype": "bfloat16", "hf_overrides": {"num_hidden_layers": 8}}
"""Its blocks are encoded: they are large, 64 KiB, and of bfloat16."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, compress, model",
    [
        pytest.param("llama", "off", MODEL, marks=pytest.mark.campaign),
        pytest.param("gemma3", "off", MODEL, marks=pytest.mark.long),
        ("llama", "auto", DEEP),
    ],
)
def test_tokens_are_the_same_from_the_disk(
    daemon: Daemon,
    engines: Engines,
    tmp_path: Path,
    name: str,
    compress: str,
    model: dict[str, Any],
) -> None:
    daemon.flags = ["--tiers.disk.path", str(tmp_path / "disk"), "--tiers.disk.bytes", "64MiB"]
    daemon.flags += ["--tiers.disk.compress", compress, *PATIENT]
    daemon.start()
    engine = engines.start(write_model(tmp_path / "model", name), daemon.target, **model)
    batch = prompts(1, LENGTHS)

    def ask() -> dict[str, Any]:
        if model["dtype"] == "bfloat16":
            return engine.ask_each(batch, 20)
        return engine.ask("generate", prompts=batch, max_tokens=20)

    def counter(counted: str) -> float:
        return float(daemon.admin("info")["counters"][counted])

    def stored() -> float:
        return counter("stored_blocks_total")

    def lose_memory() -> None:
        daemon.lose_arena()
        engine.ask("wait", connected=False, timeout_s=60)
        daemon.start()
        assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
        engine.ask("reset")

    ask()
    # vLLM's own hits are the measure: in bfloat16 a hit rounds otherwise than computing all.
    local = ask()
    settled(engine)
    wait_for(lambda: counter("tier_demoted_blocks_total") >= stored(), "the disk")
    assert counter("tier_encoded_blocks_total") == (stored() if compress == "auto" else 0)
    lose_memory()
    from_disk = ask()
    assert counter("tier_promoted_blocks_total") > 0
    lose_memory()
    # Of each prompt the first part comes into host memory before the rest is asked for.
    engine.ask("generate", prompts=[one[: len(one) // 2 + 1] for one in batch], max_tokens=1)
    engine.ask("reset")
    for one in (from_disk, ask()):
        assert one["cached"] == [usable(prompt) for prompt in batch]
        assert one["tokens"] == local["tokens"] and difference(local, one) < NOISE
    assert not counter("tier_lost_blocks_total")
