"""Tests `DeviceWatch`: whom a device in trouble affects, and when the server has a fault."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from demo.processes import runtime_folder
from hotkv_server import daemon
from hotkv_server.node.device_watch import Affected
from tests.device import timed_gpu
from tests.device.timed_gpu import TimedGpus, needs_c_compiler
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import AnyDeviceServer, DeviceEngine, block_ids, done
from tests.server.page_support import get
from tests.server.support import hashes, http_port
from tests.support.waiting import wait_for

NUM_DEVICES = 3
ENGINES = st.sampled_from("abc")
DEVICES = st.integers(0, NUM_DEVICES - 1)
IDS = block_ids(0, 1, 2, 3)


class AffectedMachine(RuleBasedStateMachine):
    """The model keeps the history: what each engine has touched, and when devices failed."""

    def __init__(self) -> None:
        super().__init__()
        self.affected = Affected(NUM_DEVICES)
        self.sessions = list[tuple[str, frozenset[int]]]()
        self.troubled = set[int]()
        self.history = list[tuple[str, int, object]]()
        self.restarts = False

    @rule(engine=ENGINES, devices=st.frozensets(DEVICES))
    def open_session(self, engine: str, devices: frozenset[int]) -> None:
        if refusing := devices & self.troubled:
            self.affected.refused(min(refusing), engine)
            self.history.append(("used", min(refusing), engine))
        else:
            self.sessions.append((engine, devices))

    @rule(number=st.integers(0, 9))
    def close_session(self, number: int) -> None:
        if self.sessions:
            self.sessions.pop(number % len(self.sessions))

    @rule(troubled=st.sets(DEVICES, max_size=NUM_DEVICES))
    def look(self, troubled: set[int]) -> None:
        for device in self.troubled - troubled:
            self.history.append(("works", device, None))
        self.troubled = troubled
        for engine, devices in self.sessions:
            for device in devices & troubled:
                self.history.append(("used", device, engine))
        self.restarts = self.affected.look(troubled, self.sessions)
        expected = self.of_model()
        served = {engine for engine, _ in self.sessions} - expected
        everything = len(troubled) == NUM_DEVICES
        assert self.restarts == (everything or (bool(expected) and not served))

    def of_model(self) -> set[str]:
        """Engines that have used a device since it was last seen to work."""
        found = set[str]()
        for at, (what, device, engine) in enumerate(self.history):
            later = self.history[at + 1 :]
            if what == "used" and ("works", device, None) not in later:
                found.add(str(engine))
        return found

    @invariant()
    def same_engines(self) -> None:
        assert self.affected.engines == self.of_model()


TestAffected = AffectedMachine.TestCase


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[TimedGpus]:
    yield TimedGpus(tmp_path, 2)


@contextlib.contextmanager
def impatient_server(gpus: TimedGpus) -> Iterator[AnyDeviceServer]:
    """What takes longer than a second hangs."""
    command = gpus.command(__name__)
    with (
        runtime_folder(64 << 20) as folder,
        AnyDeviceServer(folder, command, *copies_by("batch")) as server,
    ):
        server.wait_ready()
        yield server


@needs_c_compiler
def test_a_device_that_hangs_is_said_and_serves_again(gpus: TimedGpus) -> None:
    """Also while it hangs, sessions on other devices open and copy; new ones on it are refused."""
    with impatient_server(gpus) as server, contextlib.ExitStack() as stack:

        def engine(device: int) -> DeviceEngine:
            return stack.enter_context(
                contextlib.closing(DeviceEngine(server.target, device=device))
            )

        def limits() -> str:
            return "; ".join(server.status()["limits"])

        def usable() -> list[bool]:
            text = get(http_port(server), "/metrics").text
            return [f'hotkv_device_usable{{device="{n}"}} 1.0' in text for n in range(2)]

        one, two = engine(0).connected(), engine(1).connected()
        with gpus.hung(0):
            _, stuck = one.store(hashes(4), IDS)
            opening = engine(0)
            wait_for(lambda: "device 0 has been stuck" in limits(), "the device")
            refused = engine(0)
            wait_for(lambda: any("does not work" in said for said in refused.said), "a refusal")
            assert server.status()["state"] == "ready" and not stuck.done()
            names = hashes(4)
            done(engine(1).connected().store(names, IDS)[1])
            done(two.load(names, IDS)[1])
            assert usable() == [False, True]
        done(stuck)
        for waiting in (opening, refused):
            waiting.connected()
        wait_for(lambda: limits() == "", "the device to serve again")
        assert usable() == [True, True]


if __name__ == "__main__":
    daemon.STALLED_WORK_S = 1.0
    status = timed_gpu.main()
    os._exit(status)
