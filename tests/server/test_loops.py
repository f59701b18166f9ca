"""Tests that `Health` knows all threads and long-lived tasks of a server with tiers, events and
TCP."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun
from tests.doubles import faults
from tests.server.sharing import bucket_flags
from tests.server.support import FULL, GroupsEngine, block_ids, hashes
from tests.support.waiting import wait_for
from tests.tiers.s3_support import running as running_s3
from tests.tiers.valkey_support import running

OF_THREADS = {
    "MainThread": "",
    "hotkv-copy-": "a copy thread",
    "hotkv-events": "the event publisher",
    "hotkv-http": "the HTTP thread",
    "hotkv-lag": "the thread that looks at the loop",
    "hotkv-fill": "the thread that brings the arena in",
    "hotkv-files": "the thread that writes files",
    "hotkv-settings": "the thread that reads the settings",
    "hotkv-disk-records": "the thread that writes the records of disk",
    "hotkv-disk-": "the threads of the tier disk",
    "hotkv-compress-": "the threads of the tier valkey",
    "hotkv-valkey-": "the threads of the tier valkey",
    "hotkv-s3-": "the threads of the tier s3",
    "hotkv-generations": "the threads of generations",
    "hotkv-select": "selection threads",
    "hotkv-contents": "the thread that keeps contents for events",
    "hotkv-pool": "",
    "hotkv-sums": "",
    "Thread-1 (_poll_wrapper)": "",
}
"""The start of a thread's name, and the part of `Health` that watches it; empty: watched
elsewhere."""


def told(server: Server, file: Path) -> dict[str, Any]:
    file.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    wait_for(file.exists)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def strangers(content: dict[str, Any]) -> list[str]:
    """Tasks that `Health` does not know."""
    return [
        one["name"]
        for one in content["tasks"]
        if not one["knows"] and "hotkv_server" in one["of"] and "daemon.py" not in one["of"]
    ]


def test_health_knows_every_lasting_task_and_thread(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(running(tmp_path / "valkey"))
        s3 = stack.enter_context(running_s3(tmp_path))
        folder = stack.enter_context(runtime_folder(128 << 20))
        flags = (
            *("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB"),
            *("--tiers.valkey.address", f"unix:{valkey.path}", *bucket_flags(s3, s3.port)),
            *("--events.endpoint", "tcp://127.0.0.1:0"),
            *("--tcp-address", "127.0.0.1:0", "--security.tcp-insecure", "true"),
        )
        file = tmp_path / "told"
        command = faults.command("tell-tasks", file)
        server = stack.enter_context(Server(folder, "16MiB", *flags, command=command))
        server.wait_ready()
        engine = GroupsEngine(server.target, (FULL,), "walk")
        engine.store(BlockRun(0, hashes(8), block_ids(8)))
        engine.close()
        wait_for(lambda: not strangers(told(server, file)), "tasks that Health does not know end")
        content = told(server, file)
    parts = content["parts"]
    for name in content["threads"]:
        part = next((part for start, part in OF_THREADS.items() if name.startswith(start)), None)
        assert part is not None and (not part or part in parts), f"{name}: {parts}"
    for loop in ("timer", "the moves to disk", "the copies to valkey", "the copies to s3"):
        assert any(loop in part for part in parts)
