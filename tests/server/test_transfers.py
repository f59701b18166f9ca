"""Tests stores and loads, on a real server and on a node in this process."""

import asyncio
import itertools
import os
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, Evicted, TransferStatus
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import hash_words
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc, session_pb2
from hotkv_server.cache.values import HashList, LoadPositions
from hotkv_server.integrity.evidence import condemn
from hotkv_server.node import transfers as transfer_module
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.wire.guard.limits import Pace
from hotkv_server.wire.session_stream import SessionCalls
from tests.server.nodes import live_node, store_in, told, worker
from tests.server.places import found, load, store
from tests.server.support import block_ids, hashes
from tests.support.waiting import eventually

Make = Callable[..., PagedEngine]


def test_bytes_move_between_engines_and_are_stored_once(engine: Make) -> None:
    one, other, stranger = engine(), engine(), engine(model="another")
    one.kv[:] = np.random.default_rng(1).integers(0, 256, one.kv.shape, dtype=np.uint8)
    other.kv[:] = 0
    blocks = hashes(20)
    sources, targets = (np.random.permutation(64)[:20].astype(np.int32) for _ in range(2))
    assert store(one, blocks, sources) == {BlockResult.STORED}
    assert store(other, blocks, sources) == {BlockResult.PRESENT}
    probe = other.session.probe(0, [*blocks, *hashes(5)])
    assert probe is not None and probe.tolist() == [True] * 20 + [False] * 5
    assert all(found(other, blocks)) and not any(found(stranger, blocks))
    probe = stranger.session.probe(0, blocks)
    assert probe is not None and not probe.any()
    assert load(other, blocks, targets) is TransferStatus.DONE
    assert np.array_equal(other.kv[:, targets], one.kv[:, sources])
    untouched = np.setdiff1d(np.arange(64), targets)
    assert not other.kv[:, untouched].any()


def test_a_burst_beyond_capacity_keeps_what_it_says(own_server: Server, engine: Make) -> None:
    """A block that is not there must have been evicted."""
    told: list[Evicted] = []
    one = engine(own_server.target, on_evicted=told.append, num_blocks=64)
    lists = [hashes(64) for _ in range(200)]  # 100 MiB into 16 MiB
    futures = [
        one.session.store(f"b{i}", f"b{i}", [BlockRun(0, h, block_ids(64))], 60)
        for i, h in enumerate(lists)
    ]
    results = np.concatenate([future.result(60).results[0] for future in futures])
    refused = {BlockResult.NO_SPACE, BlockResult.ABORTED}
    assert set(results.tolist()) <= {BlockResult.STORED, *refused}
    everything = [h for blocks in lists for h in blocks]
    stored = {everything[at] for at in np.flatnonzero(results == BlockResult.STORED)}
    present = set()
    for start in range(0, len(everything), 8192):
        part = everything[start : start + 8192]
        present.update(itertools.compress(part, found(one, part)))
    one.session.ping(5)  # Notices come before the answer to a later call.
    gone = {h for notice in told for group in notice.groups for h in group.hashes}
    assert stored - gone == present
    # The burst is over, so slots are free.
    newest = hashes(64)
    assert store(one, newest) == {BlockResult.STORED} and all(found(one, newest))


@pytest.mark.parametrize("hears", [True, False])
def test_who_has_no_use_for_notices_gets_none(
    own_server: Server, engine: Make, hears: bool
) -> None:
    one, outbox = engine(own_server.target), queue.SimpleQueue[_wire.Request | None]()
    config = replace(
        one.session.config,
        engine_id="listener",
        on_evicted=(lambda notice: None) if hears else None,
    )
    ping = _wire.ping()
    ping.request_id = 7
    with grpc.insecure_channel(own_server.target) as channel:
        outbox.put(_wire.open_session(config))
        call = _wire.connect(_wire.Stub(channel), iter(outbox.get, None))
        assert next(call).WhichOneof("body") == "session_opened"
        for _ in range(40):  # 20 MiB into 16 MiB
            store(one, hashes(64))
        outbox.put(ping)
        kinds = (response.WhichOneof("body") for response in call)
        came = set(itertools.takewhile(lambda kind: kind != "pong", kinds))
        outbox.put(None)
    assert came == ({"eviction_notice"} if hears else set())


