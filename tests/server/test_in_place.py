"""Blocks are compared before a client learns their offsets: only the call that asks waits, and the
answer follows what happens to the lease meanwhile."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.table import Words, hash_words
from hotkv_proto.v1 import cache_pb2, residency_pb2, session_pb2
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.residency import calls as residency_calls
from hotkv_server.residency.capability import ResidencyCapability
from hotkv_server.wire import calls
from hotkv_server.wire.guard.limits import Pace
from hotkv_server.wire.session import SessionCalls
from tests.server.capable import capable

NUM_BLOCKS = 8
KEY_SPACE = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
LAYOUT = Layout(
    0,
    NUM_BLOCKS,
    (MemoryHandle("kv", NUM_BLOCKS * 4096),),
    (PageTensor(0, "kv", 0, 4096, 4096, 0),),
)
HASHES = [os.urandom(32) for _ in range(NUM_BLOCKS)]


class Place:
    """A node with eight blocks that nobody has compared since they came back; comparing waits for
    `go`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = NodeMemory.open(folder / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False)
        self.copies = HostCopyEngine(1)
        core = CacheCore(
            CoreConfig(1 << 20, 1 << 16, 64, check_stride=1, unadmitted_share=1.0),
            self.memory.table,
            LRU(64),
        )
        self.node = capable(Node(core, self.memory, self.copies))
        self.residencies = self.node.capability(ResidencyCapability).desk
        self.go = threading.Event()
        self.num_compared = 0
        judge = self.node.verifier.judge

        def judge_later(cases: Any) -> Any:
            self.num_compared += sum(len(case.evidence.entries) for case in cases)
            assert self.go.wait(60)
            return judge(cases)

        monkeypatch.setattr(self.node.verifier, "judge", judge_later)

    @property
    def entries(self) -> Words:
        return self.node.core.space.index.find(1, 0, hash_words(b"".join(HASHES), 32))

    async def open(self) -> LiveSession:
        session = await self.node.sessions.open("e", "worker", KEY_SPACE, "test")
        session.receive("kv", os.memfd_create("kv"))
        os.posix_fallocate(session.received_fds["kv"], 0, NUM_BLOCKS * 4096)
        await self.node.sessions.register_memory(session, LAYOUT)
        run = Run(0, hash_words(b"".join(HASHES), 32))
        storing = await self.node.transfers.store(
            session, "s", "s", [run], [np.arange(NUM_BLOCKS)], 5.0
        )
        await storing
        self.node.core.space.index.unverified[self.entries] = True
        session.close_link = lambda: None
        return session

    def spoil(self, number: int) -> None:
        self.memory.arena.array()[
            int(self.node.core.space.index.offsets(self.entries[number : number + 1])[0]) + 9
        ] ^= 1

    def acquire(self, session: LiveSession, lease_id: str, hashes: list[bytes] = HASHES) -> Any:
        groups = [cache_pb2.GroupHashes(group_index=0, hashes=b"".join(hashes))]
        return calls.acquire(
            self.node,
            session,
            cache_pb2.AcquireLeaseRequest(lease_id=lease_id, groups=groups, wants_offsets=True),
        )


def offsets(answer: cache_pb2.AcquireLeaseResponse) -> list[int]:
    return np.frombuffer(answer.offsets[0].offsets, "<i8").tolist()


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Place, LiveSession], Awaitable[None]]], None]]:
    """Runs a scenario over a place and a session of it."""
    place = Place(tmp_path, monkeypatch)

    async def whole(scenario: Callable[[Place, LiveSession], Awaitable[None]]) -> None:
        await scenario(place, await place.open())
        place.node.core.check_invariants()
        place.go.set()
        await place.node.close()
        assert not place.node.core.leases.all()

    yield lambda scenario: asyncio.run(whole(scenario))
    place.copies.close()
    place.memory.remove()


