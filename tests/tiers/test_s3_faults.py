"""Tests faults of S3 only: wrong answers to writes, refused reads and keys, cancelled requests,
slow writes. `test_remote_faults` tests the rest."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.drive.breaker import MAX_STALL_S
from hotkv_server.tiers.drive.flushes import GenerationRelay
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.remote.client import LateError, UnusableError
from hotkv_server.tiers.s3.bucket import Loop
from hotkv_server.tiers.s3.client import Shared
from hotkv_server.tiers.s3.tier import S3Tier
from tests.contracts.tier_contract import SLOT_BYTES, Bench
from tests.doubles.fault_proxy import FaultProxy, nothing
from tests.doubles.memory_tier import MemoryStore
from tests.support.waiting import WAIT_S, wait_for
from tests.tiers import nodes
from tests.tiers.s3_support import QUICK, Server, bench_over, new_prefix, settings_of
from tests.tiers.support import Asked

QUIET = {"connections": 1, "refresh_s": 3600}
"""The tier sends only the requests that the test causes."""


@pytest.fixture
def proxy(s3_proxy: FaultProxy) -> FaultProxy:
    return s3_proxy


@pytest.fixture
def bench(s3_server: Server, proxy: FaultProxy) -> Iterator[Bench]:
    """Blocks 3, 6 and 9 of one key space are stored."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, new_prefix(), endpoint=endpoint, **QUIET) as one:
        one.fill([3, 6, 9], [0, 1, 2])
        assert (one.write([3, 6, 9], [0, 1, 2]) == Write.STORED).all()
        one.check_read([3, 6, 9], [4, 5, 6])
        one.arena[:] = 0
        yield one


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (b"507 Insufficient Storage", Write.FULL),
        (b"503 Slow Down", Write.FAILED),
        (b"403 Forbidden", Write.FAILED),
        (b"200 OK", Write.STORED),
    ],
)
def test_what_a_store_answers_to_a_write(
    proxy: FaultProxy, bench: Bench, answered: bytes, expected: Write
) -> None:
    def reply(piece: bytes) -> Iterator[bytes]:
        head, gap, body = piece.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first == b"HTTP/1.1 200 OK"
        yield b"\r\n".join([b"HTTP/1.1 " + answered, *lines]) + gap + body

    bench.fill([12], [1])
    proxy.on_reply = reply
    assert bench.write([12], [1]).tolist() == [expected]
    assert bool(bench.tier.problem()) == (answered[:3] == b"403")
    proxy.on_reply = nothing
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    found = bench.read([12], [7]).tolist()
    assert found == [Read.FOUND if expected == Write.STORED else Read.ABSENT]
    bench.check_read([3, 6, 9], [4, 5, 6])


def instead_of_packs(answered: bytes) -> Callable[[bytes], Iterator[bytes]]:
    """For `FaultProxy.on_reply`: only reads of packs get partial replies (206); each becomes an
    empty one with status `answered`."""
    # Bytes of a withheld reply still to come; each connection has its thread.
    of_thread = threading.local()

    def reply(piece: bytes) -> Iterator[bytes]:
        left = getattr(of_thread, "left", 0)
        of_thread.left, piece = max(0, left - len(piece)), piece[left:]
        if not piece.startswith(b"HTTP/1.1 206"):
            yield piece
            return
        head, _, body = piece.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\ncontent-length: *([0-9]+)", head)
        assert length is not None
        of_thread.left = int(length[1]) - len(body)
        yield b"HTTP/1.1 " + answered + b"\r\nContent-Length: 0\r\n\r\n"

    return reply


def test_store_failing_reads_while_listing_isnt_empty(s3_server: Server, proxy: FaultProxy) -> None:
    prefix, endpoint = new_prefix(), f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, prefix) as writer:
        writer.fill([3, 6, 9], [0, 1, 2])
        assert (writer.write([3, 6, 9], [0, 1, 2]) == Write.STORED).all()
    packs = s3_server.packs(prefix)
    with bench_over(s3_server, prefix, endpoint=endpoint, **QUIET) as node:
        node.fill([3, 6, 9], [0, 1, 2])
        proxy.on_reply = instead_of_packs(b"503 Slow Down")
        assert node.probe([3, 6, 9]).tolist() == [Read.FAILED] * 3
        assert node.write([3], [0]).tolist() == [Write.FAILED] and not node.tier.problem()
        proxy.on_reply = nothing
        assert node.write([3, 6, 9], [0, 1, 2]).tolist() == [Write.PRESENT] * 3
        node.check_read([3, 6, 9], [4, 5, 6])
        assert s3_server.packs(prefix) == packs


@pytest.mark.parametrize("answered", [b"503 Slow Down", b"403 Forbidden"])
def test_packs_are_known_after_reads_that_failed(
    s3_server: Server, proxy: FaultProxy, bench: Bench, answered: bytes
) -> None:
    """Only reads of packs are refused."""
    proxy.on_reply = instead_of_packs(answered)
    for _ in range(3):
        assert bench.read([3, 6, 9], [4, 5, 6]).tolist() == [Read.FAILED] * 3
        assert bench.probe([3, 6, 9]).tolist() == [Read.FOUND] * 3
        assert not bench.tier.problem()
    bench.fill([12], [1])
    assert bench.write([3, 12], [0, 1]).tolist() == [Write.PRESENT, Write.STORED]
    proxy.on_reply = nothing
    bench.check_read([3, 6, 9, 12], [4, 5, 6, 7])


