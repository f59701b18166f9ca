"""Traps of loads and stores: failures, aborts, blocks that change hands while a transfer is under
way."""

import time
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.vllm.harness import prompt
from tests.vllm.traps import PROMPT, filled


def test_requires_no_delivery_and_recomputes_failed_loads(engine: Any) -> None:
    one = engine()
    assert one.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert one.scheduler.recompute_kv_load_failures and not one.scheduler.requires_kv_delivery


def test_a_load_is_not_lost_with_the_plan_that_was_to_begin_it(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = filled(engine)
    one = engine()
    side, broken = one.connector._scheduler, []
    own = side.sharing.weights.order

    def order() -> Any:
        if side.requests.loads.awaited and not broken:
            broken.append(True)
            raise RuntimeError("told to fail")
        return own()

    monkeypatch.setattr(side.sharing.weights, "order", order)
    assert one.generate("a", PROMPT, 4)[0] == answer
    assert broken and server.count("load") == 0


def test_failed_keys_are_hidden_until_stored_again(engine: Any, server: Any) -> None:
    answer = filled(engine)
    one = engine()
    server.fail_loads, server.hold = True, {"store"}
    assert one.generate("a", PROMPT, 4)[0] == answer
    hidden = one.connector._scheduler.cache.finder.hidden
    assert len(hidden) == 6
    one.drop_local()
    assert one.generate("b", PROMPT, 4)[0] == answer
    assert server.count("load") == 1
    # The server answers for them: present.
    server.fail_loads, server.hold = False, set()
    server.settle()
    one.generate("c", prompt(5, 10))
    assert len(hidden) == 0
    one.drop_local()
    assert one.generate("d", PROMPT, 4)[1] == 192


def test_new_epoch_clears_hidden_keys(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine()
    server.fail_loads, server.hold = True, {"store"}
    one.generate("a", PROMPT, 4)
    hidden = one.connector._scheduler.cache.finder.hidden
    assert len(hidden) == 6
    server.epoch += 1
    one.generate("b", prompt(6, 40))
    assert len(hidden) == 0


def test_load_deadline_waits_for_the_acknowledgement(engine: Any, server: Any) -> None:
    """Nobody tells vLLM that a load failed while the server may still write the blocks."""
    answer = filled(engine)
    one = engine(extra={"load_timeout_s": 0.02})
    server.hold, server.ack_cancels = {"load"}, False
    one.add("a", PROMPT, 4)
    until_s = time.monotonic() + 0.2
    while time.monotonic() < until_s:
        one.step()
    assert server.count("cancel") == 1 and not one.outputs["a"] and one.worker._worker.loads
    server.settle()
    one.run()
    assert one.outputs["a"] == answer and one.counters["failed_loads"] == 1


def test_abort_while_loading_keeps_the_blocks_until_the_load_has_ended(
    engine: Any, server: Any
) -> None:
    filled(engine)
    one = engine()
    free = one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    server.hold, server.ack_cancels = {"load"}, False
    one.add("a", PROMPT, 4)
    for _ in range(4):
        one.step()
    one.abort("a")
    for _ in range(3):
        one.step()
    assert server.count("cancel") == 1 and free() < before
    server.settle()
    one.run()
    assert free() == before and not server.leases


@pytest.mark.parametrize("begun", [True, False])
def test_abort_while_loading_stores_nothing(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """The blocks hold nothing yet, although vLLM counts their tokens as computed."""
    filled(engine)
    one = engine()
    server.hold = {"load"}
    if not begun:
        monkeypatch.setattr(one.connector._scheduler.cache.finder, "begin_load", lambda *_: None)
    one.add("a", PROMPT, 4)
    while one.requests["a"].status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduled = one.scheduler.schedule()
        if one.requests["a"].status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            one.queue.append((scheduled, *one._execute(scheduled)))
            one._collect()
    one.queue.append((scheduled, *one._execute(scheduled)))
    server.blocks.clear()
    one.abort("a")
    one.run()
    assert not server.blocks


@pytest.mark.parametrize("acknowledged", [True, False], ids=["acknowledged", "hung"])
def test_reused_blocks_wait_for_the_store_that_reads_them(
    engine: Any, server: Any, acknowledged: bool
) -> None:
    """Freed by a finished request, handed to the next: the step that writes them ends the store
    first."""
    one = engine(blocks=20, extra={"store_timeout_s": 0.05})
    server.hold, server.ack_cancels = {"store"}, acknowledged
    one.generate("a", prompt(1, 400), 2)
    in_flight = len(server.held)
    seen: list[tuple[int, int]] = []
    one.before_forward = lambda: seen.append(
        (len(one.metas[-1].flush_stores), len(one.worker._worker.stores))
    )
    one.generate("b", prompt(2, 400), 2)
    flushed = sum(count for count, _ in seen)
    assert in_flight >= 1 and flushed >= 1 and server.count("cancel") == flushed
    if acknowledged:
        assert flushed == in_flight
    else:
        # The session that the hung store belonged to is closed; another one is opened in its place.
        assert len(server.sessions) == 3
    assert one.counters["flushes"] >= 1


def test_preemption_with_stores_in_flight(engine: Any, server: Any) -> None:
    alone = {n: engine(blocks=64).generate(n, prompt(i, 120), 120)[0] for i, n in enumerate("abc")}
    server.blocks.clear()
    one = engine(blocks=20)
    server.hold = {"store"}
    for index, name in enumerate("abc"):
        one.add(name, prompt(index, 120), 120)
    one.run()
    assert one.preemptions > 0 and {n: one.outputs[n] for n in "abc"} == alone
    server.hold = set()
    server.settle()
    one.generate("end", prompt(9, 40))
    server.grant_limit = 1 << 30
    for index, name in enumerate("abc"):
        assert engine(blocks=64).generate(name, prompt(index, 120), 120)[0] == alone[name]


def test_a_load_into_blocks_that_a_store_reads_waits(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine(blocks=18)
    server.hold, server.ack_cancels = {"store"}, True
    one.generate("a", prompt(7, 500), 2)
    server.calls.clear()
    one.generate("b", PROMPT, 2)
    order = [kind for kind, _ in server.calls if kind in ("cancel", "load")]
    assert order[0] == "cancel" and "load" in order


def test_stores_in_flight_are_bounded(engine: Any, server: Any) -> None:
    one = engine(extra={"max_inflight_store_mib": 0})
    server.hold = {"store"}
    one.generate("a", prompt(1, 300), 1)
    one.generate("b", prompt(2, 300), 1)
    assert server.count("store") == 1 and one.counters["dropped_blocks"] > 0
    server.hold = set()
    server.settle()
    one.generate("c", prompt(3, 300), 1)
    assert server.count("store") > 1


def test_refused_blocks_are_counted(engine: Any, server: Any) -> None:
    one = engine()
    server.fail_stores = True
    one.generate("a", PROMPT, 1)
    one.generate("b", prompt(3, 10), 1)
    assert one.counters["refused_blocks"] == 6 and "stored_blocks" not in one.counters


def test_ready_blocks_are_not_stored_again(engine: Any, server: Any) -> None:
    filled(engine)
    server.calls.clear()
    one = engine()
    one.generate("a", PROMPT, 4)
    one.generate("b", PROMPT + prompt(8, 40), 1)
    stored = [
        block_hash
        for kind, runs in server.calls
        if kind == "store"
        for run in runs
        for block_hash in run.hashes
    ]
    assert len(stored) == 1
