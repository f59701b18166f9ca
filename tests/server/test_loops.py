"""Every loop and thread of a server is watched by Health: in one with all that can be configured,
no task lasts that Health does not know, and no thread runs that belongs to no part it watches."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun
from hotkv_server.node.health import Health
from hotkv_server.testing import faults
from tests.server.support import FULL, GroupsEngine, block_ids, hashes
from tests.support.waiting import wait_for
from tests.tiers import s3_support
from tests.tiers.valkey_support import running

OF_THREADS = {
    "MainThread": "",
    "hotkv-copy-": "a copy thread",
    "hotkv-events": "the event publisher",
    "hotkv-http": "the HTTP thread",
    "hotkv-lag": "the thread that looks at the loop",
    "hotkv-fill": "the thread that brings the arena in",
    "hotkv-files": "the thread that writes files",
    "hotkv-disk-records": "the thread that writes the records of disk",
    "hotkv-disk-": "the threads of the tier disk",
    "hotkv-compress-": "the threads of the tier valkey",
    "hotkv-valkey-": "the threads of the tier valkey",
    "hotkv-s3-": "the threads of the tier s3",
    "hotkv-epochs": "the threads of epochs",
    "hotkv-select": "selection threads",
    "asyncio_": "",
    "uvloop_": "",
    "ThreadPoolExecutor": "",
    "Thread-1 (_poll_wrapper)": "",
}
"""The part that Health watches of each kind of thread, by how their names begin; empty for the
loop's own, for pools of Python's, and for gRPC's poller, whose work has other watchers."""


def told(server: Server, file: Path) -> dict[str, Any]:
    file.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    wait_for(file.exists)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def strangers(server: Server, file: Path) -> list[str]:
    """Tasks of the server that Health does not know."""
    return [
        one["name"]
        for one in told(server, file)["tasks"]
        if not one["knows"] and "hotkv_server" in one["of"] and "daemon.py" not in one["of"]
    ]


def test_no_task_and_no_thread_lasts_that_health_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "s3").mkdir()
    weed = s3_support.Server(tmp_path / "s3")
    try:
        weed.wait()
        with running(tmp_path / "valkey") as valkey, runtime_folder(128 << 20) as folder:
            flags = (
                *("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB"),
                *("--tiers.valkey.address", f"unix:{valkey.path}"),
                *("--tiers.s3.bucket", s3_support.BUCKET),
                *("--tiers.s3.endpoint", f"http://127.0.0.1:{weed.port}"),
                *("--tiers.s3.credentials-file", str(weed.keys["hotkv"])),
                *("--events.endpoint", "tcp://127.0.0.1:0"),
                *("--tcp-address", "127.0.0.1:0", "--security.tcp-insecure", "true"),
            )
            told_file = tmp_path / "told"
            command = faults.command("tell-tasks", told_file)
            with Server(folder, "16MiB", *flags, command=command) as server:
                server.wait_ready()
                engine = GroupsEngine(server.target, (FULL,), "walk")
                engine.store(BlockRun(0, hashes(8), block_ids(8)))
                engine.close()
                seen: list[str] = []

                def is_quiet() -> bool:
                    seen[:] = strangers(server, told_file)
                    return not seen

                try:
                    wait_for(is_quiet)
                except AssertionError:
                    pytest.fail(f"Health knows nothing of these tasks: {seen}")
                content = told(server, told_file)
        parts, unknown = content["parts"], []
        for name in content["threads"]:
            part = next(
                (part for start, part in OF_THREADS.items() if name.startswith(start)), None
            )
            if part is None or (part and part not in parts):
                unknown.append(name)
        assert not unknown, f"{unknown} are of no part that Health watches: {parts}"
        names = " ".join(parts)
        for loop in ("timer", "the moves to disk", "the copies to valkey", "the copies to s3"):
            assert loop in names
    finally:
        weed.close()


def test_a_loop_that_dies_or_hangs_is_named_and_one_that_ends_is_not() -> None:
    async def run() -> None:
        health, turns = Health(), 0
        stop, hang = asyncio.Event(), asyncio.Event()

        async def dies() -> None:
            async for _ in health.turns("one that dies", 0.001):
                raise RuntimeError("can't start new thread")

        async def ends() -> None:
            async for _ in health.turns("one that ends", 0.001):
                return

        async def hangs() -> None:
            nonlocal turns
            async for _ in health.turns("one that hangs", 0.001, 5.0):
                turns += 1
                hang.set()
                await stop.wait()
                hang.clear()

        tasks = [asyncio.create_task(loop()) for loop in (dies, ends, hangs)]
        await hang.wait()
        await asyncio.wait(tasks[:2])
        assert health.knows(tasks[2]) and not health.knows(tasks[1])
        now_s = time.monotonic()
        health.check(now_s)
        assert health.problems(now_s) == ("one that dies has died",)
        for later_s in (now_s + 6, now_s + 6):
            health.check(later_s)
        assert any("one that hangs has been stuck" in said for said in health.problems(now_s + 6))
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
