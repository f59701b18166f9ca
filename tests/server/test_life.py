"""Life and death: of engines, of the server, of both at once; hung servers; draining; start and
stop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import (
    BlockRun,
    GroupHashes,
    LinkState,
    LoadRun,
    Role,
    Session,
    SessionConfig,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.keys import KeySpace
from tests.server.support import FULL
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]

VICTIM = """
import os, sys
import numpy as np
from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.testing import PagedEngine
engine = PagedEngine(
    sys.argv[1], engine_id="victim", layers=8, num_blocks=128, page_bytes=16384
).connect()
hashes = [os.urandom(32) for _ in range(24)]
at = np.arange(24, dtype=np.int32)
engine.session.store("s", "s", [BlockRun(0, hashes, at)], 20).result(60)
assert engine.session.acquire("held", [GroupHashes(0, hashes)], 600).result(60).pinned[0].all()
reserved = [BlockRun(0, [os.urandom(32) for _ in range(8)])]
engine.session.reserve("reserved", reserved, 600).result(60)
print("ready", flush=True)
waiting = []
for i in range(1_000_000):
    waiting.append(engine.session.load(f"l{i}", "held", [LoadRun(0, at, at + 32)], 20))
    if len(waiting) == 8:
        waiting.pop(0).result(60)
"""


def mapped_engine_memory(pid: int) -> int:
    return sum(
        "hotkv-engine" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
    )


def test_a_session_that_waits_for_a_server_ends_when_it_is_closed(tmp_path: Path) -> None:
    """An engine without a server stops at once."""
    key_space = KeySpace("model", "revision", "bfloat16", (FULL,), 16)
    session = Session(
        SessionConfig(
            f"unix:{tmp_path}/none.sock",
            "engine",
            Role.SCHEDULER,
            key_space,
            connect_timeout_s=60.0,
        )
    )
    session.start()
    wait_for(lambda: session._life._awaited is not None)
    session.close()
    assert not session._life.thread.is_alive()


def test_a_killed_engine_leaves_nothing(own_server: Server) -> None:
    """Its session, leases, reservations, mappings and descriptors go, in the middle of its loads;
    what it stored stays."""
    descriptors = Path(f"/proc/{own_server.pid}/fd")
    with AdminClient(own_server.target) as admin:
        before = len(list(descriptors.iterdir()))
        for _ in range(3):
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM, own_server.target], stdout=subprocess.PIPE, text=True
            )
            assert victim.stdout is not None
            assert victim.stdout.readline() == "ready\n"
            assert mapped_engine_memory(own_server.pid) == 1
            loaded_blocks = admin.info()["counters"]["loaded_blocks_total"]
            wait_for(
                lambda loaded=loaded_blocks: (
                    admin.info()["counters"]["loaded_blocks_total"] > loaded
                )
            )
            victim.send_signal(signal.SIGKILL)
            wait_for(lambda: not admin.sessions() and admin.info()["counters"]["leases"] == 0)
            victim.wait()
            assert mapped_engine_memory(own_server.pid) == 0
        counters = admin.info()["counters"]
        assert counters["transfers_in_flight"] == 0
        assert counters["arena_pinned_bytes"] == 0
        assert {b["state"] for b in admin.blocks(page_size=10_000)["blocks"]} == {"ready"}
        assert admin.tiers()[0]["block_count"] > 0
        wait_for(lambda: len(list(descriptors.iterdir())) <= before + 1)


def restart(server: Server, folder: Path) -> Server:
    """Returns the same runtime directory, another process."""
    return Server(folder, "16MiB", "--arena.slab-bytes", "64KiB")


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_killed_server_settles_transfers_and_comes_back(tmp_path: Path, kind: str) -> None:
    """A transfer in flight fails only when the server is dead; the client reconnects by itself;
    blocks can be stored and hit again."""
    with runtime_folder(64 << 20) as folder:
        server = restart(None, folder)  # type: ignore[arg-type]
        server.wait_ready()
        engine = PagedEngine(server.target, layers=4, num_blocks=256, page_bytes=16384).connect()
        engine.kv[:, :50] = np.random.default_rng(3).integers(
            0, 256, engine.kv[:, :50].shape, dtype=np.uint8
        )
        blocks = [os.urandom(32) for _ in range(50)]
        run, back = (
            BlockRun(0, blocks, np.arange(50, dtype=np.int32)),
            LoadRun(0, np.arange(50, dtype=np.int32), np.arange(60, 110, dtype=np.int32)),
        )
        assert (
            engine.session.store("first", "first", [run], 20).result(60).status
            is TransferStatus.DONE
        )
        epoch = engine.session.epoch
        futures = []
        for i in range(50):
            if kind == "load":
                engine.session.acquire(f"l{i}", [GroupHashes(0, blocks)])
                futures.append(engine.session.load(f"l{i}", f"l{i}", [back], 20))
            else:
                fresh = BlockRun(
                    0, [os.urandom(32) for _ in range(50)], np.arange(50, dtype=np.int32)
                )
                futures.append(engine.session.store(f"s{i}", f"s{i}", [fresh], 20))
            if i == 25:
                os.kill(server.pid, signal.SIGKILL)
        outcomes = {type(future.exception(60)) for future in futures}
        assert outcomes <= {type(None), SessionLostError, HotKVError}, outcomes
        assert SessionLostError in outcomes
        wait_for(lambda: engine.session.state is LinkState.ABSENT)
        assert engine.session.probe(0, blocks) is None
        with pytest.raises(SessionLostError):
            engine.session.acquire("x", [GroupHashes(0, blocks)]).result(60)
        server.__exit__()
        for name in ("run", "arena"):
            (folder / name).rename(folder / f"old-{name}")
        with restart(server, folder) as again:
            again.wait_ready()
            assert engine.session.wait_connected(20)
            assert engine.session.epoch != epoch
            stored = engine.session.store("again", "again", [run], 20).result(60)
            assert np.isin(stored.results[0], (1, 2)).all()
            engine.session.acquire("again-l", [GroupHashes(0, blocks)]).result(60)
            assert (
                engine.session.load("again-l", "again-l", [back], 20).result(60).status
                is TransferStatus.DONE
            )
            assert np.array_equal(engine.kv[:, 60:110], engine.kv[:, :50])
            engine.close()


def test_a_hung_server_keeps_loads_open_until_it_wakes(own_server: Server, engine: Make) -> None:
    """It might write into the engine's memory at any moment."""
    one = engine(own_server.target, layers=4, num_blocks=128)
    blocks = [os.urandom(32) for _ in range(64)]
    one.session.store("s", "s", [BlockRun(0, blocks, np.arange(64, dtype=np.int32))], 20).result(60)
    one.session.acquire("l", [GroupHashes(0, blocks)]).result(60)
    os.kill(own_server.pid, signal.SIGSTOP)
    future = one.session.load(
        "l",
        "l",
        [LoadRun(0, np.arange(64, dtype=np.int32), np.arange(64, 128, dtype=np.int32))],
        20,
    )
    one.session.cancel("l")
    time.sleep(0.3)
    assert not future.done()
    os.kill(own_server.pid, signal.SIGCONT)
    assert future.result(60).status in (TransferStatus.DONE, TransferStatus.CANCELLED)