def spoil(piece: bytes) -> Iterator[bytes]:
    """Makes a request's signature wrong."""
    yield piece.replace(b"Signature=", b"Signature=00", 1)


def test_a_refused_key_ends_all_connections_with_it(s3_server: Server, proxy: FaultProxy) -> None:
    endpoint, until_s = f"http://127.0.0.1:{proxy.port}", time.monotonic() + 60
    shared = Shared(settings_of(s3_server, new_prefix(), endpoint=endpoint), QUICK)
    try:
        one, other = shared.connect(until_s), shared.connect(until_s)
        proxy.on_command = spoil
        with pytest.raises(UnusableError, match="rejects the access key"):
            one.raise_generation("0a", 0, until_s)
        assert not one.is_fresh() and not other.is_fresh()
        proxy.on_command = nothing
        assert shared.connect(until_s).is_fresh()
    finally:
        shared.close()


def test_store_refusing_only_writes_is_not_believed(proxy: FaultProxy, bench: Bench) -> None:
    proxy.on_command = lambda piece: spoil(piece) if piece[:4] == b"PUT " else nothing(piece)
    bench.fill([12], [1])
    assert bench.write([12], [1]).tolist() == [Write.FAILED]
    # A try to connect writes an object too.
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        assert bench.tier.problem().endswith("rejects the access key: check credentials_file")
        time.sleep(1e-3)
    proxy.on_command = nothing
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    assert bench.write([12], [1]).tolist() == [Write.STORED]
    bench.check_read([12, 3], [7, 8])


def test_abandoned_requests_have_ended_at_loop_close() -> None:
    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def leave() -> None:
        left.append(asyncio.ensure_future(hang()))
        await asyncio.sleep(0)

    for _ in range(5):
        loop, ended, left = Loop(), list[bool](), list[asyncio.Future[None]]()
        with pytest.raises(LateError):
            loop.run(hang(), time.monotonic() + 0.01)
        wait_for(lambda ended=ended: ended, "a request that was given up goes on")
        # A failed call may leave requests running; `close` must end them.
        loop.run(leave(), time.monotonic() + 60)
        loop.close()
        loop.close()
        assert ended == [True, True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_shows(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_over(s3_server, new_prefix()) as bench:
        assert bench.tier.is_alive()
        monkeypatch.setattr(bench.tier._shared.lister, "_connect", sys.exit)
        # A read after its deadline asks for no listing.
        until_s = time.monotonic() + WAIT_S
        while bench.tier.is_alive():
            assert time.monotonic() < until_s, "it does not show"
            bench.read([1], [0], within_s=0.1)
    loop = Loop()
    assert loop.is_alive()
    loop._loop.call_soon_threadsafe(sys.exit)
    wait_for(lambda: not loop.is_alive(), "it does not show")


def test_writes_under_way_leave_threads_for_reads(s3_server: Server, proxy: FaultProxy) -> None:
    def hold_writes(piece: bytes) -> Iterator[bytes]:
        if piece.startswith(b"PUT ") and b"/blocks/" in piece[:500]:
            held.append(piece)
            opened.wait(60)
        yield piece

    opened, held = threading.Event(), list[bytes]()
    endpoint = f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, new_prefix(), endpoint=endpoint, connections=4) as bench:
        bench.fill([3], [0])
        assert bench.write([3], [0]).tolist() == [Write.STORED]
        proxy.on_command = hold_writes
        asked = Asked(bench)
        for number in range(10, 18):
            asked.write(number, [number])
        wait_for(lambda: len(held) == 2, "half of the threads write")
        for slot in range(20, 26):
            bench.check_read([3], [slot])
        assert not asked.codes and len(held) == 2
        # Lookups skip a tier that stalls.
        assert bench.tier.stalled_s(time.monotonic() + 100) == 0
        # The reported memory has a copy of the packs that are being written.
        memory = bench.tier.memory()
        assert 2 * 8 * SLOT_BYTES < memory.held_bytes < memory.most_bytes
        opened.set()
        assert all(asked.wait(number) == [Write.STORED] for number in range(10, 18))


async def test_slow_buckets_late_answers_serve_the_next(
    s3_server: Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(piece: bytes) -> Iterator[bytes]:
        # Only packs have partial replies.
        if piece.startswith(b"HTTP/1.1 206"):
            time.sleep(MAX_STALL_S + 0.5)
        yield piece

    def make_tier(arena: Region, store: MemoryStore, on_generation: GenerationRelay) -> S3Tier:
        return S3Tier(arena, settings, on_generation=on_generation, bounds=QUICK)

    endpoint = f"http://127.0.0.1:{proxy.port}"
    settings = settings_of(s3_server, new_prefix(), endpoint=endpoint)
    monkeypatch.setattr(nodes, "SharedMemoryTier", make_tier)
    async with nodes.nodes(lookup_wait_s=0.3) as (a, b):
        await a.share(nodes.BLOCKS)
        while not all(await b.looked_up(nodes.BLOCKS)):
            await asyncio.sleep(0.05)
        proxy.on_reply = slow
        # A very slow bucket may not even begin; then a later lease does.
        until_s = time.monotonic() + WAIT_S
        assert not any(await b.leased(nodes.BLOCKS))
        while not b.has(nodes.BLOCKS):
            assert time.monotonic() < until_s, "the blocks do not come"
            await b.leased(nodes.BLOCKS)
        assert all(await b.leased(nodes.BLOCKS))
        proxy.on_reply = nothing
