"""A server on timed GPUs (`timed_gpu`), and its engines."""

import contextlib
from pathlib import Path
from typing import Protocol, TypeVar

from tests.device.timed_gpu import TimedGpus
from tests.server.devices_support import AnyDeviceServer, DeviceEngine
from tests.support.waiting import wait_for


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class World:
    """`gpus`: the server's devices."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, **gpus: object) -> None:
        self.gpus = TimedGpus(folder, **gpus)  # type: ignore[arg-type]
        self._stack = stack
        self._folder = folder

    def start(self, *flags: str) -> "World":
        self.server = self._stack.enter_context(
            AnyDeviceServer(self._folder, self.gpus.command(), *flags)
        )
        self.server.wait_ready()
        return self

    def engine(self, **settings: object) -> DeviceEngine:
        return self.add(DeviceEngine(self.server.target, **settings)).connected()  # type: ignore[arg-type]

    def add(self, one: C) -> C:
        """Closes it at the end."""
        return self._stack.enter_context(contextlib.closing(one))

    def check_nothing_leaks(self) -> None:
        """Once all sessions are closed."""

        def is_idle() -> bool:
            status = self.server.status()
            return not status["sessions"] and not self.server.num_held()

        wait_for(is_idle, "the end of all sessions")
        status = self.server.status()
        counters = status["counters"]
        assert counters["leases"] == counters["transfers_in_flight"] == 0, counters
        assert status["devices"]["open_allocation_count"] == 0
