"""Tests `EncodingClient`: `tier_contract` over real Valkey and S3, both forms of blocks, waits
for staging memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import (
    Codes,
    Generations,
    Read,
    SharedBlocks,
    TierMemory,
    Write,
)
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.remote.encoding import EncodingClient
from hotkv_server.tiers.remote.tier import CONNECTION_BYTES, RemoteTier
from hotkv_server.tiers.remote.values import HEAD_BYTES, head
from hotkv_server.tiers.remote.workers import Timeouts
from hotkv_server.tiers.valkey.generation_keys import generation_key
from hotkv_server.tiers.valkey.resp_client import RespClient
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.contracts import flush_contract
from tests.contracts.flush_contract import answer
from tests.contracts.tier_contract import (
    Bench,
    TierRig,
    check_tier,
    key,
    shared_blocks,
)
from tests.support.waiting import wait_for
from tests.tiers.encodings import (
    ROOM_BYTES,
    SLOT_BYTES,
    check_larger_blocks,
    compressible,
    encoding_rig,
    mixed,
    noise,
)
from tests.tiers.support import Asked
from tests.tiers.valkey_support import Server


@contextlib.contextmanager
def over(server: Server, connections: int = 3, **options: Any) -> Iterator[Bench]:
    """A Valkey tier that encodes. `options`: of `encoding_rig`."""
    settings = ValkeySettings(address=f"unix:{server.path}", connections=connections)

    def damage(name: bytes, place: int) -> None:
        server.damage(encoded_key(name) if server.client.exists(encoded_key(name)) else name)

    def make(arena: Region, staged: Staged) -> ValkeyTier:
        # A busy machine may delay the server for a second.
        return ValkeyTier(arena, settings, staged=staged, timeouts=Timeouts(10.0, 20.0))

    with encoding_rig(make, damage, server.killed, **options) as rig:
        yield Bench(rig)


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[..., None], *names: str) -> None:
    """Each call first calls `before`, with its name and arguments."""
    for name in names:
        method = getattr(RespClient, name)

        def call(client: RespClient, *said: Any, name: str = name, method: Any = method) -> Any:
            before(name, *said)
            return method(client, *said)

        monkeypatch.setattr(RespClient, name, call)


def put(server: Server, name: bytes, content: bytes) -> None:
    """Stores a valid head, then `content`."""
    server.client.set(name, head(name, memoryview(content)) + content)


@pytest.mark.parametrize(
    "options",
    [
        {"content": mixed},
        {"content": noise},
        {"content": mixed, "staging_slots": 1, "connections": 1},
        {"content": mixed, "staging_slots": 2, "connections": 3},
    ],
)
def test_contract_over_valkey(server: Server, options: dict[str, Any]) -> None:
    @contextlib.contextmanager
    def make() -> Iterator[TierRig]:
        server.client.flushall()
        with over(server, **options) as bench:
            yield bench.rig

    check_tier(make, seed=1)


def test_contract_over_s3(s3_server: Any) -> None:
    from hotkv_server.tiers.s3.tier import S3Tier
    from tests.tiers import s3_support as support

    with support.proxied(s3_server) as (proxy, over_it):

        def make() -> contextlib.AbstractContextManager[TierRig]:
            prefix = support.new_prefix()
            settings = support.settings_of(s3_server, prefix, **over_it)
            return encoding_rig(
                lambda arena, staged: S3Tier(arena, settings, staged=staged, bounds=support.QUICK),
                support.damage_in(s3_server, prefix),
                lambda: support.broken(proxy),
            )

        check_tier(make, seed=5)


def read(tier: RemoteTier, blocks: SharedBlocks) -> Codes:
    return answer(lambda done: tier.read(blocks, time.monotonic() + 20, done))


def test_blocks_are_stored_in_their_keys_form(server: Server) -> None:
    with over(server) as bench:
        bench.fill(range(6), range(6))
        assert (bench.write(range(6), range(6)) == Write.STORED).all()
        names = server.client.keys()
        assert {name: server.client.strlen(name) - HEAD_BYTES for name in names} == {
            key(0): SLOT_BYTES,
            key(3): SLOT_BYTES,
        } | {encoded_key(key(number)): ROOM_BYTES for number in (1, 2, 4, 5)}
        assert server.client.get(key(3))[HEAD_BYTES:] == noise(3).tobytes()
        assert bench.write([1, 3], [1, 3]).tolist() == [Write.PRESENT] * 2
        figures = bench.tier.figures()
        assert (figures.written_blocks, figures.written_bytes) == (6, 6 * SLOT_BYTES)
        # Three connections, and staging for 16 blocks.
        num_bytes = 3 * CONNECTION_BYTES + 16 * SLOT_BYTES
        assert bench.tier.memory() == TierMemory(num_bytes, num_bytes)


def test_blocks_of_nodes_without_encoding_are_found(server: Server) -> None:
    with over(server, content=compressible) as bench:
        put(server, key(1), compressible(1).tobytes())
        assert bench.probe([1, 2]).tolist() == [Read.FOUND, Read.ABSENT]
        bench.check_read([1], [5])
        bench.tier.forget([key(1)])
        wait_for(lambda: bench.probe([1]).tolist() == [Read.ABSENT])


def test_a_deadline_ends_a_read_but_no_probe(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read's slots are needed. Ending a probe would close its connection."""
    limits: dict[str, float] = {}
    watch(monkeypatch, lambda name, *rest: limits.update({name: rest[-1]}), "read", "probe")
    with over(server) as bench:
        deadline_s, blocks = time.monotonic() + 15, bench.blocks([1], [1])
        answer(lambda done: bench.tier.read(blocks, deadline_s, done))
        answer(lambda done: bench.tier.probe(blocks.keys, deadline_s, done))
        assert limits["read"] == deadline_s < limits["probe"]


