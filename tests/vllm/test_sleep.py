"""Tests vLLM's pause and sleep. The engine empties its own cache, but the server's blocks must
stay, whatever transfers are in progress. vLLM's real `EngineCore` pauses and resets the scheduler
of the test harness."""

import os
from typing import Any
from unittest import mock

import pytest

from hotkv_vllm.worker import rank_loads
from tests.vllm.device import ScriptedDevice
from tests.vllm.engine_core import Core, Executor
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of, check_stored
from tests.vllm.specs import full_model, hybrid_model, mixed_model

PROMPT = prompt(1, 200)
WAYS = pytest.mark.parametrize("way", ["pause", "sleep"])


def goes_on(core: Core, way: str) -> None:
    core.wake_up() if way == "sleep" else core.core.resume_scheduler()


@WAYS
@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_a_pause_keeps_the_shared_cache(engine: Any, server: Any, model: Any, way: str) -> None:
    one = engine(specs=model())
    core = Core(one)
    one.fill(PROMPT)
    kept = set(server.blocks)
    getattr(core, way)()
    assert kept == set(server.blocks) and not server.flushes
    goes_on(core, way)
    # The pause has emptied vLLM's own cache, so the hit must come from hotkv.
    assert one.generate("c", PROMPT)[1] == engine(specs=model()).hit(PROMPT) == 192
    # Pauses again while there is no server. The engine must continue, without a hit.
    server.die(empty=False)
    getattr(core, way)()
    goes_on(core, way)
    assert one.generate("e", PROMPT)[1] == 0
    server.come_back()
    assert one.hit(PROMPT) == 192 and not server.flushes
    # A reset during a pause must delete the blocks in the server.
    getattr(core, way)()
    assert core.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not server.blocks


def test_kept_requests_go_on_and_share(engine: Any, server: Any) -> None:
    """Sleeps in mode "keep" during a request, which vLLM recomputes after the wake-up. The answer
    must be right, and the request's blocks must be stored."""
    one = engine()
    core = Core(one)
    one.add("a", PROMPT, 60)
    one.steps(5)
    core.sleep("keep")
    core.wake_up()
    one.run()
    one.generate("b", prompt(4, 10), 2)
    assert one.outputs["a"] == engine().generate("c", PROMPT, 60)[0] and len(server.blocks) == 8


