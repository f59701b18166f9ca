"""Health: every probe names a part that dies or stalls, a broken invariant ends the server, and a
start that fails says what to do."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError, SessionLostError
from hotkv_server.node.health import CHECK_S, STALLED_S, Health
from hotkv_server.told.http_endpoint import HttpServer
from tests.server.faulty import (
    FLAGS,
    FaultyServer,
    folder,
)
from tests.server.support import block_ids, hashes
from tests.support.ports import free_port
from tests.support.waiting import wait_for

__all__ = ["folder"]

BROKEN_STATUS = 70


# Broken invariants


def test_a_broken_invariant_ends_the_server_and_costs_only_what_it_touched(folder: Path) -> None:
    """In a store's commit: the story is logged, the store is not acknowledged, the next server
    serves what was, and never the rest."""
    with FaultyServer(folder, "publish", "assert") as server:
        server.wait_ready()
        engine = PagedEngine(server.target, layers=2, num_blocks=64, page_bytes=4096).connect()
        engine.kv[:] = np.random.default_rng(1).integers(0, 256, engine.kv.shape, np.uint8)
        kept, lost = hashes(10), hashes(5)
        assert (
            engine.session.store("a", "a", [BlockRun(0, kept, block_ids(10))], 10).result(60).status
            is TransferStatus.DONE
        )
        server.break_it()
        future = engine.session.store("b", "b", [BlockRun(0, lost, block_ids(5, 10))], 10)
        assert server.exit_status() == BROKEN_STATUS
        assert isinstance(future.exception(60), SessionLostError | HotKVError)
        log = server.log.read_text()
        assert "CRITICAL hotkv_server.node.health an invariant broke in" in log
        assert f"state=reserved key_space=1 group=0 hash={lost[0].hex()[:16]}" in log
    with Server(folder, "16MiB", "--arena.slab-bytes", "64KiB") as again:
        again.wait_ready()
        assert engine.session.wait_connected(20)
        assert (
            engine.session.lookup([GroupHashes(0, kept + lost)]).result(60)[0].tolist()
            == [True] * 10 + [False] * 5
        )
        engine.session.acquire("l", [GroupHashes(0, kept)]).result(60)
        back = LoadRun(0, block_ids(10), block_ids(10, 30))
        assert engine.session.load("l", "l", [back], 10).result(60).status is TransferStatus.DONE
        assert np.array_equal(engine.kv[:, :10], engine.kv[:, 30:40])
        engine.close()


@pytest.mark.parametrize("where", ["timer", "call"])
def test_a_broken_invariant_is_seen_wherever_it_comes_up(folder: Path, where: str) -> None:
    point = {
        "timer": "hotkv_server.cache.leases.leases:LeaseBook.expired",
        "call": "hotkv_server.cache.table.index:BlockIndex.probe",
    }[where]
    with FaultyServer(folder, point, "assert") as server:
        server.wait_ready()
        engine = PagedEngine(server.target, layers=2, num_blocks=8, page_bytes=4096).connect()
        server.break_it()
        if where == "call":
            assert isinstance(
                engine.session.lookup([GroupHashes(0, hashes(1))]).exception(60),
                HotKVError | SessionLostError,
            )
        assert server.exit_status() == BROKEN_STATUS
        engine.close()
        assert (
            "an invariant broke in " + {"timer": "the timer", "call": "a call: "}[where]
            in server.log.read_text()
        )


# What dies or stalls


@pytest.mark.parametrize(
    ("point", "how", "name"),
    [
        ("hotkv_server.integrity.verifier:Verifier.next_batch", "die", "scrubber has died"),
        ("hotkv_server.dataplane.host:HostCopyEngine._copy", "die", "a copy thread has died"),
        ("hotkv_server.events.publisher:ZmqPublisher._send", "die", "the event publisher has died"),
    ],
)
def test_what_has_died_is_named(
    folder: Path, point: str, how: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--events.endpoint", f"tcp://127.0.0.1:{free_port()}") if "publisher" in point else ()
    with FaultyServer(folder, point, how, *flags) as server:
        server.wait_ready()
        engine = PagedEngine(server.target, layers=2, num_blocks=8, page_bytes=4096).connect()
        assert (
            server.ping(),
            server.ping("--live"),
            server.probe("readyz"),
            server.probe("livez"),
        ) == (0, 0, (200, "ok\n"), (200, "ok\n"))
        server.break_it()
        engine.session.store("a", "a", [BlockRun(0, hashes(4), block_ids(4))], 10)
        wait_for(lambda: name in server.probe("livez")[1])
        assert server.probe("livez")[0] == server.probe("readyz")[0] == 503
        wait_for(lambda: server.ping() == 1)
        assert server.ping("--live") == 1
        assert "not serving" in capsys.readouterr().out
        assert name in server.status()["problems"]
        assert f"health problems={name}" in server.log.read_text()
        # A store that nobody copies any more would hold up its session's end and the server's.
        os.kill(server.pid, signal.SIGKILL)
        engine.close()


def test_sockets_that_are_gone_are_named(own_server: Server) -> None:
    (own_server.runtime_folder / "fd.sock").unlink()
    wait_for(lambda: own_server.status()["problems"] == ["the socket fd.sock has died"])


def test_stalls_are_named_for_as_long_as_they_last() -> None:
    health, stalled_s = Health(), 0.0
    health.watch("one", lambda: True, lambda now_s: stalled_s)
    health.check(0.0)
    stalled_s = STALLED_S + 1
    health.check(1.0)
    assert health.problems(1.0) == (), "a process that was stopped for a while comes back at once"
    health.check(2.0)
    assert health.problems(2.0) == (f"one has been stuck for {stalled_s:.0f} s",)
    stalled_s = 0.0
    health.check(3.0)
    assert health.problems(3.0) == ()
    assert health.problems(3.0 + STALLED_S + 1) == (f"nobody has looked for {STALLED_S + 1:.0f} s",)


def test_each_part_that_is_watched_has_a_row_also_while_it_works() -> None:
    health, is_alive, fault = Health(), True, ""
    health.watch("one", lambda: is_alive)
    health.watch_fault("two", lambda: fault)
    health.check(0.0)
    assert {"one", "two"} < set(health.by_component(0.0))
    assert not any(health.by_component(0.0).values())
    is_alive, fault = False, "two is lost"
    health.check(1.0)
    found = {name: said for name, said in health.by_component(1.0).items() if said}
    assert found == {"one": "one has died", "two": "two is lost"}
    assert health.problems(1.0) == ("one has died", "two is lost")


def test_a_copy_thread_that_is_stuck_says_for_how_long() -> None:
    from hotkv_server.dataplane.engines import CopyJob
    from hotkv_server.dataplane.host import HostCopyEngine
    from hotkv_server.dataplane.plan import CopyPlan, Region

    source, target, go_on = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8), threading.Event()
    from_source, to_target = (
        Region(source.ctypes.data, 64, "source"),
        Region(target.ctypes.data, 64, "target"),
    )
    where, count = np.zeros(1, np.int64), np.full(1, 64)
    copies = HostCopyEngine(2)
    assert copies.stalled_s(time.monotonic() + 100) == 0.0, "waiting for work is no stall"
    copies.submit(
        CopyJob(
            [CopyPlan(to_target, from_source, where, where, count)],
            lambda outcome, message: go_on.wait(60) and None,
        )
    )
    wait_for(lambda: copies.stalled_s(time.monotonic() + 100) >= 100)
    go_on.set()
    wait_for(lambda: copies.stalled_s(time.monotonic() + 100) == 0.0)
    assert np.array_equal(source, target)
    copies.close()


def test_http_ends_without_waiting_for_connections() -> None:
    async def scenario() -> None:
        node: Any = None
        http = HttpServer("127.0.0.1", 0, node)
        with socket.create_connection(("127.0.0.1", http.port)) as idle:
            wait_for(lambda: len(http._connections) == 1)
            ending = threading.Thread(target=http.close, daemon=True)
            ending.start()
            await asyncio.get_running_loop().run_in_executor(None, ending.join, 20)
            assert not ending.is_alive() and not http.is_alive()
            idle.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert idle.recv(1) == b""

    asyncio.run(scenario())


@pytest.mark.long
def test_a_loop_that_hangs_fails_every_probe(folder: Path) -> None:
    manager = Manager(folder / "notify")
    with FaultyServer(
        folder,
        "hotkv_server.cache.leases.leases:LeaseBook.expired",
        "hang",
        environment=manager.environment,
    ) as server:
        server.wait_ready()
        server.break_it()
        wait_for(lambda: server.probe("livez")[0] == 503)
        assert "the event loop does not answer" in server.probe("readyz")[1]
        assert server.ping("--live") == 1
        manager.read(CHECK_S)
        assert manager.read(3 * CHECK_S) == []
        # The log says where it hangs.
        wait_for(lambda: 'faults.py", line' in server.log.read_text())
        os.kill(server.pid, signal.SIGKILL)
    manager.close()


# What the service manager hears


class Manager:
    """systemd's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "30000000"}

    def read(self, seconds: float) -> list[str]:
        """Assignments that come within the time."""
        heard: list[str] = []
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                heard += self._socket.recv(4096).decode().splitlines()
            except TimeoutError:
                break
        return heard

    def close(self) -> None:
        self._socket.close()


