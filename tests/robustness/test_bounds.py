"""Clients that take too much, beside a bystander whose hits, stores and probes go on."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import (
    BlockResult,
    BlockRun,
    EngineMemory,
    GroupHashes,
    LoadRun,
    Role,
    Session,
    SessionConfig,
    TransferStatus,
)
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.targets import descriptor_socket
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import link_messages as _link_messages
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_server.logs import MAX_LINES_PER_S
from hotkv_server.monitoring.http_endpoint import PLACES, QueueKind
from hotkv_server.startup.cache import UNWRITTEN_SHARE
from tests.robustness.raw_client import RawSession
from tests.server.support import block_ids, hashes, http_port
from tests.support.waiting import wait_for

ARENA_BYTES, SLOT_BYTES = 16 << 20, 8192
SLOTS = ARENA_BYTES // SLOT_BYTES
NUM_HOT, NUM_NEW = 256, 16
GROUP = GroupSpec(GroupKind.FULL_ATTENTION, 16, (SLOT_BYTES,))
KEEP_SIZE, PUNCH_HOLE = 1, 3
libc = ctypes.CDLL(None, use_errno=True)


class Bystander:
    """`evicted`: blocks that the server has evicted."""

    def __init__(self, server: Server, tenant: str = "") -> None:
        self.evicted = 0
        self._http = f"http://127.0.0.1:{http_port(server)}"
        self._hot = hashes(NUM_HOT)
        self.engine = PagedEngine(
            server.target,
            engine_id="bystander",
            model="bystander",
            tenant=tenant,
            num_blocks=NUM_HOT,
            on_evicted=lambda told: self._count(sum(len(group.hashes) for group in told.groups)),
        ).connect(60)
        self.store(self._hot)

    def _count(self, num_blocks: int) -> None:
        self.evicted += num_blocks

    def store(self, blocks: list[bytes]) -> None:
        name = os.urandom(6).hex()
        runs = [BlockRun(0, blocks, block_ids(len(blocks)))]
        result = self.engine.session.store(name, name, runs, 60).result(60)
        assert {*result.results[0].tolist()} == {BlockResult.STORED}

    def goes_on(self) -> None:
        assert self.engine.session.lookup([GroupHashes(0, self._hot)]).result(60)[0].all()
        self.store(hashes(NUM_NEW))

    def is_probed(self) -> None:
        for path in ("/livez", "/readyz", "/metrics"):
            with urllib.request.urlopen(f"{self._http}{path}", timeout=60) as answer:
                assert answer.status == 200


TENANTS = f"""
[[security.tenants]]
name = "kind"
uids = [{os.getuid()}]
[[security.tenants]]
name = "hostile"
uids = [{os.getuid()}]
"""


@contextlib.contextmanager
def serving(*flags: str, settings: str = "") -> Iterator[Server]:
    with runtime_folder(64 << 20) as folder:
        (folder / "hotkv.toml").write_text(settings)
        flags = ("--config", str(folder / "hotkv.toml"), *flags)
        with Server(folder, "16MiB", *flags) as server:
            server.wait_ready()
            server.wait_filled()
            yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@contextlib.contextmanager
def bystander(server: Server, tenant: str = "") -> Iterator[Bystander]:
    one = Bystander(server, tenant)
    try:
        yield one
    finally:
        one.engine.close()


# Reservations


@pytest.mark.parametrize("has_tenants", [False, True])
def test_who_reserves_and_writes_nothing_evicts_nobody(has_tenants: bool) -> None:
    names = ("kind", "hostile") if has_tenants else ("", "")
    with (
        serving(settings=TENANTS if has_tenants else "") as server,
        bystander(server, names[0]) as kind,
    ):
        space = KeySpace("evil", "w", "bfloat16", (GROUP,), 16, tenant=names[1])
        hostile = Session(SessionConfig(server.target, "hostile", Role.TOOL, space))
        hostile.start()
        assert hostile.wait_connected(60)
        none, seen = np.empty(0, np.int32), Counter[int]()
        for number in range(12):
            run = BlockRun(0, hashes(512), none)
            seen.update(hostile.reserve(f"l{number}", [run], 1e6).result(60)[0].tolist())
            kind.goes_on()
        assert seen.keys() == {BlockResult.RESERVED, BlockResult.NO_SPACE}
        assert 0 < seen[BlockResult.RESERVED] <= UNWRITTEN_SHARE * SLOTS
        hostile.release("l0")
        again = hostile.reserve("again", [run], 1e6).result(60)[0]
        assert (again == BlockResult.RESERVED).any()
        kind.goes_on()
        assert not kind.evicted
        hostile.close()


def test_a_rank_whose_partner_never_stores_evicts_nobody() -> None:
    """With one of two shards, no block becomes ready."""
    with serving() as server, bystander(server) as kind:
        half = PagedEngine(server.target, engine_id="half", model="half", num_shards=2).connect(60)
        seen = Counter[int]()
        for number in range(SLOTS // 64):
            runs = [BlockRun(0, hashes(64), block_ids(64))]
            result = half.session.store(f"t{number}", f"l{number}", runs, 60).result(60)
            seen.update(result.results[0].tolist())
            if number % 8 == 0:
                kind.goes_on()
        assert seen.keys() == {BlockResult.WRITTEN, BlockResult.NO_SPACE}
        assert 2 * seen[BlockResult.WRITTEN] <= UNWRITTEN_SHARE * SLOTS
        assert not kind.evicted
        half.close()


# Memory with holes


def hidden_holes(num_bytes: int) -> int:
    """A hole, with as much memory beyond the file's end."""
    fd = os.memfd_create("holes")
    os.truncate(fd, num_bytes)
    beyond(fd, num_bytes)
    return fd


