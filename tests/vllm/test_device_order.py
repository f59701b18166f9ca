"""Transfers that wait for marks of a fake device, however late. Deadlines, cancels, revoked
stores: `test_worker_loads`, `test_worker_stores`.
"""

import itertools
import random
from typing import Any

import pytest

from hotkv_proto.order import OrderKind
from hotkv_vllm.compat import steps
from hotkv_vllm.worker import device_order
from tests.vllm.device import ScriptedDevice
from tests.vllm.harness import prompt
from tests.vllm.ordered_workers import (
    KINDS,
    assert_nothing_is_kept,
    finish,
    lag,
    worker_of,
)
from tests.vllm.specs import full_model, hybrid_model, mixed_model
from tests.vllm.speculation import SpeculatingEngine, speculating

PROMPT = prompt(1, 200)
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "model", "num_events", "pipelined", "v2"),
    [
        (OrderKind.EVENTS, hybrid_model, 2, False, True),
        (OrderKind.FLAGS, hybrid_model, 64, True, True),
        (OrderKind.HOST, full_model, 64, True, True),
        (OrderKind.FLAGS, mixed_model, 64, True, False),
        pytest.param(OrderKind.EVENTS, full_model, 64, True, True, marks=LONG),
        pytest.param(OrderKind.EVENTS, full_model, 2, True, False, marks=LONG),
        pytest.param(OrderKind.FLAGS, full_model, 64, True, True, marks=LONG),
        pytest.param(OrderKind.HOST, hybrid_model, 64, False, False, marks=LONG),
    ],
)
def test_random_lag_leaves_kv_right(
    engine: Any,
    server: Any,
    device: ScriptedDevice,
    monkeypatch: pytest.MonkeyPatch,
    kind: OrderKind,
    model: Any,
    num_events: int,
    pipelined: bool,
    v2: bool,
) -> None:
    monkeypatch.setattr(device_order, "NUM_EVENTS", num_events)
    server.order_kind, num_blocks = kind, 22 if model is full_model else 44
    settings = {"blocks": num_blocks, "specs": model(), "max_tokens_per_step": 128}
    one = engine(device=device, pipelined=pipelined, v2=v2, **settings)
    lag(one, server, device, random.Random(f"{kind}{model}{num_events}{pipelined}"), KINDS)


def test_marks_after_reconnect_suit_the_server(
    engine: Any, server: Any, device: ScriptedDevice
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


RUNNERS = pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps zero the blocks of loads; vLLM 0.32 and 0.33 leave them out."""
    monkeypatch.setattr(steps, "blocks_touched_early", lambda _: set(range(1000)))


@RUNNERS
def test_a_load_of_blocks_that_no_step_touches_waits_for_none(
    engine: Any, server: Any, device: ScriptedDevice, v2: bool
) -> None:
    """vLLM frees blocks only behind the steps that may touch them."""
    engine().generate("a", PROMPT, 1)
    server.order_kind, server.hold = OrderKind.EVENTS, {"load"}
    one = engine(device=device, v2=v2, pipelined=True)
    one.add("other", prompt(2, 40), 30)
    one.steps(3)
    one.add("b", PROMPT, 2)
    while not (loads := [name for kind, name, *_ in server.held if kind == "load"]):
        one.step()
    assert device.done < device.given and not server.afters.keys() & set(loads)
    finish(one, server, device)
    assert one.external["b"] > 0 and "failed_loads" not in one.counters
    assert_nothing_is_kept(one, device)


@RUNNERS
@pytest.mark.usefixtures("touched")
def test_a_device_loads_after_the_steps_zeroing(
    engine: Any, server: Any, device: ScriptedDevice, v2: bool
) -> None:
    engine(specs=mixed_model()).generate("a", PROMPT, 1)
    server.order_kind, server.hold = OrderKind.EVENTS, {"load"}
    one = engine(device=device, v2=v2, specs=mixed_model())
    zeroed: list[int] = []
    one.after_zeroing = lambda: zeroed.append(device.given)
    one.add("b", PROMPT, 2)
    for number in itertools.count():
        if loads := [name for kind, name, *_ in server.held if kind == "load"]:
            break
        one.add(f"other {number}", prompt(2 + number, 40), 2)
        one.step()
    assert device.events[server.afters[loads[0]].mark.index].point >= zeroed[-1]
    assert len(zeroed) == number
    finish(one, server, device)


@RUNNERS
def test_a_cpu_loads_before_the_steps_forward_pass(engine: Any, server: Any, v2: bool) -> None:
    engine().generate("a", PROMPT, 1)
    one = engine(v2=v2)
    one.add("other", prompt(2, 40), 30)
    one.steps(3)
    begun: list[int] = []
    one.before_forward = lambda: begun.append(server.count("load"))
    one.add("b", PROMPT, 2)
    while not server.count("load"):
        one.step()
    assert begun[-1] == 1
    one.step()
    assert one.outputs["b"] and one.external["b"] > 0
    one.run()


@pytest.mark.parametrize("saves_late", [False, True], ids=["0.32", "0.33"])
def test_stores_behind_a_drafter_work_either_way(
    make: Any, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, saves_late: bool
) -> None:
    more = speculating(monkeypatch, tmp_path)
    one, other = (make(SpeculatingEngine, v2=True, blocks=24, **more) for _ in range(2))
    one.saves_late = other.saves_late = saves_late
    called: list[str] = []
    for name in ("build_connector_worker_meta", "wait_for_save"):
        original = getattr(one.worker, name)
        monkeypatch.setattr(
            one.worker, name, lambda name=name, run=original: (called.append(name), run())[1]
        )
    one.generate("first", PROMPT, 3)
    assert called[:2] == (sorted(called[:2]) if saves_late else sorted(called[:2])[::-1])
    dice = random.Random(7)
    for number in range(40):
        engine = dice.choice((one, other))
        engine.add(f"{number}", prompt(dice.randrange(6), dice.randrange(40, 260)), 9)
        engine.steps(dice.randrange(4))
    for engine in (one, other):
        engine.run()
        assert engine.rejected
        assert not {"failed_stores", "failed_loads", "callback_errors"} & engine.counters.keys()
    assert other.external and max(other.external.values()) > 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("touched")
def test_load_cancelled_while_waiting_ends(
    engine: Any, server: Any, device: ScriptedDevice, kind: OrderKind
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


def test_dummy_runs_and_graph_capture_reach_no_callback(
    engine: Any, server: Any, device: ScriptedDevice
) -> None:
    """Runner V2 disables the connector for them."""
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
