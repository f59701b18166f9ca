"""Odd clients below whole messages: they hold calls open, do not read, send halves, and hand over
strange descriptors.

What each kind did is counted under `KIND: what`; when it returns, its connections are ended.
"""

import contextlib
import ctypes
import fcntl
import os
import queue
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from hotkv_client import BlockRun, GroupHashes
from hotkv_client.wire import requests as _wire
from hotkv_proto.blocks import NO_OPTIONS
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import admin_pb2, events_pb2, session_pb2_grpc, sparse_pb2_grpc
from tests.robustness.odd_place import INT32, NUM_BLOCKS, SMALL_WINDOW, Kinds, Place, memory_file
from tests.robustness.raw_client import DEADLINE_S, code_of

F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1033, 2, 4, 8, 16
PUNCH_HOLE = 0x03
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
libc = ctypes.CDLL(None, use_errno=True)


class OddConnections:
    """See the module."""

    def __init__(self, place: Place) -> None:
        self._place, self._chance = place, place.chance

    def kinds(self) -> Kinds:
        return {
            "idle": self.idle,
            "slow readers": self.slow_readers,
            "descriptors": self.descriptors,
            "half sent": self.half_sent,
            "server streams": self.server_streams,
        }

    def idle(self) -> None:
        """Holds calls and connections that ask for nothing while others are served."""
        with contextlib.ExitStack() as held:
            channels = [
                held.enter_context(grpc.insecure_channel(self._place.target, SMALL_WINDOW))
                for _ in range(2)
            ]
            admins = held.enter_context(grpc.insecure_channel(self._place.admin, SMALL_WINDOW))
            calls: list[tuple[str, Any]] = []
            silent: list[Callable[[], None]] = []
            for _ in range(60):
                what = self._chance.choice(
                    (
                        "SelectBlocks",
                        "Connect",
                        "Watch",
                        "WatchRequests",
                        "Subscribe",
                        "fd.sock",
                        "http",
                    )
                )
                if what in ("fd.sock", "http"):
                    with contextlib.suppress(OSError):
                        held.enter_context(self._place.connection(what))
                    self._place.note(f"idle: {what}", "held")
                    continue
                calls.append(
                    (what, self._idle_call(what, self._chance.choice(channels), admins, silent))
                )
            self._place.look()
            for what, call in calls:
                is_active = call.is_active()
                self._place.note(
                    f"idle: {what}", "held" if is_active else f"ended {call.code().name}"
                )
                call.cancel()
            for stop in silent:
                stop()

    def _idle_call(
        self,
        what: str,
        channel: grpc.Channel,
        admins: grpc.Channel,
        silent: list[Callable[[], None]],
    ) -> Any:
        if what in ("SelectBlocks", "Connect"):
            box: queue.SimpleQueue[Any] = queue.SimpleQueue()
            silent.append(lambda: box.put(None))
            requests = iter(box.get, None)
            if what == "SelectBlocks":
                return sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(
                    requests, timeout=2 * DEADLINE_S
                )
            return session_pb2_grpc.SessionServiceStub(channel).Connect(
                requests, timeout=2 * DEADLINE_S
            )
        return self._server_stream(what, channel, admins, b"")

    def _server_stream(
        self, what: str, channel: grpc.Channel, admins: grpc.Channel, request: bytes
    ) -> Any:
        """Starts a call that the server answers with a stream. An empty `request` is the plain
        one."""
        where, method = {
            "Watch": (channel, "/grpc.health.v1.Health/Watch"),
            "WatchRequests": (admins, "/hotkv.v1.AdminService/WatchRequests"),
            "Subscribe": (admins, "/hotkv.v1.EventService/Subscribe"),
        }[what]
        return where.unary_stream(method)(request, timeout=2 * DEADLINE_S)

    def slow_readers(self) -> None:
        """Opens streams of every kind and reads none of them while others are served."""
        with contextlib.ExitStack() as held:
            admins = held.enter_context(grpc.insecure_channel(self._place.admin, SMALL_WINDOW))
            channel = held.enter_context(grpc.insecure_channel(self._place.target, SMALL_WINDOW))
            streams = [
                (what, self._server_stream(what, channel, admins, b""))
                for what in ("Watch", "WatchRequests", "Subscribe")
            ]
            unread = held.enter_context(self._place.session(model="unread", hears=True))
            many = _wire.lookup([GroupHashes(0, self._place.hashes(64) * 64)], 32)
            for number in range(self._chance.choice((20, 300))):
                unread.put(
                    many if number % 2 else _wire.acquire("x" * 250, [GroupHashes(7, [])], 0, 32)
                )
                self._place.note("slow readers: Connect", "not read")
            http = held.enter_context(self._place.connection("http"))
            http.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            self._place.note("slow readers: http", "not read")
            self._unread_selections(held)
            # Events, reports and eviction notices come of others' work.
            with self._place.working("unread") as (session, _):
                for number in range(40):
                    blocks = [self._chance.randbytes(32) for _ in range(NUM_BLOCKS)]
                    run = BlockRun(
                        0,
                        blocks,
                        np.arange(NUM_BLOCKS, dtype=INT32),
                        token_ids=np.zeros(16 * NUM_BLOCKS, INT32),
                    )
                    self._place.must(
                        session,
                        _wire.store(f"t{number}", f"l{number}", [run], 20, NO_OPTIONS, 0, 32),
                    )
            self._place.look()
            for what, call in streams:
                self._place.note(
                    f"slow readers: {what}",
                    "not read" if call.is_active() else f"ended {call.code().name}",
                )
                call.cancel()

    def _unread_selections(self, held: contextlib.ExitStack) -> None:
        engine = self._place.sparse_engine(held)
        blocks = self._place.sequence(engine, "unread", 32)
        channel = held.enter_context(grpc.insecure_channel(self._place.target, SMALL_WINDOW))
        requests = [self._place.selection(engine, "unread", 16 * len(blocks)) for _ in range(100)]
        call = sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(
            iter(requests), timeout=2 * DEADLINE_S
        )
        held.callback(call.cancel)
        for _ in requests:
            self._place.note("slow readers: SelectBlocks", "not read")

    def descriptors(self) -> None:
        """Hands over fences and memory that are short, have holes, are sealed, are spoiled
        afterwards, or are not memory at all."""
        for _ in range(4):
            with (
                contextlib.ExitStack() as held,
                self._place.session(model="descriptors") as session,
            ):
                kinds = {
                    FENCE_HANDLE: self._strange_file(held, 4 * FENCE_WORDS),
                    "kv": self._strange_file(held, NUM_BLOCKS * 8192),
                }
                fds = {name: fd for name, (_, fd) in kinds.items()}
                word = session.link(fds)
                for name, (what, _) in kinds.items():
                    self._place.note(
                        f"descriptors: {'fence' if name == FENCE_HANDLE else 'memory'} {what}", word
                    )
                if word != "answered":
                    self._place.note(
                        "descriptors: link again",
                        session.link(
                            {"kv": held.enter_context(_closing(memory_file(NUM_BLOCKS * 8192)))}
                        ),
                    )
                self._place.note(
                    "descriptors: register",
                    session.ask(
                        _wire.register_memory(self._place.plain(NUM_BLOCKS * 8192), NO_ORDER)
                    )[0],
                )
                asked: dict[int, str] = {}
                for number in range(8):
                    run = BlockRun(
                        0, self._place.hashes(NUM_BLOCKS), np.arange(NUM_BLOCKS, dtype=INT32)
                    )
                    fence_index = self._chance.choice((0, 1, 7, FENCE_WORDS - 1, FENCE_WORDS, -1))
                    asked[
                        session.put(
                            _wire.store(
                                f"{number}", f"{number}", [run], 20, NO_OPTIONS, fence_index, 32
                            )
                        )
                    ] = "store"
                    if self._chance.random() < 0.4:
                        self._spoil(self._chance.choice(list(fds.values())))
                self._place.collect("descriptors", session, asked)

    def _strange_file(self, held: contextlib.ExitStack, num_bytes: int) -> tuple[str, int]:
        chance = self._chance
        what = chance.choice(
            (
                "whole",
                "whole",
                "whole",
                "holes",
                "short",
                "empty",
                "sealed",
                "read-only",
                "path",
                "pipe",
                "socket",
                "device",
                "folder",
            )
        )
        match what:
            case "pipe":
                fd, other = os.pipe()
                held.callback(os.close, other)
            case "socket":
                one, two = socket.socketpair()
                held.callback(two.close)
                fd = one.detach()
            case "device":
                fd = os.open("/dev/zero", os.O_RDWR)
            case "folder":
                fd = os.open("/dev/shm", os.O_RDONLY)
            case _:
                size = {"short": num_bytes // 2, "empty": 0}.get(what, num_bytes)
                fd = memory_file(size, filled=what != "holes")
                if what == "sealed":
                    # A seal against writing would need a file that nobody has mapped: the server
                    # may be at it.
                    fcntl.fcntl(
                        fd,
                        F_ADD_SEALS,
                        chance.choice(
                            (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, 14)
                        ),
                    )
                if what in ("read-only", "path"):
                    plain, fd = (
                        fd,
                        os.open(
                            f"/proc/self/fd/{fd}", os.O_RDONLY if what == "read-only" else os.O_PATH
                        ),
                    )
                    os.close(plain)
        held.callback(os.close, fd)
        return what, fd

    def _spoil(self, fd: int) -> None:
        """Changes a file that the server may have mapped; does nothing if the system refuses."""
        with contextlib.suppress(OSError):
            match self._chance.choice(("cut", "grow", "punch", "write", "seal")):
                case "cut":
                    os.truncate(fd, self._chance.choice((0, 1, 2048, 4096)))
                case "grow":
                    os.truncate(fd, 1 << 23)
                case "punch":
                    libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096))
                case "write":
                    os.pwrite(
                        fd,
                        (1).to_bytes(4, "little"),
                        4 * self._chance.choice((0, 1, 7, FENCE_WORDS - 1)),
                    )
                case _:
                    fcntl.fcntl(
                        fd,
                        F_ADD_SEALS,
                        self._chance.choice((F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE)),
                    )

    def half_sent(self) -> None:
        """Ends connections in the middle of packets, requests, HTTP/2 frames and gRPC messages."""
        with contextlib.ExitStack() as held:
            for _ in range(30):
                what = self._chance.choice(("fd.sock", "http", "frames", "message"))
                with contextlib.suppress(OSError):
                    connection = self._place.connection(
                        "grpc.sock" if what in ("frames", "message") else what
                    )
                    held.callback(connection.close)
                    whole = self._whole(what)
                    connection.sendall(whole[: self._chance.randrange(1, len(whole))])
                    if self._chance.random() < 0.5:
                        connection.close()
                self._place.note(f"half sent: {what}", "sent")
            self._place.look()

    def _whole(self, what: str) -> bytes:
        chance = self._chance
        if what == "fd.sock":
            return chance.choice(
                (
                    _wire.ticket_request(),
                    _wire.link_request("x" * 32, ["kv"] * 40),
                    chance.randbytes(200),
                )
            )
        if what == "http":
            return (
                b"GET /metrics HTTP/1.1\r\nHost: "
                + b"a" * chance.choice((1, 5000))
                + b"\r\nContent-Length: 100\r\n\r\n"
            )
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
        if what == "frames":
            rest = b"".join(
                _frame(
                    chance.randrange(12),
                    chance.randrange(256),
                    chance.choice((0, 1, 3)),
                    chance.randbytes(40),
                )
                for _ in range(6)
            )
            return preface + rest
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/hotkv.v1.CacheService/Lookup",
            ":authority": "a",
            "te": "trailers",
        }
        head = b"".join(
            _literal(name, value)
            for name, value in {**fields, "content-type": "application/grpc"}.items()
        )
        body = (
            b"\0"
            + chance.choice((20, 1 << 20, (1 << 32) - 1)).to_bytes(4, "big")
            + chance.randbytes(19)
        )
        return preface + _frame(1, 4, 1, head) + _frame(0, 0, 1, body)

    def server_streams(self) -> None:
        """Makes good and bad requests of all calls that the server answers with streams, and reads
        one answer of each."""
        with (
            grpc.insecure_channel(self._place.target) as channel,
            grpc.insecure_channel(self._place.admin) as admins,
        ):
            for _ in range(20):
                what = self._chance.choice(("Watch", "WatchRequests", "Subscribe"))
                call = self._server_stream(what, channel, admins, self._stream_request(what))
                try:
                    next(call)
                    self._place.note(f"server streams: {what}", "answered")
                except grpc.RpcError as error:
                    self._place.note(f"server streams: {what}", code_of(error))
                call.cancel()
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(HealthCheckRequest(), timeout=DEADLINE_S).status

    def _stream_request(self, what: str) -> bytes:
        chance = self._chance
        number = chance.choice((0, 1, 2, 999, -1, (1 << 31) - 1))
        good = {
            "Watch": HealthCheckRequest(
                service=chance.choice(("", "live", "hotkv.v1.CacheService", "x" * 10_000))
            ),
            "WatchRequests": admin_pb2.WatchRequestsRequest(key_space_id=number),
            "Subscribe": events_pb2.SubscribeRequest(key_space_id=number),
        }[what].SerializeToString()
        return (
            good if chance.random() < 0.6 else good + chance.randbytes(chance.choice((1, 8, 100)))
        )


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame of HTTP/2 (RFC 9113, 4.1)."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def _literal(name: str, value: str) -> bytes:
    """Returns a header field without index or Huffman code (RFC 7541, 6.2.2); both are shorter than
    127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