def test_what_was_compared_is_answered_at_once(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        place.go.set()
        first = await place.acquire(session, "a")
        again = place.acquire(session, "a")
        assert isinstance(again, cache_pb2.AcquireLeaseResponse) and offsets(again) == offsets(
            first
        )
        assert isinstance(place.acquire(session, "b", HASHES[:3]), cache_pb2.AcquireLeaseResponse)
        assert (
            place.num_compared == NUM_BLOCKS
            and min(offsets(first)) >= 0
            and len(set(offsets(first))) == NUM_BLOCKS
        )

    run(scenario)


def test_others_are_served_while_blocks_are_compared(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        place.spoil(5)
        waiting = [place.acquire(session, "a"), place.acquire(session, "a")]
        await asyncio.sleep(0.02)
        assert not any(call.done() for call in waiting)
        other = await place.node.sessions.open("other", "worker", KEY_SPACE, "test")
        grant = place.node.core.acquire(
            other.record.number,
            "o",
            [HashList(0, hash_words(b"".join(HASHES), 32))],
            5.0,
            time.monotonic(),
        )
        assert grant.pinned[0].all(), (
            "without offsets nothing is promised of the bytes: a load compares them"
        )
        place.go.set()
        for call in waiting:
            answer = await call
            assert [at >= 0 for at in offsets(answer)] == [
                number != 5 for number in range(NUM_BLOCKS)
            ]
            assert [bool(flag) for flag in answer.groups[0].flags[:NUM_BLOCKS]] == [
                number != 5 for number in range(NUM_BLOCKS)
            ]
        assert place.num_compared == NUM_BLOCKS, (
            "a lease is compared once, however often it is asked for"
        )
        assert place.node.core.counters.condemned_blocks == 1

    run(scenario)


@pytest.mark.parametrize("again", [False, True])
def test_a_lease_that_ends_meanwhile_grants_nothing(run: Any, again: bool) -> None:
    """Also where its id has been taken for other blocks by then."""

    async def scenario(place: Place, session: LiveSession) -> None:
        waiting = place.acquire(session, "a", HASHES[:2])
        await asyncio.sleep(0.02)
        assert place.node.core.release(session.record.number, "a")
        later = place.acquire(session, "a", HASHES[2:4]) if again else None
        place.go.set()
        with pytest.raises(HotKVError, match="lease_id 'a' was released or has expired") as raised:
            await waiting
        assert raised.value.reason is Reason.UNKNOWN_LEASE
        if later is not None:
            index = place.node.core.space.index
            assert offsets(await later) == index.offsets(place.entries[2:4]).tolist()

    run(scenario)


def test_a_session_that_closes_waits_for_what_reads_the_arena(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        waiting = place.acquire(session, "a")
        await asyncio.sleep(0.02)
        waiting.cancel()
        closing = asyncio.create_task(place.node.sessions.close(session))
        await asyncio.sleep(0.02)
        assert not closing.done()
        place.go.set()
        await closing

    run(scenario)


def test_the_stream_goes_on_and_answers_later(run: Any) -> None:
    """With the grant, or with the reason why there is none."""

    async def scenario(place: Place, session: LiveSession) -> None:
        place.spoil(0)
        sent: list[session_pb2.ConnectResponse] = []
        stream = SessionCalls(place.node, session, Pace(1000.0), sent.append)
        groups = [cache_pb2.GroupHashes(group_index=0, hashes=b"".join(HASHES))]
        for number, lease_id in enumerate("ab", 1):
            acquiring = cache_pb2.AcquireLeaseRequest(
                lease_id=lease_id, groups=groups, wants_offsets=True
            )
            assert (
                await stream.handle(
                    session_pb2.ConnectRequest(request_id=number, acquire_lease=acquiring)
                )
                is None
            )
        assert place.node.core.release(session.record.number, "a")
        assert (
            await stream.handle(session_pb2.ConnectRequest(request_id=3, ping=session_pb2.Ping()))
            is not None
        )
        await asyncio.sleep(0.02)
        assert not sent
        place.go.set()
        async with asyncio.timeout(10):
            while len(sent) < 2:
                await asyncio.sleep(0.01)
        answers = {answer.request_id: answer for answer in sent}
        assert answers[1].error.reason == Reason.UNKNOWN_LEASE
        assert [at >= 0 for at in offsets(answers[2].acquire_lease)] == [
            number != 0 for number in range(NUM_BLOCKS)
        ]

    run(scenario)


def test_what_can_not_be_compared_is_not_granted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        monkeypatch.setattr(place.node.verifier, "judge", lambda cases: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await place.acquire(session, "a")
        assert set(place.node.core.slot_offsets(session.record.number, "a")[0].tolist()) == {-1}

    run(scenario)


def extend(place: Place, session: LiveSession) -> Any:
    request = residency_pb2.ExtendResidencyRequest(residency_id="r", hashes=b"".join(HASHES))
    return residency_calls.extend_residency(place.node, place.residencies, session, request)


def test_a_residency_learns_no_offset_before_blocks_are_compared(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        place.spoil(3)
        await place.residencies.open(session, "r", {0: NUM_BLOCKS})
        waiting = [extend(place, session) for _ in range(2)]
        assert all(isinstance(each, asyncio.Task) for each in waiting)
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting)
        place.node.core.check_invariants()
        assert place.residencies.residencies.bound.pinned_bytes == 0
        place.go.set()
        found = [np.frombuffer((await each).offsets, "<i8") for each in waiting]
        assert np.array_equal(found[0], found[1])
        assert np.flatnonzero(found[0] == -1).tolist() == [3], "it does not agree"
        assert not isinstance(extend(place, session), asyncio.Task)

    run(scenario)


def test_a_residency_that_ends_meanwhile_pins_nothing(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        await place.residencies.open(session, "r", {0: NUM_BLOCKS})
        waiting = extend(place, session)
        await asyncio.sleep(0)
        assert await place.residencies.close(session, "r")
        place.go.set()
        with pytest.raises(HotKVError) as caught:
            await waiting
        assert caught.value.reason is Reason.UNKNOWN_RESIDENCY
        assert not place.node.core.space.index.pins.any()

    run(scenario)


def test_a_session_that_closes_waits_for_what_a_residency_compares(run: Any) -> None:
    async def scenario(place: Place, session: LiveSession) -> None:
        await place.residencies.open(session, "r", {0: NUM_BLOCKS})
        waiting = extend(place, session)
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(place.node.sessions.close(session))
        await asyncio.sleep(0.05)
        assert not closing.done(), "the arena is being read"
        place.go.set()
        await closing
        with pytest.raises(HotKVError):
            await waiting
        assert not place.node.core.space.index.pins.any()

    run(scenario)
