"""Tests starts, stops, kills, hangs and drains, of the server and of engines."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import (
    BlockResult,
    BlockRun,
    EngineMemory,
    GroupHashes,
    LinkState,
    LoadRun,
    Session,
    TransferResult,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_client.fence import SHARED_WORDS, Revocations, SharedFence
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.targets import descriptor_socket
from hotkv_client.tickets import fetch_ticket
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.layout import FENCE_WORDS
from tests.server.places import load as load_blocks
from tests.server.places import store as store_blocks
from tests.server.support import block_ids, hashes
from tests.support.waiting import stop, wait_for

Make = Callable[..., PagedEngine]

VICTIM = """
import os, sys
import numpy as np
from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.paged_engine import PagedEngine
engine = PagedEngine(sys.argv[1], layers=8, num_blocks=128, page_bytes=16384).connect()
hashes = [os.urandom(32) for _ in range(24)]
at = np.arange(24, dtype=np.int32)
engine.session.store("s", "s", [BlockRun(0, hashes, at)], 20).result(60)
assert engine.session.acquire("held", [GroupHashes(0, hashes)], 600).result(60).pinned[0].all()
reserved = [BlockRun(0, [os.urandom(32) for _ in range(8)])]
engine.session.reserve("reserved", reserved, 600).result(60)
print("ready", flush=True)
for i in range(1_000_000):
    runs = [LoadRun(0, at, at + 32)]
    loads = [engine.session.load(f"{i} {n}", "held", runs, 20) for n in range(8)]
    loads[0].result(60)
"""


def mapped_engine_memory(pid: int) -> int:
    return sum(
        "hotkv-engine" in line
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    )


def test_a_killed_engine_leaves_nothing(own_server: Server) -> None:
    descriptors = Path(f"/proc/{own_server.pid}/fd")
    with AdminClient(own_server.target) as admin:

        def loaded() -> int:
            return int(admin.info()["counters"]["loaded_blocks_total"])

        before = len(list(descriptors.iterdir()))
        for _ in range(3):
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM, own_server.target], stdout=subprocess.PIPE, text=True
            )
            assert victim.stdout is not None
            assert victim.stdout.readline() == "ready\n"
            assert mapped_engine_memory(own_server.pid) == 1
            before_loads = loaded()
            wait_for(lambda before=before_loads: loaded() > before)
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


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_killed_server_settles_transfers_and_comes_back(kind: str) -> None:
    with runtime_folder(64 << 20) as folder:
        server = Server(folder, "16MiB")
        server.wait_ready()
        engine = PagedEngine(server.target, layers=4, num_blocks=256, page_bytes=16384).connect()
        random, session, blocks = np.random.default_rng(3), engine.session, hashes(50)
        engine.kv[:, :50] = random.integers(0, 256, engine.kv[:, :50].shape, dtype=np.uint8)
        back = LoadRun(0, block_ids(50), block_ids(50, 60))
        assert store_blocks(engine, blocks) == {BlockResult.STORED}
        epoch, futures = session.epoch, []
        for i in range(50):
            if kind == "load":
                session.acquire(f"l{i}", [GroupHashes(0, blocks)])
                futures.append(session.load(f"l{i}", f"l{i}", [back], 20))
            else:
                fresh = BlockRun(0, hashes(50), block_ids(50))
                futures.append(session.store(f"s{i}", f"s{i}", [fresh], 20))
            if i == 25:
                os.kill(server.pid, signal.SIGKILL)
        outcomes = {type(future.exception(60)) for future in futures}
        assert outcomes <= {type(None), SessionLostError, HotKVError}, outcomes
        assert SessionLostError in outcomes
        wait_for(lambda: session.state is LinkState.ABSENT)
        assert session.probe(0, blocks) is None
        with pytest.raises(SessionLostError):
            session.acquire("x", [GroupHashes(0, blocks)]).result(60)
        server.__exit__()
        for name in ("run", "arena"):
            (folder / name).rename(folder / f"old-{name}")
        with Server(folder, "16MiB") as again:
            again.wait_ready()
            assert session.wait_connected(20) and session.epoch != epoch
            assert store_blocks(engine, blocks) <= {BlockResult.STORED, BlockResult.PRESENT}
            assert load_blocks(engine, blocks, 60) is TransferStatus.DONE
            assert np.array_equal(engine.kv[:, 60:110], engine.kv[:, :50])
            engine.close()


def load_of_a_hung_server(server: Server, one: PagedEngine) -> "Future[TransferResult]":
    """SIGSTOP makes it hang."""
    blocks = hashes(64)
    store_blocks(one, blocks)
    one.session.acquire("l", [GroupHashes(0, blocks)]).result(60)
    stop(server.pid)
    return one.session.load("l", "l", [LoadRun(0, block_ids(64), block_ids(64, 64))], 20)


def test_hung_server_keeps_loads_open_until_awake(own_server: Server, engine: Make) -> None:
    """The server might still write into the engine's memory, even if the load is cancelled."""
    one = engine(own_server.target, layers=4, num_blocks=128)
    future = load_of_a_hung_server(own_server, one)
    one.session.cancel("l")
    runs = [BlockRun(0, hashes(1), block_ids(1))]
    stores = [one.session.store(f"s{n}", f"s{n}", runs, 20) for n in range(FENCE_WORDS)]
    error = stores.pop().exception(0)
    assert isinstance(error, HotKVError) and error.reason is Reason.OVERLOADED
    assert not any(store.done() for store in stores), "each can be revoked"
    one.session.revoke_stores()
    time.sleep(0.3)
    assert not future.done()
    os.kill(own_server.pid, signal.SIGCONT)
    assert future.result(60).status in (TransferStatus.DONE, TransferStatus.CANCELLED)
    for store in stores:
        assert not any(BlockResult.STORED in part for part in store.result(60).results)
    assert store_blocks(one, hashes(1)) == {BlockResult.STORED}