UNSEEN, ANSWERED = 0, 1
"""Turns that leave nothing to chance: the server hangs before it has seen the store, or after it
has answered it."""


def wait_at_random(
    turn: int, futures: "Sequence[Future[Any]]", random: np.random.Generator
) -> None:
    """Lets the server go on with stores for a moment, or to their end."""
    if turn == ANSWERED:
        for future in futures:
            future.result(60)
    elif turn != UNSEEN:
        time.sleep(random.uniform(0, 0.002))


def holds_only(reader: PagedEngine, name: str, blocks: list[bytes], value: int) -> bool:
    """Returns whether some of the blocks are there; those hold nothing but `value`."""
    pinned = reader.session.acquire(name, [GroupHashes(0, blocks)]).result(60).pinned[0]
    at = np.flatnonzero(pinned).astype(np.int32)
    if len(at):
        reader.kv[:] = 0
        reader.session.load(name, name, [LoadRun(0, at, at)], 20).result(60)
        assert (reader.kv[:, at] == value).all()
    reader.session.release(name)
    return len(at) > 0


def test_a_hung_server_never_commits_what_was_taken_back(own_server: Server, engine: Make) -> None:
    """A cancelled store resolves at once, the engine overwrites its blocks, and no wrong byte is
    ever ready."""
    one, reader = (
        engine(own_server.target, layers=8, num_blocks=64, page_bytes=16384),
        engine(own_server.target, layers=8, num_blocks=64, page_bytes=16384),
    )
    random = np.random.default_rng(5)
    kept = []
    for i in range(40):
        blocks = [os.urandom(32) for _ in range(32)]
        one.kv[:, :32] = 7
        if i == UNSEEN:
            os.kill(own_server.pid, signal.SIGSTOP)
        future = one.session.store(
            f"s{i}", f"s{i}", [BlockRun(0, blocks, np.arange(32, dtype=np.int32))], 20
        )
        wait_at_random(i, [future], random)
        os.kill(own_server.pid, signal.SIGSTOP)
        one.session.cancel(f"s{i}")
        assert future.result(0.5) is not None
        one.kv[:, :32] = 13
        os.kill(own_server.pid, signal.SIGCONT)
        one.session.ping(10)
        one.session.ping(10)
        kept.append(holds_only(reader, f"r{i}", blocks, 7))
    assert (kept[UNSEEN], kept[ANSWERED]) == (False, True)


