"""A server that can be told to fail."""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client.command import cli
from hotkv_server.testing import faults
from tests.support.daemons import ForkedChild
from tests.support.ports import free_port

FLAGS = ("--arena.bytes", "16MiB", "--arena.slab-bytes", "64KiB")


class FaultyServer(Server):
    """A server in which `point` does `how` once `break_it` is called."""

    def __init__(
        self,
        folder: Path,
        point: str,
        how: str,
        *flags: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.runtime_folder = folder / "run"
        self.runtime_folder.mkdir(mode=0o700, exist_ok=True)
        self.target = f"unix:{self.runtime_folder}/grpc.sock"
        self.begin_s = time.monotonic()
        self.port = free_port()
        self._trigger = folder / "now"
        command = [
            *faults.command("break", point, how, self._trigger),
            *FLAGS,
        ]
        command += [
            "--runtime-dir",
            str(self.runtime_folder),
            "--arena.dir",
            str(folder / "arena"),
            "--http.port",
            str(self.port),
            *flags,
        ]
        self._child = ForkedChild(
            "hotkv-server", command, folder / "hotkv-server.log", environment or {}
        )

    def break_it(self) -> None:
        self._trigger.touch()

    def exit_status(self) -> int:
        return self._child.process.wait(60)

    def probe(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP probe; (0, "") where nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/{path}", timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ping(self, *flags: str) -> int:
        return cli.main(["ping", "--target", self.target, "--timeout-s", "2", *flags])


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(64 << 20) as made:
        yield made
