"""Tests a client's connection: each call gets one answer or error, an unreadable answer fails
alone, and the process can fork."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_client import (
    GroupHashes,
    LinkState,
    Role,
    Session,
    SessionConfig,
    connection,
    life,
    targets,
)
from hotkv_client.connection import Connection, Pending
from hotkv_client.fence import Fence
from hotkv_client.types import After, EngineMemory, Evicted, TransferResult, TransferStatus
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import CudaBacking, Layout, MemoryHandle
from hotkv_proto.messages.cache import MAX_LOADED_BLOCKS
from hotkv_proto.order import DeviceMark, OrderKind
from hotkv_proto.v1 import session_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from tests.doubles.fake import OddServer
from tests.server.refusals import fill
from tests.support.waiting import WAIT_S, wait_for

SPACE = KeySpace("m", "w", "bfloat16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
CONFIG = SessionConfig("unix:/none/none.sock", "e", Role.WORKER, SPACE)


class Unsent:
    """A stream whose server takes nothing."""

    def __init__(self) -> None:
        self.requests, self.answers = list[Any](), list[Any]()
        self.num_cancels = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.answers)

    @property
    def num_unsent(self) -> int:
        return len(self.requests)

    def put(self, request: Any) -> None:
        self.requests.append(request)

    begin = put

    def cancel(self) -> None:
        self.num_cancels += 1

    def close(self) -> None:
        pass


@pytest.fixture
def made() -> Any:
    connection = Connection(CONFIG, None, Fence())
    connection.stream.close()
    connection.stream = Unsent()  # type: ignore[assignment]
    return connection


def pending(**fields: Any) -> Pending:
    return Pending(Future(), **fields)


def test_after_its_end_a_connection_takes_no_call(made: Any) -> None:
    before = pending()
    assert made.submit(_wire.ping(), before, None) is None and made.num_pending == 1
    made.stream.requests.pop()
    made.send_only(_wire.release("x" * MAX_MESSAGE_BYTES))
    assert not made.stream.requests, "the server would end the stream"
    made.end()
    assert isinstance(before.future.exception(0), SessionLostError)
    after = pending()
    assert isinstance(made.submit(_wire.ping(), after, None), SessionLostError)
    assert made.num_pending == 0 and not after.future.done()


def test_calls_wait_up_to_the_bound_numbered(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING", 3)
    requests = [_wire.ping() for _ in range(3)]
    assert all(made.submit(request, pending(), None) is None for request in requests)
    assert len({request.request_id for request in requests} - {0}) == 3
    refused = made.submit(_wire.ping(), pending(), None)
    assert isinstance(refused, HotKVError) and refused.reason is Reason.OVERLOADED
    assert refused.retryable and made.num_pending == 3


@pytest.mark.parametrize(
    ("fields", "after"),
    [({}, After(OrderKind.FLAGS, DeviceMark(0, 1))), ({"fence_index": 3}, None)],
)
def test_request_refused_by_the_link_isnt_sent(
    made: Any, fields: dict[str, Any], after: After | None
) -> None:
    refused = made.submit(_wire.ping(), pending(**fields), after)
    assert isinstance(refused, SessionLostError) and "mark anew" in refused.message
    assert made.num_pending == 0 and not made.stream.requests


FORKED = """
import os, sys
from tests.wire.test_connection import Server, connected, masks_by

