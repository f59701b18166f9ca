"""Faults of the server while contexts exceed the device."""

import os
import signal
import time
from typing import Any

import pytest

from tests.sparse.engines.resident_runs import (
    CONTEXT,
    EXACT,
    EXACT_POOL,
    POOL_BLOCKS,
    REFERENCE,
    RESIDENT,
    SCHEDULING,
    Start,
    prompts,
    references,
    same,
    start,
    until_stored,
)
from tests.sparse.engines.sparse_runs import References, totals
from tests.support.waiting import stop
from tests.vllm.processes import Daemon, EngineProcess

__all__ = ["references", "start"]
WINDOWS = {"kind": "gemma3", "hf_overrides": {"max_position_embeddings": 2 * CONTEXT}}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def begun(
    start: Start,
    daemon: Daemon,
    batch: list[list[int]],
    pace_s: float,
    sparse: dict[str, Any] = RESIDENT,
    blocks: int = POOL_BLOCKS,
    **more: Any,
) -> EngineProcess:
    """Returns an engine that has begun to answer `batch`.

    pace_s: shortest step.
    """
    one = start(sparse, target=daemon.start().target, num_gpu_blocks_override=blocks, **more)
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("pace", seconds=pace_s)
    one.begin("generate", prompts=batch, max_tokens=60)
    return one


@pytest.mark.long
@SCHEDULING
@pytest.mark.parametrize(
    ("stored", "sparse", "blocks", "reference"),
    [
        pytest.param(30, EXACT, EXACT_POOL, {}, id="prefill"),
        pytest.param(59, RESIDENT, POOL_BLOCKS, {"engine": REFERENCE}, id="decode"),
    ],
)
def test_a_server_is_killed_and_comes_back(
    start: Start,
    daemon: Daemon,
    references: References,
    stored: int,
    sparse: dict[str, Any],
    blocks: int,
    reference: dict[str, Any],
    is_async: bool,
) -> None:
    """The engine reads the old memory meanwhile. In prefill the request may begin anew on the
    device; then tokens are equal only if the budget covers it."""
    batch = prompts(11, 1900)
    one = begun(start, daemon, batch, 0.05, sparse, blocks, async_scheduling=is_async)
    until_stored(daemon, stored)
    daemon.kill()
    time.sleep(0.5)
    daemon.start()
    assert same(one.answer(), references.ask(**reference, prompts=batch, max_tokens=60))
    assert "callback_errors" not in totals(one)


@pytest.mark.long
def test_a_server_is_gone_for_good(start: Start, daemon: Daemon) -> None:
    """Decode goes on while the device has room."""
    settings = {"residency_timeout_s": 3.0}
    # The kill must come before the prompt is computed.
    one = begun(start, daemon, prompts(12, 4000), 0.1, connector_settings=settings)
    until_stored(daemon, 30)
    daemon.kill()
    found = one.answer()
    assert len(found["tokens"][0]) < 60
    assert found["ended"] == ["error"]
    assert one.ask("generate", prompts=prompts(13, 100), max_tokens=5)["tokens"]


@SCHEDULING
def test_requests_fitting_the_device_need_no_server(
    start: Start, daemon: Daemon, references: References, is_async: bool
) -> None:
    """A recomputed request selects other blocks unless the hot set covers it: only the first
    engine has a smaller budget."""
    more: dict[str, Any] = {
        "connector_settings": {"residency_timeout_s": 4.0},
        "num_gpu_blocks_override": 2 * EXACT_POOL,
        "async_scheduling": is_async,
    }
    batch, long = prompts(16, 699, 733, 650), prompts(17, 2600)
    sparse = references.ask(engine=REFERENCE, prompts=batch, max_tokens=40)
    alone = start(RESIDENT, **more)
    assert same(alone.ask("generate", prompts=batch, max_tokens=40), sparse), "never a server"
    wanted = references.ask(prompts=batch, max_tokens=40)
    one = start(EXACT, target=daemon.start().target, **more)
    one.ask("wait", connected=True, timeout_s=60.0)
    stop(daemon.pid)
    assert same(one.ask("generate", prompts=batch, max_tokens=40), wanted), "frozen"
    os.kill(daemon.pid, signal.SIGCONT)
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("pace", seconds=0.05)
    one.begin("generate", prompts=batch, max_tokens=40, salt="killed")
    time.sleep(0.5)
    daemon.kill()
    assert same(one.answer(), wanted), "killed"
    daemon.start()
    one.ask("wait", connected=True, timeout_s=60.0)
    assert one.ask("generate", prompts=long, max_tokens=20)["ended"] == ["length"]
    assert not {"failed_residencies", "callback_errors"} & totals(one).keys()


@pytest.mark.parametrize(
    ("is_async", "model"),
    [
        pytest.param(True, {}, id="async", marks=pytest.mark.long),
        pytest.param(False, {}, id="sync", marks=pytest.mark.campaign),
        pytest.param(True, WINDOWS, id="windows"),
        pytest.param(False, WINDOWS, id="windows-sync", marks=pytest.mark.long),
    ],
)
def test_bytes_are_lost_again_and_again(
    start: Start, daemon: Daemon, references: References, is_async: bool, model: dict[str, Any]
) -> None:
    one = start(
        EXACT,
        target=daemon.start().target,
        num_gpu_blocks_override=2 * EXACT_POOL,
        async_scheduling=is_async,
        **model,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(14, 1700, 1503)
    one.ask("rewrite_always")
    # Blocks must be stored before they are read.
    one.ask("pace", seconds=0.03)
    one.ask("lose", steps=[8, 9, 24, 12, 1, 1])
    found = one.ask("generate", prompts=batch, max_tokens=50)
    assert same(found, references.ask(engine=model or None, prompts=batch, max_tokens=50))
    counted = totals(one)
    assert counted["lost_residencies"] >= 2 and "callback_errors" not in counted


@pytest.mark.long
@SCHEDULING
def test_requests_are_preempted_and_resume(
    start: Start, daemon: Daemon, references: References, is_async: bool
) -> None:
    """Five requests on a device for two."""
    one = start(
        EXACT,
        target=daemon.start().target,
        num_gpu_blocks_override=2 * EXACT_POOL,
        async_scheduling=is_async,
        scheduler_reserve_full_isl=False,
        max_num_seqs=5,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch = prompts(15, 460, 1400, 480, 1600, 470)
    one.ask("rewrite_always")
    found = one.ask("generate", prompts=batch, max_tokens=80)
    assert same(found, references.ask(prompts=batch, max_tokens=80))
    counted = totals(one)
    assert one.ask("sparse")["preemptions"] > 0
    assert counted["resident_pulled_pages"] > 0 and "callback_errors" not in counted
