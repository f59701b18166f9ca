"""Pauses and sleep: the engine forgets its own cache and the shared one stays, whatever was under
way. vLLM's own `EngineCore` pauses and resets round the harness's scheduler (`engine_core`)."""

import os
from typing import Any

import pytest

from hotkv_vllm import versions
from hotkv_vllm.compat import uses
from tests.vllm.device import ToldDevice
from tests.vllm.engine_core import Core, Executor
from tests.vllm.harness import prompt
from tests.vllm.specs import full_model, hybrid_model, mixed_model

PROMPT = prompt(1, 200)
WAYS = pytest.mark.parametrize("way", ["pause", "sleep"])


def goes_on(core: Core, way: str) -> None:
    core.wake_up() if way == "sleep" else core.core.resume_scheduler()


def loading(one: Any) -> None:
    """Has an engine begin a load of PROMPT, request "b"."""
    one.add("b", PROMPT, 4)
    for _ in range(4):
        one.step()
    assert one.worker._worker.loads


# --------------------------------------------------------------------------------- the shared cache


@WAYS
@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_a_pause_keeps_the_shared_cache(engine: Any, server: Any, model: Any, way: str) -> None:
    one = engine(specs=model())
    core = Core(one)
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 40))
    kept = set(server.blocks)
    getattr(core, way)()
    assert kept == set(server.blocks) and not server.flushes
    goes_on(core, way)
    assert one.generate("c", PROMPT, 4) == (answer, 192)
    assert engine(specs=model()).generate("d", PROMPT, 4) == (answer, 192)
    # Without a server, too.
    server.die(empty=False)
    getattr(core, way)()
    goes_on(core, way)
    assert one.generate("e", PROMPT, 4) == (answer, 0)
    server.come_back()
    one.drop_local()
    assert one.generate("f", PROMPT, 4) == (answer, 192) and not server.flushes
    # A reset that somebody asks for while it pauses empties the shared cache.
    getattr(core, way)()
    assert core.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not server.blocks


def test_kept_requests_go_on_and_their_blocks_are_shared(engine: Any, server: Any) -> None:
    """Mode "keep": vLLM computes them anew after the sleep."""
    one = engine()
    core = Core(one)
    one.add("a", PROMPT, 60)
    for _ in range(5):
        one.step()
    core.sleep("keep")
    core.wake_up()
    one.run()
    one.generate("b", prompt(4, 10), 2)
    assert one.outputs["a"] == engine().generate("c", PROMPT, 60)[0] and len(server.blocks) == 8


# ---------------------------------------------------------------------------- memory that goes away


def test_the_server_holds_no_memory_of_a_sleeping_engine(engine: Any, server: Any) -> None:
    one = engine()
    core = Core(one)
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 40))
    worker, scheduler = one.worker._worker, one.connector._scheduler
    session, fds, link = worker.rank.session, dict(worker.rank.memory.fds), scheduler.cache.session
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
    assert one.generate("c", PROMPT, 4) == (answer, 192)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_stores_under_way_bring_nothing_after_the_sleep(engine: Any, server: Any, v2: bool) -> None:
    """With V2 the words in which the scheduler revokes stay the same page."""
    one = engine(specs=mixed_model(), v2=v2)
    core = Core(one)
    server.hold = {"store"}
    answer, _ = one.generate("a", PROMPT, 1)
    worker, planner = one.worker._worker, one.connector._scheduler.cache.planner
    stores = list(worker.stores.active.values())
    core.sleep()
    assert stores and all(store.answer.done() for store in stores)
    server.hold = set()
    server.settle()
    assert not server.blocks
    core.wake_up()
    one.generate("b", prompt(2, 10), 2)
    assert not len(planner.in_flight) and not worker.stores
    one.drop_local()
    assert one.generate("c", PROMPT, 1) == (answer, 0)
    one.generate("d", prompt(3, 10))
    one.drop_local()
    assert one.generate("e", PROMPT, 1) == (answer, 192)


def test_blocks_that_wait_for_the_next_step_are_not_stored_after_the_sleep(
    engine: Any, server: Any
) -> None:
    one = engine(pipelined=True)
    core = Core(one)
    one.add("a", prompt(3, 60), 5)
    while not one.connector._scheduler.cache.planner.tails.waiting:
        one.step()
    kept = set(server.blocks)
    core.sleep()
    core.wake_up()
    one.generate("b", prompt(4, 10), 3)
    assert set(server.blocks) == kept


def test_a_store_behind_the_device_is_never_sent(engine: Any, server: Any) -> None:
    device = ToldDevice()
    one = engine(device=device)
    one.add("a", PROMPT, 1)
    one.step()
    assert [store.answer for store in one.worker._worker.stores.active.values()] == [None]
    executor = Executor(one)
    executor.sleep(1)
    device.run_to(device.given)
    executor.wake_up(None)
    one.generate("b", prompt(2, 10), 2)
    assert not one.worker._worker.stores and not server.blocks
    assert not one.connector._scheduler.cache.planner.in_flight