def test_shared_fence_word_waits_for_its_answer(own_server: Server, engine: Make) -> None:
    """The hung server may still read the word of a cancelled store."""
    one, fence = engine(own_server.target), SharedFence()
    words, config = Revocations([fence.place]), replace(one.session.config, engine_id="shared")
    with closing(Session(config, EngineMemory(one.layout, {"kv": one.fd}, fence=fence))) as session:
        session.start()
        assert session.wait_connected(60)
        stop(own_server.pid)
        index, run = words.take(), BlockRun(0, hashes(1), block_ids(1))
        store = session.store("s", "s", [run], 20, fence_index=index)
        session.cancel("s")
        assert store.result(0).status is TransferStatus.CANCELLED
        words.end(index)
        assert index not in [words.take() for _ in range(SHARED_WORDS)]
        os.kill(own_server.pid, signal.SIGCONT)
        wait_for(lambda: words.take() == index)
        assert not session.probe(0, run.hashes).any()


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_broken_streams_load_stays_open_until_release(
    own_server: Server, engine: Make, end: signal.Signals
) -> None:
    def settling() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hotkv-settle"]

    one = engine(own_server.target, layers=4, num_blocks=128, reconnect_max_s=60.0)
    future = load_of_a_hung_server(own_server, one)
    lookup = one.session.lookup([GroupHashes(0, hashes(1))])
    assert one.session._connection is not None
    one.session._connection.stream.cancel()
    # The lookup fails at once; the load must not, as it writes into the engine's memory.

    assert isinstance(lookup.exception(60), SessionLostError)
    wait_for(lambda: one.session.state is LinkState.ABSENT)
    with pytest.raises(TimeoutError):
        future.exception(0.5)
    wait_for(lambda: len(settling()) == 1)
    os.kill(own_server.pid, end)
    assert isinstance(future.exception(60), SessionLostError)
    # The load has ended: the server must write nothing now.
    one.kv[:] = 77
    wait_for(lambda: not settling())
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.5:
        assert (one.kv == 77).all()


def test_hundred_clients_at_once_all_get_tickets(
    own_server: Server,
) -> None:
    path, timeout_s = descriptor_socket(own_server.target), 60.0
    assert path is not None
    with ThreadPoolExecutor(100) as pool:
        stop(own_server.pid)
        tickets = [pool.submit(fetch_ticket, path, timeout_s) for _ in range(100)]
        # A client that the system refuses fails at once.
        _, waiting = wait(tickets, 0.5)
        os.kill(own_server.pid, signal.SIGCONT)
        assert len(waiting) == 100
        assert len({ticket.result(timeout_s) for ticket in tickets}) == 100


UNSEEN, ANSWERED = 0, 1
"""Turns in which the order is certain: the server hangs before it receives the store, or after
its answer."""