@pytest.mark.long
def test_systemd_is_told_of_start_work_trouble_and_stop(folder: Path) -> None:
    manager = Manager(folder / "notify")
    point = "hotkv_server.integrity.verifier:Verifier.next_batch"
    with FaultyServer(
        folder, point, "die", "--drain-timeout-s", "3", environment=manager.environment
    ) as server:
        server.wait_ready()
        heard = manager.read(3 * CHECK_S)
        assert heard.index("READY=1") < heard.index("STATUS=serving") < heard.index("WATCHDOG=1")
        server.break_it()
        wait_for(lambda: "STATUS=scrubber has died" in manager.read(CHECK_S))
        assert "WATCHDOG=1" not in manager.read(3 * CHECK_S)
        os.kill(server.pid, signal.SIGTERM)
        heard = manager.read(3 * CHECK_S)
        assert "STOPPING=1" in heard and "EXTEND_TIMEOUT_USEC=43000000" in heard
        assert server.exit_status() == 0
    manager.close()


def test_draining_is_not_ready_but_alive(folder: Path) -> None:
    """A copy that never ends keeps the server draining."""
    with FaultyServer(folder, "copy", "hang") as server:
        server.wait_ready()
        engine = PagedEngine(server.target, layers=2, num_blocks=8, page_bytes=4096).connect()
        server.break_it()
        engine.session.store("b", "b", [BlockRun(0, hashes(2), block_ids(2))], 10)
        wait_for(lambda: server.counter("transfers_in_flight") == 1)
        server.cli("drain", "--timeout", "60")
        with AdminClient(server.target) as admin:
            told = admin.info()
        assert told["state"] == "draining"
        assert (server.probe("readyz"), server.probe("livez")) == (
            (503, "the server drains\n"),
            (200, "ok\n"),
        )
        lines = server.probe("metrics")[1].splitlines()
        assert {"hotkv_ready 0.0", "hotkv_draining 1.0"} <= set(lines)
        assert not any(line.startswith("hotkv_problem{") and line[-3:] != "0.0" for line in lines)
        wait_for(lambda: server.ping() == 1)
        assert server.ping("--live") == 0
        os.kill(server.pid, signal.SIGKILL)
        engine.close()


