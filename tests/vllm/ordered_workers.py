"""Workers whose transfers wait for marks."""

from typing import Any

import pytest

from hotkv_proto.order import OrderKind
from tests.vllm.device import ToldDevice
from tests.vllm.harness import prompt

KINDS = (OrderKind.EVENTS, OrderKind.FLAGS, OrderKind.HOST)


@pytest.fixture
def device(server: Any) -> ToldDevice:
    """Returns a device whose marks the server's double checks. Fails the test if an event is
    recorded again while a transfer waits for it."""
    device = ToldDevice()

    def on_record(event: Any) -> None:
        names = {name for _, name, _, _ in server.held if name in server.afters}
        afters = [server.afters[name] for name in names]
        in_use = {after.mark.index for after in afters if after.kind is OrderKind.EVENTS}
        assert event.number not in in_use, f"{event.number} is recorded while {names} wait"

    device.on_record = on_record
    server.has_passed = device.has_passed
    return device


def worker_of(engine: Any) -> Any:
    return engine.worker._worker


def finish(engine: Any, server: Any, device: ToldDevice) -> None:
    """Runs steps, the device and the server until the engine is idle."""
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


def assert_nothing_is_kept(engine: Any, device: ToldDevice) -> None:
    worker = worker_of(engine)
    assert not worker.loads and not worker.stores
    assert len(worker.rank.marks._free) == len(worker.rank.marks._ring), worker.rank
