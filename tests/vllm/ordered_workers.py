"""Simulated engines with a fake device."""

import random
from collections.abc import Sequence
from typing import Any

from hotkv_proto.order import OrderKind
from tests.vllm.device import ScriptedDevice
from tests.vllm.harness import prompt

KINDS = (OrderKind.EVENTS, OrderKind.FLAGS, OrderKind.HOST)


def worker_of(engine: Any) -> Any:
    return engine.worker._worker


def finish(engine: Any, server: Any, device: ScriptedDevice) -> None:
    """Runs until idle, then one more request."""
    server.hold = set()
    for _ in range(2000):
        if not engine.scheduler.has_requests() and not engine.queue:
            break
        engine.step()
        device.run()
        server.settle()
    engine.add("last words", prompt(99, 4), 3)
    while engine.scheduler.has_requests() or engine.queue:
        engine.step()
        device.run()
        server.settle()


def assert_nothing_is_kept(engine: Any, device: ScriptedDevice) -> None:
    worker = worker_of(engine)
    assert not worker.loads and not worker.stores
    assert len(worker.rank.marks._free) == len(worker.rank.marks._ring), worker.rank


def lag(
    engine: Any,
    server: Any,
    device: ScriptedDevice,
    chance: random.Random,
    kinds: Sequence[OrderKind] = (),
) -> None:
    """Device and server move on at random, and the server restarts.

    kinds: of marks, one of which it takes after a restart; empty: it keeps its kind.
    """
    prompts = [prompt(seed, length) for seed in range(8) for length in (40, 150, 230)]
    server.hold = {"load", "store"}
    for number in range(60):
        engine.add(f"r{number}", chance.choice(prompts), chance.choice((1, 3, 20)))
        while len(engine.scheduler.requests) > chance.choice((0, 1, 3)):
            engine.step()
            device.run(chance.choice((0, 0, 3, 10, 1000)))
            if chance.random() < 0.2:
                server.settle(chance.choice(("", "load", "store")))
            if chance.random() < 0.03:
                server.die(empty=False)
                server.order_kind = chance.choice(kinds) if kinds else server.order_kind
                server.come_back()
            if chance.random() < 0.1:
                engine.drop_local_if_idle()
    finish(engine, server, device)
    assert engine.counters["loads"] > 3 and engine.counters["stores"] > 8
    assert "callback_errors" not in engine.counters
    assert_nothing_is_kept(engine, device)
