"""vLLM's pause and sleep, by its real `EngineCore`: the server's blocks stay."""

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
    # The hit is hotkv's: vLLM's cache is empty.
    assert one.generate("c", PROMPT)[1] == engine(specs=model()).hit(PROMPT) == 192
    server.die(empty=False)
    getattr(core, way)()
    goes_on(core, way)
    assert one.generate("e", PROMPT)[1] == 0
    server.come_back()
    assert one.hit(PROMPT) == 192 and not server.flushes
    getattr(core, way)()
    assert core.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not server.blocks


def test_kept_requests_go_on_and_share(engine: Any, server: Any) -> None:
    """vLLM recomputes it after the wake-up."""
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
    # Only the scheduler side may use the block table.
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
    # No thread can start, so no session opens.
    with monkeypatch.context() as patch:
        refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        patch.setattr("hotkv_vllm.link.open_session", refuse)
        worker.stores.begin_anew()
        core.sleep()
    assert reopened.closed and worker.rank.memory is None
    core.wake_up()
    reopened = worker.rank.session
    # A failing withdrawal ends the session; a failing export turns hotkv off.
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
        # vLLM does not sleep then. If it did, the request would be computed.
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
    """num_stored: blocks of the request in the end."""
    # On a busy machine too.
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
        # Until this late end, its blocks must not be used.
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
    one.fill(PROMPT)
    assert one.hit(PROMPT) == 192


def test_a_flush_that_is_owed_outlives_a_sleep(updated: Any, server: Any) -> None:
    """The session stays, but the engine checks its weights."""
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
    """vLLM 0.33 may make that call later (`Scheduler.deferred_loads`) or never.

    is_reset: its callback raised; the lease protects old blocks.
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
    # Wrongly counted blocks would be stored.
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
