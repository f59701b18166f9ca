"""Real vLLM over a daemon with tiers: prompts whose blocks lie on the disk or in a Valkey only, or
half there and half in host memory, are answered as with vLLM's own cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import PATIENT
from tests.tiers.valkey_support import running
from tests.vllm.processes import Daemon, EngineProcess, Engines, own_daemon
from tests.vllm.runs import NOISE, RANDOM, difference, prompts, settled, usable
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 257, 641, 901)
ALWAYS = {"load": "always"}
"""A model this small computes many prompts sooner than they can be read."""
MODEL: dict[str, Any] = RANDOM | {"connector": {"weights_identity": "random", **ALWAYS}}
DEEP = MODEL | {"dtype": "bfloat16", "hf_overrides": {"num_hidden_layers": 8}}
"""Its blocks are encoded: they are large, 64 KiB, and of bfloat16."""


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
    start: Callable[..., EngineProcess] = engines.start
    engine = start(write_model(tmp_path / "model", name), daemon.target, **model)
    batch = prompts(1, LENGTHS)

    def ask() -> dict[str, Any]:
        if model["dtype"] == "bfloat16":
            return engine.ask_each(batch, 20)
        return engine.ask("generate", prompts=batch, max_tokens=20)

    ask()
    # vLLM's own hits are the measure: in bfloat16 a hit rounds otherwise than computing all.
    local = ask()
    settled(engine)
    all_down(daemon)
    encoded = counter(daemon, "tier_encoded_blocks_total")
    assert encoded == (counter(daemon, "stored_blocks_total") if compress == "auto" else 0)

    def warm() -> Any:
        daemon.lose_arena()
        engine.ask("wait", connected=False, timeout_s=60)
        daemon.start()
        assert engine.ask("wait", connected=True, timeout_s=60)["connected"] == [True, True]
        return engine.ask("reset")

    warm()
    from_disk = ask()
    promoted = counter(daemon, "tier_promoted_blocks_total")
    warm()
    # Of each prompt the first part comes into host memory before the rest is asked for.
    engine.ask("generate", prompts=[one[: len(one) // 2 + 1] for one in batch], max_tokens=1)
    engine.ask("reset")
    half = ask()
    for one in (from_disk, half):
        assert one["cached"] == [usable(prompt) for prompt in batch]
        assert one["tokens"] == local["tokens"] and difference(local, one) < NOISE
    assert promoted > 0 and not counter(daemon, "tier_lost_blocks_total")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.campaign), "gemma3"])
def test_tokens_are_the_same_from_another_node(
    daemon: Daemon, engines: Engines, tmp_path: Path, name: str
) -> None:
    """An engine of one node stores; one of another node, which shares a Valkey with it, hits."""
    with running(tmp_path / "valkey") as valkey, own_daemon() as other:
        for one in (daemon, other):
            one.flags = ["--tiers.valkey.address", f"unix:{valkey.path}"]
            # A lookup waits as long as it takes: the machine is slow, and that is not tested.
            one.flags += PATIENT
            one.start()
        model = write_model(tmp_path / "model", name)
        connector = MODEL["connector"] | {"lookup_timeout_s": 20.0}
        first, second = (
            engines.start(model, one.target, **MODEL | {"connector": connector})
            for one in (daemon, other)
        )
        batch = prompts(1, LENGTHS)
        cold = first.ask("generate", prompts=batch, max_tokens=20)
        settled(first)
        until_s = time.monotonic() + 60
        while counter(daemon, "shared_copied_blocks_total") < counter(
            daemon, "stored_blocks_total"
        ):
            assert time.monotonic() < until_s, "the Valkey is behind"
            time.sleep(0.05)
        # Of each prompt the first part comes into host memory before the rest is asked for.
        second.ask("generate", prompts=[one[: len(one) // 2 + 1] for one in batch], max_tokens=1)
        second.ask("reset")
        warm = second.ask("generate", prompts=batch, max_tokens=20)
        assert warm["cached"] == [usable(prompt) for prompt in batch]
        assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < NOISE
        assert counter(other, "shared_fetched_blocks_total") > 0
        assert not counter(other, "shared_corrupt_blocks_total")


def counter(daemon: Daemon, name: str) -> float:
    return float(daemon.admin("info")["counters"][name])


def all_down(daemon: Daemon) -> None:
    """Waits until the disk has all that was stored."""
    until_s = time.monotonic() + 60
    while counter(daemon, "tier_demoted_blocks_total") < counter(daemon, "stored_blocks_total"):
        assert time.monotonic() < until_s, "the disk is behind"
        time.sleep(0.05)
