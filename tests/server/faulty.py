"""A server with fault injection."""

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client.command import cli
from tests.doubles import faults
from tests.support.ports import free_port

FLAGS = ("--arena.bytes", "16MiB")


class FaultyServer(Server):
    """A server with a fault: after `break_it`, its code fails at `point`, as `how` says (such as
    `hang`)."""

    def __init__(
        self,
        folder: Path,
        point: str,
        how: str,
        *flags: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._trigger = folder / "now"
        command = faults.command("break", point, how, self._trigger)
        own = (*FLAGS, "--http.port", str(self.port))
        with mock.patch.dict(os.environ, environment or {}):
            super().__init__(folder, "16MiB", *own, *flags, command=command)

    def break_it(self) -> None:
        self._trigger.touch()

    def exit_status(self) -> int:
        return self._child.process.wait(60)

    def probe(self, path: str) -> tuple[int, str]:
        """(Status, body); (0, "") without an answer."""
        url = f"http://127.0.0.1:{self.port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
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