with connected(sys.argv[1], Server(lambda number: [masks_by(number)])) as session:
    child = os.fork()
    if not child:
        try:
            print(session.lookup([]).exception(5), flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert session.lookup([]).exception(60) is None
"""


def test_a_process_with_a_session_can_fork(target: str) -> None:
    """No answer reaches the child, so its calls fail. gRPC's fork handlers would warn, or stop
    its threads and perhaps hang."""
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", FORKED, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert f"no server at {target} (closed)" in done.stdout and "fork" not in done.stderr, done


def bodies(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in kind.DESCRIPTOR.oneofs_by_name["body"].fields)


BODIES, ANSWERS = bodies(session_pb2.ConnectRequest), bodies(session_pb2.ConnectResponse)
TRANSFERS = ("load", "store")
UNKNOWN = 9
"""A number that no enum of the wire has."""


def request(body: str) -> Any:
    message = session_pb2.ConnectRequest()
    getattr(message, body).SetInParent()
    return message


def answer(body: str, request_id: int, seed: int = 0, is_filled: bool = True) -> Any:
    """An answer with random fields; without a body if `body` is ""."""
    message = session_pb2.ConnectResponse(request_id=request_id)
    if body:
        getattr(message, body).SetInParent()
    if body and is_filled:
        fill(getattr(message, body), np.random.default_rng(seed), 0)
    return message


def spoiled(message: Any, cuts: list[tuple[int, int]]) -> Any:
    """The message with other bytes at (position, value), if protobuf can parse that."""
    packed = bytearray(message.SerializeToString())
    for place, value in cuts:
        if packed:
            packed[place % len(packed)] = value
    try:
        read = session_pb2.ConnectResponse.FromString(bytes(packed))
    except DecodeError:
        return message
    read.request_id = message.request_id
    return read


def call(made: Any, body: str, name: str = "", **fields: Any) -> "Future[Any]":
    """Submits a call without a server. `name`: transfer id."""

    future: Future[Any] = Future()
    waiting = Pending(future, transfer_id=name, is_load=body == "load", **fields)
    assert made.submit(request(body), waiting, None) is None
    return future


@example([("load", "load", 0, [])])
@example([(body, "its own", 0, []) for body in BODIES])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(BODIES),
            st.sampled_from((*ANSWERS, "", *["its own"] * len(ANSWERS))),
            st.integers(0, 1 << 30),
            st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_answer_resolves_its_call(calls: list[tuple[str, str, int, list[Any]]]) -> None:
    """An answer of another kind than the call is an error."""
    made = Connection(CONFIG, None, Fence())
    futures, answers = [], []
    for number, (body, kind, seed, cuts) in enumerate(calls, 1):
        futures.append(call(made, body, f"t{number}" if body in TRANSFERS else ""))
        kind = _answers.ANSWERED_AS.get(body, body) if kind == "its own" else kind
        answers.append(spoiled(answer(kind if kind in ANSWERS else "", number, seed), cuts))
    late = call(made, "ping")
    made.responses = iter([*answers, answer("pong", 77), answer("eviction_notice", 0)])
    notices: list[Any] = []
    made.serve(notices.append)
    for (body, kind, _, cuts), future in zip(calls, futures, strict=True):
        assert future.done(), body
        error = future.exception(0)
        assert error is None or isinstance(error, HotKVError), repr(error)
        if kind not in ("its own", "error", _answers.ANSWERED_AS.get(body, body)) and not cuts:
            assert error is not None and f"answered {body} by" in error.message
        if error is None and body in TRANSFERS:
            assert isinstance(future.result(0), TransferResult)
            assert future.result(0).status in set(TransferStatus)
    assert len(notices) == 1 and made.num_pending == 1 and not late.done()
    made.end()
    assert isinstance(late.exception(0), HotKVError)


def serve(made: Any, *answers: Any) -> None:
    made.responses = iter([*answers])
    made.serve(lambda _: None)


@pytest.mark.parametrize("body", TRANSFERS)
def test_newer_servers_unknown_status_is_failure(made: Any, body: str) -> None:
    future, told = call(made, body, "t"), answer(body, 1, is_filled=False)
    getattr(told, body).status = UNKNOWN
    serve(made, told)
    assert future.result(0).status is TransferStatus.FAILED


def opened() -> Any:
    message = answer("session_opened", 0, is_filled=False)
    message.session_opened.session_id = "s"
    return message


def link(**sizes: int) -> bytes:
    packed: bytes = session_pb2.LinkResponse(**sizes).SerializeToString()
    return packed


@pytest.mark.parametrize(
    ("packet", "file_bytes", "words"),
    [
        (b"", (), "closed the descriptor socket without an answer"),
        (link(arena_byte_count=4096), (), "sent 0 descriptors, not one for each size"),
        (link(table_byte_count=4096), (4096, 4096), "sent 2 descriptors"),
        (link(table_byte_count=4096), (0,), "the file has 0 bytes, not 4096"),
        (link(table_byte_count=4096), (4096,), "block table has magic"),
        (b"\xff" * 40, (), "DecodeError"),
    ],
)
def test_link_without_table_opens_nothing_leaves_nothing(
    target: str, packet: bytes, file_bytes: tuple[int, ...], words: str
) -> None:
    files = [os.memfd_create("odd-table") for _ in file_bytes]
    for fd, num_bytes in zip(files, file_bytes, strict=True):
        os.truncate(fd, num_bytes)

    def says(packed: bytes) -> list[bytes]:
        message = opened()
        message.session_opened.has_descriptor_socket = True
        return [message.SerializeToString()]

    def serves() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as peer:
                    if peer.recv(4096) and packet:
                        socket.send_fds(peer, [packet], files)

    heard: queue.SimpleQueue[tuple[LinkState, str]] = queue.SimpleQueue()
    session = session_to(target, on_state=lambda *news: heard.put(news))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, OddServer(target, says):
        listener.bind(str(Path(target.removeprefix("unix:")).parent / "fd.sock"))
        listener.listen()
        thread = threading.Thread(target=serves)
        thread.start()
        session.start()
        state, reason = heard.get(timeout=60)
        session.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert state is LinkState.ABSENT and words in reason, reason
    left = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            left += "odd-table" in os.readlink(f"/proc/self/fd/{number}")
    assert left == len(files)
    for fd in files:
        os.close(fd)


class Server:
    """An `OddServer`'s behaviour: it opens sessions, and answers call n with `say(n)`."""

    def __init__(self, say: Callable[[int], list[bytes]]) -> None:
        self.say = say

    def __call__(self, packed: bytes) -> list[bytes]:
        message = session_pb2.ConnectRequest.FromString(packed)
        if message.WhichOneof("body") == "open_session":
            return [opened().SerializeToString()]
        return self.say(message.request_id) if message.request_id else []


def session_to(target: str, space: KeySpace = SPACE, **more: Any) -> Session:
    return Session(SessionConfig(target, "e", Role.TOOL, space, reconnect_initial_s=0.01, **more))


@contextlib.contextmanager
def connected(target: str, says: Callable[[bytes], list[bytes]], **more: Any) -> Iterator[Session]:
    """A session with an `OddServer`."""
    with OddServer(target, says), contextlib.closing(session_to(target, **more)) as session:
        session.start()
        assert session.wait_connected(60)
        yield session


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    yield f"unix:{tmp_path}/grpc.sock"


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def masks_by(number: int) -> bytes:
    packed: bytes = answer("lookup", number, is_filled=False).SerializeToString()
    return packed


@pytest.mark.parametrize(
    "says",
    [
        lambda number: [b"\xff" * 40],
        lambda number: [answer("", number).SerializeToString()],
        lambda number: [answer("load", number, number).SerializeToString()],
        lambda number: [opened().SerializeToString(), masks_by(number)],
        lambda number: [answer("eviction_notice", 0).SerializeToString() + b"\x6a\x03\x0a\x01\x08"],
        lambda number: 1 / 0,
    ],
    ids=["no message", "no body", "another call's", "opened twice", "half a notice", "no answer"],
)
def test_a_session_outlives_what_it_can_not_read(
    target: str, says: Callable[[int], list[bytes]]
) -> None:
    server = Server(says)
    with connected(target, server) as session:
        futures = [session.lookup([GroupHashes(0, [bytes(32)])]) for _ in range(5)]
        for future in futures:
            assert isinstance(future.exception(60), HotKVError | None)
        server.say = lambda number: [masks_by(number)]
        assert answered_again(session) == ()


def answered_again(session: Session) -> Any:
    """Repeats a lookup until it is answered, also over new connections."""
    for _ in range(1000):
        assert session.wait_connected(60)
        future = session.lookup([GroupHashes(0, [bytes(32)])])
        if future.exception(60) is None:
            return future.result(0)
    raise AssertionError("no call is answered any more")


@pytest.mark.parametrize(
    ("hash_bytes", "answers"), [(32, True), (8, True), (16, False), (16, None)]
)
def test_split_lookup_resolves_with_any_answers(
    target: str, hash_bytes: int, answers: bool | None
) -> None:
    """The lookup is too large for one call. `answers` None: all calls are refused; False:
    answers are empty."""
    counts: list[int] = []

    def says(packed: bytes) -> list[bytes]:
        message = session_pb2.ConnectRequest.FromString(packed)
        if message.WhichOneof("body") == "open_session":
            return [opened().SerializeToString()]
        counts.append(len(message.lookup.groups[0].hashes) // hash_bytes)
        body = "error" if answers is None else "lookup"
        told = answer(body, message.request_id, is_filled=False)
        if answers:
            told.lookup.groups.add(flags=bytes([len(counts) % 2]) * counts[-1])
        return [told.SerializeToString()]

    space = KeySpace("m", "w", "bfloat16", SPACE.groups, 16, hash_bytes=hash_bytes)
    with connected(target, says, space=space) as session:
        whole = session.lookup([GroupHashes(0, [bytes(hash_bytes)] * (MAX_LOADED_BLOCKS + 1))])
        assert not whole.cancel(), "a cancelled future can't be resolved"
        error = whole.exception(60)
    assert len(counts) == 2 and sum(counts) == MAX_LOADED_BLOCKS + 1 > max(counts)
    if answers:
        assert whole.result()[0].tolist() == [True] * counts[0] + [False] * counts[1]
    else:
        assert isinstance(error, HotKVError) and error.reason is Reason.INTERNAL


def test_unread_reports_end_their_stream_once(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bounded number of messages without an answer may wait."""
    monkeypatch.setattr(connection, "MAX_UNSENT", 3)
    assert made.submit(_wire.ping(), pending(), None) is None
    for _ in range(3):
        made.send_only(_wire.release("l"))
    assert made.stream.num_unsent == 4 and not made.stream.num_cancels
    for _ in range(2):
        made.send_only(_wire.release("l"))
    assert made.stream.num_unsent == 4, "calls that wait for answers do not count"
    assert made.stream.num_cancels == 1
    assert caplog.text.count("requests unread") == 1


def test_notices_before_registration_are_delivered(target: str) -> None:
    told = answer("drain_notice", 0, is_filled=False)
    done = answer("memory_registered", 1, is_filled=False)
    states: list[LinkState] = []
    is_draining = threading.Event()

    def hear(state: LinkState, reason: str) -> None:
        states.append(state)
        if state is LinkState.DRAINING:
            is_draining.set()

    config = SessionConfig(target, "e", Role.WORKER, SPACE, on_state=hear)
    session = Session(config, EngineMemory(Layout(0, 1, (), ()), {}))
    says = Server(lambda number: [told.SerializeToString(), done.SerializeToString()])
    with OddServer(target, says):
        session.start()
        assert is_draining.wait(60)
        session.close()
        # `close` waits for the thread for at most 5 s.
        wait_for(lambda: "hotkv-session-worker" not in threads())
    assert states[:2] == [LinkState.CONNECTED, LinkState.DRAINING]


def test_session_can_close_while_looking_for_server(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(target.removeprefix("unix:"))
        hangs.listen()
        for number in range(20):
            session = session_to(target, connect_timeout_s=60.0)
            session.start()
            if not number:
                hangs.accept()
            session.close()
            wait_for(lambda: "hotkv-session-tool" not in threads())
    assert not failed


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("unix:/none/none.sock", ": there is no /none/none.sock"),
        ("unix:{folder}/left.sock", "{folder}/left.sock: Connection refused"),
        ("127.0.0.1:1", "TLS certificates"),
    ],
)
def test_silent_server_is_named_with_the_reason(tmp_path: Path, place: str, said: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    place, said = (text.format(folder=tmp_path) for text in (place, said))
    heard: queue.SimpleQueue[tuple[LinkState, str]] = queue.SimpleQueue()
    with contextlib.closing(
        session_to(place, connect_timeout_s=0.1, on_state=lambda *news: heard.put(news))
    ) as session:
        session.start()
        state, why = heard.get(timeout=WAIT_S)
    assert state is LinkState.ABSENT and f"no server answers at {place}" in why and said in why
    assert ("TLS" in why) is not targets.is_unix(place)


@pytest.mark.parametrize("closes", [False, True])
def test_a_server_has_time_to_map_large_memory(target: str, closes: bool) -> None:
    """The server takes longer than `connect_timeout_s`."""
    asked, goes_on = threading.Semaphore(0), threading.Event()

    def slow(packed: bytes) -> list[bytes]:
        message = session_pb2.ConnectRequest.FromString(packed)
        if message.WhichOneof("body") == "open_session":
            return [opened().SerializeToString()]
        asked.release()
        goes_on.wait(WAIT_S if closes else 1.5)
        return [
            answer("memory_registered", message.request_id, is_filled=False).SerializeToString()
        ]

    config = SessionConfig(target, "e", Role.WORKER, SPACE, connect_timeout_s=1.0)
    layout = Layout(0, 1, (MemoryHandle("kv", 64 << 30),), ())
    session = Session(config, EngineMemory(layout, {}))
    with OddServer(target, slow):
        session.start()
        assert asked.acquire(timeout=WAIT_S)
        if closes:
            session.close()
            wait_for(lambda: "hotkv-session-worker" not in threads())
            goes_on.set()
        assert session.wait_connected(WAIT_S) is not closes
        assert not asked.acquire(blocking=False), "the server is asked once"
        session.close()


def test_an_old_server_gets_no_descriptors_of_a_range(target: str) -> None:
    def old(packed: bytes) -> list[bytes]:
        message = opened()
        message.session_opened.has_descriptor_socket = True
        return [message.SerializeToString()]

    said: list[str] = []
    config = SessionConfig(
        target, "e", Role.WORKER, SPACE, on_state=lambda _, why: said.append(why)
    )
    handle = MemoryHandle("kv", 1, device_uuid=bytes(16), backings=(CudaBacking("b", 1),))
    session = Session(config, EngineMemory(Layout(0, 1, (handle,), ()), {"b": 0}))
    with OddServer(target, old):
        session.start()
        wait_for(lambda: any("too old to map CUDA's virtual memory" in why for why in said))
        session.close()


@pytest.mark.parametrize("opens", [True, False])
def test_start_waits_for_session_opening_server(target: str, opens: bool) -> None:
    """It returns at once if there is no server, or if that opens no session."""
    asked, goes_on = threading.Event(), threading.Event()

    def slow(packed: bytes) -> list[bytes]:
        asked.set()
        assert goes_on.wait(60)
        return [(opened() if opens else answer("pong", 0)).SerializeToString()]

    session = session_to(target)
    assert not session.wait_opened(60)
    with OddServer(target, slow), ThreadPoolExecutor(1) as pool:
        session.start()
        assert asked.wait(60) and not session.wait_connected(0) and not session.wait_opened(0)
        # The test waits for less than 90 s, so the answer must end it.
        waits = pool.submit(session.wait_opened, 90)
        goes_on.set()
        assert waits.result(60) == opens
        session.close()
        assert not pool.submit(session.wait_connected, 90).result(60)


def test_pauses_grow_until_a_connection_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SessionConfig(
        "unix:/none", "e", Role.TOOL, SPACE, reconnect_initial_s=1.0, reconnect_max_s=4.0
    )
    one, now_s, pauses_s = life.SessionLife(config, None), [100.0], list[float]()
    lasts_s = iter([0.0, 0.0, 0.0, 0.0, 9.0, 0.0])

    def serve() -> str:
        now_s[0] += next(lasts_s)
        return "gone"

    def wait(pause_s: float) -> None:
        pauses_s.append(pause_s)
        if len(pauses_s) == 6:
            one._closed.set()

    monkeypatch.setattr(one, "_connect_and_serve", serve)
    monkeypatch.setattr(one._closed, "wait", wait)
    monkeypatch.setattr(life, "time", Mock(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(life, "random", Mock(uniform=lambda least, most: most))
    one._run()
    assert pauses_s == [1.0, 2.0, 4.0, 4.0, 1.0, 2.0]


def test_listeners_that_raise_do_not_end_a_session(target: str) -> None:
    heard: list[object] = []

    def raises(*news: object) -> None:
        heard.extend(news)
        raise RuntimeError("a listener's own fault")

    def says(number: int) -> list[bytes]:
        notice = answer("eviction_notice", 0, is_filled=False)
        notice.eviction_notice.groups.add(group_index=0, hashes=bytes(32))
        return [notice.SerializeToString(), masks_by(number)]

    with connected(target, Server(says), on_state=raises, on_evicted=raises) as session:
        for _ in range(2):
            assert session.lookup([GroupHashes(0, [bytes(32)])]).result(60) == ()
        error = session.open_residency("r", {0: 1}).exception(60)
        assert isinstance(error, HotKVError) and error.reason is Reason.VERSION_MISMATCH
    assert LinkState.CONNECTED in heard and LinkState.CLOSED in heard
    assert any(isinstance(one, Evicted) for one in heard)


def test_arguments_that_fail_raise_through_the_future(target: str) -> None:
    session = session_to(target)
    future = session.lookup([GroupHashes("0", [bytes(32)])])  # type: ignore[arg-type]
    error = future.exception(0)
    assert isinstance(error, HotKVError) and error.reason is Reason.INVALID_FIELD
    error = session.acquire("l", [GroupHashes(0, [b"short"])]).exception(0)
    assert isinstance(error, HotKVError) and error.reason is Reason.INVALID_HASH
    with pytest.raises(SessionLostError):
        session.selects()
