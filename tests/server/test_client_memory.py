"""Attacks on the server's memory, one by one and all at once; other clients are served."""

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server, runtime_folder
from hotkv_client import (
    After,
    BlockRun,
    GroupHashes,
    HotKVError,
    RequestReport,
    Role,
    Session,
    SessionConfig,
    channels,
)
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import Reason, SessionLostError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.order import DeviceMark, OrderKind
from hotkv_proto.v1 import cache_pb2, session_pb2_grpc
from hotkv_proto.versions import MAX_MESSAGE_BYTES, MAX_PARTS
from hotkv_server.node import sessions as node_sessions
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl, Peer
from hotkv_server.wire import session_stream as session_service
from hotkv_server.wire.edge import Edge
from hotkv_server.wire.guard.interceptor import MAX_UNREAD_BYTES
from hotkv_server.wire.guard.limits import BURST_S, MAX_WAIT_S, Pace, SessionlessCalls
from hotkv_server.wire.session_stream import SessionOpener, SessionService, SessionStream
from tests.doubles.with_constants import constant
from tests.robustness.raw_client import Footprint
from tests.server.half_sent import HalfSender
from tests.server.hostile import marked_engine, unary_stream_of
from tests.server.nodes import live_node
from tests.server.support import FULL, GroupsEngine, block_ids, hashes, http_port
from tests.support.waiting import eventually, wait_for

NUM_HALVES = 12
LARGE_BYTES = MAX_MESSAGE_BYTES - 1024
HALVES_BYTES = 2 * NUM_HALVES * MAX_MESSAGE_BYTES
"""Total of the messages that are sent without their last byte."""
MOST_BYTES = (300 << 20) + HALVES_BYTES
SLACK_BYTES = 48 << 20
CONNECT, LOOKUP = "/hotkv.v1.SessionService/Connect", "/hotkv.v1.CacheService/Lookup"
Make = Callable[..., PagedEngine]
KEY_SPACE = KeySpace("m", "m", "bfloat16", (FULL,), 16)


class Watched:
    """A thread that measures the server's peak of anonymous memory."""

    def __init__(self, server: Server) -> None:
        self.idle_bytes = self.most_bytes = Footprint(server.pid).anonymous_bytes
        self._pid, self._closed = server.pid, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._closed.wait(0.02):
            self.most_bytes = max(self.most_bytes, Footprint(self._pid).anonymous_bytes)

    def close(self) -> int:
        """The largest growth, in bytes."""
        self._closed.set()
        self._thread.join()
        grown_bytes = self.most_bytes - self.idle_bytes
        print(f"grew by {grown_bytes >> 20} MiB")
        return grown_bytes


@contextlib.contextmanager
def session_of(server: Server, key_space: KeySpace = KEY_SPACE) -> Iterator[Session]:
    session = Session(SessionConfig(server.target, os.urandom(4).hex(), Role.SCHEDULER, key_space))
    session.start()
    assert session.wait_connected(20)
    try:
        yield session
    finally:
        session.close()


def until_refused(call: Callable[[int], "Future[Any]"], most: int) -> int:
    """How many calls succeeded before one was refused."""
    for number in range(most):
        try:
            call(number).result(60)
        except SessionLostError:
            # The server has ended the session, because it was silent.
            return number
        except HotKVError as refused:
            assert "OVERLOADED" in str(refused)
            return number
    return most


Attack = Callable[[Server, contextlib.ExitStack], None]


