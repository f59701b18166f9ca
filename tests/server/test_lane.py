"""Tests what is the lane's alone: frames, silence, floods and half-closed sockets. What it has in
common with gRPC's stream, the tests of sessions see over both."""

import asyncio
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.processes import Server
from hotkv_client import SessionConfig
from hotkv_client.streams import GrpcStream, LaneStream, open_stream
from hotkv_client.types import Role
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.lane import framed
from hotkv_proto.messages.errors import read_error_detail
from hotkv_proto.v1 import session_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.wire import lane
from tests.server.nodes import SPACE
from tests.support.waiting import WAIT_S, eventually, wait_for


def path_of(server: Server) -> Path:
    return Path(server.target.removeprefix("unix:")).with_name("lane.sock")


@pytest.fixture
def raw(server: Server) -> Iterator[socket.socket]:
    """A connection whose greeting has been read."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path_of(server)))
        assert read(connection).WhichOneof("body") == "pong"
        yield connection


def read(connection: socket.socket) -> session_pb2.ConnectResponse:
    """Raises EOFError at the end."""
    parts = connection.makefile("rb", buffering=0)

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = parts.read(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    (size,) = struct.unpack("<I", exactly(4))
    return session_pb2.ConnectResponse.FromString(exactly(size))


def opening(server: Server, name: str = "lane") -> session_pb2.ConnectRequest:
    return _wire.open_session(SessionConfig(server.target, name, Role.TOOL, SPACE))


def ping(number: int) -> session_pb2.ConnectRequest:
    request = _wire.ping()
    request.request_id = number
    return request


def sent(*requests: session_pb2.ConnectRequest) -> bytes:
    return b"".join(framed(one.SerializeToString()) for one in requests)


@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_frames_in_any_pieces_are_served_in_order(
    server: Server, raw: socket.socket, cuts: int
) -> None:
    data = sent(opening(server), *map(ping, range(1, 30)))
    for at in range(0, len(data), cuts):
        raw.sendall(data[at : at + cuts])
    raw.shutdown(socket.SHUT_WR)
    assert read(raw).WhichOneof("body") == "session_opened"
    assert [read(raw).request_id for _ in range(29)] == [*range(1, 30)]
    with pytest.raises(EOFError):
        read(raw)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), Reason.TOO_LARGE),
        (framed(b"\xff" * 9), Reason.INVALID_FIELD),
        (framed(b""), Reason.INVALID_FIELD),
        (sent(ping(1)), Reason.INVALID_FIELD),
    ],
    ids=["too long", "no message", "empty", "no opening"],
)
def test_what_opens_no_session_is_refused(raw: socket.socket, data: bytes, reason: Reason) -> None:
    raw.sendall(data)
    last = read(raw)
    assert last.WhichOneof("body") == "error" and read_error_detail(last.error).reason is reason
    with pytest.raises(EOFError):
        read(raw)


def test_garbage_within_a_session_costs_its_call(server: Server, raw: socket.socket) -> None:
    raw.sendall(sent(opening(server)) + framed(b"\xff" * 9) + sent(ping(5)))
    assert read(raw).WhichOneof("body") == "session_opened"
    assert read(raw).WhichOneof("body") == "error"
    assert read(raw).request_id == 5


def test_a_long_message_ends_only_its_session(server: Server, raw: socket.socket) -> None:
    raw.sendall(sent(opening(server)) + struct.pack("<I", 1 << 31) + b"x" * 100)
    with pytest.raises(EOFError):
        while read(raw).WhichOneof("body") != "error":
            pass
        read(raw)
    stream = open_stream(SessionConfig(server.target, "other", Role.TOOL, SPACE))
    assert isinstance(stream, LaneStream) and stream.has_answered(WAIT_S)
    stream.close()


def test_a_flood_of_frames_lets_others_in(server: Server, raw: socket.socket) -> None:
    flood = sent(*map(ping, range(1, 20_000)))
    raw.sendall(sent(opening(server)))
    stop = threading.Event()

    def pour() -> None:
        try:
            while not stop.is_set():
                raw.send(flood)
        except OSError:
            return

    def drain() -> None:
        try:
            while raw.recv(1 << 20):
                pass
        except OSError:
            return

    threads = [threading.Thread(target=one, daemon=True) for one in (pour, drain)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            stream = LaneStream(path_of(server))
            assert stream.has_answered(WAIT_S)
            stream.begin(opening(server, f"beside{number}"))
            assert next(iter(stream)).WhichOneof("body") == "session_opened"
            stream.close()
    finally:
        stop.set()
        raw.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT_S)


def test_bytes_the_socket_refuses_are_sent_later(server: Server) -> None:
    stream = LaneStream(path_of(server))
    assert stream.has_answered(WAIT_S)
    stream.begin(opening(server))
    answers = iter(stream)
    assert next(answers).WhichOneof("body") == "session_opened"
    large = session_pb2.ConnectRequest(request_id=7)
    large.cancel_transfer.transfer_id = "x" * (MAX_MESSAGE_BYTES - 100)
    for _ in range(8):
        stream.put(large)
    stream.put(ping(9))
    stream.put(None)
    assert stream.num_unsent
    assert [one.request_id for one in answers] == [7] * 8 + [9]
    assert not stream.num_unsent
    stream.close()


def test_cancel_ends_a_reader_at_once(server: Server) -> None:
    stream = LaneStream(path_of(server))
    assert stream.has_answered(WAIT_S)
    stream.begin(opening(server))
    answers = iter(stream)
    next(answers)
    caught = list[BaseException]()

    def read_on() -> None:
        try:
            next(answers)
        except HotKVError as error:
            caught.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    stream.cancel()
    reader.join(WAIT_S)
    assert caught and not reader.is_alive()
    assert not stream.has_answered(WAIT_S)
    stream.close()


def test_without_a_lane_sessions_use_grpc(server: Server, tmp_path: Path) -> None:
    os.symlink(server.target.removeprefix("unix:"), tmp_path / "grpc.sock")
    stream = open_stream(SessionConfig(f"unix:{tmp_path}/grpc.sock", "g", Role.TOOL, SPACE))
    assert isinstance(stream, GrpcStream) and stream.has_answered(WAIT_S)
    stream.close()


class Opener:
    """Serves by reading everything."""

    async def serve(self, requests, write, context, who):  # type: ignore[no-untyped-def]
        async for _ in requests:
            pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "TURN_S", 0.01)


async def test_silent_connections_end_and_pinging_ones_stay(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = asyncio.Semaphore(0)

    class Health:
        async def turns(self, what, every_s):  # type: ignore[no-untyped-def]
            while True:
                await turns.acquire()
                yield

    class Node:
        health, refusals = Health(), dict.fromkeys(Reason, 0)

    node = Node()
    server = lane.LaneServer(node, Opener(), tmp_path / "l.sock", 0o600, 2)  # type: ignore[arg-type]
    await server.start()
    with ExitStack() as stack:
        silent, loud, third = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
        for one in (silent, loud):
            one.connect(str(tmp_path / "l.sock"))
        await eventually(lambda: len(server._streams) == 2)
        third.connect(str(tmp_path / "l.sock"))
        await eventually(lambda: node.refusals[Reason.OVERLOADED] == 1)
        streams = list(server._streams)
        for _ in range(lane.SILENT_TURNS + 1):
            loud.send(sent(ping(1)))
            await eventually(lambda: any(not one.silent_turns for one in streams))
            turns.release()
            await eventually(lambda: not turns._value)
            await asyncio.sleep(0)
        await eventually(lambda: len(server._streams) == 1)
    await server.stop(1.0)
    assert not (tmp_path / "l.sock").exists()


def test_the_socket_goes_with_its_server(own_server: Server) -> None:
    path = path_of(own_server)
    assert path.is_socket() and path.stat().st_mode & 0o777 == 0o660
    os.kill(own_server.pid, signal.SIGTERM)
    wait_for(lambda: not path.exists())
