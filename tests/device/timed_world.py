"""A server on timed GPUs (`timed_gpu`), and its engines."""

import contextlib
from pathlib import Path
from typing import TypeVar

from tests.device.timed_gpu import TimedGpus
from tests.server.devices_support import AnyDeviceServer, DeviceEngine

E = TypeVar("E", bound=DeviceEngine)


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

    def add(self, engine: E) -> E:
        """Closes it at the end."""
        return self._stack.enter_context(contextlib.closing(engine))