def halves_of_calls(server: Server, held: contextlib.ExitStack) -> None:
    for path in (LOOKUP, CONNECT):
        sender = HalfSender(server.runtime_folder / "grpc.sock")
        held.callback(sender.close)
        for _ in range(NUM_HALVES // 2):
            sender.call(path, LARGE_BYTES)
        wait_for(lambda sender=sender: not sender.num_left)


def halves_of_sessions(server: Server, held: contextlib.ExitStack) -> None:
    sender = HalfSender(server.runtime_folder / "grpc.sock")
    held.callback(sender.close)
    for number in range(NUM_HALVES):
        opening = opening_of(server, f"half {number}").SerializeToString()
        sender.call(CONNECT, LARGE_BYTES, opening)
    wait_for(lambda: not sender.num_left)


def stores_behind_a_mark(server: Server, held: contextlib.ExitStack) -> None:
    never = After(OrderKind.FLAGS, DeviceMark(0, 5))
    runs = [BlockRun(0, hashes(1), block_ids(1), extra_keys=[("x" * (3 << 20),)])]
    for _ in range(2):
        session = held.enter_context(marked_engine(server.target))
        stores = [session.store(f"t{n}", f"l{n}", runs, 60, after=never) for n in range(32)]
        wait_for(lambda stores=stores: sum(store.done() for store in stores) >= 3)


def lists_of_leases(server: Server, held: contextlib.ExitStack) -> None:
    absent = GroupHashes(0, hashes((1 << 17) - 1024))
    for _ in range(2):
        session = held.enter_context(session_of(server))
        assert until_refused(lambda n, s=session: s.acquire(f"l{n}", [absent], 600), 400) < 400


def sequences(server: Server, held: contextlib.ExitStack) -> None:
    context = hashes(1 << 16)
    for _ in range(2):
        session = held.enter_context(session_of(server))
        assert until_refused(lambda n, s=session: s.create_sequence(f"s{n}", 0, context), 99) < 99


def opening_of(server: Server, name: str, key_space: KeySpace = KEY_SPACE) -> Any:
    return _wire.open_session(SessionConfig(server.target, name, Role.SCHEDULER, key_space))


def own_channel(server: Server, *options: tuple[str, int]) -> grpc.Channel:
    return grpc.insecure_channel(
        server.target, [*channels.OPTIONS, ("grpc.use_local_subchannel_pool", 1), *options]
    )


MANY_LAYERS = tuple(f"{n:x}" for n in range(5000))
LONG_LAYERS = tuple(f"{n}" * 7_900 for n in range(4))


def key_spaces(
    server: Server, held: contextlib.ExitStack, layers: tuple[str, ...] = MANY_LAYERS
) -> None:
    """Opens sessions in new key spaces. By default, the names of their layers fill a message."""
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,), 0, layers),)
    with own_channel(server) as channel:
        for number in range(150):
            space = KeySpace(f"m{number}", "w", "bfloat16", groups, 16)
            stub = session_pb2_grpc.SessionServiceStub(channel)
            call = stub.Connect(iter([opening_of(server, "e", space)]))
            assert next(call).session_opened.session_id


def test_operators_are_told_of_the_largest_key_spaces(own_server: Server) -> None:
    with contextlib.ExitStack() as held, AdminClient(own_server.target) as admin:
        key_spaces(own_server, held, LONG_LAYERS)
        engine = held.enter_context(
            contextlib.closing(GroupsEngine(own_server.target, (FULL,), "busiest"))
        )
        engine.store(BlockRun(0, hashes(1), block_ids(1)))
        told = admin.tell("key_spaces")
        names = [one["model"] for one in told["key_spaces"]]
        assert told["key_space_count"] == 151 and "busiest" in names and len(names) > 50
        assert cli.main(["status", "--target", own_server.target]) == 0


def asking(*requests: Any, held: contextlib.ExitStack) -> Iterator[Any]:
    """The stream stays open until `held` is closed."""
    ended = threading.Event()
    held.callback(ended.set)
    yield from requests
    ended.wait()


def sessions(server: Server, held: contextlib.ExitStack) -> None:
    for number in range(400):
        if number % 20 == 0:
            channel = held.enter_context(own_channel(server))
        requests = asking(opening_of(server, f"idle {number}"), held=held)
        call = session_pb2_grpc.SessionServiceStub(channel).Connect(requests)
        held.callback(call.cancel)
        assert next(call).session_opened.session_id