@pytest.mark.parametrize("how", ["under way", "ended and not reported", "hung"])
def test_a_load_of_before_the_sleep_counts_as_failed(engine: Any, server: Any, how: str) -> None:
    """vLLM does not sleep while a request waits for a load; if it did, the request would be
    computed. The late write of a hung server lands where vLLM still holds the blocks."""
    answer, _ = engine().generate("a", PROMPT, 4)
    one = engine(extra={"store_timeout_s": 0.0, "load_timeout_s": 0.0} if how == "hung" else {})
    server.hold, server.ack_cancels = {"load"}, how != "hung"
    loading(one)
    if how == "ended and not reported":
        server.settle("load")
    executor = Executor(one)
    executor.sleep(1)
    assert any(kind == "load" for kind, *_ in server.held) == (how == "hung")
    executor.wake_up(None)
    if how == "hung":
        for _ in range(4):
            one.step()
        assert not one.outputs["b"] and one.worker._worker.loads
        server.cancelled.clear()
        server.settle("load")
    server.hold = set()
    one.run()
    assert one.outputs["b"] == answer and one.counters["failed_loads"] == 1


def test_memory_that_can_not_be_shared_again_turns_hotkv_off(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    core = Core(one)
    answer, _ = one.generate("a", PROMPT, 4)
    one.generate("b", prompt(2, 40))
    core.sleep()
    monkeypatch.setattr("hotkv_vllm.worker.layout.export", lambda *_: 1 // 0)
    core.wake_up()
    assert one.connector._scheduler.cache is None
    assert one.generate("c", PROMPT, 4) == (answer, 0)
    core.pause()


def test_an_unregister_that_breaks_ends_the_session(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    session = one.worker._worker.rank.session
    monkeypatch.setattr(one.worker._worker, "_let_go", lambda: 1 // 0)
    one.worker.unregister_kv_caches()
    assert session.closed and one.worker._worker.rank.session is None


# ----------------------------------------------------------------------------------- vLLM's version


def test_other_versions_run_without_hotkv(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(versions, "VERSION", "0.34.0")
    changed = uses.Answer(versions.OWN, "0.34.0", ("Request has no attribute id",), 9)
    monkeypatch.setattr(versions, "_answer", lambda *_: changed)
    one = engine()
    assert "hotkv is off: it is tested with vLLM 0.32 to 0.33, and this is 0.34.0" in caplog.text
    assert one.generate("a", PROMPT, 4)[1] == 0 and not server.sessions
    Core(one).sleep()
    assert not one.connector.edge.broken and not one.worker.edge.broken
    allowed = engine(extra={"allow_untested_vllm": True})
    assert allowed.generate("b", PROMPT, 4)[0] == one.outputs["a"] and server.sessions


# ---------------------------------------------------------------------------- what 0.33 calls later


def test_a_load_that_vllm_has_put_off_leaves_nothing_to_store(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 may call `update_state_after_alloc` steps after it admitted a load
    (`Scheduler.deferred_loads`), or never."""
    answer, _ = engine().generate("a", PROMPT, 4)
    one = engine()
    kept = dict(server.blocks)
    monkeypatch.setattr(one.connector, "update_state_after_alloc", lambda *_: None)
    one.add("b", PROMPT, 4)
    for _ in range(4):
        one.step()
    assert one.requests["b"].num_computed_tokens == 192
    # As if the server had lost them, so that they would be stored.
    server.blocks.clear()
    one.abort("b")
    one.add("c", prompt(2, 10), 3)
    for _ in range(5):
        one.step()
    assert one.outputs["c"] and not server.blocks and not server.leases
    server.blocks.update(kept)
    assert engine().generate("d", PROMPT, 4) == (answer, 192)


def test_vllm_refuses_a_pause_that_keeps_requests_during_a_load(engine: Any, server: Any) -> None:
    """It can't take the blocks of a load back, whoever loads; the engine goes on, and pauses once
    the load has ended."""
    first, one = engine(), engine()
    answer = first.generate("a", PROMPT, 4)[0]
    server.hold = {"load"}
    loading(one)
    core = Core(one)
    with pytest.raises(RuntimeError, match="running requests waiting for remote KV transfer"):
        core.pause("keep")
    core.core.resume_scheduler()
    server.hold = set()
    server.settle()
    one.run()
    assert one.outputs["b"] == answer and "hook_errors" not in one.counters
    core.pause("keep")
    core.core.resume_scheduler()
    assert one.generate("c", PROMPT, 4)[0] == answer
