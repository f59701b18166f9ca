"""Real vLLM over a daemon with a disk: prompts whose blocks lie on the disk only, or half there and
half in host memory, are answered as with vLLM's own cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.test_end_to_end import difference, prompts, settled, usable
from tests.vllm.tiny import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (33, 100, 257, 641, 901)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_are_the_same_from_the_disk(
    daemon: Daemon, engines: Engines, tmp_path: Path, name: str
) -> None:
    daemon.flags = ["--tiers.disk.path", str(tmp_path / "disk"), "--tiers.disk.bytes", "64MiB"]
    daemon.start()
    start: Callable[..., EngineProcess] = engines.start
    engine = start(write_model(tmp_path / "model", name), daemon.target)
    batch = prompts(1, LENGTHS)
    cold = engine.ask("generate", prompts=batch, max_tokens=20)
    local = engine.ask("generate", prompts=batch, max_tokens=20)
    settled(engine)
    all_down(daemon)

    def warm() -> Any:
        daemon.lose_arena()
        engine.ask("wait", connected=False, timeout_s=20)
        daemon.start()
        assert engine.ask("wait", connected=True, timeout_s=20)["connected"] == [True, True]
        return engine.ask("reset")

    warm()
    from_disk = engine.ask("generate", prompts=batch, max_tokens=20)
    promoted = counter(daemon, "tier_promoted_blocks_total")
    warm()
    # Of each prompt the first part comes into host memory before the rest is asked for.
    engine.ask("generate", prompts=[one[: len(one) // 2 + 1] for one in batch], max_tokens=1)
    engine.ask("reset")
    half = engine.ask("generate", prompts=batch, max_tokens=20)
    allowed = difference(cold, local)
    for one in (from_disk, half):
        assert one["cached"] == [usable(prompt) for prompt in batch]
        assert one["tokens"] == local["tokens"] and difference(cold, one) <= allowed
    assert promoted > 0 and not counter(daemon, "tier_lost_blocks_total")


def counter(daemon: Daemon, name: str) -> float:
    return float(daemon.admin("info")["counters"][name])


def all_down(daemon: Daemon) -> None:
    """Waits until the disk has all that was stored."""
    until_s = time.monotonic() + 30
    while counter(daemon, "tier_demoted_blocks_total") < counter(daemon, "stored_blocks_total"):
        assert time.monotonic() < until_s, "the disk is behind"
        time.sleep(0.05)