# A start that fails says what to do


def start(
    folder: Path, *flags: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [
        *before,
        sys.executable,
        "-m",
        "hotkv_server.cli",
        "run",
        *FLAGS,
        "--arena.dir",
        str(folder / "arena"),
    ]
    command += ["--runtime-dir", str(folder / "run"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_shared_memory_that_is_full_is_named(folder: Path) -> None:
    """On a file system of 8 MiB, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    command = 'mount -t tmpfs -o size=8m,mode=700 tmpfs "$0" && exec "$@"'
    mount = (str(unshare), "--mount", "/bin/sh", "-c", command, str(folder / "arena"))
    (folder / "arena").mkdir(mode=0o700)
    if (
        os.geteuid() != 0
        or unshare is None
        or subprocess.run([*mount, "true"], capture_output=True).returncode
    ):
        pytest.skip("mounting a small file system needs root and unshare")
    done = start(folder, "--http.port", "-1", before=mount)
    assert done.returncode == 1
    assert (
        "MiB free, arena and table need " in done.stderr
        and "lower arena.bytes (16 MiB), or enlarge the file system" in done.stderr
    )


def test_a_directory_that_may_not_be_written_is_named(folder: Path) -> None:
    """Root without its capabilities is bound by modes like everybody else."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("tests run as root, and setpriv is not installed")
    drop = (str(setpriv), "--inh-caps=-all", "--bounding-set=-all") if os.geteuid() == 0 else ()
    (folder / "run").mkdir(mode=0o555)
    (folder / "run").chmod(0o555)
    done = start(folder, "--http.port", "-1", before=drop)
    assert done.returncode == 1
    assert (
        "runtime_dir: [Errno 13] Permission denied" in done.stderr
        and "choose a directory this user may write" in done.stderr
    )


def test_without_huge_pages_it_goes_on_and_says_so(tmp_path: Path) -> None:
    """No file system on a disk gives them for a shared mapping that is written."""
    with Server(tmp_path, "16MiB", "--arena.slab-bytes", "64KiB") as server:
        server.wait_ready()
        if server.counter("arena_huge_page_bytes"):
            pytest.skip("this kernel gives huge pages on the file system of the temporary folder")
        assert "no huge pages, so copies are slower: " in server.log.read_text()


def test_what_is_granted_too_little_of_is_said(folder: Path) -> None:
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        pytest.skip("prlimit is not installed")
    # The address of events is tried when the arena is there.
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"tcp://*:{holder.getsockname()[1]}"
        limited = (prlimit, "--memlock=65536:65536")
        done = start(folder, "--http.port", "-1", "--events.endpoint", taken, before=limited)
    assert done.returncode == 1
    assert (
        "locked memory is limited to 65536 bytes: enough for engines on CPU, too little to pin "
        "the arena"
    ) in done.stderr


def test_limits_of_control_groups_count_from_all_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotkv_server.memory import limits

    own = next(
        (
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        ),
        None,
    )
    if own is None:
        pytest.skip("this machine has no control groups of version 2")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    assert limits.cgroup_bytes() == limits.NO_LIMIT
    (tmp_path / own.strip("/")).mkdir(parents=True, exist_ok=True)
    (tmp_path / own.strip("/") / "memory.max").write_text("max\n")
    assert limits.cgroup_bytes() == limits.NO_LIMIT
    (tmp_path / "memory.max").write_text("1048576\n")
    assert limits.cgroup_bytes() == 1 << 20


def test_ping_answers_in_json_and_says_no_without_a_server(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ping", "--json", "--target", server.target]) == 0
    assert json.loads(capsys.readouterr().out) == {"serving": True}
    assert cli.main(["ping", "--target", f"unix:{tmp_path}/grpc.sock", "--timeout-s", "1"]) == 1
