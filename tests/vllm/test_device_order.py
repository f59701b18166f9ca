"""Transfers that wait for marks in the device's queue. The test runs the device: KV is right
however late the device executes its queue."""

import random
import time
from typing import Any

import pytest

from hotkv_proto.order import OrderKind
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.worker import device_order
from tests.vllm.device import ToldDevice
from tests.vllm.harness import prompt
from tests.vllm.ordered_workers import (
    KINDS,
    assert_nothing_is_kept,
    device,
    finish,
    lag,
    worker_of,
)
from tests.vllm.specs import full_model, hybrid_model

__all__ = ["device"]

PROMPT = prompt(1, 200)
LONG = pytest.mark.long


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_store_is_sent_at_once_and_read_when_the_device_is_there(
    engine: Any, server: Any, device: ToldDevice, kind: OrderKind
) -> None:
    server.order_kind = kind
    one = engine(device=device)
    one.add("a", PROMPT, 1)
    one.queue.append((scheduled := one.scheduler.schedule(), *one._execute(scheduled)))
    assert server.count("store") == (kind is not OrderKind.HOST) and not server.blocks
    server.settle()
    assert not server.blocks
    device.run()
    one._collect()
    server.settle()
    finish(one, server, device)
    assert len(server.blocks) == 6
    assert engine().generate("c", PROMPT, 1)[1] == 192
    assert_nothing_is_kept(one, device)


@pytest.mark.parametrize(
    ("kind", "model", "num_events", "pipelined"),
    [
        (OrderKind.EVENTS, hybrid_model, 2, False),
        (OrderKind.FLAGS, hybrid_model, 64, True),
        (OrderKind.HOST, full_model, 64, True),
        pytest.param(OrderKind.EVENTS, full_model, 64, True, marks=LONG),
        pytest.param(OrderKind.EVENTS, full_model, 2, True, marks=LONG),
        pytest.param(OrderKind.FLAGS, full_model, 64, True, marks=LONG),
        pytest.param(OrderKind.HOST, hybrid_model, 64, False, marks=LONG),
    ],
)
def test_random_lag(
    engine: Any,
    server: Any,
    device: ToldDevice,
    monkeypatch: pytest.MonkeyPatch,
    kind: OrderKind,
    model: Any,
    num_events: int,
    pipelined: bool,
) -> None:
    """A restarted server may take another kind of marks."""
    monkeypatch.setattr(device_order, "NUM_EVENTS", num_events)
    server.order_kind, num_blocks = kind, 22 if model is full_model else 44
    settings = {"blocks": num_blocks, "specs": model(), "max_tokens_per_step": 128}
    one = engine(device=device, pipelined=pipelined, v2=True, **settings)
    lag(one, server, device, random.Random(f"{kind}{model}{num_events}{pipelined}"), KINDS)


def test_after_a_reconnect_marks_are_of_the_kind_that_the_server_takes_then(
    engine: Any, server: Any, device: ToldDevice
) -> None:
    one = engine(device=device)
    seen = []
    for kind in (OrderKind.EVENTS, OrderKind.HOST, OrderKind.FLAGS, OrderKind.EVENTS):
        server.die(empty=False)
        server.order_kind = kind
        server.come_back()
        server.afters.clear()
        one.generate(f"{len(seen)}", prompt(10 + len(seen), 100), 2)
        seen.append({after.kind for after in server.afters.values()})
    assert seen == [{OrderKind.EVENTS}, set(), {OrderKind.FLAGS}, {OrderKind.EVENTS}]
    offers = [session.order for session in server.sessions if session.layout is not None]
    counts = {(len(offer.event_handles), offer.num_flags) for offer in offers}
    assert counts == {(device_order.NUM_EVENTS, device_order.NUM_WORDS)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_deadlines_of_loads_run_from_the_mark(
    engine: Any, server: Any, device: ToldDevice, kind: OrderKind
) -> None:
    """A load's deadline counts from its mark. A load that waits in a long device queue is not late;
    a load that the server does not end is late."""
    engine().generate("a", PROMPT, 1)
    server.order_kind, server.hold = kind, {"load"}
    one = engine(device=device, extra={"load_timeout_s": 0.03})
    device.give(lambda: None)
    one.add("b", PROMPT, 2)
    # Run steps until the deadline that a load without a mark would have.
    until_s = time.monotonic() + 0.12
    while time.monotonic() < until_s:
        one.step()
    one.steps(3)
    assert server.count("cancel") == 0 and worker_of(one).loads
    device.run()
    while worker_of(one).loads:
        one.step()
    finish(one, server, device)
    assert server.count("cancel") == 1 and one.counters["failed_loads"] == 1
    assert_nothing_is_kept(one, device)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_does_not_wait_for_the_device_to_take_blocks_back(
    engine: Any, server: Any, device: ToldDevice, kind: OrderKind
) -> None:
    """A store whose mark has not passed when its blocks are reallocated ends at once, and is
    dropped."""
    server.order_kind = kind
    one = engine(device=device, extra={"flush_timeout_s": 600.0, "store_timeout_s": 600.0})
    one.add("a", PROMPT, 1)
    one._execute(one.scheduler.schedule())
    worker = worker_of(one)
    (store_id,) = worker.stores.active
    worker.before_step(HotKVMetadata(flush_stores=(store_id,)))
    device.run()
    server.settle()
    assert not server.blocks and worker.take_report(None).stores[store_id].results == [b""]
    assert_nothing_is_kept(one, device)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_load_that_is_cancelled_while_it_waits_ends(
    engine: Any, server: Any, device: ToldDevice, kind: OrderKind
) -> None:
    engine().generate("a", PROMPT, 1)
    server.order_kind = kind
    one = engine(device=device)
    device.give(lambda: None)
    one.add("b", PROMPT, 2)
    one.steps(5)
    assert worker_of(one).loads
    one.abort("b")
    one.run()
    loads = server.count("load")
    finish(one, server, device)
    assert server.count("load") == loads == (kind is not OrderKind.HOST)
    assert "failed_loads" not in one.counters
    assert_nothing_is_kept(one, device)


def test_dummy_runs_and_graph_capture_reach_no_hook(
    engine: Any, server: Any, device: ToldDevice
) -> None:
    """Runner V2 switches the connector off for dummy runs and graph capture."""
    one = engine(device=device, v2=True)
    one.active.set_disabled(True)
    one.active.pre_forward(None)
    one.active.finish_forward()
    assert one.active.post_forward(set()) is None
    one.active.reset_capture_state()
    one.active.set_disabled(False)
    one.worker.start_load_kv(None)
    one.worker.wait_for_save()
    assert not device.given and {kind for kind, _ in server.calls} <= {"probe"}
    answer = one.generate("a", PROMPT, 2)
    finish(one, server, device)
    assert answer[0] and not one.worker.edge.broken