def beyond(fd: int, num_bytes: int, mode: int = KEEP_SIZE) -> None:
    size = ctypes.c_long(os.fstat(fd).st_size)
    assert libc.fallocate(fd, mode, size, ctypes.c_long(num_bytes)) == 0


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_memory_that_hides_its_holes_is_refused(server: Server) -> None:
    num_bytes = 8 << 20
    fd = hidden_holes(num_bytes)
    before, space = allocated(fd), KeySpace("holes", "w", "bfloat16", (GROUP,), 16)
    tensors = (PageTensor(0, "kv", 0, SLOT_BYTES, SLOT_BYTES, 0),)
    layout = Layout(0, num_bytes // SLOT_BYTES, (MemoryHandle("kv", num_bytes),), tensors, "x")
    config = SessionConfig(server.target, "holes", Role.WORKER, space)
    with bystander(server) as kind, grpc.insecure_channel(server.target) as channel:
        session = RawSession(channel, server.target, _wire.open_session(config))
        assert session.link({"kv": fd}) == "answered"
        word, answer = session.ask(_wire.register_memory(layout, NO_ORDER))
        assert word == "INVALID_LAYOUT" and "have no memory yet" in answer.error.message
        assert allocated(fd) == before, "the server paid for pages"
        session.close()
        kind.goes_on()
    os.close(fd)


def test_holes_that_come_later_cost_the_server_nothing(server: Server) -> None:
    """The number of allocated pages stays the same."""
    num_blocks, fd = 64, os.memfd_create("kv")
    num_bytes = num_blocks * SLOT_BYTES
    os.posix_fallocate(fd, 0, num_bytes)
    tensors = (PageTensor(0, "kv", 0, SLOT_BYTES, SLOT_BYTES, 0),)
    layout = Layout(0, num_blocks, (MemoryHandle("kv", num_bytes),), tensors, "x")
    space = KeySpace("later", "w", "bfloat16", (GROUP,), 16)
    config = SessionConfig(server.target, "later", Role.WORKER, space)
    session = Session(config, EngineMemory(layout, {"kv": fd}))
    session.start()
    assert session.wait_connected(60)
    with bystander(server) as kind:
        runs = [BlockRun(0, hashes(num_blocks), block_ids(num_blocks))]
        assert session.store("t", "l", runs, 60).result(60).status is TransferStatus.DONE
        assert session.acquire("r", [GroupHashes(0, runs[0].hashes)]).result(60).pinned[0].all()
        loads = [LoadRun(0, block_ids(num_blocks), block_ids(num_blocks))]
        assert session.load("u", "r", loads, 60).result(60).status is TransferStatus.DONE
        assert libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(num_bytes)) == 0
        beyond(fd, num_bytes)
        before = allocated(fd)
        new = [BlockRun(0, hashes(num_blocks), block_ids(num_blocks))]
        for ended in (session.load("v", "r", loads, 60), session.store("w", "w", new, 60)):
            result = ended.result(60)
            assert result.status is TransferStatus.FAILED
            assert "memory of the file of 'kv' was given back" in result.message
        assert allocated(fd) == before, "the server paid for pages"
        kind.goes_on()
    session.close()
    os.close(fd)


# HTTP


SAVINGS = """
import asyncio, itertools, sys
numbers = itertools.count(1)
async def ask():
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
            since_s = 60 * (next(numbers) % 11000)
            path = f"/api/v1/savings?since_s={since_s}"
            writer.write(f"GET {path} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n".encode())
            await reader.read()
            writer.close()
        except OSError:
            pass
async def main():
    tasks = [asyncio.create_task(ask()) for _ in range(int(sys.argv[2]))]
    await asyncio.sleep(1)
    print("begun", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


def test_who_waits_for_savings_keeps_no_probe_out(server: Server) -> None:
    num_clients = str(2 * PLACES[QueueKind.SAVINGS] + 6)
    with bystander(server) as kind, running(SAVINGS, str(http_port(server)), num_clients):
        for _ in range(10):
            kind.is_probed()
            kind.goes_on()


# Descriptor socket

FLOOD = """
import socket, sys
print("begun", flush=True)
while True:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(5)
        try:
            one.connect(sys.argv[1])
            one.send(eval(sys.argv[2]))
        except OSError:
            pass
"""
PACKETS = {"malformed": "b'x'", "foreign": repr(_link_messages.link_request("no-session", []))}


@contextlib.contextmanager
def running(program: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def refused(server: Server) -> dict[str, float]:
    url = f"http://127.0.0.1:{http_port(server)}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = (line.split('"') for line in lines if line.startswith("hotkv_refused_total{"))
    return {parts[1]: float(parts[2].split()[1]) for parts in found}


def num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")


@pytest.mark.parametrize("packet", PACKETS)
def test_a_flood_of_bad_packets_is_cut_off(packet: str) -> None:
    with serving() as server, bystander(server) as kind:
        lines, began_s = num_lines(server.log), time.monotonic()
        with running(FLOOD, str(descriptor_socket(server.target)), PACKETS[packet]):
            for number in range(10):
                kind.goes_on()
                kind.is_probed()
                PagedEngine(server.target, engine_id=f"new {number}").connect(60).close()
            wait_for(lambda: sum(refused(server).values()) > 1500, "the flood")
            counts = refused(server)
        seconds = time.monotonic() - began_s + 1
        served = sum(counts.values()) - counts["overloaded"]
        # A process's rate, and its burst after a pause.
        assert served <= 20 * (seconds + 2), counts
        # Two loggers per packet, and the sessions' own lines.
        assert num_lines(server.log) - lines <= 3 * MAX_LINES_PER_S * (seconds + 2)
