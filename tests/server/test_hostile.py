"""Tests clients that use up connections, descriptors and time."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.processes import Server, runtime_folder
from hotkv_client import (
    After,
    BlockRun,
    GroupHashes,
    HotKVError,
    LoadRun,
    Role,
    SessionConfig,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_client.targets import descriptor_socket
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER, DeviceMark, OrderKind
from hotkv_server.monitoring.http_endpoint import MAX_CONNECTIONS
from hotkv_server.wire.health import HealthService
from tests.robustness.raw_client import Footprint, RawSession
from tests.server.hostile import marked_engine, unary_stream_of
from tests.server.nodes import memory_file
from tests.server.support import FULL, NUM_BLOCKS, PAGE_BYTES, block_ids, hashes, http_port
from tests.support.waiting import WAIT_S, wait_for

MAX_DESCRIPTORS = 160


def test_signal_ends_a_long_draining_server() -> None:
    """For signals, the shorter drain time applies."""
    options = ["--drain-timeout-s", "1"]
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *options) as server:
        server.wait_ready()
        with marked_engine(server.target) as session, AdminClient(server.target) as admin:
            never = After(OrderKind.FLAGS, DeviceMark(0, 5))
            session.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 3600, after=never)
            wait_for(lambda: admin.info()["counters"]["transfers_in_flight"] == 1)
            assert admin.drain(3600)["timeout_ms"] == 3_600_000
            os.kill(server.pid, signal.SIGTERM)
            assert server._child.process.wait(60) == 0
            log = server.log.read_text()
            assert "draining timeout_s=3600.0" in log and "draining timeout_s=1.0" in log


@pytest.fixture
def short_of_descriptors() -> Iterator[Server]:
    run = (sys.executable, "-m", "hotkv_server.cli", "run")
    command = ("prlimit", f"--nofile={MAX_DESCRIPTORS}", *run)
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", command=command) as server:
        server.wait_ready()
        yield server


def connected(server: Server) -> socket.socket:
    """An idle connection, which the server may not have accepted yet."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(1.0)
    with contextlib.suppress(OSError):
        one.connect(str(server.runtime_folder / "fd.sock"))
    time.sleep(0.005)
    return one


@pytest.mark.long
def test_who_takes_all_descriptors_makes_nothing_spin(short_of_descriptors: Server) -> None:
    server = short_of_descriptors
    held = [connected(server) for _ in range(MAX_DESCRIPTORS)]
    wait_for(lambda: "can't accept" in server.log.read_text())
    began_s, before = time.monotonic(), server.log.read_text().count("can't accept")
    time.sleep(1.5)
    tries = server.log.read_text().count("can't accept") - before
    assert tries <= 2 * (time.monotonic() - began_s) + 1
    for one in held:
        one.close()
    # New sessions must be served then.
    with marked_engine(server.target) as session:
        blocks = hashes(1)
        assert session.store("t", "l", [BlockRun(0, blocks, block_ids(1))], 20).result(60)
        assert session.lookup([GroupHashes(0, blocks)]).result(60)[0].all()


def raw_session(channel: grpc.Channel, server: Server) -> RawSession:
    space = KeySpace("greedy", "m", "bfloat16", (FULL,), 16)
    config = SessionConfig(server.target, os.urandom(4).hex(), Role.WORKER, space)
    return RawSession(channel, server.target, _wire.open_session(config))


def test_descriptors_for_connections_are_not_given_to_memory(short_of_descriptors: Server) -> None:
    server, fd, links = short_of_descriptors, memory_file(PAGE_BYTES), list[str]()
    with grpc.insecure_channel(server.target) as channel:
        sessions = [raw_session(channel, server) for _ in range(6)]
        for session in sessions:
            links.append(session.link({f"kv{n}": fd for n in range(30)}))
        assert links[0] == "answered" and links[-1] == "OVERLOADED", links
        with marked_engine(server.target) as engine:
            assert engine.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 20).result(60)
        for session in sessions:
            session.close()
    os.close(fd)


