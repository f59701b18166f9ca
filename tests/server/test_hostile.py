"""Clients that take what they can get: connections, descriptors, time. Others are served, and the server can be stopped."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv.keys import KeySpace
from hotkv.layout import Layout, MemoryHandle, PageTensor
from hotkv.order import DeviceMark, DeviceOrder, OrderKind
from hotkv_client import After, BlockRun, EngineMemory, GroupHashes, HotKVError, LoadRun, Role, Session, SessionConfig
from hotkv_client.admin import AdminClient
from tests.server.support import FULL, NUM_BLOCKS, PAGE_BYTES, block_ids, hashes
from tests.server.test_life import wait_until
from tests.server.test_service import http_port

MAX_DESCRIPTORS = 160


@contextlib.contextmanager
def marked_engine(target: str) -> Iterator[Session]:
    """A session whose transfers may lie behind marks."""
    memory, flags = os.memfd_create("engine"), os.memfd_create("flags")
    os.posix_fallocate(memory, 0, NUM_BLOCKS * PAGE_BYTES)
    os.posix_fallocate(flags, 0, 4096)
    handles = (MemoryHandle("kv", NUM_BLOCKS * PAGE_BYTES), MemoryHandle("flags", 4096))
    layout = Layout(0, NUM_BLOCKS, handles, (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),), "x")
    config = SessionConfig(target, os.urandom(4).hex(), Role.WORKER, KeySpace("m", "m", "bfloat16", (FULL,), 16))
    order = DeviceOrder(flags_handle_id="flags", num_flags=8)
    session = Session(config, EngineMemory(layout, {"kv": memory, "flags": flags}, order))
    session.start()
    assert session.wait_connected(20)
    try:
        yield session
    finally:
        session.close()
        os.close(memory)
        os.close(flags)


def test_a_signal_ends_a_server_that_an_operator_lets_drain_for_long() -> None:
    """It was not heard: the operator's hour counted."""
    options = ["--arena.slab-bytes", "64KiB", "--drain-timeout-s", "1"]
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *options) as server:
        server.wait_ready()
        with marked_engine(server.target) as session, AdminClient(server.target) as admin:
            never = After(OrderKind.FLAGS, DeviceMark(0, 5))
            session.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 3600, after=never)
            wait_until(lambda: admin.info()["counters"]["transfers_in_flight"] == 1)
            admin.drain(3600)
            os.kill(server.pid, signal.SIGTERM)
            assert server._child.process.wait(60) == 0
            # A drain that ends later does not keep a server that is to stop.
            assert "draining timeout_s=3600.0" in server.log.read_text() and "draining timeout_s=1.0" in server.log.read_text()


@pytest.fixture
def short_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that may have few."""
    start = subprocess.Popen

    def limited(*arguments: Any, preexec_fn: Callable[[], None], **more: Any) -> Any:
        def limit() -> None:
            preexec_fn()
            resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))

        return start(*arguments, **more, preexec_fn=limit)

    with runtime_folder(64 << 20) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", limited)
            server = Server(folder, "16MiB", "--arena.slab-bytes", "64KiB", "--integrity.scrub-bytes-per-s", "0")
        with server:
            server.wait_ready()
            yield server


def connected(server: Server) -> socket.socket:
    """A connection to the descriptor socket, that asks for nothing; or one that waits to be taken."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(1.0)
    with contextlib.suppress(OSError):
        one.connect(str(server.runtime_folder / "fd.sock"))
    time.sleep(0.005)
    return one


def test_who_takes_all_descriptors_makes_nothing_spin(short_of_descriptors: Server) -> None:
    server = short_of_descriptors
    held = [connected(server) for _ in range(MAX_DESCRIPTORS)]
    wait_until(lambda: "can't accept" in server.log.read_text())
    before, began_s = server.log.read_text().count("can't accept"), time.monotonic()
    time.sleep(1.5)
    tries = server.log.read_text().count("can't accept") - before
    assert tries <= 2 * (time.monotonic() - began_s) + 1
    for one in held:
        one.close()
    # And then it goes on.
    with marked_engine(server.target) as session:
        blocks = hashes(1)
        assert session.store("t", "l", [BlockRun(0, blocks, block_ids(1))], 20).result(20)
        assert session.lookup([GroupHashes(0, blocks)]).result(20)[0].all()


