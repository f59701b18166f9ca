"""Starts servers in a tenth of a second, by forks of a process with hotkv-server imported and
kernels loaded (`server_nursery`).

`start_server` gives a stand-in for `subprocess.Popen`; `quick_servers` makes
`demo.processes.Server` fork. A forked server has the environment (without `_LEFT_OUT`), streams
and working directory that a program started by the test would have. If the test has changed
another variable or `subprocess.Popen`, a new program is started. Servers end with the tests.
Tests of the start itself use `subprocess`.
"""

import contextlib
import functools
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo import processes
from hotkv_client.command import cli, sizing
from tests.doubles import with_constants
from tests.support.server_nursery import MAX_ORDER_BYTES

_POPEN = subprocess.Popen
_LEFT_OUT = (
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "NUMEXPR_",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "VLLM_",
)
"""Prefixes of variables that pytest or vLLM's config sets, and servers do not read."""


class ForkedServer:
    """What tests use of `subprocess.Popen`. Any thread may send signals, one may wait."""

    def __init__(self, nursery: "ServerNursery", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = None
        self._nursery, self._pidfd = nursery, os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"ForkedServer(pid={self.pid}, returncode={self.returncode})"

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0.0)
            self.returncode = self._nursery.status_of(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ServerNursery:
    """Thread-safe."""

    def __init__(self) -> None:
        self.environment = _environment()
        self._lock = threading.Lock()
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.server_nursery", str(far.fileno())],
            pass_fds=[far.fileno()],
            cwd=processes.ROOT,
        )
        far.close()
        # Its first run compiles kernels, which must not count against a server's deadline.
        self._answer()

    def fork(
        self,
        arguments: Sequence[str],
        streams: Sequence[int],
        *,
        leads_group: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedServer:
        """Runs `python -m ARGUMENTS` in the test's working directory.

        streams: descriptors of standard input, output and error.
        leads_group: it leads a new process group.
        environment: variables to add.
        """
        order = {"arguments": list(arguments), "cwd": os.getcwd(), "leads_group": leads_group}
        order["environment"] = environment or {}
        return ForkedServer(self, self._ask(order, list(streams))["pid"])

    def status_of(self, pid: int) -> int:
        status: int = self._ask({"wait_for": pid}, [])["status"]
        return status

    def _ask(self, order: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = self._socket.recv(MAX_ORDER_BYTES)
        assert answer, "the process that forks servers has ended"
        read: dict[str, Any] = json.loads(answer)
        return read


@functools.cache
def nursery() -> ServerNursery:
    return ServerNursery()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}


def can_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Would a forked server behave like this command with `env` added?"""
    is_server = command[:2] == [sys.executable, "-m"] and (
        command[2].startswith("hotkv_server") or command[2] == with_constants.MODULE
    )
    return (
        is_server
        and not env
        and subprocess.Popen is _POPEN
        and nursery().environment == _environment()
    )


class ForkedChild(processes.Child):
    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: dict[str, str], pipes: bool = False
    ) -> None:
        command = with_constants.applied(command)
        if pipes or not can_fork(command, env):
            super().__init__(name, command, log, env, pipes)
            return
        self.name = name
        self.log = log
        with log.open("wb") as sink, open(os.devnull, "rb") as nothing:
            streams = nothing.fileno(), sink.fileno(), sink.fileno()
            self.process = nursery().fork(command[2:], streams, leads_group=True)  # type: ignore[assignment]


def _cli(server: processes.Server, *arguments: str) -> str:
    """Runs `hotkv` in this process. Raises ChildError if it fails."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            failed = cli.main([*arguments, "--target", server.target])
        except SystemExit as end:
            failed = int(str(end.code))
    if failed:
        raise processes.ChildError(f"hotkv {' '.join(arguments)}: {said.getvalue().strip()}")
    return printed.getvalue()


def _simulate(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    if can_fork(command, {}):
        return run(*command[3:], timeout_s=300)
    return subprocess.run(command, **options)


@contextlib.contextmanager
def quick_servers() -> Iterator[None]:
    """Also makes `hotkv size` fork the simulator, and `hotkv` run in this process."""
    nursery()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "subprocess", SimpleNamespace(run=_simulate))
        patch.setattr(processes, "Child", ForkedChild)
        patch.setattr(processes.Server, "cli", _cli)
        yield


def start_server(*arguments: str) -> "ForkedServer | subprocess.Popen[bytes]":
    command = with_constants.applied([sys.executable, "-m", "hotkv_server", "run", *arguments])
    if not can_fork(command, {}):
        return subprocess.Popen(command)
    return nursery().fork(command[2:], (0, 1, 2))


def run(
    *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m hotkv_server` to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        streams = 0, printed.fileno(), said.fileno()
        command = ["hotkv_server", *arguments]
        child = nursery().fork(command, streams, environment=environment)
        try:
            status = child.wait(timeout_s)
        finally:
            child.kill()
        printed.seek(0)
        said.seek(0)
        return subprocess.CompletedProcess(command, status, printed.read(), said.read())