def idle_calls(server: Server, held: contextlib.ExitStack) -> None:
    channel = held.enter_context(own_channel(server))
    health = health_pb2_grpc.HealthStub(channel)
    calls = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(300)]
    calls += [unary_stream_of(channel) for _ in range(200)]
    for call in calls:
        held.callback(call.cancel)
    for _ in range(300):
        with contextlib.suppress(OSError):
            held.enter_context(socket.create_connection(("127.0.0.1", http_port(server)), 1))


def deaf_readers(server: Server, held: contextlib.ExitStack) -> None:
    asked = [GroupHashes(0, hashes((1 << 17) - 1024))]
    lookups = [_wire.lookup(asked, 32) for _ in range(59)]
    for request_id, lookup in enumerate(lookups, 1):
        lookup.request_id = request_id
    for number in range(3):
        channel = held.enter_context(own_channel(server, ("grpc.http2.bdp_probe", 0)))
        requests = asking(opening_of(server, f"deaf {number}"), *lookups, held=held)
        held.callback(_wire.connect(_wire.Stub(channel), requests).cancel)


def deaf_callers(server: Server, held: contextlib.ExitStack) -> None:
    """Makes lookups whose answers nobody reads, until one is refused. They end with `held`."""
    session = held.enter_context(session_of(server, replace(KEY_SPACE, hash_bytes=8)))
    assert session._connection is not None
    groups = [cache_pb2.GroupHashes(hashes=bytes(8 << 17))]
    asked = cache_pb2.LookupRequest(session_id=session._connection.session_id, groups=groups)
    calls: list[Any] = []
    while not any(call.done() for call in calls):
        assert len(calls) < 1000
        if len(calls) % 200 == 0:
            channel = held.enter_context(own_channel(server, ("grpc.http2.bdp_probe", 0)))
        # Called as a stream, gRPC's client fetches no answer before it is read.
        calls.append(channel.unary_stream(LOOKUP)(asked.SerializeToString()))
        held.callback(calls[-1].cancel)
        # By then the server has begun to answer.
        calls[-1].initial_metadata()
    (refused,) = {call.code() for call in calls if call.done()}
    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED


ATTACKS: tuple[Attack, ...] = (
    halves_of_calls,
    halves_of_sessions,
    stores_behind_a_mark,
    lists_of_leases,
    sequences,
    key_spaces,
    sessions,
    idle_calls,
    deaf_readers,
    deaf_callers,
)


@pytest.mark.long
def test_all_together_stay_within_a_bound(own_server: Server) -> None:
    bystander = GroupsEngine(own_server.target, (FULL,), "bystander")
    watch = Watched(own_server)
    with contextlib.ExitStack() as held, ThreadPoolExecutor(len(ATTACKS)) as pool:
        attacks = [pool.submit(attack, own_server, held) for attack in ATTACKS]
        stored = 0
        while not all(attack.done() for attack in attacks):
            bystander.session.wait_connected(20)
            with contextlib.suppress(HotKVError):
                bystander.store(BlockRun(0, hashes(4), block_ids(4)))
                stored += 1
            time.sleep(0.05)
        grown_bytes = watch.close()
        for attack in attacks:
            try:
                attack.result()
            except grpc.RpcError as refused:
                # An attack may be refused only because a limit is used up.
                assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stored and grown_bytes < MOST_BYTES
    assert bystander.store(BlockRun(0, hashes(4), block_ids(4)))
    bystander.close()


