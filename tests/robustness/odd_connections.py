"""Odd clients that break the rules below whole messages: they do not read, send halves, and send
strange descriptors. Each kind is counted under `KIND: what`, and ends its connections."""

import contextlib
import ctypes
import fcntl
import os
import socket
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from hotkv_client import GroupHashes
from hotkv_client.wire import requests as _wire
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import admin_pb2, events_pb2, sparse_pb2_grpc
from tests.robustness import odd_place
from tests.robustness.odd_place import INT32, NUM_BLOCKS, SMALL_WINDOW, Kinds, Place, memory_file
from tests.robustness.raw_client import DEADLINE_S, code_of

F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1033, 2, 4, 8, 16
SEALS = (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, 14)
LATER_SEALS = (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE)
PUNCH_HOLE = 0x03
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""
STREAMS = ("Watch", "WatchRequests", "Subscribe")
PLAIN_FILES = ("whole", "whole", "whole", "holes", "short", "empty", "sealed", "read-only", "path")
STRANGE_FILES = (*PLAIN_FILES, "pipe", "socket", "device", "folder")
libc = ctypes.CDLL(None, use_errno=True)


class OddConnections:
    def __init__(self, place: Place) -> None:
        self._place, self._chance = place, place.chance

    def kinds(self) -> Kinds:
        return {
            "slow readers": self.slow_readers,
            "descriptors": self.descriptors,
            "half sent": self.half_sent,
            "server streams": self.server_streams,
        }

    def _channel(self, held: contextlib.ExitStack, target: str) -> grpc.Channel:
        return held.enter_context(grpc.insecure_channel(target, SMALL_WINDOW))

    def _let_go(self, kind: str, calls: list[tuple[str, Any]], word: str) -> None:
        """Counts each call under `word` if the server has kept it open, else under its status code.
        Then ends all calls."""
        for what, call in calls:
            said = word if call.is_active() else f"ended {call.code().name}"
            self._place.note(f"{kind}: {what}", said)
            call.cancel()

    def _server_stream(
        self, what: str, channel: grpc.Channel, admins: grpc.Channel, request: bytes
    ) -> Any:
        """Starts a call that the server answers with a stream. An empty `request` is the default
        request."""
        where, method = {
            "Watch": (channel, "/grpc.health.v1.Health/Watch"),
            "WatchRequests": (admins, "/hotkv.v1.AdminService/WatchRequests"),
            "Subscribe": (admins, "/hotkv.v1.EventService/Subscribe"),
        }[what]
        return where.unary_stream(method)(request, timeout=2 * DEADLINE_S)

    def slow_readers(self) -> None:
        """Opens streams of every kind and never reads them, while the server must serve other
        clients."""
        with contextlib.ExitStack() as held:
            admins = self._channel(held, self._place.admin)
            channel = self._channel(held, self._place.target)
            streams = [(what, self._server_stream(what, channel, admins, b"")) for what in STREAMS]
            unread = held.enter_context(self._place.session(model="unread", hears=True))
            many = _wire.lookup([GroupHashes(0, self._place.hashes(64) * 64)], 32)
            for number in range(self._chance.choice((20, 300))):
                odd = _wire.acquire("x" * 250, [GroupHashes(7, [])], 0, 32)
                unread.put(many if number % 2 else odd)
                self._place.note("slow readers: Connect", "not read")
            http = held.enter_context(self._place.connection("http"))
            http.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            self._place.note("slow readers: http", "not read")
            self._unread_selections(held)
            # Other clients' work causes events, reports and eviction notices.
            with self._place.working("unread") as (session, _):
                tokens = np.zeros(16 * NUM_BLOCKS, INT32)
                for number in range(40):
                    blocks = [self._chance.randbytes(32) for _ in range(NUM_BLOCKS)]
                    run = odd_place.run_of(blocks, token_ids=tokens)
                    self._place.must(session, odd_place.store(f"t{number}", [run]))
            self._place.look()
            self._let_go("slow readers", streams, "not read")

    def _unread_selections(self, held: contextlib.ExitStack) -> None:
        engine = self._place.sparse_engine(held)
        blocks = self._place.sequence(engine, "unread", 32)
        channel = self._channel(held, self._place.target)
        requests = [self._place.selection(engine, "unread", 16 * len(blocks)) for _ in range(100)]
        select = sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks
        held.callback(select(iter(requests), timeout=2 * DEADLINE_S).cancel)
        for _ in requests:
            self._place.note("slow readers: SelectBlocks", "not read")

    def descriptors(self) -> None:
        """Sends fences and memory that are too short, have holes, are sealed, are spoiled
        afterwards, or are not memory at all."""
        note, num_bytes = self._place.note, NUM_BLOCKS * 8192
        for _ in range(4):
            with contextlib.ExitStack() as held:
                session = held.enter_context(self._place.session(model="descriptors"))
                kinds = {
                    FENCE_HANDLE: self._strange_file(held, 4 * FENCE_WORDS),
                    "kv": self._strange_file(held, num_bytes),
                }
                fds = {name: fd for name, (_, fd) in kinds.items()}
                word = session.link(fds)
                for name, (what, _) in kinds.items():
                    kind = "fence" if name == FENCE_HANDLE else "memory"
                    note(f"descriptors: {kind} {what}", word)
                if word != "answered":
                    plain = memory_file(num_bytes)
                    held.callback(os.close, plain)
                    note("descriptors: link again", session.link({"kv": plain}))
                register = _wire.register_memory(self._place.plain(num_bytes), NO_ORDER)
                note("descriptors: register", session.ask(register)[0])
                asked: dict[int, str] = {}
                for number in range(8):
                    run = odd_place.run_of(self._place.hashes(NUM_BLOCKS))
                    word_index = self._chance.choice((0, 1, 7, FENCE_WORDS - 1, FENCE_WORDS, -1))
                    request = odd_place.store(f"{number}", [run], fence_index=word_index)
                    asked[session.put(request)] = "store"
                    if self._chance.random() < 0.4:
                        self._spoil(self._chance.choice(list(fds.values())))
                self._place.collect("descriptors", session, asked)

    def _strange_file(self, held: contextlib.ExitStack, num_bytes: int) -> tuple[str, int]:
        what = self._chance.choice(STRANGE_FILES)
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
                    # A file with mappings can't be sealed against writing, and the server may have
                    # mapped it.
                    fcntl.fcntl(fd, F_ADD_SEALS, self._chance.choice(SEALS))
                if what in ("read-only", "path"):
                    mode = os.O_RDONLY if what == "read-only" else os.O_PATH
                    plain, fd = fd, os.open(f"/proc/self/fd/{fd}", mode)
                    os.close(plain)
        held.callback(os.close, fd)
        return what, fd

    def _spoil(self, fd: int) -> None:
        """Changes a file that the server may have mapped, if the system allows it."""
        with contextlib.suppress(OSError):
            match self._chance.choice(("cut", "grow", "punch", "write", "seal")):
                case "cut":
                    os.truncate(fd, self._chance.choice((0, 1, 2048, 4096)))
                case "grow":
                    os.truncate(fd, 1 << 23)
                case "punch":
                    libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096))
                case "write":
                    word_index = self._chance.choice((0, 1, 7, FENCE_WORDS - 1))
                    os.pwrite(fd, (1).to_bytes(4, "little"), 4 * word_index)
                case _:
                    fcntl.fcntl(fd, F_ADD_SEALS, self._chance.choice(LATER_SEALS))

    def half_sent(self) -> None:
        """Ends connections in the midst of packets and HTTP requests (gRPC: test_client_memory)."""
        with contextlib.ExitStack() as held:
            for _ in range(30):
                what = self._chance.choice(("fd.sock", "http"))
                with contextlib.suppress(OSError):
                    connection = self._place.connection(what)
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
            link = _wire.link_request("x" * 32, ["kv"] * 40)
            return chance.choice((_wire.ticket_request(), link, chance.randbytes(200)))
        host = b"a" * chance.choice((1, 5000))
        return b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 100\r\n\r\n"

    def server_streams(self) -> None:
        """Makes good and bad requests to all calls that the server answers with streams. Reads one
        answer from each stream."""
        with contextlib.ExitStack() as held:
            channel = held.enter_context(grpc.insecure_channel(self._place.target))
            admins = held.enter_context(grpc.insecure_channel(self._place.admin))
            for _ in range(20):
                what = self._chance.choice(STREAMS)
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
        service = chance.choice(("", "live", "hotkv.v1.CacheService", "x" * 10_000))
        good = {
            "Watch": HealthCheckRequest(service=service),
            "WatchRequests": admin_pb2.WatchRequestsRequest(key_space_id=number),
            "Subscribe": events_pb2.SubscribeRequest(key_space_id=number),
        }[what].SerializeToString()
        if chance.random() < 0.6:
            return good
        return good + chance.randbytes(chance.choice((1, 8, 100)))