def holds_only(reader: PagedEngine, blocks: list[bytes], value: int) -> bool:
    """All ready blocks must have this value in every byte. False if none is ready."""
    name = os.urandom(8).hex()
    pinned = reader.session.acquire(name, [GroupHashes(0, blocks)]).result(60).pinned[0]
    at = np.flatnonzero(pinned).astype(np.int32)
    if len(at):
        reader.kv[:] = 0
        reader.session.load(name, name, [LoadRun(0, at, at)], 20).result(60)
        assert (reader.kv[:, at] == value).all()
    reader.session.release(name)
    return len(at) > 0


Stores = Sequence["Future[TransferResult]"]


def cancelled(one: PagedEngine, names: list[str], stores: Stores) -> None:
    """Their futures end although the server hangs."""
    for name, store in zip(names, stores, strict=True):
        one.session.cancel(name)
        assert store.result(60) is not None


def revoked(one: PagedEngine, names: list[str], stores: Stores) -> None:
    one.session.revoke_stores()


def broken(one: PagedEngine, names: list[str], stores: Stores) -> None:
    """Stores that were not answered before must fail."""
    connection, were_answered = one.session._connection, [store.done() for store in stores]
    assert connection is not None
    connection.stream.cancel()
    for store, was_answered in zip(stores, were_answered, strict=True):
        error = store.exception(60)
        assert was_answered or isinstance(error, SessionLostError) or store.result(0)


@pytest.mark.parametrize(("take_back", "num_turns"), [(cancelled, 40), (revoked, 15), (broken, 15)])
def test_hung_server_never_commits_revoked_stores(
    own_server: Server,
    engine: Make,
    take_back: Callable[[PagedEngine, list[str], Stores], None],
    num_turns: int,
) -> None:
    """Their blocks are overwritten as soon as they are revoked."""
    shape = {"layers": 8, "num_blocks": 64, "page_bytes": 16384}
    one, reader = (engine(own_server.target, **shape) for _ in range(2))
    random, kept = np.random.default_rng(5), []
    for turn in range(num_turns):
        if take_back is broken:
            one = engine(own_server.target, engine_id=f"breaks-{turn}", **shape)
        parts, names = [hashes(16), hashes(16)], [f"s{turn}-{n}" for n in range(2)]
        one.kv[:, :32] = 7
        if turn == UNSEEN:
            stop(own_server.pid)
        elif turn == ANSWERED:
            # What earlier stores reserved leaves no room: a client has a quarter of the arena.
            wait_for(lambda: not own_server.counter("transfers_in_flight"))
        stores = [
            one.session.store(name, name, [BlockRun(0, blocks, block_ids(16, 16 * n))], 20)
            for n, (name, blocks) in enumerate(zip(names, parts, strict=True))
        ]
        if turn == ANSWERED:
            for store in stores:
                store.result(60)
        elif turn != UNSEEN:
            time.sleep(random.uniform(0, 0.002))
        stop(own_server.pid)
        take_back(one, names, stores)
        if take_back is broken:
            one.session.close()
        one.kv[:, :32] = 13
        os.kill(own_server.pid, signal.SIGCONT)
        if take_back is broken:
            # With the session, its transfers have ended.
            gone = f"breaks-{turn}"
            with AdminClient(own_server.target) as admin:
                wait_for(lambda: gone not in [s["engine_id"] for s in admin.sessions()])  # noqa: B023
        else:
            assert all(store.result(60) for store in stores)
            one.session.ping(10)
            one.session.ping(10)
        kept.append([holds_only(reader, blocks, 7) for blocks in parts])
    assert (kept[UNSEEN], kept[ANSWERED]) == ([False, False], [True, True])
    later = hashes(1)
    reader.kv[:, :1] = 9
    assert store_blocks(reader, later) == {BlockResult.STORED} and holds_only(reader, later, 9)


def test_a_server_that_is_ready_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling or loading one later would delay the first calls."""
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as running:
        running.wait_ready()
        said = running.log.read_text()
        engine = PagedEngine(running.target, engine_id="one").connect()
        assert store_blocks(engine, hashes(4)) == {BlockResult.STORED}
        engine.close()
        assert "table_reading.copy_runs" in said and not re.search(
            r"_kernels\.|table_reading\.", running.log.read_text()[len(said) :]
        )