def test_unread_single_answers_keep_nobody_out(own_server: Server) -> None:
    watch = Watched(own_server)
    question = health_pb2.HealthCheckRequest()
    with contextlib.ExitStack() as held, grpc.insecure_channel(own_server.target) as channel:
        deaf_callers(own_server, held)
        with session_of(own_server) as other:
            assert not other.lookup([GroupHashes(0, hashes(1))]).result(60)[0].any()
        assert health_pb2_grpc.HealthStub(channel).Check(question, timeout=60)
    assert watch.close() < SLACK_BYTES + MAX_UNREAD_BYTES
    with grpc.insecure_channel(own_server.target) as channel:
        look_up = channel.unary_unary(LOOKUP)

        def is_answered() -> bool:
            # The server may not know yet that the calls have ended.
            try:
                look_up(b"", timeout=60)
            except grpc.RpcError as error:
                return error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
            return True

        wait_for(is_answered)


def test_message_declaring_too_much_is_refused_early(own_server: Server) -> None:
    watch = Watched(own_server)
    sender = HalfSender(own_server.runtime_folder / "grpc.sock")
    for path in (LOOKUP, CONNECT):
        for _ in range(NUM_HALVES):
            sender.call(path, 1 << 30)
    wait_for(lambda: sender.num_ended == 2 * NUM_HALVES)
    sender.close()
    assert watch.close() < SLACK_BYTES


def test_call_with_incomplete_request_is_ended(server: Server) -> None:
    sender = HalfSender(server.runtime_folder / "grpc.sock")
    sender.call(LOOKUP, 64)
    wait_for(lambda: sender.num_ended == 1)
    sender.close()


def test_a_foreign_client_is_told_the_limit(own_server: Server) -> None:
    with grpc.insecure_channel(own_server.target) as channel:
        call = channel.unary_unary(LOOKUP)
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(MAX_MESSAGE_BYTES + 1), timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in refused.value.details()


