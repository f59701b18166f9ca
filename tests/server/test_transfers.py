"""Stores and loads through a real server, byte for byte."""

import itertools
import os
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, Evicted, GroupHashes, LoadRun, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError, Reason

Make = Callable[..., PagedEngine]


def hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def ids(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def store(
    engine: PagedEngine,
    blocks: list[bytes],
    block_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    name: str = "s",
) -> list[int]:
    result = engine.session.store(
        name, f"lease-{name}", [BlockRun(0, blocks, block_ids)], 20
    ).result(60)
    return [int(value) for value in result.results[0]]


def load(
    engine: PagedEngine,
    blocks: list[bytes],
    block_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    name: str = "l",
) -> TransferStatus:
    grant = engine.session.acquire(f"lease-{name}", [GroupHashes(0, blocks)]).result(60)
    assert grant.pinned[0].all()
    result = engine.session.load(
        name, f"lease-{name}", [LoadRun(0, np.arange(len(blocks), dtype=np.int32), block_ids)], 20
    ).result(60)
    engine.session.release(f"lease-{name}")
    return result.status


def test_bytes_move_between_engines(engine: Make) -> None:
    one, other = engine(), engine()
    one.kv[:] = np.random.default_rng(1).integers(0, 256, one.kv.shape, dtype=np.uint8)
    other.kv[:] = 0
    blocks, sources, targets = (
        hashes(20),
        np.random.permutation(64)[:20].astype(np.int32),
        np.random.permutation(64)[:20].astype(np.int32),
    )
    assert store(one, blocks, sources) == [BlockResult.STORED] * 20
    probe = other.session.probe(0, [*blocks, *hashes(5)])
    assert probe is not None
    assert probe.tolist() == [True] * 20 + [False] * 5
    assert other.session.lookup([GroupHashes(0, blocks)]).result(60)[0].all()
    assert load(other, blocks, targets) is TransferStatus.DONE
    assert np.array_equal(other.kv[:, targets], one.kv[:, sources])
    untouched = np.setdiff1d(np.arange(64), targets)
    assert not other.kv[:, untouched].any()


def test_a_block_is_stored_once(engine: Make) -> None:
    one, other = engine(), engine()
    blocks = hashes(4)
    one.kv[:, :4], other.kv[:, :4] = 1, 2
    assert store(one, blocks, ids(0, 1, 2, 3)) == [BlockResult.STORED] * 4
    assert store(other, blocks, ids(0, 1, 2, 3)) == [BlockResult.PRESENT] * 4
    assert load(other, blocks, ids(10, 11, 12, 13)) is TransferStatus.DONE
    assert (other.kv[:, 10:14] == 1).all()


def test_key_spaces_do_not_share(engine: Make) -> None:
    one, other = engine(model="one"), engine(model="other")
    blocks = hashes(3)
    assert store(one, blocks, ids(0, 1, 2)) == [BlockResult.STORED] * 3
    probe = other.session.probe(0, blocks)
    assert probe is not None
    assert not probe.any()
    assert not other.session.acquire("x", [GroupHashes(0, blocks)]).result(60).pinned[0].any()


def test_all_ranks_make_a_block_ready(engine: Make) -> None:
    ranks = [engine(model="tp2", engine_id="tp2", shard_index=i, num_shards=2) for i in range(2)]
    for i, rank in enumerate(ranks):
        rank.kv[:, :2] = 10 + i
    blocks = hashes(2)
    assert store(ranks[0], blocks, ids(0, 1), "tp") == [BlockResult.WRITTEN] * 2
    probe = ranks[0].session.probe(0, blocks)
    assert probe is not None
    assert not probe.any()
    assert store(ranks[1], blocks, ids(0, 1), "tp") == [BlockResult.STORED] * 2
    for i, rank in enumerate(ranks):
        assert load(rank, blocks, ids(5, 6), f"tp-{i}") is TransferStatus.DONE
        assert (rank.kv[:, 5:7] == 10 + i).all()


def test_a_burst_beyond_capacity_keeps_what_it_says(own_server: Server, engine: Make) -> None:
    """What is answered `stored` is there afterwards or was named in a notice; the rest is refused.
    The next store has room."""
    gone: set[bytes] = set()

    def on_evicted(notice: Evicted) -> None:
        gone.update(h for group in notice.groups for h in group.hashes)

    one = engine(own_server.target, on_evicted=on_evicted, num_blocks=64)
    lists = [hashes(64) for _ in range(200)]  # 100 MiB into 16 MiB
    futures = [
        one.session.store(f"b{i}", f"b{i}", [BlockRun(0, h, np.arange(64, dtype=np.int32))], 60)
        for i, h in enumerate(lists)
    ]
    answered = [future.result(60).results[0] for future in futures]
    stored = {
        h
        for blocks, results in zip(lists, answered, strict=True)
        for h, r in zip(blocks, results, strict=True)
        if r == BlockResult.STORED
    }
    refused = {
        h
        for blocks, results in zip(lists, answered, strict=True)
        for h, r in zip(blocks, results, strict=True)
        if r == BlockResult.NO_SPACE
    }
    assert len(stored) + len(refused) == 200 * 64
    everything = [h for blocks in lists for h in blocks]
    present = set()
    for start in range(0, len(everything), 8192):
        part = everything[start : start + 8192]
        present.update(
            h
            for h, there in zip(
                part, one.session.lookup([GroupHashes(0, part)]).result(60)[0], strict=True
            )
            if there
        )
    one.session.ping(5)  # Notices come before the answer to a later call.
    assert stored - gone == present
    # While all room is being written, stores are refused; afterwards there is room again.
    newest = hashes(64)
    run = BlockRun(0, newest, np.arange(64, dtype=np.int32))
    assert (one.session.store("after", "after", [run], 60).result(60).results[0] == 1).all()
    assert one.session.lookup([GroupHashes(0, newest)]).result(60)[0].all()


@pytest.mark.parametrize("hears", [True, False])
def test_who_has_no_use_for_notices_gets_none(
    own_server: Server, engine: Make, hears: bool
) -> None:
    one, outbox = (
        engine(own_server.target, num_blocks=64),
        queue.SimpleQueue[_wire.Request | None](),
    )
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
        for i in range(40):  # 20 MiB into 16 MiB
            store(one, hashes(64), np.arange(64, dtype=np.int32), f"push-{i}")
        outbox.put(ping)
        came = list(
            itertools.takewhile(
                lambda kind: kind != "pong", (response.WhichOneof("body") for response in call)
            )
        )
        outbox.put(None)
    assert set(came) == ({"eviction_notice"} if hears else set())


def test_a_lease_protects_from_eviction(own_server: Server, engine: Make) -> None:
    one = engine(own_server.target)
    kept = hashes(16)
    one.kv[:, :16] = np.arange(16, dtype=np.uint8)[None, :, None]
    assert store(one, kept, np.arange(16, dtype=np.int32)) == [BlockResult.STORED] * 16
    one.session.acquire("pin", [GroupHashes(0, kept)], ttl_s=30).result(60)
    one.kv[:, 16:] = 99
    for i in range(100):
        store(one, hashes(48), np.arange(16, 64, dtype=np.int32), f"push-{i}")
    positions = np.arange(16, dtype=np.int32)
    result = one.session.load("back", "pin", [LoadRun(0, positions, positions + 20)], 10).result(60)
    assert result.status is TransferStatus.DONE
    assert np.array_equal(one.kv[:, 20:36], one.kv[:, :16])


def test_only_what_was_loaded_counts_as_loaded(own_server: Server, engine: Make) -> None:
    one = engine(own_server.target)
    blocks = hashes(4)
    store(one, blocks, ids(0, 1, 2, 3))
    one.session.acquire("l", [GroupHashes(0, blocks)]).result(60)
    for i in range(3):
        one.session.load(f"l{i}", "l", [LoadRun(0, ids(i), ids(9))], 5).result(60)
    assert own_server.counter("loaded_blocks_total") == 3
    assert own_server.counter("loaded_bytes_total") == 3 * 2 * 4096


def test_an_expired_lease_is_unknown(engine: Make) -> None:
    one = engine()
    blocks = hashes(2)
    store(one, blocks, ids(0, 1))
    one.session.acquire("short", [GroupHashes(0, blocks)], ttl_s=0.05).result(60)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            one.session.load(os.urandom(4).hex(), "short", [LoadRun(0, ids(0), ids(5))], 5).result(
                5
            )
            time.sleep(0.05)
        except HotKVError as error:
            assert error.reason is Reason.UNKNOWN_LEASE
            return
    pytest.fail("the lease never expired")


def test_truncated_memory_is_refused(engine: Make) -> None:
    """An engine that cuts its own file short gets a refusal; the server lives."""
    one = engine()
    blocks = hashes(1)
    os.truncate(one.fd, 4096)
    with pytest.raises(HotKVError, match="truncated"):
        one.session.store("t", "t", [BlockRun(0, blocks, ids(0))], 5).result(60)
    assert store(engine(), blocks, ids(0)) == [BlockResult.STORED]


def test_admin_sees_and_evicts(own_server: Server, engine: Make) -> None:
    one = engine(own_server.target, engine_id="seen")
    blocks = hashes(5)
    store(one, blocks, ids(0, 1, 2, 3, 4))
    with AdminClient(own_server.target) as admin:
        assert [s["engine_id"] for s in admin.sessions()] == ["seen"]
        listed = admin.blocks(page_size=2)
        assert len(listed["blocks"]) == 2
        rest = admin.blocks(page_token=listed["next_page_token"])
        chain = listed["blocks"] + rest["blocks"]
        assert [b["block_hash"] for b in chain] == [h.hex() for h in blocks]
        assert [b["parent_hash"] for b in chain] == ["", *(h.hex() for h in blocks[:-1])]
        explained = admin.explain(hashes=b"".join([*blocks, *hashes(1)]))[0]
        assert explained["hit_token_count"] == 5 * 16
        assert explained["blocks"][-1]["verdict"] == "never stored"
        assert admin.evict(1, 0, blocks[3])["evicted_block_count"] == 1
        assert admin.explain(hashes=b"".join(blocks))[0]["blocks"][3]["verdict"] == "evicted"
        assert admin.tiers()[0]["block_count"] == 4
        assert admin.evict(everything=True)["evicted_block_count"] == 4


def test_a_transfer_that_cannot_be_planned_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing that validated can fail so; if it does, the lease is free again and the next transfer
    works."""
    import asyncio

    from hotkv_proto.groups import GroupKind, GroupSpec
    from hotkv_proto.keys import KeySpace
    from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
    from hotkv_proto.table import hash_words
    from hotkv_server.cache.core import CacheCore
    from hotkv_server.cache.room.policies import LRU
    from hotkv_server.cache.values import CoreConfig, Run
    from hotkv_server.dataplane.host import HostCopyEngine
    from hotkv_server.memory.arena import NodeMemory
    from hotkv_server.node import transfers as transfer_module
    from hotkv_server.node.node import Node

    async def scenario() -> None:
        memory = NodeMemory.open(tmp_path / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False)
        copies = HostCopyEngine(1)
        node = Node(
            CacheCore(CoreConfig(1 << 20, 1 << 16, 64), memory.table, LRU(64)), memory, copies
        )
        space = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
        session = await node.sessions.open("e", "worker", space, "test")
        session.receive("kv", os.memfd_create("kv"))
        os.posix_fallocate(session.received_fds["kv"], 0, 4096)
        await node.sessions.register_memory(
            session,
            Layout(0, 1, (MemoryHandle("kv", 4096),), (PageTensor(0, "kv", 0, 4096, 4096, 0),)),
        )
        run, block_ids = Run(0, hash_words(os.urandom(32), 32)), [np.zeros(1, np.int64)]
        with monkeypatch.context() as patch:
            patch.setattr(transfer_module, "block_copies", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await node.transfers.store(session, "t", "l", [run], block_ids, 5.0)
        node.core.check_invariants()
        assert (len(node.core.leases), len(node.core.transfers), session.jobs) == (0, 0, {})
        storing = await node.transfers.store(session, "t", "l", [run], block_ids, 5.0)
        end = await storing
        assert end.results[0].tolist() == [BlockResult.STORED]
        await node.close()
        copies.close()
        memory.remove()

    asyncio.run(scenario())


@pytest.mark.parametrize("good", [True, False])
def test_a_load_that_cannot_be_verified_fails_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, good: bool
) -> None:
    """Its session closes meanwhile, and waits for it and no longer."""
    import asyncio

    from hotkv_proto.groups import GroupKind, GroupSpec
    from hotkv_proto.keys import KeySpace
    from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
    from hotkv_proto.table import hash_words
    from hotkv_server.cache.core import CacheCore
    from hotkv_server.cache.room.policies import LRU
    from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run
    from hotkv_server.dataplane.host import HostCopyEngine
    from hotkv_server.memory.arena import NodeMemory
    from hotkv_server.node.node import Node

    async def scenario() -> None:
        memory = NodeMemory.open(tmp_path / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False)
        copies = HostCopyEngine(1)
        node = Node(
            CacheCore(CoreConfig(1 << 20, 1 << 16, 64, check_stride=1), memory.table, LRU(64)),
            memory,
            copies,
        )
        space = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
        session = await node.sessions.open("e", "worker", space, "test")
        session.receive("kv", os.memfd_create("kv"))
        os.posix_fallocate(session.received_fds["kv"], 0, 4096)
        await node.sessions.register_memory(
            session,
            Layout(0, 1, (MemoryHandle("kv", 4096),), (PageTensor(0, "kv", 0, 4096, 4096, 0),)),
        )
        block, zeros = hash_words(os.urandom(32), 32), [np.zeros(1, np.int64)]
        storing = await node.transfers.store(session, "t", "l", [Run(0, block)], zeros, 5.0)
        end = await storing
        assert end.results[0].tolist() == [BlockResult.STORED]
        node.core.acquire(session.record.number, "r", [HashList(0, block)], 60.0, time.monotonic())
        node.core.space.index.unverified[:] = True
        if not good:
            monkeypatch.setattr(node.verifier, "judge", lambda cases: 1 / 0)
        load = node.transfers.load(session, "u", "r", [LoadPositions(0, zeros[0])], zeros, 5.0)
        await node.sessions.close(session)
        end = await load
        assert (
            end.status is (TransferStatus.CANCELLED if good else TransferStatus.FAILED)
            and ("ZeroDivisionError" in end.message) != good
        )
        node.core.check_invariants()
        assert (len(node.core.leases), len(node.core.transfers), session.jobs) == (0, 0, {})
        await node.close()
        copies.close()
        memory.remove()

    asyncio.run(scenario())
