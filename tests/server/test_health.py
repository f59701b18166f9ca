"""Tests health probes: each names what has died or hangs."""

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, TransferStatus
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import __version__
from hotkv_proto.errors import HotKVError, SessionLostError
from hotkv_server import systemd
from hotkv_server.node.health import CHECK_S, STALLED_S, Health
from tests.server.faulty import FaultyServer, folder
from tests.server.places import found, load, store
from tests.server.support import block_ids, hashes
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, eventually, wait_for

__all__ = ["folder"]

BROKEN_STATUS = 70
VERIFIER = "hotkv_server.integrity.verifier:Verifier.next_batch"
EXPIRED = "hotkv_server.cache.leases.leases:LeaseBook.expired"


@contextlib.contextmanager
def broken(
    folder: Path, point: str, how: str, *flags: str, **more: Any
) -> Iterator[tuple[FaultyServer, PagedEngine]]:
    """`how` happens at `point` once `break_it` is called. The server is killed at the end: it
    may wait for a copy that never ends."""
    with FaultyServer(folder, point, how, *flags, **more) as server:
        server.wait_ready()
        engine = PagedEngine(server.target, layers=2, num_blocks=64, page_bytes=4096).connect()
        yield server, engine
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
        engine.close()


def begin_store(engine: PagedEngine, blocks: list[bytes], at: int = 0) -> Any:
    run = BlockRun(0, blocks, block_ids(len(blocks), at))
    return engine.session.store("begun", "begun", [run], 10)


# Broken invariants


def test_broken_invariant_ends_the_server_alone(folder: Path) -> None:
    """A store that it was committing is not confirmed, and its blocks are not there later."""
    kept, lost = hashes(10), hashes(5)
    with broken(folder, "publish", "assert") as (server, engine):
        engine.kv[:] = np.random.default_rng(1).integers(0, 256, engine.kv.shape, np.uint8)
        assert store(engine, kept) == {BlockResult.STORED}
        server.break_it()
        future = begin_store(engine, lost, 10)
        assert server.exit_status() == BROKEN_STATUS
        assert isinstance(future.exception(60), SessionLostError | HotKVError)
        log = server.log.read_text()
        assert "CRITICAL hotkv_server.node.health an invariant broke in" in log
        assert f"state=reserved key_space=1 group=0 hash={lost[0].hex()[:16]}" in log
        with Server(folder, "16MiB") as again:
            again.wait_ready()
            assert engine.session.wait_connected(20)
            assert found(engine, kept + lost) == [True] * 10 + [False] * 5
            assert load(engine, kept, 30) is TransferStatus.DONE
            assert np.array_equal(engine.kv[:, :10], engine.kv[:, 30:40])


@pytest.mark.parametrize(
    ("point", "said"),
    [(EXPIRED, "the timer"), ("hotkv_server.cache.table.index:BlockIndex.probe", "a call: ")],
)
def test_broken_invariant_is_seen_anywhere(folder: Path, point: str, said: str) -> None:
    with broken(folder, point, "assert") as (server, engine):
        server.break_it()
        if point != EXPIRED:
            with pytest.raises((HotKVError, SessionLostError)):
                found(engine, hashes(1))
        assert server.exit_status() == BROKEN_STATUS
        assert f"an invariant broke in {said}" in server.log.read_text()


# Parts that die or stall


def problem_metrics(server: FaultyServer) -> dict[str, float]:
    """The value of `hotkv_problem` for each part."""
    shown = server.probe("metrics")[1]
    found = re.findall(r'^hotkv_problem{component="(.*)"} (\S+)$', shown, re.M)
    return {part: float(value) for part, value in found}