def test_only_what_was_loaded_counts_as_loaded(own_server: Server, engine: Make) -> None:
    one, blocks = engine(own_server.target), hashes(4)
    store(one, blocks)
    for at in range(3):
        load(one, blocks[at : at + 1], 9)
    assert own_server.counter("loaded_blocks_total") == 3
    assert own_server.counter("loaded_bytes_total") == 3 * 2 * 4096


def test_blocks_move_by_unary_calls_too(server: Server, engine: Make) -> None:
    one, blocks = engine(), b"".join(hashes(2))
    one.kv[:] = np.frombuffer(os.urandom(one.kv.nbytes), np.uint8).reshape(one.kv.shape)
    connection = one.session._connection
    assert connection is not None
    of = {"session_id": connection.session_id}
    run = cache_pb2.BlockRun(hashes=blocks, block_ids=block_ids(2).tobytes())
    store = cache_pb2.StoreRequest(**of, transfer_id="t", lease_id="w", runs=[run])
    named = [cache_pb2.GroupHashes(hashes=blocks)]
    moves = cache_pb2.LoadRun(
        lease_positions=block_ids(2).tobytes(), block_ids=block_ids(2, 2).tobytes()
    )
    load = cache_pb2.LoadRequest(**of, transfer_id="t", lease_id="r", runs=[moves])
    with grpc.insecure_channel(server.target) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        stored = stub.Store(store)
        assert stored.runs[0].results == bytes([BlockResult.STORED] * 2), stored
        stub.AcquireLease(cache_pb2.AcquireLeaseRequest(**of, lease_id="r", groups=named))
        loaded = stub.Load(load)
        assert (stored.status, loaded.status) == (TransferStatus.DONE, TransferStatus.DONE)
        assert (one.kv[:, 2:4] == one.kv[:, :2]).all()
        assert stored.byte_count == loaded.byte_count == one.kv[:, :2].nbytes
        assert not stub.CancelTransfer(cache_pb2.CancelTransferRequest(**of, transfer_id="t")).found
        release = cache_pb2.ReleaseLeaseRequest(**of, lease_id="r")
        assert [stub.ReleaseLease(release).released for _ in range(2)] == [True, False]


@pytest.mark.parametrize("reason", [Reason.UNKNOWN_SESSION, Reason.OVERLOADED, None])
async def test_store_that_may_not_begin_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: Reason | None
) -> None:
    async with live_node(tmp_path) as node:
        session = await worker(node)

        async def waits(*_: object) -> bool:
            if reason is Reason.OVERLOADED:
                monkeypatch.setattr(transfer_module, "MAX_TRANSFERS_OF_SESSION", 0)
            elif reason is None:  # Flushes the key space of the session.
                await node.flush(1)
            else:
                # The arena is being read, so the close must wait.
                session.num_reads = 1
                closing.append(asyncio.create_task(node.sessions.close(session)))
                await asyncio.sleep(0)
            return True

        closing: list[asyncio.Task[None]] = []
        monkeypatch.setattr(node.growth, "await_room", waits)
        monkeypatch.setattr(node.growth, "is_growing", True)
        if reason is None:
            assert await store_in(node, session, hashes(1)) == [BlockResult.ABORTED]
        else:
            with pytest.raises(HotKVError) as caught:
                await store_in(node, session, hashes(1))
            assert caught.value.reason is reason and not node.transfers.stored_bytes
        assert not node.core.space.index.num_entries
        check_clean(node, session)
        session.num_reads = 0
        session.settled.set()
        await asyncio.gather(*closing)


def check_clean(node: Node, session: LiveSession) -> None:
    node.core.check_invariants()
    assert (len(node.core.leases), len(node.core.transfers), session.jobs) == (0, 0, {})


