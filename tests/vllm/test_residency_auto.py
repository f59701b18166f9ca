"""Tests `"residency": "auto"` in real vLLM on CPU with a real server: a request's context stays on
the device until the block pool is full, then moves to host memory. The tokens must equal those of
sparse decode with all blocks on the device, at whatever step a request moves, and after any fault
of the server."""

import pytest

from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.resident_runs import (
    AUTO,
    EXACT,
    POOL_BLOCKS,
    REFERENCE,
    SCHEDULING,
    Start,
    prompts,
    references,
    same,
    start,
    until_stored,
)
from tests.vllm.runs import settled
from tests.vllm.sparse_runs import References, totals

__all__ = ["references", "start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOL = POOL_BLOCKS + 41
"""Number of device blocks; they hold 3,328 tokens. With asynchronous scheduling, a request that has
moved to host memory still holds 41 of them."""
EXACT_AUTO = EXACT | {"residency": "auto"}
TROUBLES = {"failed_residencies", "lost_residencies", "callback_errors", "failed_loads"}


def grown(one: EngineProcess, before: dict[str, float], *names: str) -> list[float]:
    now = totals(one)
    return [now.get(name, 0.0) - before.get(name, 0.0) for name in names]


def test_requests_move_once_pool_is_full(
    start: Start, daemon: Daemon, references: References
) -> None:
    """Runs two requests of 145 blocks together, in a pool of 104 blocks: a request must move to
    host memory. Then runs a request that fits the pool, which must not move."""
    one = start(AUTO, target=daemon.start().target, num_gpu_blocks_override=POOL)
    one.ask("wait", connected=True, timeout_s=60.0)
    batch, alone = prompts(1, 2503, 1901), prompts(2, 1900)
    found = one.ask("generate", prompts=batch, max_tokens=36)
    assert same(found, references.ask(engine=REFERENCE, prompts=batch, max_tokens=36))
    before = totals(one)
    assert before["moved_residencies"] >= 1 and not TROUBLES & before.keys()
    assert one.ask("sparse")["preemptions"] == 0
    found = one.ask("generate", prompts=alone, max_tokens=20)
    assert same(found, references.ask(engine=REFERENCE, prompts=alone, max_tokens=20))
    moved = ("moved_residencies", "resident_pulled_pages", "resident_staged_pages")
    assert grown(one, before, *moved) == [0, 0, 0]


@pytest.mark.long
@SCHEDULING
def test_moves_at_any_step_change_no_token(
    start: Start, shared_daemon: Daemon, references: References, is_async: bool
) -> None:
    """Moves requests to host memory in every third step, then less often, in prefill and in decode.
    Later makes the moved bytes unreadable, so that they must be recomputed. Decode attends to the
    whole context here, so the tokens must be those of dense attention."""
    one = start(
        EXACT_AUTO,
        target=shared_daemon.target,
        num_gpu_blocks_override=420,
        async_scheduling=is_async,
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("rewrite_always")
    one.ask("pace", seconds=0.01)
    batch, lost = prompts(3, 1700, 460, 1503, 900), prompts(4, 1650)
    for every in (3, 11, 23):
        before = totals(one)
        one.ask("move", every=every)
        found = one.ask("generate", prompts=batch, max_tokens=50, salt=f"{every}")
        assert same(found, references.ask(prompts=batch, max_tokens=50))
        # Loses bytes that were moved to host memory. They must be recomputed.
        one.ask("lose", steps=[14, 9, 1])
        found = one.ask("generate", prompts=lost, max_tokens=50, salt=f"{every}")
        assert same(found, references.ask(prompts=lost, max_tokens=50))
        moved, pulled = grown(one, before, "moved_residencies", "resident_pulled_pages")
        assert moved >= 3 and pulled > 0
    assert not {"callback_errors", "failed_residencies"} & totals(one).keys()


@pytest.mark.long
def test_hit_loads_whole_if_there_is_room(
    start: Start, daemon: Daemon, references: References
) -> None:
    target = daemon.start().target
    large = start(AUTO, target=target, num_gpu_blocks_override=180)
    small = start(AUTO, target=target, num_gpu_blocks_override=POOL)
    (base, *tails) = prompts(5, 4000, 97, 90)
    for engine in (large, small):
        engine.ask("wait", connected=True, timeout_s=60.0)
    small.ask("generate", prompts=[base], max_tokens=30)
    settled(small)
    for engine, tail, least, most in ((large, tails[0], 0.9, 1.1), (small, tails[1], 0.0, 0.1)):
        before = totals(engine)
        found = engine.ask("generate", prompts=[base + tail], max_tokens=30)
        assert found["cached"] == [4000]
        assert same(found, references.ask(engine=REFERENCE, prompts=[base + tail], max_tokens=30))
        loaded, staged = grown(engine, before, "load_bytes", "resident_staged_pages")
        # A token's KV takes 2 KiB: 4 layers, 2 heads, 32 channels, keys and values, 4 bytes each.
        assert least <= loaded / (4000 * 2048) <= most
        assert bool(staged) == (engine is small)


@pytest.mark.long
@SCHEDULING
def test_a_server_is_killed_while_requests_are_whole(
    start: Start, daemon: Daemon, references: References, is_async: bool
) -> None:
    """Kills the server while a request's blocks are all on the device; the request must finish.
    After the server's restart, requests must store their blocks again and be able to move to host
    memory."""
    one = start(
        AUTO,
        target=daemon.start().target,
        num_gpu_blocks_override=POOL,
        async_scheduling=is_async,
        connector_settings={"residency_timeout_s": 4.0},
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    batch, other = prompts(6, 2000), prompts(7, 2300, 2200)
    one.ask("pace", seconds=0.03)
    one.begin("generate", prompts=batch, max_tokens=90)
    until_stored(daemon, 62)
    daemon.kill()
    assert same(one.answer(), references.ask(engine=REFERENCE, prompts=batch, max_tokens=90))
    assert not TROUBLES & totals(one).keys() and one.ask("sparse")["preemptions"] == 0
    one.begin("generate", prompts=other[:1], max_tokens=90)
    daemon.start()
    one.answer()
    one.ask("wait", connected=True, timeout_s=60.0)
    found = one.ask("generate", prompts=other, max_tokens=90)
    assert same(found, references.ask(engine=REFERENCE, prompts=other, max_tokens=90))
    counted = totals(one)
    assert counted["moved_residencies"] >= 1 and not TROUBLES & counted.keys()