@pytest.mark.parametrize("num_bytes", [NUM_BLOCKS * PAGE_BYTES, 30 << 40])
def test_memory_with_holes_is_refused(server: Server, num_bytes: int) -> None:
    """A load would allocate memory at the server's cost; 30 TiB exceed its address space."""
    fd = os.memfd_create("holes")
    os.truncate(fd, num_bytes)
    tensors = (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),)
    layout = Layout(0, NUM_BLOCKS, (MemoryHandle("kv", num_bytes),), tensors, "x")
    with grpc.insecure_channel(server.target) as channel:
        session = raw_session(channel, server)
        assert session.link({"kv": fd}) == "answered"
        word, answer = session.ask(_wire.register_memory(layout, NO_ORDER))
        assert word == "INVALID_LAYOUT" and "have no memory yet" in answer.error.message
        session.close()
    os.close(fd)


def test_client_cutting_its_memory_harms_only_itself(server: Server) -> None:
    """Newlines in ids must not forge log lines."""
    outcomes, until_s = set[bool](), time.monotonic() + WAIT_S
    with marked_engine(server.target) as session:
        assert session._life.memory is not None
        fd = session._life.memory.fds["kv"]
        for number in itertools.count():
            if number >= 50 and (False in outcomes or time.monotonic() > until_s):
                break
            os.posix_fallocate(fd, 0, NUM_BLOCKS * PAGE_BYTES)
            blocks = hashes(NUM_BLOCKS)
            runs = [BlockRun(0, blocks, block_ids(NUM_BLOCKS))]
            store = session.store(f"{number}\nERROR forged", f"l{number}", runs, 20)
            os.truncate(fd, 0)
            error = store.exception(60)
            kept = error is None and store.result().status is TransferStatus.DONE
            assert session.lookup([GroupHashes(0, blocks)]).result(60)[0].any() == kept
            outcomes.add(kept)
        refused = session.store("t", "l", runs, 20).exception(60)
        assert isinstance(refused, HotKVError) and "truncated; register it again" in str(refused)
    assert False in outcomes
    assert not re.search("^ERROR forged", server.log.read_text(), re.MULTILINE)


def test_memory_that_is_given_back_takes_no_loads(server: Server) -> None:
    with marked_engine(server.target) as session:
        blocks = hashes(1)
        session.store("t", "l", [BlockRun(0, blocks, block_ids(1))], 20).result(60)
        session.acquire("r", [GroupHashes(0, blocks)]).result(60)
        assert session._life.memory is not None
        keep_size_and_punch_hole, page = 0x03, ctypes.c_long(PAGE_BYTES)
        fd = session._life.memory.fds["kv"]
        assert ctypes.CDLL(None).fallocate(fd, keep_size_and_punch_hole, page, page) == 0
        with pytest.raises(HotKVError, match="memory of the file of 'kv' was given back"):
            session.load(
                "t2", "r", [LoadRun(0, np.zeros(1, np.int32), np.ones(1, np.int32))], 20
            ).result(60)


def test_unread_http_answers_keep_nobody_out(server: Server) -> None:
    port, held = http_port(server), list[socket.socket]()
    with marked_engine(server.target) as session:
        # With 128 layers, /metrics does not fit into a connection's buffers.
        session.report_sparse({}, {layer: {"selects": 1.0} for layer in range(128)})
        session.ping(20)
    try:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        for _ in range(MAX_CONNECTIONS + 8):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 88)
            one.connect(("127.0.0.1", port))
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            one.settimeout(20)
            # The server may have dropped this connection for later ones.
            with contextlib.suppress(ConnectionResetError):
                one.recv(1)
            held.append(one)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=20) as answer:
            assert answer.status == 200
        assert held[0].recv(1) == b"", "it asked nothing, and was dropped"
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 20_000, b"431"),
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
        (b"HEAD /livez HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
        (b"HEAD /nowhere HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
        (b"GET /livez?a=b HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\n\r\n", b"200"),
    ],
)
def test_http_answers_whatever_it_is_sent(server: Server, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", http_port(server))) as one:
        one.settimeout(20)
        one.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := one.recv(65536):
                answer += part
    assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"\r\n\r\n") == sent.startswith(b"HEAD"), "no body, or one"