def test_keys_without_room_for_the_suffix_are_plain(server: Server) -> None:
    with over(server, content=compressible) as bench:
        blocks = bench.blocks([1, 2], [0, 1])
        long = [b"k" * 248, b"k" * 249]
        bench.fill([1, 2], [0, 1])
        codes, _ = bench.answer(shared_blocks(long, blocks.slots, blocks.num_bytes))
        assert codes.tolist() == [Write.STORED] * 2
        assert set(server.client.keys()) == {long[0] + b"~1", long[1]}
        found = shared_blocks(long, blocks.slots + 8 * SLOT_BYTES, blocks.num_bytes)
        assert read(bench.tier, found).tolist() == [Read.FOUND] * 2
        assert np.array_equal(bench.slot(9), compressible(2))


def test_malformed_encoding_is_corrupt_and_forgotten(server: Server) -> None:
    with over(server) as bench:
        put(server, encoded_key(key(1)), bytes(ROOM_BYTES))
        bench.fill([2], [1])
        bench.write([2], [1])
        assert bench.read([1, 2], [3, 4]).tolist() == [Read.CORRUPT, Read.FOUND]
        assert bench.tier.figures().corrupt_blocks == 1
        assert not server.client.exists(encoded_key(key(1)))
        assert bench.read([1], [3]).tolist() == [Read.ABSENT]


def test_blocks_larger_than_staging_are_stored_plain(
    server: Server,
) -> None:
    with over(server, staging_slots=2) as bench:
        check_larger_blocks(bench, 2)
        server.client.set(generation_key("f"), 7)
        large = bench.blocks([92], [1], [3 * SLOT_BYTES])
        assert read(bench.tier, replace(large, generations={"f": 6})).tolist() == [Read.ABSENT]
        assert server.client.exists(encoded_key(key(91)), key(92)) == 2


def test_reads_wait_for_staging_until_their_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes may use half of the memory."""
    goes_on, hanging = threading.Event(), list[str]()

    def hang(name: str, *_: Any) -> None:
        if name == "write" or hanging:
            hanging.append(name)
            assert goes_on.wait(60)

    with over(server, staging_slots=4, connections=8, content=compressible) as bench:
        bench.fill(range(9), range(9))
        assert bench.write([8], [8]).tolist() == [Write.STORED]
        watch(monkeypatch, hang, "read", "write")
        asked = Asked(bench)
        asked.write(0, [0, 1, 2])
        # Two blocks' writes fill their half.
        wait_for(lambda: hanging)
        asked.write(3, [3])
        asked.read(4, [8], [20])
        asked.read(5, [8], [21])
        wait_for(lambda: len(hanging) >= 3)
        assert hanging == ["write", "read", "read"]
        before = bench.arena.copy()
        assert bench.read([8], [22], within_s=0.2).tolist() == [Read.FAILED]
        assert np.array_equal(before, bench.arena) and not asked.codes
        goes_on.set()
        assert asked.wait(0) == [Write.STORED] * 3 and asked.wait(3) == [Write.STORED]
        assert asked.wait(4) == asked.wait(5) == [Read.FOUND]


def test_waiting_for_staging_is_no_store_stall(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the wait for the store is a stall."""
    waits, asks, goes_on = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        asks.set()
        assert goes_on.wait(60)

    with over(server, staging_slots=1, connections=1, content=compressible) as bench:
        bench.fill([1], [1])
        assert bench.write([1], [1]).tolist() == [Write.STORED]
        staged = bench.tier._staged
        take = staged.take
        place = take(SLOT_BYTES, 0.0, is_write=False)

        def taken(*said: Any, **options: Any) -> Any:
            waits.set()
            return take(*said, **options)

        monkeypatch.setattr(staged, "take", taken)
        watch(monkeypatch, hang, "read")
        asked = Asked(bench)
        asked.read(0, [1], [2])
        assert waits.wait(60)
        assert bench.tier.stalled_s(time.monotonic() + 1000) == 0
        freed_s = time.monotonic()
        staged.give(place, SLOT_BYTES, is_write=False)
        assert asks.wait(60)
        now_s = time.monotonic()
        assert 1000 <= bench.tier.stalled_s(now_s + 1000) <= now_s + 1000 - freed_s
        goes_on.set()
        assert asked.wait(0) == [Read.FOUND]