async def test_a_store_is_answered_although_a_capability_breaks(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        node.events.blocks_stored.add(lambda *_: 1 / 0)
        storing = store_in(node, await worker(node), hashes(1))
        assert await asyncio.wait_for(storing, 20) == [BlockResult.STORED]


async def test_evicted_before_answering_is_answered_absent(tmp_path: Path) -> None:
    """The answer comes after the eviction notice, so "present" would be wrong."""
    async with live_node(tmp_path) as node:
        session, sent = await worker(node, 2), list[session_pb2.ConnectResponse]()
        old, new = hashes(2)
        await store_in(node, session, [old])
        run = cache_pb2.BlockRun(hashes=old + new, block_ids=block_ids(2).tobytes())
        request = cache_pb2.StoreRequest(transfer_id="t", lease_id="t", runs=[run])
        stream = SessionCalls(node, session, Pace(1000.0), told(sent))
        await stream.handle(session_pb2.ConnectRequest(request_id=7, store=request))
        await node.removals.evict(session.record.key_space_id, 0, hash_words(old, 32))
        await eventually(lambda: bool(sent))
        assert [*sent[0].store.runs[0].results] == [BlockResult.ABORTED, BlockResult.STORED]
        node.core.check_invariants()


async def test_lease_waiting_at_session_close_is_none(
    tmp_path: Path,
) -> None:
    async with live_node(tmp_path) as node:
        session, sent = await worker(node), list[session_pb2.ConnectResponse]()
        answered, generations = asyncio.Event(), Mock(wait_to_serve=AsyncMock(return_value=True))
        tiers = node.tiers = Mock(generations=generations, promote=lambda *_: answered.wait())
        stream = SessionCalls(node, session, Pace(1000.0), told(sent))
        groups = [cache_pb2.GroupHashes(hashes=hashes(1)[0])]
        asked = cache_pb2.AcquireLeaseRequest(lease_id="l", groups=groups)
        request = session_pb2.ConnectRequest(request_id=7, acquire_lease=asked)
        assert await stream.handle(request) is None
        (task,) = [one for one in asyncio.all_tasks() if "_acquire_later" in repr(one)]
        await node.sessions.close(session)
        answered.set()
        await asyncio.wait([task])
        await eventually(lambda: tiers.unpin.called)
        node.tiers = None
        assert not sent and not node.refusals


@pytest.mark.parametrize("broken", ["", "judge", "settle", "submit"])
async def test_load_that_cant_be_verified_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    """If nothing breaks, it is cancelled by the session's close."""
    async with live_node(tmp_path, config={"check_stride": 1}) as node:
        session, blocks, at = await worker(node), hashes(1), [np.zeros(1, np.int64)]
        assert await store_in(node, session, blocks) == [BlockResult.STORED]
        asked = [HashList(0, hash_words(blocks[0], 32))]
        node.core.acquire(session.record.number, "r", asked, 60.0, time.monotonic())
        node.core.space.index.unverified[:] = True
        if broken:
            part = node.copy_engine if broken == "submit" else node.verifier
            monkeypatch.setattr(part, broken, lambda *_: 1 / 0)
        load = node.transfers.load(session, "u", "r", [LoadPositions(0, at[0])], at, 5.0)
        await asyncio.wait_for(node.sessions.close(session), 20)
        end = await load
        assert end.status is (TransferStatus.FAILED if broken else TransferStatus.CANCELLED)
        assert ("ZeroDivisionError" in end.message) == bool(broken)
        check_clean(node, session)


@pytest.mark.parametrize("what", ["", "condemned", "breach"])
async def test_a_load_fails_with_what_it_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Meanwhile its block is condemned, or the server's books break."""
    async with live_node(tmp_path, config={"check_stride": 1}) as node:
        session, blocks, at = await worker(node), hashes(1), [np.zeros(1, np.int64)]
        await store_in(node, session, blocks)
        words = hash_words(blocks[0], 32)
        node.core.acquire(session.record.number, "r", [HashList(0, words)], 60.0, time.monotonic())
        submit = node.copy_engine.submit

        def meanwhile(job: Any) -> None:
            if what == "condemned":
                condemn(node.core, node.core.space.index.find(1, 0, words))
            elif what == "breach":
                node.health.breach = "the test says so"
            submit(job)

        monkeypatch.setattr(node.copy_engine, "submit", meanwhile)
        end = await node.transfers.load(session, "u", "r", [LoadPositions(0, at[0])], at, 5.0)
        assert end.status is (TransferStatus.FAILED if what else TransferStatus.DONE)
        node.health.breach = ""


def test_the_time_of_an_answer_ends_with_it() -> None:
    """One of two answers is still a task."""
    timings = transfer_module.Timings()
    began_s = time.monotonic() - 3.0

    async def answer() -> None:
        assert timings.answered(timings.lookup_s, began_s, "found") == "found"
        task = asyncio.ensure_future(asyncio.sleep(0.01))
        assert timings.answered(timings.lease_s, began_s, task) is task
        assert not timings.lease_s.count
        await task
        await asyncio.sleep(0)

    asyncio.run(answer())
    for times in (timings.lookup_s, timings.lease_s):
        assert times.count == 1 and 3.0 <= times.sum < 3.0 + time.monotonic() - began_s
