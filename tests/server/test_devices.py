"""Tests engines whose KV is on simulated GPUs, with a real server."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from demo.processes import ROOT, Server, runtime_folder
from hotkv_client import BlockResult
from hotkv_client.types import TransferStatus
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import SessionLostError
from hotkv_proto.order import NO_ORDER, OrderKind
from tests.doubles.with_constants import copies_by
from tests.doubles.with_devices import FakeDevices
from tests.robustness.raw_client import RawSession
from tests.server.devices_support import (
    DEADLINE_S,
    DeviceEngine,
    DeviceServer,
    block_ids,
    done,
)
from tests.server.page_support import get
from tests.server.support import hashes, http_port
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[DeviceServer]:
    """Copy methods are not measured at the start."""
    with (
        runtime_folder(64 << 20) as folder,
        DeviceServer(folder, FakeDevices(2, 5, 0.001), *copies_by("kernel")) as running,
    ):
        running.wait_ready()
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(64 << 20) as made:
        yield made


@pytest.fixture
def engine(server: DeviceServer) -> Iterator[Callable[..., DeviceEngine]]:
    made: list[DeviceEngine] = []

    def make(**settings: object) -> DeviceEngine:
        made.append(DeviceEngine(server.target, **settings))  # type: ignore[arg-type]
        return made[-1].connected()

    yield make
    for one in reversed(made):
        one.close()
    wait_for(lambda: server.num_held() == 0, "closing")


def test_one_devices_engine_reads_another_devices_blocks(
    engine: Callable[..., DeviceEngine], server: DeviceServer
) -> None:
    """Metrics count what each device has copied."""
    one, two, names = engine(shape="LHBNC"), engine(shape="BLHNC", device=1), hashes(4)
    one.fill(block_ids(0, 1, 2, 3), 7)
    done(one.store(names, block_ids(0, 1, 2, 3))[1])
    done(two.load(names, block_ids(9, 8, 7, 6))[1])
    assert two.content(block_ids(9, 8, 7, 6)) == one.content(block_ids(0, 1, 2, 3))
    text = get(http_port(server), "/metrics").text
    shown = {name: float(value) for name, value in re.findall("(hotkv_device_.*}) (.*)", text)}
    for device, direction in ((0, "store"), (1, "load")):
        label = f'device="{device}"'
        names = ("usable", "pieces_queued", "pieces_in_flight")
        assert [shown[f"hotkv_device_{name}{{{label}}}"] for name in names] == [1, 0, 0]
        assert f"hotkv_device_failed_jobs_total{{{label}}}" in shown
        label += f',direction="{direction}"'
        assert shown[f"hotkv_device_busy_seconds_total{{{label}}}"] > 0
        for name in ("copied_bytes", "pieces"):
            assert shown[f'hotkv_device_{name}_total{{{label},method="kernel"}}'] > 0


# Order


def _reach(one: DeviceEngine, index: int, value: int = 1) -> None:
    if one.session.order_kind is OrderKind.EVENTS:
        one.events[index].reach()
    else:
        one.words[index] = value


@pytest.mark.parametrize("offers", [("events",), ("flags",)])
def test_load_writes_after_its_mark_can_cancel(
    engine: Callable[..., DeviceEngine], offers: tuple[str, ...]
) -> None:
    one, names, ids = engine(offers=offers), hashes(2), block_ids(0, 1)
    one.fill(ids, 1)
    done(one.store(names, ids)[1])
    for event in one.events:
        event.record()
    one.fill(ids + 4, 9)
    before = one.content(ids + 4)
    cancelled, held = one.load(names, ids + 4, one.after(2, 5))
    one.session.ping(5)  # when the ping is answered, the server has begun the load
    one.session.cancel(cancelled)
    assert held.result(60).status is TransferStatus.CANCELLED
    assert one.content(ids + 4) == before
    # A load's time limit begins only when its mark is reached. A busy machine may need longer
    # than the first ones.
    for value, timeout_s in enumerate((0.2, 2.0, DEADLINE_S), 7):
        for event in one.events:
            event.record()
        _, late = one.load(names, ids + 6, one.after(3, value), timeout_s=timeout_s)
        one.session.ping(5)
        begun_s = time.monotonic()
        wait_for(lambda end_s=begun_s + timeout_s: time.monotonic() > end_s, "its timeout")
        one.session.ping(5)
        assert not late.done()
        _reach(one, 3, value)
        if late.result(60).status is TransferStatus.DONE:
            break
    done(late)
    assert one.content(ids + 6) == one.content(ids)


@pytest.mark.parametrize("offers", [("events",), ("flags",)])
def test_a_store_behind_a_mark_can_be_revoked(
    engine: Callable[..., DeviceEngine], offers: tuple[str, ...]
) -> None:
    one, names, ids = engine(offers=offers), hashes(1), block_ids(0)
    for event in one.events:
        event.record()
    name, store = one.store(names, ids, one.after(0, 1))
    one.session.cancel(name)
    assert store.result(0).status is TransferStatus.CANCELLED
    _reach(one, 0)
    one.session.ping(10)
    results: list[int] = []

    def is_stored() -> bool:
        """False while the blocks are reserved for the revoked store."""
        results.append(int(done(one.store(names, ids)[1]).results[0][0]))
        return results[-1] != BlockResult.IN_FLIGHT

    wait_for(is_stored)
    assert results[-1] == BlockResult.STORED


# Deaths


@pytest.mark.parametrize("offers", ['["events"]', '["flags"]'])
def test_a_killed_engines_memory_is_let_go(server: DeviceServer, offers: str) -> None:
    """One of its stores waits for a mark that never comes."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.server.devices_support", server.target, offers],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "copying\n"
    assert server.num_held() >= 1
    wait_for(lambda: server.counter("transfers_in_flight") > 0, "a copy in flight")
    child.kill()
    child.wait()
    wait_for(lambda: server.num_held() == 0, "letting go")
    assert server.status()["state"] == "ready"


