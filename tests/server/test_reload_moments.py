"""SIGHUP while the server starts, several times and while it drains; what of the write gate
outlives a reload; odd text in JSON lines. `test_reload` has what a reload changes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import GroupHashes
from hotkv_client.testing import PagedEngine
from hotkv_server.settings import Settings, load_settings
from hotkv_server.startup.reload import Reloader
from hotkv_server.tiers.book.write_gate import DAY_S, SLOT_S, WriteGate
from tests.server.guarded import store
from tests.support.waiting import wait_for

CHANGED_AT_THE_START = """
import os, pathlib, signal, sys
from hotkv_server import daemon
load_kernels = daemon.load_kernels
def changed(settings):
    path = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
    path.write_text("drain_timeout_s = 7")
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
    load_kernels(settings)
daemon.load_kernels = changed
from hotkv_server.cli import main
sys.exit(main())
"""


def test_what_the_write_gate_knows_outlives_a_reload(tmp_path: Path) -> None:
    """Other settings leave it alone; another budget counts what was written."""
    disk = {"path": str(tmp_path / "tier"), "bytes": "32MiB", "write_gb_per_day": 1}

    def settings(**more: Any) -> Settings:
        return Settings.model_validate({"tiers": {"disk": {**disk, **more}}})

    gate = WriteGate(settings().tiers.write_bytes_per_day, 100)
    seen = np.arange(4, dtype=np.uint64) | np.uint64(7 << 33)
    gate._remember(seen)
    gate.add(600_000_000, 0.0)
    wanted, node, listeners = [settings()], MagicMock(), MagicMock()
    node.tiers.set_write_budget = gate.set_budget
    reloader = Reloader(lambda: wanted[0], settings(), node, listeners)
    wanted[0] = settings().model_copy(update={"drain_timeout_s": 7.0, "policy": "lru"})
    assert reloader() and reloader() and reloader.drain_timeout_s == 7.0
    assert gate._is_remembered(seen).all() and gate.left_bytes(1.0) == 400_000_000
    wanted[0] = settings(write_gb_per_day=2)
    assert reloader() and gate.left_bytes(1.0) == 1_400_000_000
    wanted[0] = settings(write_gb_per_day=0.5)
    assert reloader() and gate.left_bytes(1.0) == 0
    assert gate.left_bytes(DAY_S + SLOT_S) == 500_000_000


class Fleeting(type(Path())):  # type: ignore[misc]
    """A file that is gone, or says something else, once it has been read."""

    then: str | None = None

    def read_text(self, *args: Any, **more: Any) -> str:
        text = Path(self).read_text(*args, **more)
        if self.then is None:
            Path(self).unlink()
        else:
            Path(self).write_text(self.then)
        return text


@pytest.mark.parametrize("then", [None, "drain_timeout_s = 7", "no TOML"])
def test_settings_come_from_the_bytes_that_were_checked(tmp_path: Path, then: str | None) -> None:
    file = Fleeting(tmp_path / "hotkv.toml")
    file.write_text("drain_timeout_s = 6\npolicy = 'lru'")
    file.then = then
    settings = load_settings(file, ["--policy", "arc"], "test")
    assert (settings.drain_timeout_s, settings.policy) == (6.0, "arc")


def test_what_is_asked_while_it_starts_is_done_when_it_has() -> None:
    """The settings had been read by then; whoever changed them asks once."""
    with runtime_folder(64 << 20) as folder:
        config = folder / "hotkv.toml"
        config.write_text("drain_timeout_s = 6")
        command = (sys.executable, "-c", CHANGED_AT_THE_START, "run")
        with Server(folder, "16MiB", "--config", str(config), command=command) as server:
            server.wait_ready()
            wait_for(lambda: "reloaded changed=drain_timeout_s" in server.log.read_text())
            assert server.log.read_text().count("settings reloaded") == 1


def test_reloads_one_after_the_other_and_while_it_drains_do_no_harm() -> None:
    with runtime_folder(64 << 20) as folder:
        config = folder / "hotkv.toml"
        config.write_text("drain_timeout_s = 6")
        with Server(folder, "16MiB", "--config", str(config)) as server:
            server.wait_ready()
            engine = PagedEngine(server.target).connect()
            for _ in range(20):
                os.kill(server.pid, signal.SIGHUP)
            config.unlink()
            os.kill(server.pid, signal.SIGHUP)
            wait_for(lambda: "there is no file" in server.log.read_text())
            held = engine.session
            blocks = store(engine)
            assert held.acquire("held", [GroupHashes(0, blocks)], 600).result(60).pinned[0].all()
            os.kill(server.pid, signal.SIGTERM)
            wait_for(lambda: "draining timeout_s=6.0" in server.log.read_text())
            config.write_text("drain_timeout_s = 1")
            os.kill(server.pid, signal.SIGHUP)
            wait_for(lambda: "reloaded changed=drain_timeout_s" in server.log.read_text())
            held.release("held")
            engine.close()
        text = server.log.read_text()
        assert "hotkv_server.daemon stopped" in text and "Traceback" not in text


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_odd_text_is_one_line_of_json_in_any_locale(encoding: str) -> None:
    code = (
        "import logging; from hotkv_server import logs; logs.set_up('info', 'json');"
        "logging.info('caf\\xe9 \\U0001f600 \\u2028 \\x85 %s', 'a\\nb\\udc80')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
    )
    (line,) = done.stderr.decode().splitlines()
    assert json.loads(line)["message"] == "caf\xe9 \U0001f600 \u2028 \x85 a\nb\udc80"