def test_descriptors_for_connections_are_not_given_to_memory(short_of_descriptors: Server) -> None:
    """A client that links memory in many pieces is refused before there is none left for anybody's connection."""
    server, sessions, told = short_of_descriptors, list[Session](), list[str]()
    files = [os.memfd_create("piece") for _ in range(30)]
    for fd in files:
        os.posix_fallocate(fd, 0, NUM_BLOCKS * PAGE_BYTES)
    handles = tuple(MemoryHandle(f"kv{n}", NUM_BLOCKS * PAGE_BYTES) for n in range(len(files)))
    layout = Layout(0, NUM_BLOCKS, handles, (PageTensor(0, "kv0", 0, PAGE_BYTES, PAGE_BYTES, 0),), "x")
    space = KeySpace("greedy", "m", "bfloat16", (FULL,), 16)
    try:
        for number in range(6):
            memory = EngineMemory(layout, {f"kv{n}": fd for n, fd in enumerate(files)})
            config = SessionConfig(server.target, f"greedy{number}", Role.WORKER, space, on_state=lambda _, message: told.append(message))
            sessions.append(Session(config, memory))
            sessions[-1].start()
        wait_until(lambda: any("OVERLOADED: the server has nearly all descriptors in use" in message for message in told))
        with marked_engine(server.target) as session:
            assert session.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 20).result(20)
    finally:
        for one in sessions:
            one.close()
        for fd in files:
            os.close(fd)


@pytest.mark.parametrize("num_bytes", [NUM_BLOCKS * PAGE_BYTES, 30 << 40])
def test_memory_with_holes_is_refused(server: Server, num_bytes: int) -> None:
    """Loads into holes are charged to the server; and a file of 30 TiB takes addresses that nobody has then."""
    fd, told = os.memfd_create("holes"), list[str]()
    os.truncate(fd, num_bytes)
    layout = Layout(0, NUM_BLOCKS, (MemoryHandle("kv", num_bytes),), (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),), "x")
    space = KeySpace("holes", "m", "bfloat16", (FULL,), 16)
    config = SessionConfig(server.target, "holes", Role.WORKER, space, on_state=lambda _, message: told.append(message))
    session = Session(config, EngineMemory(layout, {"kv": fd}))
    try:
        session.start()
        wait_until(lambda: any("parts of the file of 'kv' have no memory yet" in message for message in told))
    finally:
        session.close()
        os.close(fd)


def test_memory_that_is_given_back_takes_no_loads(server: Server) -> None:
    with marked_engine(server.target) as session:
        blocks = hashes(1)
        session.store("t", "l", [BlockRun(0, blocks, block_ids(1))], 20).result(20)
        session.acquire("r", [GroupHashes(0, blocks)]).result(20)
        assert session._memory is not None
        libc = ctypes.CDLL(None, use_errno=True)
        keep_size_and_punch_hole = 0x03
        page = ctypes.c_long(PAGE_BYTES)
        assert libc.fallocate(session._memory.fds["kv"], keep_size_and_punch_hole, page, page) == 0
        with pytest.raises(HotKVError, match="memory of the file of 'kv' was given back"):
            session.load("t2", "r", [LoadRun(0, np.zeros(1, np.int32), np.ones(1, np.int32))], 20).result(20)


def test_idle_http_connections_cost_no_threads_and_keep_nobody_out(server: Server) -> None:
    port = http_port(server)
    threads = len(os.listdir(f"/proc/{server.pid}/task"))
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        for one in held[::2]:
            with contextlib.suppress(OSError):
                one.send(b"GET /metrics HTTP/1.1\r\nHost: ")
        for path in ("livez", "readyz", "metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
                assert answer.status == 200
        assert len(os.listdir(f"/proc/{server.pid}/task")) <= threads + 2
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
        (b"GET /livez?a=b HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
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
