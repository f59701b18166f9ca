"""Tests that a death in native code leaves stacks on standard error."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import Server
from hotkv_client import BlockRun
from hotkv_client.paged_engine import PagedEngine
from tests.server.faulty import FaultyServer, folder
from tests.server.support import block_ids, hashes

__all__ = ["folder"]

STACK = "(most recent call first):\n"


def ended(server: Server, number: signal.Signals) -> int:
    """The exit status. A SIGBUS of kill(2) may reach a thread that is just acquiring the GIL, which
    then waits for itself (`memory.mapping`): another gets the next."""
    for _ in range(6):
        os.kill(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            status: int = server._child.process.wait(10)
            return status
    raise AssertionError(f"the server does not end by {number.name}")


@pytest.mark.parametrize(
    ("number", "form", "words"),
    [
        (signal.SIGSEGV, "json", "Fatal Python error: Segmentation fault"),
        (signal.SIGBUS, "text", "Fatal Python error: Bus error"),
    ],
)
def test_a_native_death_of_the_server_leaves_stacks(
    folder: Path, number: signal.Signals, form: str, words: str
) -> None:
    command = [sys.executable, "-m", "hotkv_server", "run"]
    with Server(folder, "16MiB", "--log-format", form, command=command) as server:
        server.wait_ready()
        assert ended(server, number) == -number
        log = server.log.read_text()
    assert words in log and STACK in log and 'cli.py", line' in log


def test_native_death_in_copy_leaves_its_stack(folder: Path) -> None:
    with FaultyServer(folder, "copy", "fault", "--log-format", "json") as server:
        server.wait_ready()
        engine = PagedEngine(server.target).connect()
        server.break_it()
        run = BlockRun(0, hashes(2), block_ids(2))
        engine.session.store("s", "s", [run], 20)
        assert server.exit_status() == -signal.SIGSEGV
        engine.close()
        log = server.log.read_text()
    dying = log.partition("Current thread")[2].partition("\n\n")[0]
    assert "Fatal Python error: Segmentation fault" in log and "in faulty" in dying


CLIENT = """
import os, signal, sys
from hotkv_client.command import cli
cli._main = lambda _: os.kill(os.getpid(), signal.SIGSEGV)
cli.main(["status"])
"""


def test_a_native_death_of_the_command_leaves_stacks() -> None:
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and STACK in done.stderr