def test_messages_of_transfers_that_wait_are_bounded(own_server: Server) -> None:
    """Each store has 3 MiB of text."""

    with marked_engine(own_server.target) as session, marked_engine(own_server.target) as other:
        before_bytes = Footprint(own_server.pid).anonymous_bytes
        never = After(OrderKind.FLAGS, DeviceMark(0, 5))
        runs = [BlockRun(0, hashes(1), block_ids(1), extra_keys=[("x" * (3 << 20),)])]
        stores = [session.store(f"t{n}", f"l{n}", runs, 60, after=never) for n in range(40)]
        wait_for(lambda: sum(store.done() for store in stores) >= 20)
        refused = [str(store.exception()) for store in stores if store.done()]
        assert all("OVERLOADED" in why and "bytes of transfers" in why for why in refused)
        # One client may use at most half of the limit.
        assert other.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 20).result(60)
        assert Footprint(own_server.pid).anonymous_bytes - before_bytes < 200 << 20
        for waiting in [f"t{n}" for n, store in enumerate(stores) if not store.done()]:
            session.cancel(waiting)
        wait_for(lambda: all(store.done() for store in stores))
        # A cancelled store ends at the client at once, at the server later.
        with AdminClient(own_server.target) as admin:
            wait_for(lambda: not admin.info()["counters"]["transfers_in_flight"])
        assert session.store("u", "u", runs, 20).result(60)


def test_peers_parting_words_stay_out_of_logs(server: Server) -> None:
    """gRPC's C core would log the text of a GOAWAY as it is."""

    def frame(kind: int, payload: bytes) -> bytes:
        """An HTTP/2 frame (RFC 9113, 4.1); stream 0 is the whole connection."""
        return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload

    settings, goaway = 4, 7
    last_words = b"\n2026-11-21 00:00:00,000 ERROR hotkv_server.farewell \x1b[2J\xff"
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(server.target.removeprefix("unix:"))
        peer.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(settings, b"")
            + frame(goaway, bytes(4) + b"\0\0\0\1" + last_words)
        )
        peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
    with marked_engine(server.target) as session:
        session.ping(10)
    assert b"farewell" not in server.log.read_bytes()


def test_who_leaves_before_it_asks_is_refused_nothing(server: Server) -> None:
    """A client whose process ends does so."""
    left, before = b"left before it asked", server.log.read_bytes()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(descriptor_socket(server.target)))
    wait_for(lambda: server.log.read_bytes().count(left) > before.count(left))
    refused = b"refused descriptor socket"
    assert server.log.read_bytes().count(refused) == before.count(refused)


def test_calls_that_are_nobodys_end_for_new_ones(server: Server) -> None:
    options, asked = [("grpc.use_local_subchannel_pool", 1)], health_pb2.HealthCheckRequest()
    serving = health_pb2.HealthCheckResponse.SERVING
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.target, options)) for _ in range(6)
        ]
        health = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        oldest = health[0].Watch(asked)
        # Once answered, this call is the oldest; calls over several channels come in any order.
        assert next(oldest).status == serving
        watchers = [oldest, *(health[n % 4].Watch(asked) for n in range(600))]
        assert next(watchers[-1]).status == serving
        with pytest.raises(grpc.RpcError, match="open longest") as caught:
            list(oldest)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        selections = [unary_stream_of(channels[4]) for _ in range(200)]
        assert health[5].Check(asked, timeout=20).status == serving
        with marked_engine(server.target) as session:
            assert session.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 20).result(60)
        for call in (*watchers, *selections):
            call.cancel()


async def test_watcher_that_does_not_read_delays_nobody() -> None:
    service, serving = HealthService(), health_pb2.HealthCheckResponse
    service.set({"": True})
    stuck = service.Watch(health_pb2.HealthCheckRequest(), None)
    reads = service.Watch(health_pb2.HealthCheckRequest(), None)
    assert (await anext(stuck)).status == (await anext(reads)).status == serving.SERVING
    service.set({"": False})
    assert (await anext(reads)).status == serving.NOT_SERVING
    service.set({"": False})
    service.set({"": True})
    assert (await anext(reads)).status == serving.SERVING
    # The state has changed twice, and is what this client knows.
    waiting = asyncio.ensure_future(anext(stuck))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    service.set({"": True, "other": False})
    other = service.Watch(health_pb2.HealthCheckRequest(service="other"), None)
    unknown = service.Watch(health_pb2.HealthCheckRequest(service="unknown"), None)
    assert (await anext(other)).status == serving.NOT_SERVING
    assert (await anext(unknown)).status == serving.SERVICE_UNKNOWN
    waiting.cancel()