@pytest.mark.parametrize(
    ("point", "name"),
    [
        (VERIFIER, "scrubber has died"),
        ("hotkv_server.dataplane.host:HostCopyEngine._copy", "a copy thread has died"),
        ("hotkv_server.events.publisher:ZmqPublisher._send", "the event publisher has died"),
    ],
)
def test_what_has_died_is_named(
    folder: Path, point: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--events.endpoint", f"tcp://127.0.0.1:{free_port()}") if "publisher" in point else ()
    with broken(folder, point, "die", *flags) as (server, engine):
        assert server.ping() == server.ping("--live") == 0
        assert server.probe("readyz") == server.probe("livez") == (200, "ok\n")
        figures, shown = problem_metrics(server), server.probe("metrics")[1]
        assert not any(figures.values()) and "hotkv_ready 1.0\n" in shown
        assert {"devices", "timer", "HTTP thread", "socket grpc.sock"} < figures.keys()
        assert re.search(f'hotkv_build_info{{.*version="{__version__}".*}} 1.0', shown)
        server.break_it()
        begin_store(engine, hashes(4))
        wait_for(lambda: name in server.probe("livez")[1])
        assert server.probe("livez")[0] == server.probe("readyz")[0] == 503
        wait_for(lambda: server.ping() == 1)
        assert server.ping("--live") == 1
        assert "not serving" in capsys.readouterr().out
        assert name in server.status()["problems"]
        dead = [part for part, value in problem_metrics(server).items() if value]
        assert len(dead) == 1 and dead[0] in name
        assert "hotkv_ready 0.0\n" in server.probe("metrics")[1]
        assert f"health problems={name}" in server.log.read_text()


def test_server_without_more_threads_goes_on(folder: Path) -> None:
    flags = ("--events.endpoint", f"tcp://127.0.0.1:{free_port()}")
    with FaultyServer(folder, "threading:Thread.start", "refuse", *flags) as server:
        server.wait_ready()
        server.break_it()
        engine = PagedEngine(server.target, layers=2, num_blocks=64, page_bytes=4096).connect()
        run = BlockRun(0, hashes(4), block_ids(4), token_ids=np.arange(64, dtype=np.int32))
        stored = engine.session.store("s", "s", [run], 10).result(20)
        assert set(stored.results[0].tolist()) == {BlockResult.STORED}
        engine.close()
        wait_for(lambda: server.counter("sessions") == 0)
        assert server.status()["problems"] == []


def test_sockets_that_are_gone_are_named(own_server: Server) -> None:
    (own_server.runtime_folder / "fd.sock").unlink()
    wait_for(lambda: own_server.status()["problems"] == ["the socket fd.sock has died"])


def test_stalls_are_named_while_they_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    health, stalled_s, fault = Health(), 0.0, ""
    health.watch("one", lambda: True, lambda now_s: stalled_s)
    health.watch_fault("two", lambda: fault)
    health.check(0.0)
    stalled_s = STALLED_S + 1
    health.check(1.0)
    assert health.problems(1.0) == (), "a process that was stopped for a while comes back at once"
    health.check(2.0)
    assert health.problems(2.0) == (f"one has been stuck for {stalled_s:.0f} s",)
    fault = "two is lost"
    health.check(2.5)
    assert health.problems(2.5)[1:] == ("two is lost",)
    stalled_s, fault = 0.0, ""
    health.check(3.0)
    assert health.problems(3.0) == ()
    assert health.problems(3.0 + STALLED_S + 1) == (f"nobody has looked for {STALLED_S + 1:.0f} s",)
    # A new problem is logged also beside another one.
    stuck = "health problems=one has been stuck for 11 s"
    logged = [stuck, f"health problems=two is lost; {stuck.partition('=')[2]}"]
    assert caplog.messages == [*logged, "health problems=none"]


@pytest.mark.parametrize("ends", ["returns", "raises", "is cancelled"])
async def test_loop_in_turns_is_watched_until_return(
    ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn that takes too long is reported, a long pause is not. `wake` ends a pause."""
    health, wake, go_on, num_turns = Health(), asyncio.Event(), asyncio.Event(), 0

    async def work() -> None:
        nonlocal num_turns
        async for _ in health.turns("loop", 1000.0, 5.0, wake):
            num_turns += 1
            await go_on.wait()
            if num_turns == 2 and ends == "returns":
                return
            assert num_turns == 1, "told to raise"

    def problems() -> tuple[str, ...]:
        now_s = time.monotonic()
        health.check(now_s + 7)
        health.check(now_s + 7)
        return health.problems(now_s + 7)

    task = asyncio.create_task(work(), name="worker")
    await eventually(lambda: health.knows(task))
    assert problems() == ()
    wake.set()
    await eventually(lambda: num_turns == 1)
    (stuck,) = problems()
    assert stuck.startswith("loop has been stuck for ")
    go_on.set()
    await eventually(lambda: problems() == ())
    assert num_turns == 1 and health.knows(task)
    (task.cancel if ends == "is cancelled" else wake.set)()
    await eventually(lambda: not health.knows(task))
    assert problems() == (() if ends == "returns" else ("loop has died",))
    assert ("task died name=worker" in caplog.text) == (ends == "raises") and not health.breach


@pytest.mark.long
def test_a_loop_that_hangs_fails_every_probe(folder: Path) -> None:
    with (
        contextlib.closing(Manager(folder / "notify")) as manager,
        broken(folder, EXPIRED, "hang", environment=manager.environment) as (server, _),
    ):
        server.break_it()
        wait_for(lambda: server.probe("livez")[0] == 503)
        assert "the event loop does not answer" in server.probe("readyz")[1]
        assert server.ping("--live") == 1
        manager.read(CHECK_S)
        assert manager.read(3 * CHECK_S) == []
        # The log shows where the event loop hangs.
        wait_for(lambda: 'faults.py", line' in server.log.read_text())


# Messages to the service manager


class Manager:
    """A notification socket in place of systemd's."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "30000000"}
        self.close = self._socket.close

    def read(self, seconds: float) -> list[str]:
        """`NAME=value` assignments within `seconds`, or until this looks again."""
        heard: list[str] = []
        end_s = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(0.0, end_s - time.monotonic()))
            try:
                heard += self._socket.recv(4096).decode().splitlines()
            except (BlockingIOError, TimeoutError):
                return heard

    def read_until(self, last: str) -> list[str]:
        """Assignments up to the message with `last`."""
        heard: list[str] = []
        self._socket.settimeout(WAIT_S)
        while last not in heard:
            heard += self._socket.recv(4096).decode().splitlines()
        return heard


def test_systemd_is_told_although_no_descriptor_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(Manager(tmp_path / "notify")) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.environment["NOTIFY_SOCKET"])
        systemd.notify("READY=1")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        systemd.notify("WATCHDOG=1")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert manager.read(0.1) == ["READY=1", "WATCHDOG=1"]


