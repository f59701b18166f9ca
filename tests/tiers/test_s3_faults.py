"""A store that is dead, hung, slow, refuses or is out of its mind costs hits, never bytes."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.testing.fault_proxy import (
    Dam,
    FaultProxy,
    changed_at,
    cut_after,
    delayed,
    nothing,
)
from hotkv_server.testing.tier_contract import SLOT_BYTES, Bench, Codes, content
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.remote import calls
from hotkv_server.tiers.remote.client import LateError
from hotkv_server.tiers.s3.bucket import Loop
from tests.support.waiting import wait_for
from tests.tiers.s3_support import Gate, Server, answer, bench_over, broken, new_prefix, proxied
from tests.tiers.support import quickest_s

QUIET = {"connections": 1, "refresh_s": 3600}
"""Nothing is asked that a test does not ask for."""


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[FaultProxy]:
    with proxied(s3_server) as (one, _):
        yield one


@pytest.fixture
def bench(s3_server: Server, proxy: FaultProxy) -> Iterator[Bench]:
    """With blocks 3, 6, 9, of one key space, in the store."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, new_prefix(), endpoint=endpoint, **QUIET) as one:
        one.fill([3, 6, 9], [0, 1, 2])
        assert (one.write([3, 6, 9], [0, 1, 2]) == Write.STORED).all()
        one.check_read([3, 6, 9], [4, 5, 6])
        one.arena[:] = 0
        yield one


