"""Tests that restored blocks are compared before clients learn where they are. Only the call
that asks waits. Offsets come only for blocks that are still pinned."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import Sketch
from hotkv_proto.table import Words, hash_words
from hotkv_proto.v1 import cache_pb2, residency_pb2, session_pb2
from hotkv_server.cache.values import HashList, Run
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.wire import calls
from hotkv_server.wire.guard.limits import Pace
from hotkv_server.wire.session_stream import SessionCalls
from hotkv_sparse.server.residency import calls as residency_calls
from hotkv_sparse.server.residency.capability import ResidencyCapability
from hotkv_sparse.server.select.book import SelectSpec
from hotkv_sparse.server.select.drive import SparseDecode
from tests.core.support import begin_store
from tests.server.capable import capability_of, capable
from tests.server.nodes import PAGE, SPACE, live_node, store_in, told, worker
from tests.server.sparse_support import CONFIG
from tests.server.support import hashes
from tests.support.waiting import eventually

NUM_BLOCKS = 8
HASHES = hashes(NUM_BLOCKS)
PACKED = b"".join(HASHES)


class Place:
    """A node with eight unverified blocks, whose comparison waits for `go`."""

    session: LiveSession

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.go, self.num_compared = node, threading.Event(), 0
        self.residencies = capability_of(node, ResidencyCapability).desk
        judge = node.verifier.judge

        def judge_later(cases: Any) -> Any:
            self.num_compared += sum(len(case.evidence.entries) for case in cases)
            assert self.go.wait(60)
            return judge(cases)

        monkeypatch.setattr(node.verifier, "judge", judge_later)

    @property
    def entries(self) -> Words:
        return self.node.core.space.index.find(1, 0, hash_words(PACKED, 32))

    async def open(self) -> None:
        self.session = await worker(self.node, NUM_BLOCKS)
        await store_in(self.node, self.session, HASHES)
        self.node.core.space.index.unverified[self.entries] = True
        self.session.close_link = lambda: None

    def spoil(self, number: int) -> None:
        offset = self.node.core.space.index.offsets(self.entries[number : number + 1])[0]
        self.node.memory.arena.array()[int(offset) + 9] ^= 1

    def acquire(self, lease_id: str, blocks: list[bytes] = HASHES) -> Any:
        return calls.acquire(self.node, self.session, lease_request(lease_id, blocks))

    def extend(self) -> Any:
        request = residency_pb2.ExtendResidencyRequest(residency_id="r", hashes=PACKED)
        asked = self.node, self.residencies, self.session, request
        return asyncio.ensure_future(residency_calls.extend_residency(*asked))


def lease_request(lease_id: str, blocks: list[bytes] = HASHES) -> cache_pb2.AcquireLeaseRequest:
    groups = [cache_pb2.GroupHashes(group_index=0, hashes=b"".join(blocks))]
    return cache_pb2.AcquireLeaseRequest(lease_id=lease_id, groups=groups, wants_offsets=True)


def offsets(answer: cache_pb2.AcquireLeaseResponse) -> list[int]:
    return np.frombuffer(answer.offsets[0].offsets, "<i8").tolist()


def all_but(number: int) -> list[bool]:
    return [at != number for at in range(NUM_BLOCKS)]


Opened = Callable[[], contextlib.AbstractAsyncContextManager[Place]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """At the end, no lease may be left."""

    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Place]:
        more = {"check_stride": 1, "unadmitted_share": 1.0}
        async with live_node(tmp_path, config=more) as node:
            place = Place(capable(node), monkeypatch)
            await place.open()
            yield place
            node.core.check_invariants()
            place.go.set()
        assert not node.core.leases.all()

    return make


async def test_others_are_served_while_blocks_are_compared(opened: Opened) -> None:
    async with opened() as place:
        place.spoil(5)
        waiting = [place.acquire("a"), place.acquire("a")]
        await asyncio.sleep(0.02)
        assert not any(call.done() for call in waiting)
        other = await place.node.sessions.open("other", "worker", SPACE, "test")
        asked = [HashList(0, hash_words(PACKED, 32))]
        grant = place.node.core.acquire(other.record.number, "o", asked, 5.0, time.monotonic())
        assert grant.pinned[0].all(), "a load compares them"
        place.go.set()
        for call in waiting:
            answer = await call
            assert 0 < answer.ttl_ms <= 30_000
            assert [at >= 0 for at in offsets(answer)] == all_but(5)
            assert list(map(bool, answer.groups[0].flags[:NUM_BLOCKS])) == all_but(5)
        assert place.num_compared == NUM_BLOCKS, "a lease is compared once"
        assert place.node.core.counters.condemned_blocks == 1


@pytest.mark.parametrize("again", [False, True])
async def test_a_lease_that_ends_meanwhile_grants_nothing(opened: Opened, again: bool) -> None:
    """`again`: a new lease has got the id meanwhile."""
    async with opened() as place:
        waiting = place.acquire("a", HASHES[:2])
        await asyncio.sleep(0.02)
        assert place.node.core.release(place.session.record.number, "a")
        later = place.acquire("a", HASHES[2:4]) if again else None
        place.go.set()
        with pytest.raises(HotKVError, match="lease_id 'a' was released or has expired") as raised:
            await waiting
        assert raised.value.reason is Reason.UNKNOWN_LEASE
        if later is not None:
            index = place.node.core.space.index
            assert offsets(await later) == index.offsets(place.entries[2:4]).tolist()


async def test_the_stream_goes_on_and_answers_later(opened: Opened) -> None:
    """After the comparison, the released lease is refused."""
    async with opened() as place:
        place.spoil(0)
        sent: list[session_pb2.ConnectResponse] = []
        stream = SessionCalls(place.node, place.session, Pace(1000.0), told(sent))
        for number, lease_id in enumerate("ab", 1):
            asked = lease_request(lease_id)
            request = session_pb2.ConnectRequest(request_id=number, acquire_lease=asked)
            assert await stream.handle(request) is None
        assert place.node.core.release(place.session.record.number, "a")
        ping = session_pb2.ConnectRequest(request_id=3, ping=session_pb2.Ping())
        assert await stream.handle(ping) is not None
        await asyncio.sleep(0.02)
        assert not sent
        place.go.set()
        await eventually(lambda: len(sent) >= 2)
        answers = {answer.request_id: answer for answer in sent}
        assert answers[1].error.reason == Reason.UNKNOWN_LEASE
        assert [at >= 0 for at in offsets(answers[2].acquire_lease)] == all_but(0)


async def test_residency_learns_offsets_only_after_comparison(opened: Opened) -> None:
    async with opened() as place:
        place.spoil(3)
        await place.residencies.open(place.session, "r", {0: NUM_BLOCKS})
        waiting = [place.extend() for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting)
        place.node.core.check_invariants()
        assert place.residencies.residencies.bound.pinned_bytes == 0
        place.go.set()
        found = [np.frombuffer((await each).offsets, "<i8") for each in waiting]
        assert np.array_equal(found[0], found[1])
        assert np.flatnonzero(found[0] == -1).tolist() == [3], "it does not agree"
        assert await place.extend() == await waiting[0], "once compared"


async def test_offsets_stay_secret_during_possible_flush(
    opened: Opened,
) -> None:
    """Tiers can't confirm that all blocks are newer than a flush, so even pinned ones have no
    offset."""
    async with opened() as place:
        place.go.set()
        await place.residencies.open(place.session, "r", {0: NUM_BLOCKS})
        before = (await place.extend()).offsets
        generations = Mock(may_serve=lambda key_space_id: False)
        generations.wait_to_serve = AsyncMock(side_effect=[False, True] * 2)
        tiers = place.node.tiers = Mock(generations=generations, promote=AsyncMock())
        tiers.must_promote.return_value = False
        absent, again = [(await place.extend()).offsets for _ in range(2)]
        refused, granted = [await place.acquire(lease_id) for lease_id in "ab"]
        # The tiers can confirm it now, but a repeated call gets its first answer.
        generations.wait_to_serve = AsyncMock(side_effect=[False, True])
        assert [(await place.acquire("a")).groups for _ in "aa"] == [refused.groups] * 2
        place.node.tiers = None
    assert refused.groups[0].flags == bytes(NUM_BLOCKS) and all(granted.groups[0].flags)
    assert offsets(refused) == [-1] * NUM_BLOCKS and min(offsets(granted)) >= 0
    assert [call.args for call in tiers.unpin.mock_calls] == [(tiers.promote.return_value,)] * 4
    assert np.frombuffer(absent, "<i8").tolist() == [-1] * NUM_BLOCKS
    assert again == before and absent != before


async def test_sequence_covers_nothing_during_possible_flush(
    opened: Opened,
) -> None:
    async with opened() as place:
        node, core, words = place.node, place.node.core, hash_words(PACKED, 32)
        kinds = (Sketch(0, "mean", 1, (64,)),)
        session, other = [await node.sessions.open("e", "worker", SPACE, "t", kinds) for _ in "so"]
        number, (kind,) = session.record.number, session.record.sketches
        begin_store(core, number, "t", "w", [Run(kind, words)], 0, 0.0, 1.0)
        core.end_store(number, "t", True, 1.0)
        generations = Mock(wait_to_serve=AsyncMock(side_effect=[False, True, False]))
        sparse = SparseDecode(
            core, node.memory.arena.array(), node.verifier, Mock(generations=generations)
        )
        spec = SelectSpec(CONFIG, kind, (0,), 1, 64, 16, 1)
        made = await sparse.create(session, "s", 0, words, spec)
        assert not made.lease_id and not len(made.slots)
        lease_ids = set[str]()
        for _ in range(2):
            made = await sparse.append(session, "s", NUM_BLOCKS, words[:0])
            assert len(made.slots) == NUM_BLOCKS
            lease_ids.add(made.lease_id)
        generations.wait_to_serve, core.draining = AsyncMock(return_value=True), True
        for _ in range(2):
            with pytest.raises(HotKVError, match="DRAINING"):
                await sparse.create(session, "d", 0, words, spec)
        lease_ids.add((await sparse.append(session, "s", NUM_BLOCKS, words[:0])).lease_id)
        assert len(lease_ids) == 1
        core.draining = False

        async def ends(key_space_id: int) -> bool:
            await node.sessions.close(other)
            return key_space_id == 1

        generations.wait_to_serve = ends
        with pytest.raises(HotKVError, match="UNKNOWN_SESSION"):
            await sparse.create(other, "o", 0, hash_words(bytes(32), 32), spec)
        assert len(sparse.sequences) == 1
        sparse.close()


async def test_blocks_make_room_for_residency_unless_draining(opened: Opened) -> None:
    async with opened() as place:
        core, other = place.node.core, await worker(place.node, 50)
        await store_in(place.node, other, hashes(50))
        wide = replace(SPACE, groups=(replace(SPACE.groups[0], shard_bytes=(3 * PAGE,)),))
        session = await place.node.sessions.open("wide", "scheduler", wide, "test")
        # The residency needs more than the free slabs, so blocks must go.
        for core.draining in (True, False):
            asked = place.residencies.open(session, "r", {0: 63})
            if core.draining:
                with pytest.raises(HotKVError, match="DRAINING"):
                    await asked
                assert core.counters.stored_blocks == core.space.index.num_entries == 58
            else:
                assert (await asked).residency_id == "r"
                assert other.notices.qsize() == 1, "their engine hears of it first"


async def test_a_residency_that_ends_meanwhile_pins_nothing(opened: Opened) -> None:
    async with opened() as place:
        await place.residencies.open(place.session, "r", {0: NUM_BLOCKS})
        waiting = place.extend()
        await asyncio.sleep(0)
        assert await place.residencies.close(place.session, "r")
        place.go.set()
        with pytest.raises(HotKVError) as caught:
            await waiting
        assert caught.value.reason is Reason.UNKNOWN_RESIDENCY
        assert not place.node.core.space.index.pins.any()


@pytest.mark.parametrize("reads", ["for a lease", "for a residency"])
async def test_closing_session_waits_for_arena_readers(opened: Opened, reads: str) -> None:
    async with opened() as place:
        if reads == "for a lease":
            waiting = place.acquire("a")
            await asyncio.sleep(0.02)
            waiting.cancel()
        else:
            await place.residencies.open(place.session, "r", {0: NUM_BLOCKS})
            waiting = place.extend()
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(place.node.sessions.close(place.session))
        await asyncio.sleep(0.05)
        whole = asyncio.create_task(place.node.sessions.close_all())
        await asyncio.sleep(0.05)
        assert not closing.done() and not whole.done()
        place.go.set()
        await asyncio.gather(closing, whole)
        with pytest.raises((HotKVError, asyncio.CancelledError)):
            await waiting
        assert not place.node.core.space.index.pins.any()