@pytest.mark.long
def test_systemd_learns_of_start_trouble_and_stop(folder: Path) -> None:
    drain = ("--drain-timeout-s", "3")
    with (
        contextlib.closing(Manager(folder / "notify")) as manager,
        FaultyServer(folder, VERIFIER, "die", *drain, environment=manager.environment) as server,
    ):
        server.wait_ready()
        heard = manager.read_until("WATCHDOG=1")
        assert heard.index("READY=1") < heard.index("STATUS=serving") < heard.index("WATCHDOG=1")
        server.break_it()
        wait_for(lambda: "STATUS=scrubber has died" in manager.read(CHECK_S))
        assert "WATCHDOG=1" not in manager.read(3 * CHECK_S)
        os.kill(server.pid, signal.SIGTERM)
        assert "STOPPING=1" in manager.read_until("EXTEND_TIMEOUT_USEC=43000000")
        assert server.exit_status() == 0


def test_draining_is_not_ready_but_alive(folder: Path) -> None:
    """Its copy never ends, so it goes on draining."""
    with broken(folder, "copy", "hang") as (server, engine):
        server.break_it()
        begin_store(engine, hashes(2))
        wait_for(lambda: server.counter("transfers_in_flight") == 1)
        server.cli("drain", "--grace-s", "60")
        assert server.status()["state"] == "draining"
        assert server.probe("readyz") == (503, "the server drains\n")
        assert server.probe("livez") == (200, "ok\n")
        lines = server.probe("metrics")[1].splitlines()
        assert {"hotkv_ready 0.0", "hotkv_draining 1.0"} <= set(lines)
        assert not any(line.startswith("hotkv_problem{") and line[-3:] != "0.0" for line in lines)
        wait_for(lambda: server.ping() == 1)
        assert server.ping("--live") == 0