@pytest.fixture
def hasty(s3_server: Server, proxy: FaultProxy) -> Iterator[Bench]:
    """As `bench`, and gives up soon."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    options = {"endpoint": endpoint, "timeout_s": 0.5, "connect_timeout_s": 0.5, **QUIET}
    with bench_over(s3_server, new_prefix(), **options) as one:
        one.fill([3], [0])
        wait_for(lambda: one.write([3], [0]).tolist() != [Write.FAILED], "nothing is stored")
        one.check_read([3], [4])
        yield one


@pytest.mark.long
def test_a_store_hung_in_mid_read_writes_no_slot_later(proxy: FaultProxy, bench: Bench) -> None:
    dam = Dam(SLOT_BYTES + SLOT_BYTES // 2)
    proxy.on_reply = dam
    ended: list[Codes] = []
    begun_s = time.monotonic()
    bench.tier.read(bench.blocks([3, 6], [4, 5]), begun_s + 0.5, ended.append)
    assert dam.is_full.wait(60)
    wait_for(lambda: ended, "the read did not end")
    assert time.monotonic() - begun_s > 0.4
    assert ended[0].tolist() == [Read.FAILED] * 2
    # The request is given up, and nobody waits for its answer.
    loop = bench.tier._shared.loop._loop
    wait_for(lambda: not asyncio.all_tasks(loop), "a request goes on")
    assert not bench.arena.any(), "bytes that have not come whole are in a slot"
    # The slots belong to somebody else now.
    bench.arena[:] = 0xEE
    proxy.on_reply = nothing
    dam.opened.set()
    time.sleep(0.2)
    assert (bench.arena == 0xEE).all()
    wait_for(lambda: bench.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
    bench.check_read([6, 3, 9], [7, 8, 9])


def test_a_store_hung_in_mid_write_is_not_believed(proxy: FaultProxy, hasty: Bench) -> None:
    dam = Dam(5000)
    proxy.on_command = dam
    hasty.fill([6], [1])
    assert hasty.write([6], [1]).tolist() == [Write.FAILED]
    # The slot belongs to somebody else now; what goes on its way has the bytes of before, or none.
    hasty.arena[:] = 0xEE
    proxy.on_command = nothing
    dam.opened.set()
    wait_for(lambda: hasty.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
    assert hasty.read([6], [5]).tolist() == [Read.ABSENT]
    hasty.fill([6], [1])
    assert hasty.write([6], [1]).tolist() == [Write.STORED]
    hasty.check_read([6, 3], [7, 8])


def test_a_dead_store_is_named_and_comes_back_by_itself(proxy: FaultProxy, bench: Bench) -> None:
    with broken(proxy):
        assert bench.read([3], [4]).tolist() == [Read.FAILED]
        assert bench.write([12], [1]).tolist() == [Write.FAILED]
        wait_for(bench.tier.problem, "no problem is known")
        name = f"s3 at http://127.0.0.1:{proxy.port}/of-tests/"
        assert bench.tier.problem().startswith(name)
        assert bench.tier.problem().endswith("has broken off its answer")
        codes: list[int] = []
        quickest = quickest_s(lambda: codes.extend(bench.read([3], [4]).tolist()), 200)
        assert codes == [Read.FAILED] * 200
        assert quickest < 0.3, "a dead store costs waiting"
    # Nobody calls meanwhile: the runtime skips a tier with a problem.
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    bench.check_read([3, 6, 9], [4, 5, 6])
    assert bench.tier.figures().failed_blocks == 202


def test_a_store_that_is_away_at_the_start_is_known_without_a_call(s3_server: Server) -> None:
    with bench_over(s3_server, new_prefix(), endpoint="http://127.0.0.1:1") as bench:
        wait_for(bench.tier.problem, "no problem is known")
        assert bench.tier.problem().endswith("refuses connections: Connection refused")
        assert bench.read([3], [4]).tolist() == [Read.FAILED]


def test_a_hung_store_is_given_up_after_its_time(proxy: FaultProxy, hasty: Bench) -> None:
    dam = Dam(0)
    proxy.on_reply = dam
    begun_s = time.monotonic()
    assert hasty.read([3], [4]).tolist() == [Read.FAILED]
    assert time.monotonic() - begun_s > 0.4
    wait_for(hasty.tier.problem, "no problem is known")
    assert hasty.tier.problem().endswith("has not answered in time")
    codes: list[int] = []
    assert quickest_s(lambda: codes.extend(hasty.write([9], [4]).tolist()), 10) < 0.3
    assert codes == [Write.FAILED] * 10
    codes.clear()
    assert quickest_s(lambda: codes.extend(hasty.probe([9]).tolist()), 10) < 0.3
    assert codes == [Read.FAILED] * 10
    proxy.on_reply = nothing
    dam.opened.set()
    wait_for(lambda: not hasty.tier.problem(), "the problem stays")
    hasty.check_read([3], [4])


def test_a_hung_store_that_misses_deadlines_is_found_out(proxy: FaultProxy, hasty: Bench) -> None:
    dam = Dam(0)
    proxy.on_reply = dam
    assert hasty.read([3], [4], within_s=0.05).tolist() == [Read.FAILED]
    assert not hasty.tier.problem()
    assert hasty.read([3], [4], within_s=0.05).tolist() == [Read.FAILED]
    assert hasty.tier.problem().endswith("has not answered in time")
    dam.opened.set()


def test_a_call_that_waits_for_the_store_shows(proxy: FaultProxy, bench: Bench) -> None:
    dam = Dam(0)
    proxy.on_reply = dam
    ended: list[Codes] = []
    bench.tier.read(bench.blocks([3], [4]), time.monotonic() + 60, ended.append)
    wait_for(lambda: bench.tier.stalled_s(time.monotonic()) > 0.2, "it does not show")
    assert bench.tier.figures().queued_bytes == SLOT_BYTES and not ended
    dam.opened.set()
    wait_for(lambda: ended, "the read did not end")
    assert bench.tier.stalled_s(time.monotonic()) == 0
    assert bench.tier.figures().queued_bytes == 0


def test_a_slow_store_misses_deadlines_and_nothing_else(proxy: FaultProxy, bench: Bench) -> None:
    proxy.on_reply = delayed(0.2)
    assert bench.read([3], [4], within_s=0.05).tolist() == [Read.FAILED]
    assert not bench.tier.problem()
    bench.check_read([3, 6], [4, 5])


@pytest.mark.parametrize("at", [0, 1, 200, 4096, SLOT_BYTES, 2 * SLOT_BYTES])
def test_an_answer_that_is_cut_gives_no_block(proxy: FaultProxy, bench: Bench, at: int) -> None:
    proxy.on_reply = cut_after(at)
    assert bench.read([3, 6], [4, 5]).tolist() == [Read.FAILED] * 2
    assert not bench.arena.any()
    proxy.on_reply = nothing
    bench.check_read([6, 3, 9], [7, 8, 9])


@pytest.mark.parametrize("garbage", [b"\x00", b"404", b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("at", [0, 9, 100, 2000, SLOT_BYTES])
def test_garbage_is_never_served_and_the_next_read_is_right(
    proxy: FaultProxy, bench: Bench, at: int, garbage: bytes
) -> None:
    proxy.on_reply = changed_at(at, garbage)
    codes = bench.read([3, 6, 9], [4, 5, 6]).tolist()
    for slot, (number, code) in enumerate(zip([3, 6, 9], codes, strict=True), 4):
        assert code != Read.FOUND or np.array_equal(bench.slot(slot), content(number))
    proxy.on_reply = nothing
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    again = bench.read([3, 6, 9], [7, 8, 9]).tolist()
    for slot, (code, before) in enumerate(zip(again, codes, strict=True), 7):
        if before in (Read.CORRUPT, Read.ABSENT):
            assert code == Read.ABSENT
        else:
            assert code == Read.FOUND
            assert np.array_equal(bench.slot(slot), content(3 * (slot - 6)))


def test_a_connection_that_ended_meanwhile_costs_one_read_at_most(
    proxy: FaultProxy, bench: Bench
) -> None:
    for _ in range(3):
        proxy.drop()
        wait_for(lambda: bench.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
        assert not bench.tier.problem()
    bench.check_read([3, 6, 9], [4, 5, 6])


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


def test_a_store_that_refuses_writes_only_is_not_believed_in_between(
    proxy: FaultProxy, bench: Bench
) -> None:
    def spoil(piece: bytes) -> Iterator[bytes]:
        yield piece.replace(b"Signature=", b"Signature=00", 1) if piece[:4] == b"PUT " else piece

    proxy.on_command = spoil
    bench.fill([12], [1])
    assert bench.write([12], [1]).tolist() == [Write.FAILED]
    # To be listed is not enough: each try to connect writes.
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        assert bench.tier.problem().endswith("rejects the access key: check credentials_file")
        time.sleep(1e-3)
    proxy.on_command = nothing
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    assert bench.write([12], [1]).tolist() == [Write.STORED]
    bench.check_read([12, 3], [7, 8])


def test_a_first_look_that_hangs_ends_by_the_deadline(
    s3_server: Server, proxy: FaultProxy, bench: Bench
) -> None:
    prefix = repr(bench.tier).partition("/of-tests/")[2].partition("'")[0]
    gate = Gate(b"GET", "blocks%2F1")
    proxy.on_command = gate
    endpoint = f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, prefix, endpoint=endpoint, connections=1) as node_b:
        begun_s = time.monotonic()
        assert node_b.read([3], [4], within_s=0.3).tolist() == [Read.FAILED]
        assert time.monotonic() - begun_s > 0.2 and gate.is_held.is_set()
        assert not node_b.tier.problem()
        gate.opened.set()
        node_b.check_read([3, 6, 9], [4, 5, 6])


def test_closing_over_a_hung_store_takes_its_time_and_no_longer(
    proxy: FaultProxy, hasty: Bench
) -> None:
    dam = Dam(0)
    proxy.on_reply = dam
    ended: list[Codes] = []
    for slot in range(20):
        hasty.tier.write(
            hasty.blocks([100 + slot], [slot]), lambda codes, seals: ended.append(codes)
        )
    hasty.tier.close()
    assert [codes.tolist() for codes in ended] == [[Write.FAILED]] * 20
    dam.opened.set()


def test_requests_that_were_given_up_have_ended_when_the_loop_is_closed() -> None:
    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    for _ in range(5):
        loop, ended = Loop(), []
        with pytest.raises(LateError):
            loop.run(hang(), time.monotonic() + 0.01)
        loop.close()
        loop.close()
        assert ended


def test_closing_gives_threads_back(s3_server: Server) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with bench_over(s3_server, new_prefix(), connections=3) as bench:
        bench.fill([3], [0])
        assert bench.write([3], [0]).tolist() == [Write.STORED]
        ended: list[Codes] = []
        for _ in range(30):
            bench.tier.read(bench.blocks([3], [4]), time.monotonic() + 9, ended.append)
        wait_for(lambda: len(ended) == 30, "reads did not end")
        left = weakref.ref(bench.tier)
        begun = {thread.name for thread in threading.enumerate()} - before
        assert {"hotkv-s3-0", "hotkv-s3-1", "hotkv-s3-2", "hotkv-s3-loop"} < begun
    assert {thread.name for thread in threading.enumerate()} <= before
    bench.tier.close()
    del bench
    gc.collect()
    assert left() is None


def test_a_call_beyond_the_queue_fails_at_once(
    proxy: FaultProxy, hasty: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_QUEUED_PARTS", 3)
    dam = Dam(0)
    proxy.on_reply = dam
    ended: list[Codes] = []
    for slot in range(6):
        if slot == 1:
            # The first one is on its way.
            wait_for(lambda: hasty.tier.stalled_s(time.monotonic()), "nothing began")
        hasty.tier.write(
            hasty.blocks([100 + slot], [slot]), lambda codes, seals: ended.append(codes)
        )
    assert len(ended) == 2
    wait_for(lambda: len(ended) == 6, "calls did not end")
    assert hasty.tier.figures().queued_bytes == 0
    dam.opened.set()


def test_writes_under_way_leave_threads_for_reads(s3_server: Server, proxy: FaultProxy) -> None:
    def hold_writes(piece: bytes) -> Iterator[bytes]:
        if piece.startswith(b"PUT ") and b"/blocks/" in piece[:500]:
            opened.wait(60)
        yield piece

    opened = threading.Event()
    endpoint = f"http://127.0.0.1:{proxy.port}"
    with bench_over(s3_server, new_prefix(), endpoint=endpoint, connections=4) as bench:
        bench.fill([3], [0])
        assert bench.write([3], [0]).tolist() == [Write.STORED]
        proxy.on_command = hold_writes
        ended: list[Codes] = []
        for number in range(10, 18):
            bench.tier.write(
                bench.blocks([number], [number]), lambda codes, seals: ended.append(codes)
            )
        for slot in range(20, 26):
            bench.check_read([3], [slot])
        assert not ended
        opened.set()
        wait_for(lambda: len(ended) == 8, "writes did not end")
        assert all(codes.tolist() == [Write.STORED] for codes in ended)


def test_a_write_wakes_a_thread_that_takes_writes() -> None:
    queue, taken = calls.PartQueue(), []
    part = calls.Part(calls.RemoteCall(0, lambda call: None), lambda client, until_s: None)

    def work(*, takes_writes: bool) -> None:
        taken.append(queue.get(float("inf"), takes_writes=takes_writes))

    threads = [
        threading.Thread(target=work, kwargs={"takes_writes": takes_writes}, daemon=True)
        for takes_writes in (False, True)
    ]
    for thread in threads:
        # The one that takes none waits first, so one notice would go to it.
        thread.start()
        time.sleep(0.05)
    assert queue.put([part], is_read=False)
    wait_for(lambda: taken == [part], "nobody takes the write")
    queue.close()
    for thread in threads:
        thread.join()
    assert taken == [part, None]


def test_a_call_that_is_too_late_costs_nothing(proxy: FaultProxy, bench: Bench) -> None:
    before = proxy.num_connections
    assert bench.read([3], [4], within_s=-1.0).tolist() == [Read.FAILED]
    keys = bench.blocks([3], [4]).keys
    late = answer(lambda done: bench.tier.probe(keys, time.monotonic() - 1, done))
    assert late.tolist() == [Read.FAILED]
    bench.check_read([3], [4])
    assert proxy.num_connections == before