def test_connection_closes_before_its_memory_is_reused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(name: str, *_: Any) -> None:
        said.append(name)
        if name == "read":
            raise LostError("is away")

    with over(server, connections=1, content=compressible) as bench:
        bench.fill([1], [1])
        assert bench.write([1], [1]).tolist() == [Write.STORED]
        said: list[str] = []
        give = bench.tier._staged.give
        with monkeypatch.context() as patch:
            watch(patch, away, "read", "close")
            patch.setattr(
                bench.tier._staged, "give", lambda *at, **of: said.append("give") or give(*at, **of)
            )
            assert bench.read([1], [2]).tolist() == [Read.FAILED]
        assert said[:3] == ["read", "close", "give"]
        wait_for(lambda: bench.read([1], [2]).tolist() == [Read.FOUND])


@pytest.mark.parametrize("raised_at", [None, 1, 2, 3, 4, 5, 6])
def test_flush_during_read_refuses_its_blocks(
    server: Server, monkeypatch: pytest.MonkeyPatch, raised_at: int | None
) -> None:
    """Two encoded and two plain blocks, staging for one: six requests. `raised_at`: number of
    the request before which a flush comes."""
    server.client.set(generation_key("f"), 7)
    asked: list[str] = []

    def count(name: str, *_: Any) -> None:
        asked.append(name)
        if len(asked) == raised_at:
            server.client.set(generation_key("f"), 8)

    with over(server, 1, staging_slots=1, content=lambda n: mixed(2 + n % 2)) as bench:
        bench.fill(range(4), range(4))
        assert (bench.write(range(4), range(4)) == Write.STORED).all()
        watch(monkeypatch, count, "read", "probe")
        blocks = replace(bench.blocks(range(4), range(10, 14)), generations={"f": 7})
        found = Read.FOUND if raised_at is None else Read.ABSENT
        assert read(bench.tier, blocks).tolist() == [found] * 4


def test_generations_and_depths_reach_the_store(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[bytes, int] = {}
    watch(
        monkeypatch,
        lambda _, keys, slots, depths, *rest: said.update(zip(keys, depths, strict=True)),
        "write",
    )
    with over(server) as bench:
        first, raised = flush_contract.generation(bench.tier), flush_contract.flush(bench.tier)
        assert first < raised == flush_contract.generation(bench.tier)
        bench.fill([1, 3], [1, 3])
        bench.answer(replace(bench.blocks([1, 3], [1, 3]), depths=np.array([5, 6], np.int64)))
        assert said == {encoded_key(key(1)): 5, key(3): 6}


def test_a_probe_asks_for_both_forms() -> None:
    """FOUND if one exists; FAILED if one is unknown and the other absent."""

    class Inner:
        def probe(
            self, keys: list[bytes], expected: Generations, codes: Codes, until_s: float
        ) -> Generations:
            assert [*keys[3:]] == [b"a", b"b", b"c"] and len({*keys}) == 6
            codes[:] = [
                *(Read.FAILED, Read.FOUND, Read.ABSENT),
                *(Read.ABSENT, Read.FAILED, Read.ABSENT),
            ]
            return expected

    inner: Any = Inner()
    staged: Any = None
    client, codes = EncodingClient(inner, staged), np.zeros(3, np.uint8)
    assert not client.probe([b"a", b"b", b"c"], {}, codes, 0.0)
    assert codes.tolist() == [Read.FAILED, Read.FOUND, Read.ABSENT]
    assert client.probe([b"a", b"b", b"c"], {"f": 1}, codes, 0.0) == {"f": 1}
