"""What lies in Valkey under a block's key: damaged, foreign, of another version, of any age."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.testing.tier_contract import SLOT_BYTES, Bench, content, key
from hotkv_server.tiers.protocol import Blocks, Read, Write
from hotkv_server.tiers.remote.values import HEAD_BYTES, head
from hotkv_server.tiers.valkey.resp_client import ttl_ms
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, arena_of, bench_over, running, tier_over


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.client.flushall()
    return shared


@pytest.fixture
def bench(server: Server) -> Iterator[Bench]:
    with bench_over(f"unix:{server.path}", connections=1) as one:
        one.fill([1, 2, 3], [0, 1, 2])
        assert (one.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
        yield one


def read_three(bench: Bench) -> list[int]:
    """Codes of the blocks; those beside the second are right bit for bit, and the connection goes
    on with the next call."""
    bench.arena[:] = 0
    codes = bench.read([1, 2, 3], [4, 5, 6]).tolist()
    assert codes[0] == codes[2] == Read.FOUND
    assert np.array_equal(bench.slot(4), content(1)) and np.array_equal(bench.slot(6), content(3))
    bench.check_read([1, 3], [7, 8])
    return codes


@pytest.mark.parametrize("at", [0, 2, 8, 15, 16, 23, 24, 5000, SLOT_BYTES + HEAD_BYTES - 1])
def test_a_flipped_bit_is_corrupt_and_the_value_goes(server: Server, bench: Bench, at: int) -> None:
    server.damage(key(2), at)
    assert read_three(bench)[1] == Read.CORRUPT
    assert not server.client.exists(key(2))
    assert bench.read([2], [5]).tolist() == [Read.ABSENT]
    assert bench.write([2], [1]).tolist() == [Write.STORED]


@pytest.mark.parametrize("num_bytes", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, SLOT_BYTES])
def test_a_shorter_value_is_corrupt(server: Server, bench: Bench, num_bytes: int) -> None:
    value = server.client.get(key(2))
    server.client.set(key(2), value[:num_bytes])
    assert read_three(bench)[1] == Read.CORRUPT
    assert not server.client.exists(key(2))


@pytest.mark.parametrize("more", [1, 4096, 3_000_000])
def test_a_longer_value_is_corrupt_and_stays_out_of_the_arena(
    server: Server, bench: Bench, more: int
) -> None:
    server.client.append(key(2), b"x" * more)
    assert read_three(bench)[1] == Read.CORRUPT
    assert not bench.arena[9 * SLOT_BYTES :].any()


def test_a_block_of_another_size_is_corrupt(bench: Bench) -> None:
    bench.arena[:] = 0
    assert bench.read([2], [5], [SLOT_BYTES // 2]).tolist() == [Read.CORRUPT]
    assert not bench.arena.any()


def test_foreign_bytes_are_corrupt(server: Server, bench: Bench) -> None:
    server.client.set(key(2), b"<html>" * 5000)
    assert read_three(bench)[1] == Read.CORRUPT


def test_a_list_under_the_key_is_corrupt_and_goes(server: Server, bench: Bench) -> None:
    server.client.delete(key(2))
    server.client.rpush(key(2), b"a", b"b")
    assert bench.write([2], [1]).tolist() == [Write.PRESENT]
    assert read_three(bench)[1] == Read.CORRUPT
    assert not server.client.exists(key(2))


def test_a_value_of_another_version_is_absent_and_stays(server: Server, bench: Bench) -> None:
    server.damage(key(2), 4)
    assert read_three(bench)[1] == Read.ABSENT
    assert server.client.exists(key(2))


def test_the_layout_of_a_value(server: Server, bench: Bench) -> None:
    value = server.client.get(key(1))
    body = content(1).tobytes()
    assert value == head(key(1), memoryview(body))[0] + body
    assert value[:8] == b"hkvb\x01\x00\x00\x00"
    assert int.from_bytes(value[8:16], "little") == SLOT_BYTES
    assert int.from_bytes(value[16:24], "little") == bench.seals[1]


def test_a_full_server_says_full_and_reads_go_on(server: Server, bench: Bench) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", "1")
    try:
        bench.fill([9], [9])
        assert bench.write([9], [9]).tolist() == [Write.FULL]
        assert read_three(bench)[1] == Read.FOUND
        assert not bench.tier.problem()
    finally:
        server.client.config_set("maxmemory", "0")
    assert bench.write([9], [9]).tolist() == [Write.STORED]


def test_two_nodes_may_write_the_same_key(server: Server, bench: Bench) -> None:
    with bench_over(f"127.0.0.1:{server.port}") as other:
        other.fill([1, 4], [0, 1])
        assert other.write([1, 4], [0, 1]).tolist() == [Write.PRESENT, Write.STORED]
        other.check_read([1], [3])
        bench.check_read([4, 1], [5, 6])
        other.tier.forget([key(1)])
        wait_for(lambda: bench.probe([1]).tolist() == [Read.ABSENT], "it was not forgotten")


def test_deeper_blocks_expire_sooner(server: Server) -> None:
    depths = [0, 1, 2, 63, 64, 65, 1000, 1001, 30_000, 30_001]
    with tier_over(f"unix:{server.path}", ttl_s=1000.0) as (tier, _):
        keys = [key(100 + depth) for depth in depths]
        slots = np.arange(len(keys), dtype=np.int64) * SLOT_BYTES
        sizes = np.full(len(keys), 4096, np.int64)
        done = []
        blocks = Blocks(keys, slots, sizes, depths=np.array(depths, np.int64))
        tier.write(blocks, lambda codes, seals: done.append(codes.tolist()))
        wait_for(lambda: done, "the write did not end")
        assert done == [[Write.STORED] * len(keys)]
        # What is left of each, with its expiry as one moment for all.
        expiries = [server.client.pexpiretime(one) for one in keys]
        assert expiries == sorted(expiries, reverse=True)
        assert 999_000 < server.client.pttl(keys[0]) <= 1_000_000
        assert 749_000 < server.client.pttl(keys[4]) <= 750_000
        assert server.client.pttl(keys[-1]) > 499_000


def test_times_to_live_fall_from_all_to_half() -> None:
    assert ttl_ms(86400.0, 0) == 86_400_000
    day = [ttl_ms(86400.0, depth) for depth in range(50_000)]
    assert all(sooner > later for sooner, later in pairwise(day))
    assert day[-1] >= 43_200_000
    assert ttl_ms(1.0, 1 << 40) == 500


def test_prefixes_stay_whole_while_a_full_server_evicts(tmp_path: Path) -> None:
    # Sequences in turns, each from its begin, into a server that holds a third of them.
    chains, length, size = 24, 16, 16384
    with running(
        tmp_path / "small",
        maxmemory="4mb",
        **{"maxmemory-policy": "volatile-ttl", "maxmemory-samples": "10"},
    ) as small:
        used = small.client.info("memory")["used_memory"]
        small.client.config_set("maxmemory", used + chains * length * size // 3)
        with tier_over(f"unix:{small.path}", connections=1) as (tier, _):
            for chain in range(chains):
                keys = [b"hotkv/1/f/1/0/%d/%d" % (chain, depth) for depth in range(length)]
                depths = np.arange(length, dtype=np.int64)
                slots, sizes = depths * size, np.full(length, size, np.int64)
                done = []
                tier.write(
                    Blocks(keys, slots, sizes, depths=depths * 8),
                    lambda codes, seals, done=done: done.append(codes),
                )
                wait_for(lambda done=done: done, "the write did not end")
        alive = {
            (chain, depth)
            for chain in range(chains)
            for depth in range(length)
            if small.client.exists(b"hotkv/1/f/1/0/%d/%d" % (chain, depth))
        }
    usable = {
        (chain, depth)
        for chain, depth in alive
        if all((chain, before) in alive for before in range(depth))
    }
    assert len(alive) > chains * length // 6
    assert len(usable) > 0.8 * len(alive), f"{len(usable)} of {len(alive)} are prefixes"


def test_a_large_call_is_cut_and_comes_back_whole(server: Server) -> None:
    count, size = 300, 32768
    arena = arena_of(2 * count * size)
    bytes_ = arena.array()
    bytes_[: count * size] = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
    tier = ValkeyTier(arena, ValkeySettings(address=f"unix:{server.path}"))
    try:
        keys = [key(1000 + at) for at in range(count)]
        slots, sizes = np.arange(count, dtype=np.int64) * size, np.full(count, size, np.int64)
        done: list[list[int]] = []
        tier.write(Blocks(keys, slots, sizes), lambda codes, seals: done.append(codes.tolist()))
        wait_for(lambda: done, "the write did not end")
        reverse = slots[::-1] + count * size
        tier.read(
            Blocks(keys, reverse, sizes),
            float("inf"),
            lambda codes: done.append(codes.tolist()),
        )
        wait_for(lambda: len(done) == 2, "the read did not end")
        assert done == [[Write.STORED] * count, [Read.FOUND] * count]
        back = bytes_[count * size :].reshape(count, size)[::-1]
        assert np.array_equal(back.ravel(), bytes_[: count * size])
        tier.probe(keys * 9, float("inf"), lambda codes: done.append(codes.tolist()))
        wait_for(lambda: len(done) == 3, "the probe did not end")
        assert done[2] == [Read.FOUND] * 9 * count
    finally:
        tier.close()
