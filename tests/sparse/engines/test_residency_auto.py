"""`"residency": "auto"` in real vLLM on CPU: tokens equal those of sparse decode on the device,
whenever requests move."""

import pytest

from tests.sparse.engines.resident_runs import (
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
from tests.sparse.engines.sparse_runs import References, totals
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import settled

__all__ = ["references", "start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOL = POOL_BLOCKS + 41
"""3,328 tokens. A moved request still holds 41 with asynchronous scheduling."""
EXACT_AUTO = EXACT | {"residency": "auto"}
TROUBLES = {"failed_residencies", "lost_residencies", "callback_errors", "failed_loads"}


def grown(one: EngineProcess, before: dict[str, float], *names: str) -> list[float]:
    now = totals(one)
    return [now.get(name, 0.0) - before.get(name, 0.0) for name in names]


def test_requests_move_once_pool_is_full(
    start: Start, daemon: Daemon, references: References
) -> None:
    """Two requests of 145 blocks in a pool of 104; then one that fits."""
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


@pytest.mark.parametrize("is_served", [True, False])
def test_requests_share_a_prefix_on_the_device(
    start: Start, daemon: Daemon, references: References, is_served: bool
) -> None:
    """As in vLLM alone: four contexts of 49 blocks in a pool of 104. Then two more that share
    nothing: some must move."""
    one = start(AUTO, target=daemon.start().target, num_gpu_blocks_override=POOL)
    if is_served:
        one.ask("wait", connected=True, timeout_s=60.0)
    else:
        daemon.kill()
    (prefix, *tails), others = prompts(11, 1503, 20, 33, 41, 50, 60), prompts(12, 1700, 1650)
    shared = [prefix + tail for tail in tails]
    one.ask("generate", prompts=shared[:1], max_tokens=4)
    before = totals(one)
    one.ask("crowd")
    found = one.ask("generate", prompts=shared[1:], max_tokens=24)
    assert same(found, references.ask(engine=REFERENCE, prompts=shared[1:], max_tokens=24))
    assert one.ask("crowd") == {"running": 4, "steps": 26}
    assert found["cached"] == [1472] * 4
    assert grown(one, before, "moved_residencies", "load_bytes") == [0, 0]
    batch = [*shared[1:3], *others]
    found = one.ask("generate", prompts=batch, max_tokens=40, salt="pressed")
    assert same(found, references.ask(engine=REFERENCE, prompts=batch, max_tokens=40))
    assert bool(grown(one, before, "moved_residencies")[0]) == is_served
    assert not TROUBLES & totals(one).keys()


@pytest.mark.long
@SCHEDULING
def test_moves_at_any_step_change_no_token(
    start: Start, shared_daemon: Daemon, references: References, is_async: bool
) -> None:
    """Decode attends to everything here, so tokens are those of full attention."""
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
        # Lost bytes are recomputed.
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
        # 2 KiB a token: 4 layers, 2 heads, 32 channels, keys and values, 4 bytes.
        assert least <= loaded / (4000 * 2048) <= most
        assert bool(staged) == (engine is small)


@pytest.mark.long
@SCHEDULING
def test_a_server_is_killed_while_requests_are_whole(
    start: Start, daemon: Daemon, references: References, is_async: bool
) -> None:
    """After the restart, requests store anew and can move."""
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