def test_a_killed_server_leaves_no_wrong_bytes(folder: Path) -> None:
    devices, names, ids = FakeDevices(1, 3, 0.002), hashes(8), np.arange(8, dtype=np.int32)
    with contextlib.ExitStack() as stack:
        with DeviceServer(folder, devices, *copies_by("kernel")) as first:
            first.wait_ready()
            one = stack.enter_context(contextlib.closing(DeviceEngine(first.target).connected()))
            one.fill(ids, 1)
            content = one.content(ids)
            done(one.store(names, ids)[1])
            flying = [one.store(hashes(8), ids)[1] for _ in range(20)]
            flying += [one.load(names, ids + 8)[1] for _ in range(3)]
            first.kill()
            for future in flying:
                assert future.exception(60) is not None or future.result().status is not None
        with DeviceServer(folder, devices, *copies_by("memcpy")) as second:
            second.wait_ready()
            one.connected()
            done(one.load(names, ids + 16)[1])
            assert one.content(ids + 16) == content


def test_loads_end_when_device_leaves_dead_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may still run the dead server's copies."""
    asked, has_left = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        asked.set()
        assert has_left.wait(60)

    monkeypatch.setattr("hotkv_client.connection._await_devices", wait_for_it)
    with DeviceServer(folder, FakeDevices(1, 3)) as running:
        running.wait_ready()
        one = DeviceEngine(running.target, offers=["flags"]).connected()
        names, ids = hashes(4), np.arange(4, dtype=np.int32)
        done(one.store(names, ids)[1])
        load = one.load(names, ids + 8, one.after(0, 1))[1]
        store = one.store(hashes(4), ids, one.after(0, 1))[1]
        running.kill()
        # A dead server commits nothing, even if its copies go on.
        assert isinstance(store.exception(60), SessionLostError)
        assert asked.wait(60) and not load.done()
        has_left.set()
        assert isinstance(load.exception(60), SessionLostError)
        one.close()


def test_memory_of_devices_needs_the_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the link, an engine learns that a dead server's GPU copies have ended."""
    with DeviceServer(folder, FakeDevices(1, 3)) as running:
        running.wait_ready()
        # If the engine found the socket again, it would register its memory.
        monkeypatch.setattr("hotkv_client.connection.descriptor_socket", lambda target: None)
        one = DeviceEngine(running.target)
        wait_for(lambda: any("needs a unix: target" in why for why in one.said), "a refusal")
        assert not one.session.connected and running.num_held() == 0
        memory = one.session._life.memory
        assert memory is not None
        register = _wire.register_memory(memory.layout, NO_ORDER)
        with grpc.insecure_channel(running.target) as channel:
            opening = _wire.open_session(replace(one.session.config, engine_id="by hand"))
            session = RawSession(channel, running.target, opening)
            word, answer = session.ask(register)
            assert word == "INVALID_LAYOUT" and "needs the session's link" in answer.error.message
            assert running.num_held() == 0 and session.link({}) == "answered"
            assert session.ask(register)[0] == "answered" and running.num_held() == 1
            session.close()
        one.close()


def test_engine_without_devices_is_refused_with_reason(folder: Path) -> None:
    said = "it is given no NVIDIA device"
    with Server(folder, "16MiB") as plain:
        plain.wait_ready()
        one = DeviceEngine(plain.target)
        wait_for(lambda: any(f"no CUDA copy engine: {said}" in why for why in one.said))
        assert f"no devices: {said}" in plain.cli("devices")
        one.close()