def test_a_hung_server_never_commits_what_was_revoked_all_at_once(
    own_server: Server, engine: Make
) -> None:
    """As above, of several stores that nobody names; stores that come later are kept."""
    one, reader = (
        engine(own_server.target, layers=8, num_blocks=64, page_bytes=16384),
        engine(own_server.target, layers=8, num_blocks=64, page_bytes=16384),
    )
    random, kept = np.random.default_rng(7), []
    for i in range(15):
        parts = [[os.urandom(32) for _ in range(16)] for _ in range(2)]
        one.kv[:, :32] = 7
        if i == UNSEEN:
            os.kill(own_server.pid, signal.SIGSTOP)
        futures = [
            one.session.store(
                f"s{i}-{n}",
                f"s{i}-{n}",
                [BlockRun(0, blocks, np.arange(16 * n, 16 * n + 16, dtype=np.int32))],
                20,
            )
            for n, blocks in enumerate(parts)
        ]
        wait_at_random(i, futures, random)
        os.kill(own_server.pid, signal.SIGSTOP)
        one.session.revoke_stores()
        one.kv[:, :32] = 13
        os.kill(own_server.pid, signal.SIGCONT)
        assert [future.result(60).status for future in futures]
        kept.append([holds_only(reader, f"r{i}-{n}", blocks, 7) for n, blocks in enumerate(parts)])
    assert (kept[UNSEEN], kept[ANSWERED]) == ([False, False], [True, True])
    later = [os.urandom(32)]
    one.kv[:, :1] = 9
    one.session.store("later", "later", [BlockRun(0, later, np.array([0], np.int32))], 20).result(
        10
    )
    assert holds_only(reader, "later", later, 9)


def test_a_server_that_hangs_while_the_stream_breaks_never_commits_what_was_under_way(
    own_server: Server, engine: Make
) -> None:
    """The store fails at once, the engine overwrites its blocks, and no wrong byte is ever
    ready."""
    reader = engine(own_server.target, layers=8, num_blocks=64, page_bytes=16384)
    random, kept = np.random.default_rng(6), []
    for i in range(15):
        one = engine(
            own_server.target, layers=8, num_blocks=64, page_bytes=16384, engine_id=f"breaks-{i}"
        )
        with AdminClient(own_server.target) as admin:
            numbers = {
                session["session_number"]
                for session in admin.sessions()
                if session["engine_id"] == f"breaks-{i}"
            }
        assert numbers
        blocks = [os.urandom(32) for _ in range(32)]
        one.kv[:, :32] = 7
        if i == UNSEEN:
            os.kill(own_server.pid, signal.SIGSTOP)
        future = one.session.store(
            "s", "s", [BlockRun(0, blocks, np.arange(32, dtype=np.int32))], 20
        )
        wait_at_random(i, [future], random)
        os.kill(own_server.pid, signal.SIGSTOP)
        was_answered, connection = future.done(), one.session._connection
        assert connection is not None
        connection.channel.close()
        assert (
            was_answered
            or isinstance(future.exception(60), SessionLostError)
            or future.result(0).status is TransferStatus.DONE
        )
        one.kv[:, :32] = 13
        os.kill(own_server.pid, signal.SIGCONT)
        reader.session.ping(10)
        # The server has settled what the broken stream left.
        with AdminClient(own_server.target) as admin:
            wait_for(
                lambda numbers=numbers: (
                    not numbers & {session["session_number"] for session in admin.sessions()}
                )
            )
        kept.append(holds_only(reader, f"r{i}", blocks, 7))
    assert (kept[UNSEEN], kept[ANSWERED]) == (False, True)


def test_a_cancelled_store_answers_at_once(own_server: Server, engine: Make) -> None:
    """All of it was committed before, or none of it is; the server's books are clean either way."""
    one = engine(own_server.target, layers=8, num_blocks=128, page_bytes=16384)
    for i in range(30):
        blocks = [os.urandom(32) for _ in range(100)]
        future = one.session.store(
            f"c{i}", f"c{i}", [BlockRun(0, blocks, np.arange(100, dtype=np.int32))], 20
        )
        one.session.cancel(f"c{i}")
        assert future.done() or future.result(1)
        one.session.ping(10)
        there = one.session.lookup([GroupHashes(0, blocks)]).result(60)[0]
        assert there.all() or not there.any()
    with AdminClient(own_server.target) as admin:
        wait_for(lambda: admin.info()["counters"]["leases"] == 0)
        assert {b["state"] for b in admin.blocks(page_size=10_000)["blocks"]} <= {"ready"}


