"""Tests values under blocks' keys: damaged, foreign and old ones, times to live, large calls,
surplus replies."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.protocol import (
    Read,
    Write,
)
from hotkv_server.tiers.remote.values import HEAD_BYTES, head
from hotkv_server.tiers.seals import seal
from hotkv_server.tiers.valkey.resp_client import ttl_ms
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.contracts.flush_contract import answer, blocks_of
from tests.contracts.tier_contract import (
    SLOT_BYTES,
    Bench,
    content,
    key,
    shared_blocks,
)
from tests.doubles.fault_proxy import Dam, FaultProxy, nothing
from tests.support.waiting import wait_for
from tests.tiers.support import Asked, arena_of
from tests.tiers.valkey_support import PATIENT, Server, bench_over


@pytest.fixture
def bench(server: Server) -> Iterator[Bench]:
    with bench_over(f"unix:{server.path}", connections=1) as one:
        one.fill([1, 2, 3], [0, 1, 2])
        assert (one.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
        yield one


def read_three(bench: Bench) -> list[int]:
    """1 and 3 must be found, and the connection go on."""
    bench.arena[:] = 0
    codes = bench.read([1, 2, 3], [4, 5, 6]).tolist()
    assert codes[0] == codes[2] == Read.FOUND
    assert np.array_equal(bench.slot(4), content(1)) and np.array_equal(bench.slot(6), content(3))
    bench.check_read([1, 3], [7, 8])
    return codes


def cut(client: Any, num_bytes: int) -> None:
    client.set(key(2), client.get(key(2))[:num_bytes])


def flip(client: Any, at: int) -> None:
    (byte,) = client.getrange(key(2), at, at)
    client.setrange(key(2), at, bytes([byte ^ 1]))


def of_another_kind(client: Any, number: int) -> None:
    client.delete(key(2))
    client.rpush(key(2), b"a", b"b")


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        *((cut, num_bytes) for num_bytes in (0, 1, HEAD_BYTES - 1, HEAD_BYTES, SLOT_BYTES)),
        *(
            (lambda client, more: client.append(key(2), b"x" * more), more)
            for more in (1, 4096, 3_000_000)
        ),
        (lambda client, number: client.copy(key(number), key(2), replace=True), 1),
        (lambda client, count: client.set(key(2), b"<html>" * count), 5000),
        (of_another_kind, 0),
        *((flip, at) for at in (0, 2, 8, 15, 16, 23, 24, 5000, SLOT_BYTES + HEAD_BYTES - 1)),
    ],
)
def test_foreign_value_is_corrupt_and_leaves(
    server: Server, bench: Bench, spoil: Callable[[Any, int], None], number: int
) -> None:
    spoil(server.client, number)
    assert bench.write([2], [1]).tolist() == [Write.PRESENT]
    assert read_three(bench)[1] == Read.CORRUPT
    assert not bench.arena[9 * SLOT_BYTES :].any()
    assert not server.client.exists(key(2))
    assert bench.write([2], [1]).tolist() == [Write.STORED]


def test_a_block_of_another_size_is_corrupt(bench: Bench) -> None:
    bench.arena[:] = 0
    assert bench.read([2], [5], [SLOT_BYTES // 2]).tolist() == [Read.CORRUPT]
    assert not bench.arena.any()


def test_value_of_another_version_is_absent(server: Server, bench: Bench) -> None:
    server.damage(key(2), 4)
    assert read_three(bench)[1] == Read.ABSENT
    assert server.client.exists(key(2))


def test_the_layout_of_a_value(server: Server, bench: Bench) -> None:
    value = server.client.get(key(1))
    body = content(1).tobytes()
    assert value == head(key(1), memoryview(body)) + body
    assert value[:8] == b"hkvb\x01\x00\x00\x00"
    assert int.from_bytes(value[8:16], "little") == SLOT_BYTES
    assert int.from_bytes(value[16:24], "little") == seal(key(1), body)


def test_databases_are_apart(server: Server, bench: Bench) -> None:
    with bench_over(f"unix:{server.path}", database=5) as other:
        assert other.read([1], [0]).tolist() == [Read.ABSENT]


def test_deeper_blocks_expire_sooner(server: Server) -> None:
    depths = [0, 1, 2, 63, 64, 65, 1000, 1001, 30_000, 30_001]
    keys = [key(100 + depth) for depth in depths]
    blocks = replace(blocks_of(keys, 0, {}), depths=np.array(depths, np.int64))
    with bench_over(f"unix:{server.path}", ttl_s=1000.0) as bench:
        begun_s = time.time()
        codes, _ = bench.answer(blocks)
        took_s = time.time() - begun_s
        assert codes.tolist() == [Write.STORED] * len(keys)
        # It begins between call and answer; 2 ms for the two clocks.
        for depth, one in zip(depths, keys, strict=True):
            left_s = server.client.pexpiretime(one) / 1000 - begun_s
            expected_s = ttl_ms(1000.0, depth) / 1000
            assert expected_s - 0.002 <= left_s <= expected_s + took_s + 0.002


def test_times_to_live_fall_from_all_to_half() -> None:
    assert ttl_ms(86400.0, 0) == 86_400_000
    day = [ttl_ms(86400.0, depth) for depth in range(50_000)]
    assert all(sooner > later for sooner, later in pairwise(day))
    assert day[-1] >= 43_200_000
    assert ttl_ms(1.0, 1 << 40) == 500


def test_large_call_is_cut_and_comes_whole(server: Server) -> None:
    count, size = 300, 32768
    arena = arena_of(2 * count * size)
    bytes_ = arena.array()
    bytes_[: count * size] = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
    settings = ValkeySettings(address=f"unix:{server.path}")
    tier = ValkeyTier(arena, settings, timeouts=PATIENT)
    try:
        keys = [key(1000 + at) for at in range(count)]
        slots, sizes = np.arange(count, dtype=np.int64) * size, np.full(count, size, np.int64)
        blocks = shared_blocks(keys, slots, sizes)
        codes = answer(lambda done: tier.write(blocks, lambda codes, seals: done(codes)))
        assert codes.tolist() == [Write.STORED] * count
        back = replace(blocks, slots=slots[::-1] + count * size)
        codes = answer(lambda done: tier.read(back, float("inf"), done))
        assert codes.tolist() == [Read.FOUND] * count
        rows = bytes_[count * size :].reshape(count, size)[::-1]
        assert np.array_equal(rows.ravel(), bytes_[: count * size])
        codes = answer(lambda done: tier.probe(keys * 9, float("inf"), done))
        assert codes.tolist() == [Read.FOUND] * 9 * count
    finally:
        tier.close()


def test_leftover_bytes_end_the_connection(bench: Bench, proxy: FaultProxy) -> None:
    def chatty(piece: bytes) -> Iterator[bytes]:
        yield piece + b":1\r\n"

    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as other:
        assert other.probe([1]).tolist() == [Read.FOUND]
        proxy.on_reply = chatty
        assert other.probe([1]).tolist() == [Read.FOUND]
        proxy.on_reply = nothing
        before = proxy.num_connections
        assert other.probe([9, 1, 8]).tolist() == [Read.ABSENT, Read.FOUND, Read.ABSENT]
        assert proxy.num_connections == before + 1


def test_closing_gives_connections_back(server: Server, bench: Bench) -> None:
    assert "hotkv" in [client["name"] for client in server.client.client_list()]
    bench.tier.close()
    wait_for(lambda: len(server.client.client_list()) == 1, "connections are left")


def test_slow_read_with_bytes_is_no_stall(server: Server, proxy: FaultProxy) -> None:
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1, timeout_s=60) as bench:
        bench.fill([3], [0])
        assert bench.write([3], [0]).tolist() == [Write.STORED]
        begins, dam, asked = threading.Event(), Dam(SLOT_BYTES // 2), Asked(bench)

        def reply(piece: bytes) -> Iterator[bytes]:
            begins.wait()
            yield from dam(piece)

        proxy.on_reply = reply
        asked.read("read", [3], [4])
        wait_for(lambda: bench.tier.stalled_s(time.monotonic()) > 0.2, "it does not show")
        released_s = time.monotonic()
        begins.set()
        wait_for(lambda: bench.tier.stalled_s(released_s) == 0, "the stall goes on")
        assert not asked.codes and dam.is_full.wait(60)
        # No more bytes: a new stall.
        wait_for(lambda: bench.tier.stalled_s(time.monotonic()) > 0.2, "no new stall")
        dam.opened.set()
        assert asked.wait("read") == [Read.FOUND]


def test_lookup_does_not_wait_for_writes(server: Server, proxy: FaultProxy) -> None:
    held, opened = list[bytes](), threading.Event()

    def hold(piece: bytes) -> Iterator[bytes]:
        if piece.startswith(b"*6\r\n$3\r\nSET\r\n"):
            held.append(piece)
            opened.wait(60)
        yield piece

    with bench_over(f"127.0.0.1:{proxy.port}", connections=2, timeout_s=60) as bench:
        proxy.on_command = hold
        numbers, asked = range(3), Asked(bench)
        bench.fill(numbers, numbers)
        for number in numbers:
            asked.write(number, [number])
        wait_for(lambda: held, "nothing is written")
        # A connection used by a lookup would begin the next write.
        for number in range(100, 120):
            assert bench.probe([number]).tolist() == [Read.ABSENT]
        assert not asked.codes
        opened.set()
        assert [asked.wait(number) for number in numbers] == [[Write.STORED]] * 3
