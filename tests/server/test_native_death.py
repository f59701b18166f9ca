"""Tests that a death in native code leaves stacks on standard error."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.processes import Server
from hotkv_client import BlockRun
from hotkv_client.paged_engine import PagedEngine
from hotkv_server.settings.tiers import MooncakeSettings
from hotkv_server.tiers.mooncake.tier import MooncakeClient
from hotkv_server.tiers.remote.client import StoreError
from tests.server.faulty import FaultyServer, folder
from tests.server.support import block_ids, hashes

__all__ = ["folder"]

STACK = "(most recent call first):\n"


@pytest.mark.parametrize(
    ("number", "form", "words"),
    [
        (signal.SIGSEGV, "json", "Fatal Python error: Segmentation fault"),
        (signal.SIGABRT, "text", "Fatal Python error: Aborted"),
        (signal.SIGBUS, "text", "Fatal Python error: Bus error"),
    ],
)
def test_a_native_death_of_the_server_leaves_stacks(
    folder: Path, number: signal.Signals, form: str, words: str
) -> None:
    command = [sys.executable, "-m", "hotkv_server", "run"]
    with Server(folder, "16MiB", "--log-format", form, command=command) as server:
        server.wait_ready()
        os.kill(server.pid, number)
        assert server._child.process.wait(60) == -number
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


def test_native_death_while_loading_leaves_stacks(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "hotkv_server", "--version"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGSEGV and 'numpy.py", line 2' in done.stderr


CLIENT = """
import os, signal, sys
from hotkv_client.command import cli
cli._main = lambda _: os.kill(os.getpid(), signal.SIGSEGV)
cli.main(["status"])
"""


def test_a_native_death_of_the_command_leaves_stacks() -> None:
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and STACK in done.stderr


FAKE_STORE = """
import os, signal
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_native_death_of_a_child_leaves_stacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(FAKE_STORE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    settings = MooncakeSettings(master="127.0.0.1:1", local_hostname="127.0.0.1")
    with pytest.raises(StoreError):
        MooncakeClient(settings, [], time.monotonic() + 60)
    said = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in said and 'mooncake/store.py", line 3' in said