def test_server_holds_no_memory_of_sleeping_engine(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    core = Core(one)
    one.fill(PROMPT)
    worker, scheduler = one.worker._worker, one.connector._scheduler
    session, fds, link = worker.rank.session, dict(worker.rank.memory.fds), scheduler.cache.session
    # Only the scheduler side's session (connection) may use the block table.
    assert link.config.use_table and not session.config.use_table
    with monkeypatch.context() as patch:
        patch.setattr("hotkv_vllm.worker.side.logger.error", pytest.fail)
        core.sleep()
    assert session.closed and worker.rank.session is None and worker.rank.memory is None
    for fd in fds.values():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    one.worker.unregister_kv_caches()
    core.wake_up()
    reopened = worker.rank.session
    assert reopened is not None and reopened.connected and scheduler.cache.session is link
    one.worker.restore_kv_caches()
    assert worker.rank.session is reopened
    assert one.hit(PROMPT) == 192
    # At the next sleep the system refuses to start a thread, so no new session (connection to the
    # server) can be opened. The engine must withdraw its memory from the server all the same.
    with monkeypatch.context() as patch:
        refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        patch.setattr("hotkv_vllm.link.open_session", refuse)
        worker.stores.begin_anew()
        core.sleep()
    assert reopened.closed and worker.rank.memory is None
    core.wake_up()
    reopened = worker.rank.session
    # Now withdrawing the memory raises at a sleep: the session (connection to the server) must end.
    # Then sharing the memory again raises at the wake-up: hotkv must switch off.
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_withdraw", lambda: 1 // 0)
        core.sleep()
    assert reopened.closed and worker.rank.session is None
    monkeypatch.setattr("hotkv_vllm.worker.layout.export", lambda *_: 1 // 0)
    core.wake_up()
    assert scheduler.cache is None and one.hit(PROMPT) == 0
    core.pause()


UNDER_WAY = {
    "a store": {},
    "a store of runner V2": {"specs": mixed_model(), "v2": True},
    "a late store": {},
    "a hung store": {"extra": {"store_timeout_s": 0.05}},
    "a tail": {"pipelined": True},
    "a lone tail": {},
    "a store behind the device": {"device": ScriptedDevice()},
    "a load": {},
    "an ended load": {},
    "a hung load": {"extra": {"store_timeout_s": 0.0, "load_timeout_s": 0.0}},
    "a lease": {},
}


def begin(one: Any, server: Any, what: str) -> None:
    """Makes the engine begin `what` (a load, a store, ...) for a request "a", and makes the fake
    server delay its end."""
    server.ack_cancels = what != "a hung load"
    if what.endswith("tail"):
        one.add("a", prompt(3, 60), 5)
        while not one.connector._scheduler.cache.planner.tails.waiting:
            one.step()
        return
    call = {"load": "load", "lease": "acquire"}.get(what.split()[-1], "store")
    if what == "a late store":
        server.late = {call}
    else:
        server.hold = {call}
    one.add("a", PROMPT, 1)
    one.steps(4 if call == "load" else 1)
    if what == "an ended load":
        server.settle("load")


@pytest.mark.parametrize(
    ("what", "event", "num_stored"),
    [
        ("a store", "reset", 0),
        ("a late store", "reset", 0),
        ("a hung store", "reset", 0),
        ("a tail", "reset", 0),
        ("a lone tail", "reset", 0),
        ("a load", "reset", 6),
        ("a load", "broken reset", 0),
        ("a lease", "reset", 6),
        ("a store", "sleep", 0),
        ("a store of runner V2", "sleep", 0),
        ("a tail", "sleep", 1),
        ("a store behind the device", "sleep", 0),
        # vLLM itself does not sleep while a request waits for a load. If it did, the request would
        # have to be computed, and its six blocks to stay in the server.
        ("a load", "sleep", 6),
        ("an ended load", "sleep", 6),
        ("a hung load", "sleep", 6),
    ],
)
def test_what_is_under_way_brings_nothing_wrong(
    engine: Any,
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    event: str,
    num_stored: int,
) -> None:
    """Resets the cache, or lets the engine sleep and wake up, while `what` is in progress. Then
    checks answers, both caches, and that no transfer remains.

    event: the reset or sleep.
    num_stored: the number of the request's blocks that the server must have in the end.
    """
    # The engine must wait for the end of a hung load even if the machine is busy.
    monkeypatch.setattr(rank_loads, "CANCEL_GRACE_S", 60.0)
    if what.split()[-1] in ("load", "lease"):
        engine().generate("before", PROMPT, 4)
    one = engine(**UNDER_WAY[what])
    begin(one, server, what)
    worker, scheduler = one.worker._worker, one.connector._scheduler
    late, server.held = (server.held, []) if what == "a late store" else ([], server.held)
    if event == "reset":
        is_done = one.scheduler.reset_prefix_cache(reset_connector=True)
        assert is_done == (what != "a load") and not server.blocks
    elif event == "broken reset":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "reset_cache", lambda: 1 // 0)
            assert not one.scheduler.reset_prefix_cache(reset_connector=True)
        one.step()
    elif what == "a tail":
        core = Core(one)
        core.sleep()
        core.wake_up()
    else:
        executor, fence = Executor(one), worker.rank.fence
        executor.sleep(1)
        if one.device is not None:
            one.device.run_to(one.device.given)
        executor.wake_up(None)
        assert worker.rank.fence is fence
    for _, _, future, act in late:
        future.set_result(act())
    assert scheduler.cache.reset.under_way or not late
    if what == "a hung load":
        one.steps(4)
        # The server now ends the load late. Until then its device blocks must not be used for
        # anything else.
        assert not one.outputs["a"] and worker.loads
        server.cancelled.clear()
        server.settle("load")
    if what != "a hung store":
        server.late = set()
        server.resume()
    one.run()
    one.fill(prompt(2, 10), 3)
    tokens = list(one.requests["a"].prompt_token_ids)
    assert one.outputs["a"] == answer_of(tokens, len(one.outputs["a"])) != []
    found = {block_hash for _, _, block_hash in server.blocks}
    hashes = one.requests["a"].block_hashes
    assert sum(block_hash in found for block_hash in hashes) == num_stored
    assert one.counters.get("failed_loads", 0) == ("load" in what)
    assert not len(scheduler.cache.finder.hidden)
    assert not worker.stores and not worker.loads and not server.leases
    assert not scheduler.cache.planner.in_flight.stores and not scheduler.cache.reset.under_way
    server.hold = set()
    one.scheduler.reset_prefix_cache()
    check_stored(server, [one])
    # Afterwards, requests must be stored and hit as usual.
    one.fill(PROMPT)
    assert one.hit(PROMPT) == 192


def test_a_flush_that_is_owed_outlives_a_sleep(updated: Any, server: Any) -> None:
    """Resets the cache while the server is absent, so the engine has to send the flush (deletion of
    its blocks) later. The engine then sleeps and wakes up, still with the same session, and checks
    its weights. The flush must reach the server when it returns."""
    one = updated()
    session = one.connector._scheduler.cache.session
    one.fill(PROMPT)
    core = Core(one)
    server.die(empty=False)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    core.sleep()
    one.model.load_weights(one.model.state_dict())
    core.wake_up()
    assert one.connector._scheduler.cache.session is session
    server.come_back()
    one.generate("next", prompt(3, 10), 3)
    assert one.hit(PROMPT) == 0 and server.flushes == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_load_vllm_put_off_leaves_no_store(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    """vLLM 0.33 may admit a request with a load, but call `update_state_after_alloc` some steps
    later (`Scheduler.deferred_loads`), or never. Meanwhile the load's blocks must not be stored.

    is_reset: if True, a reset was requested, but its callback raised. So the lease of the load
        still protects blocks from before the reset.
    """
    answer = engine().fill(PROMPT)
    one, late = engine(), list[Any]()
    kept = dict(server.blocks)
    with monkeypatch.context() as patch:
        patch.setattr(one.connector, "update_state_after_alloc", lambda *those: late.append(those))
        one.add("b", PROMPT, 4)
        one.steps(4)
        assert one.requests["b"].num_computed_tokens == 192
        if is_reset:
            patch.setattr(one.connector._scheduler, "reset_cache", lambda: 1 // 0)
            assert not one.scheduler.reset_prefix_cache(reset_connector=True)
    # Empties the server. If hotkv wrongly counted the load's blocks as computed, it would store
    # them.
    server.blocks.clear()
    if not is_reset:
        one.abort("b")
    one.add("c", prompt(2, 10), 3)
    one.steps(5)
    if is_reset:
        one.connector.update_state_after_alloc(*late[0])
        one.run()
        assert server.flushes == 1 and one.outputs["b"] == answer and not server.count("load")
    assert one.outputs["c"] and not server.blocks and not server.leases
    server.blocks.update(kept)
    assert engine().hit(PROMPT) == 192