def test_draining_refuses_new_work_and_stops(tmp_path: Path, engine: Make) -> None:
    with runtime_folder(64 << 20) as folder, restart(None, folder) as server:  # type: ignore[arg-type]
        server.wait_ready()
        one = engine(server.target)
        blocks = [os.urandom(32)]
        one.session.store("s", "s", [BlockRun(0, blocks, np.zeros(1, np.int32))], 5).result(60)
        with AdminClient(server.target) as admin:
            admin.drain(5)
        wait_for(lambda: one.session.state is not LinkState.CONNECTED)
        with pytest.raises(HotKVError):
            one.session.acquire("l", [GroupHashes(0, blocks)]).result(60)
        wait_for(
            lambda: (
                not Path(f"/proc/{server.pid}").exists() or server._child.process.poll() is not None
            )
        )
        assert server._child.process.returncode == 0
        assert not (server.runtime_folder / "grpc.sock").exists()


def test_a_second_server_on_one_directory_refuses(own_server: Server, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hotkv_server",
        "run",
        "--runtime-dir",
        str(own_server.runtime_folder),
        "--arena.bytes",
        "16MiB",
    ]
    command += ["--arena.dir", str(tmp_path / "arena")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"in use by hotkv-server with pid {own_server.pid}" in done.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--arena.bytes", "10Gx"], {}, ["arena.bytes", "10Gx"]),
        (["--copy.threads", "-1"], {}, ["copy.threads", "greater than or equal to 0"]),
        ([], {"HOTKV_LOG_LEVEL": "loud"}, ["log_level", "loud", "'debug'"]),
        (["--tcp-address", "0.0.0.0:1"], {}, ["tcp_address", "security.tcp_insecure"]),
        (["--config", "/nowhere.toml"], {}, ["--config", "/nowhere.toml"]),
        (
            ["--arena.bytes", "16MiB", "--arena.slab-bytes", "32MiB"],
            {},
            ["slab_bytes", "not be larger"],
        ),
    ],
)
def test_bad_settings_name_the_field(
    flags: list[str], environment: dict[str, str], words: list[str]
) -> None:
    command = [sys.executable, "-m", "hotkv_server", "run", "--check", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_settings_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    config = tmp_path / "hotkv.toml"
    config.write_text(
        'log_level = "warning"\n[arena]\nbytes = "2GiB"\nslab_bytes = "1MiB"\n[leases]\nttl_s = 7\n'
    )
    command = [
        sys.executable,
        "-m",
        "hotkv_server",
        "run",
        "--check",
        "--config",
        str(config),
        "--arena.bytes",
        "4GiB",
    ]
    environment = {**os.environ, "HOTKV_LEASES__TTL_S": "9"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    import json

    shown = json.loads(done.stdout)
    assert (
        shown["log_level"],
        shown["arena"]["bytes"],
        shown["arena"]["slab_bytes"],
        shown["leases"]["ttl_s"],
    ) == (
        "warning",
        4 << 30,
        1 << 20,
        9,
    )


def test_an_arena_that_does_not_fit_says_so(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hotkv_server",
        "run",
        "--runtime-dir",
        str(tmp_path),
        "--arena.bytes",
        "100TiB",
    ]
    command += ["--arena.dir", str(tmp_path / "arena")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "MiB free" in done.stderr
    assert "lower arena.bytes" in done.stderr


def test_reason_of_an_unknown_session_is_not_found(own_server: Server, engine: Make) -> None:
    one = engine(own_server.target)
    one.session.close()
    with pytest.raises(HotKVError) as caught:
        one.session.lookup([]).result(60)
    assert caught.value.reason is Reason.UNKNOWN_SESSION


def test_a_server_that_is_ready_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba names each kernel that it reads or compiles. The first store of a new installation took
    seconds for the last of them."""
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as running:
        running.wait_ready()
        said = running.log.read_text()
        engine = PagedEngine(running.target, engine_id="one").connect()
        hashes = [os.urandom(32) for _ in range(4)]
        assert (
            engine.session.store("s", "s", [BlockRun(0, hashes, np.arange(4, dtype=np.int32))], 20)
            .result(60)
            .num_bytes
        )
        engine.close()
        assert (
            "kernels.copy_runs" in said and "kernels." not in running.log.read_text()[len(said) :]
        )
