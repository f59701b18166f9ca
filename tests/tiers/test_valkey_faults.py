"""A server that is dead, stopped, slow, restarted or out of its mind costs hits, never bytes."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
from hotkv_server.tiers.remote.calls import (
    PART_BLOCKS,
    PART_BYTES,
    Part,
    PartQueue,
    RemoteCall,
    cut,
)
from tests.support.waiting import wait_for
from tests.tiers.support import quickest_s
from tests.tiers.valkey_support import Server, bench_over, running

REPLY_BYTES = len(b"$16408\r\n") + 24 + SLOT_BYTES + 2
"""Of one block on the wire."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "server") as one:
        yield one


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    one = FaultProxy(server.path)
    yield one
    one.close()


def stored(bench: Bench) -> Bench:
    """Returns the bench, with blocks 1, 2, 3 in the store and connections that are open."""
    bench.fill([1, 2, 3], [0, 1, 2])
    assert (bench.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
    bench.check_read([1, 2, 3], [4, 5, 6])
    bench.arena[:] = 0
    return bench


def test_a_server_stopped_in_mid_read_writes_no_slot_later(
    server: Server, proxy: FaultProxy
) -> None:
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        dam = Dam(REPLY_BYTES + REPLY_BYTES // 2)
        proxy.on_reply = dam
        ended: list[Codes] = []
        bench.tier.read(bench.blocks([1, 2], [4, 5]), time.monotonic() + 0.5, ended.append)
        assert dam.is_full.wait(60)
        with server.stopped():
            wait_for(lambda: ended, "the read did not end")
            assert ended[0].tolist() == [Read.FOUND, Read.FAILED]
            assert np.array_equal(bench.slot(4), content(1)) and bench.slot(5)[:100].any()
            # The slots belong to somebody else now.
            bench.arena[:] = 0xEE
            proxy.on_reply = nothing
            dam.opened.set()
        time.sleep(0.3)
        assert (bench.arena == 0xEE).all()
        wait_for(lambda: bench.read([1], [4]).tolist() == [Read.FOUND], "it did not come back")
        bench.check_read([2, 1, 3], [7, 8, 9])


def test_a_server_stopped_while_it_sends_writes_no_slot_later(server: Server) -> None:
    # More than sockets hold, so the server is in the middle of its replies.
    with bench_over(f"unix:{server.path}", connections=1) as bench:
        numbers, slots = list(range(32)), list(range(32))
        bench.fill(numbers, slots)
        assert (bench.write(numbers, slots) == Write.STORED).all()
        ended: list[Codes] = []
        with server.stopped():
            bench.tier.read(bench.blocks(numbers, slots), time.monotonic() + 0.2, ended.append)
            wait_for(lambda: ended, "the read did not end")
            bench.arena[:] = 0xEE
        time.sleep(0.2)
        assert (bench.arena == 0xEE).all()
        wait_for(lambda: bench.read([1], [4]).tolist() == [Read.FOUND], "it did not come back")


def test_a_dead_server_is_named_and_comes_back_by_itself(server: Server) -> None:
    with bench_over(f"127.0.0.1:{server.port}") as bench:
        stored(bench)
        with server.killed():
            assert bench.read([1], [4]).tolist() == [Read.FAILED]
            assert bench.write([2], [1]).tolist() == [Write.FAILED]
            wait_for(bench.tier.problem, "no problem is known")
            assert (
                bench.tier.problem()
                == f"valkey at 127.0.0.1:{server.port} refuses connections: Connection refused"
            )
            codes: list[int] = []
            quickest = quickest_s(lambda: codes.extend(bench.read([1], [4]).tolist()), 200)
            assert codes == [Read.FAILED] * 200
            assert quickest < 0.3, "a dead server costs waiting"
        # Nobody calls meanwhile: the runtime skips a tier with a problem.
        wait_for(lambda: not bench.tier.problem(), "the problem stays")
        assert bench.read([1], [4]).tolist() == [Read.ABSENT]
        assert bench.tier.figures().failed_blocks == 202


def test_a_server_that_is_away_at_the_start_is_known_without_a_call(tmp_path: Path) -> None:
    with bench_over(f"unix:{tmp_path}/v.sock") as bench:
        wait_for(bench.tier.problem, "no problem is known")
        assert "can't be reached: No such file" in bench.tier.problem()
        with running(tmp_path):
            wait_for(lambda: not bench.tier.problem(), "the problem stays")
            stored(bench)


def test_a_stopped_server_is_given_up_after_its_time(server: Server) -> None:
    with bench_over(f"unix:{server.path}", timeout_s=0.3, connect_timeout_s=0.3) as bench:
        stored(bench)
        with server.stopped():
            begun_s = time.monotonic()
            assert bench.read([1], [4]).tolist() == [Read.FAILED]
            assert time.monotonic() - begun_s > 0.25
            assert bench.tier.problem().endswith("has not answered in time")
            codes: list[int] = []
            assert quickest_s(lambda: codes.extend(bench.write([9], [4]).tolist()), 10) < 0.2
            assert codes == [Write.FAILED] * 10
            codes.clear()
            assert quickest_s(lambda: codes.extend(bench.probe([9]).tolist()), 10) < 0.2
            assert codes == [Read.FAILED] * 10
        wait_for(lambda: not bench.tier.problem(), "the problem stays")
        bench.check_read([1], [4])


def test_a_stopped_server_that_misses_deadlines_is_found_out(server: Server) -> None:
    with bench_over(f"unix:{server.path}", connections=1, connect_timeout_s=0.3) as bench:
        stored(bench)
        with server.stopped():
            assert bench.read([1], [4], within_s=0.05).tolist() == [Read.FAILED]
            assert not bench.tier.problem()
            assert bench.read([1], [4], within_s=0.05).tolist() == [Read.FAILED]
            assert bench.tier.problem().endswith("has not answered in time")


def test_a_call_that_waits_for_the_store_shows(server: Server) -> None:
    with bench_over(f"unix:{server.path}", timeout_s=60) as bench:
        stored(bench)
        ended: list[Codes] = []
        with server.stopped():
            bench.tier.read(bench.blocks([1], [4]), time.monotonic() + 60, ended.append)
            wait_for(lambda: bench.tier.stalled_s(time.monotonic()) > 0.2, "it does not show")
            assert bench.tier.figures().queued_bytes == SLOT_BYTES and not ended
        wait_for(lambda: ended, "the read did not end")
        assert bench.tier.stalled_s(time.monotonic()) == 0
        assert bench.tier.figures().queued_bytes == 0


def test_a_slow_server_misses_deadlines_and_nothing_else(proxy: FaultProxy) -> None:
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        proxy.on_reply = delayed(0.2)
        assert bench.read([1], [4], within_s=0.05).tolist() == [Read.FAILED]
        assert not bench.tier.problem()
        bench.check_read([1, 2], [4, 5])


@pytest.mark.parametrize(
    "at", [0, 1, 5, 20, 32, 33, REPLY_BYTES - 1, REPLY_BYTES, REPLY_BYTES + 3, 2 * REPLY_BYTES - 2]
)
def test_a_reply_that_is_cut_costs_its_block_only(proxy: FaultProxy, at: int) -> None:
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        proxy.on_reply = cut_after(at)
        codes = bench.read([1, 2], [4, 5]).tolist()
        first = Read.FOUND if at >= REPLY_BYTES else Read.FAILED
        assert codes == [first, Read.FAILED]
        assert first != Read.FOUND or np.array_equal(bench.slot(4), content(1))
        proxy.on_reply = nothing
        bench.check_read([2, 1, 3], [7, 8, 9])


@pytest.mark.parametrize(
    "garbage", [b"\x00", b"$", b":1\r\n", b"$-1\r\n", b"$9\r\n", b"+OK\r\n+OK\r\n"]
)
@pytest.mark.parametrize(
    "at", [0, 1, 4, 6, 8, 16, 40, REPLY_BYTES - 2, REPLY_BYTES - 1, REPLY_BYTES]
)
def test_garbage_is_never_served_and_the_next_read_is_right(
    proxy: FaultProxy, at: int, garbage: bytes
) -> None:
    options = {"connections": 1, "timeout_s": 0.3}
    with bench_over(f"127.0.0.1:{proxy.port}", **options) as bench:
        stored(bench)
        proxy.on_reply = changed_at(at, garbage)
        codes = bench.read([1, 2, 3], [4, 5, 6]).tolist()
        for number, code in enumerate(codes, 1):
            assert code != Read.FOUND or np.array_equal(bench.slot(3 + number), content(number))
        proxy.on_reply = nothing
        wait_for(lambda: not bench.tier.problem(), "the problem stays")
        again = bench.read([1, 2, 3], [7, 8, 9]).tolist()
        for number, (code, before) in enumerate(zip(again, codes, strict=True), 1):
            if before == Read.CORRUPT:
                assert code == Read.ABSENT
            else:
                assert code == Read.FOUND
                assert np.array_equal(bench.slot(6 + number), content(number))


def test_connections_that_the_server_ended_meanwhile_cost_nothing(server: Server) -> None:
    with bench_over(f"unix:{server.path}", connections=1) as bench:
        stored(bench)
        for _ in range(3):
            server.client.client_kill_filter(_type="normal", skipme=True)
            bench.check_read([1, 2, 3], [4, 5, 6])


def test_what_is_left_over_on_a_connection_ends_it(proxy: FaultProxy) -> None:
    def chatty(piece: bytes) -> Iterator[bytes]:
        yield piece + b":1\r\n"

    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        proxy.on_reply = chatty
        assert bench.probe([1]).tolist() == [Read.FOUND]
        proxy.on_reply = nothing
        before = proxy.num_connections
        assert bench.probe([9, 1, 8]).tolist() == [Read.ABSENT, Read.FOUND, Read.ABSENT]
        assert proxy.num_connections == before + 1


def test_closing_over_a_stopped_server_takes_its_time_and_no_longer(server: Server) -> None:
    with bench_over(f"unix:{server.path}", connections=2, timeout_s=0.4) as bench:
        stored(bench)
        ended: list[Codes] = []
        with server.stopped():
            for slot in range(20):
                bench.tier.write(
                    bench.blocks([100 + slot], [slot]), lambda codes, seals: ended.append(codes)
                )
            bench.tier.close()
        assert [codes.tolist() for codes in ended] == [[Write.FAILED]] * 20


def test_closing_gives_threads_and_connections_back(server: Server) -> None:
    begun = {thread.name for thread in threading.enumerate()}
    with bench_over(f"unix:{server.path}", connections=3) as bench:
        stored(bench)
        ended: list[Codes] = []
        for _ in range(30):
            bench.tier.read(bench.blocks([1], [4]), time.monotonic() + 9, ended.append)
        wait_for(lambda: len(ended) == 30, "reads did not end")
        names = [client["name"] for client in server.client.client_list()]
        assert 1 <= names.count("hotkv") <= 3
        left = weakref.ref(bench.tier)
    assert {thread.name for thread in threading.enumerate()} <= begun
    wait_for(lambda: len(server.client.client_list()) == 1, "connections are left")
    del bench
    gc.collect()
    assert left() is None


def test_a_call_beyond_the_queue_fails_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_QUEUED_PARTS", 3)
    with bench_over(f"unix:{server.path}", connections=1, timeout_s=1) as bench:
        stored(bench)
        ended: list[Codes] = []
        with server.stopped():
            for slot in range(6):
                if slot == 1:
                    # The first one is on its way.
                    wait_for(lambda: bench.tier.stalled_s(time.monotonic()), "nothing began")
                bench.tier.write(
                    bench.blocks([100 + slot], [slot]), lambda codes, seals: ended.append(codes)
                )
            assert len(ended) == 2
        wait_for(lambda: len(ended) == 6, "calls did not end")
        assert bench.tier.figures().queued_bytes == 0


def test_a_read_that_is_too_late_costs_no_connection(proxy: FaultProxy) -> None:
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        before = proxy.num_connections
        assert bench.read([1], [4], within_s=-1.0).tolist() == [Read.FAILED]
        bench.check_read([1], [4])
        assert proxy.num_connections == before


@given(st.lists(st.integers(0, 3 * PART_BYTES // 2) | st.integers(0, 4096), max_size=300))
@example([4096] * 150)
def test_parts_are_all_rows_in_order_and_bounded(sizes: list[int]) -> None:
    num_bytes = np.array(sizes, np.int64)
    parts = list(cut(num_bytes))
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(sizes))]
    for part in parts:
        count = part.stop - part.start
        assert 0 < count <= PART_BLOCKS
        assert count == 1 or num_bytes[part].sum() <= PART_BYTES
    for part, after in pairwise(parts):
        # No part ends too early.
        more = num_bytes[part.start : after.start + 1]
        assert len(more) > PART_BLOCKS or more.sum() > PART_BYTES


def test_reads_go_before_writes_and_each_kind_in_its_order() -> None:
    queue = PartQueue()
    parts = [Part(RemoteCall(0, lambda call: None), lambda client, until_s: None) for _ in range(6)]
    for part, is_read in zip(parts, [False, True, False, True, True, False], strict=True):
        assert queue.put([part], is_read=is_read)
    taken = [queue.get(0.0) for _ in range(6)]
    assert [parts.index(part) for part in taken] == [1, 3, 4, 0, 2, 5]
    assert queue.get(0.0) is None
    queue.put(parts[:2], is_read=True)
    assert queue.close() == parts[:2] and queue.get(float("inf")) is None
    assert not queue.put(parts, is_read=True)