def test_client_splits_large_calls_keeps_its_session(own_server: Server) -> None:
    engine = GroupsEngine(own_server.target, (FULL, FULL), "splits")
    stored = hashes(8)
    engine.store(BlockRun(0, stored, block_ids(8)))
    session = engine.session
    absent = hashes(MAX_MESSAGE_BYTES // 32)
    first, second = session.lookup(
        [GroupHashes(0, [*absent, *stored]), GroupHashes(1, [*stored, *absent])]
    ).result(60)
    assert len(first) == len(second) == len(absent) + 8
    assert first[-8:].all() and not first[:-8].any() and not second.any()
    session.report_requests([RequestReport(absent[: 1 << 16], 1 << 20, 0, 0, 0.0)] * 3)
    with pytest.raises(HotKVError, match=f"has at most {MAX_MESSAGE_BYTES}"):
        session.acquire("all", [GroupHashes(0, absent)]).result(60)
    assert session.lookup([GroupHashes(0, stored)]).result(60)[0].all()
    assert session.connected
    engine.close()


# Malformed messages, and unread answers

TURNS = 10


@given(st.floats(1, 1e4), st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_a_pace_is_kept(per_s: float, gaps_s: list[float]) -> None:
    pace, now_s, ends = Pace(per_s), 100.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = pace.wait_s(now_s)
        assert 0 <= wait_s <= MAX_WAIT_S
        if wait_s < MAX_WAIT_S:
            ends.append(now_s + wait_s)
    assert ends == sorted(ends)
    for (i, first_s), (j, last_s) in itertools.combinations(enumerate(ends), 2):
        assert j - i <= per_s * (last_s - first_s + BURST_S) + 1 + 1e-6
    assert not any(map(Pace(per_s).wait_s, range(100, 150))), "what comes seldom waits"


def test_call_with_too_many_parts_is_refused(engine: Make) -> None:
    """Each field and list entry becomes an object in memory."""
    one, count = engine(engine_id="many parts"), MAX_PARTS // 5 + 1
    runs = [BlockRun(0, hashes(count), np.zeros(count, np.int32), extra_keys=[(("i", 1),)] * count)]
    error = one.session.store("t", "l", runs, 20).exception(60)
    assert isinstance(error, HotKVError) and error.reason is Reason.TOO_LARGE
    assert one.session.connected


@pytest.mark.long
def test_who_sends_nonsense_waits_and_others_do_not(engine: Make) -> None:
    flags = constant("startup.access.MALFORMED_PER_S", 1)
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *flags) as server:
        server.wait_ready()
        quiet, num_overtaken = engine(server.target, engine_id="quiet"), 0
        with grpc.insecure_channel(server.target) as channel:
            lookup = channel.unary_unary(LOOKUP)
            # These are more than the server answers without a delay.
            nonsense = [lookup.future(b"\xff" * 100, timeout=30) for _ in range(4)]
            for _ in range(TURNS):
                nonsense.append(lookup.future(b"\xff" * 100, timeout=30))
                for _ in range(5):
                    quiet.session.lookup([GroupHashes(0, hashes(1))]).result(60)
                num_overtaken += not nonsense[-1].done()
            assert {call.code() for call in nonsense} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert num_overtaken > TURNS // 2


def unread(told: list[str]) -> Any:
    """A gRPC context whose client reads nothing. `told` gets the details of an abort."""

    async def abort(code: Any, details: str, trailers: Any) -> None:
        told.append(details)
        await asyncio.Event().wait()

    async def write(message: Any) -> None:
        await asyncio.Event().wait()

    def add_done_callback(ended: Callable[[Any], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(ended)

    return SimpleNamespace(
        peer=lambda: "p", abort=abort, write=write, add_done_callback=add_done_callback
    )


def deaf_session(
    node: Node, told: list[str], num_pings: int = 0, *, half_closes: bool = False
) -> asyncio.Task[None]:
    """A session whose client sends pings, reads nothing, and may close its side of the stream.
    `told` gets the details of an abort."""

    async def requests() -> AsyncGenerator[Any, None]:
        yield _wire.open_session(SessionConfig("", "deaf", Role.TOOL, KEY_SPACE))
        for number in range(1, num_pings + 1):
            request = _wire.ping()
            request.request_id = number
            yield request
        if not half_closes:
            await asyncio.Event().wait()

    edge = Edge(node, AccessControl(), lambda *_: Peer(), Pace(1e6), SessionlessCalls(8), False)

    async def call() -> None:
        await SessionService(SessionOpener(edge)).Connect(requests(), unread(told))
        # gRPC ends the call only once the answers are read.

        await asyncio.Event().wait()

    return asyncio.create_task(call())


async def cancel(*calls: asyncio.Task[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(("num_pings", "half_closes"), [(299, False), (9, True)])
async def test_client_that_never_reads_ends_is_bounded(
    num_pings: int, half_closes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gRPC keeps such a call open. Its answers must be freed, and another session refused
    meanwhile."""
    monkeypatch.setattr(session_service, "SLOW_READER_S", 0.1)
    monkeypatch.setattr(session_service, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(node_sessions, "MAX_UNREAD_ENDS", 2)
    streams: list[SessionStream] = []
    init = SessionStream.__init__

    def noted(stream: SessionStream, *arguments: Any) -> None:
        streams.append(stream)
        init(stream, *arguments)

    monkeypatch.setattr(SessionStream, "__init__", noted)
    ended, refused, told = list[str](), list[str](), list[str]()
    async with live_node(tmp_path) as node:
        first = deaf_session(node, ended, num_pings, half_closes=half_closes)
        await eventually(lambda: node.sessions.unread_ends.total)
        assert repr(streams[0]._outbox) == "SessionOutbox(0 messages, 0 bytes)"
        assert bool(ended) != half_closes and not node.sessions
        second = deaf_session(node, refused, num_pings, half_closes=half_closes)
        await eventually(lambda: any("unread answers" in details for details in refused))
        await cancel(first, second)
        third = deaf_session(node, told)
        await eventually(lambda: node.sessions)
        assert not told
        await cancel(third)
