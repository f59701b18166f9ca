"""A shared tier as the daemon's event loop drives it, between nodes: what one stores the others
find, bit for bit; after a flush on one, none finds it; nobody waits for a store that is away."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv.table import SLOT_ALIGN
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.copies import STORED
from hotkv_server.core.policies import LRU
from hotkv_server.core.space import Space
from hotkv_server.core.values import CoreConfig, HashList
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.epoch_notes import EpochNotes
from hotkv_server.runtime import breaker, shared_epochs, tier_copies, tier_shared
from hotkv_server.runtime.health import Health
from hotkv_server.runtime.shared_epochs import EpochRelay
from hotkv_server.runtime.tier_below import TierBelow
from hotkv_server.runtime.tier_shared import TierShared
from hotkv_server.runtime.tiers import Tiers, moving_bytes
from hotkv_server.testing.memory_tier import MemoryStore, MemoryTier
from hotkv_server.testing.shared_memory_tier import SharedMemoryTier
from tests.core.support import evict, flush, make_key_space, make_table, words_of
from tests.tiers.support import content, store_blocks

SLAB = 4 * SLOT_ALIGN
NUM_SLOTS = 64
ARENA_BYTES = NUM_SLOTS * SLOT_ALIGN
BLOCKS = list(range(6))


class SharedNode:
    """A core over memory of its own, and a tier that it shares."""

    def __init__(
        self,
        store: MemoryStore,
        lookup_wait_s: float,
        notes: EpochNotes | None = None,
        left: list[int] | None = None,
        disk: MemoryStore | None = None,
    ) -> None:
        """`left`: the blocks of an earlier server, None if there was none. `disk`: of a tier
        below."""
        config = CoreConfig(ARENA_BYTES, SLAB, 200, check_stride=1)
        places = Space(make_table(200), 256 * SLOT_ALIGN, SLAB, LRU(200)) if disk else None
        self.core = CacheCore(config, make_table(200), LRU(200), below=places)
        self.num_calls = self.num_flushed_here = 0
        self.memory = np.zeros(ARENA_BYTES, np.uint8)
        self.arena = arena = Region(self.memory.ctypes.data, ARENA_BYTES, "arena")
        relay = EpochRelay()
        self.tier = SharedMemoryTier(arena, store, on_epoch=relay)
        if left is not None:
            self._open()
            self.put(left)
            index = self.core.space.index
            index.unverified[index.ready_blocks()] = True
        verifier = Verifier(self.core, arena)
        most_bytes = moving_bytes(self.core)
        below = None
        if disk is not None:
            below = TierBelow(self.core, MemoryTier(arena, disk), verifier, most_bytes)
        self.shared = TierShared(self.core, self.tier, verifier, relay, most_bytes, notes)
        self.tiers = Tiers(self.core, arena, lookup_wait_s, below, [self.shared])
        if left is None:
            self._open()

    def _open(self) -> None:
        key_space = make_key_space("m", SLOT_ALIGN, SLOT_ALIGN)
        self.fingerprint = key_space.fingerprint.hex()
        self.number = self.core.open_session("e", "worker", key_space, 0.0).number
        self.session: Any = SimpleNamespace(
            record=self.core.sessions.record(self.number), knows_tiers=True
        )

    async def flushed_here(self, key_space_id: int) -> int:
        self.num_flushed_here += 1
        flush(self.core, key_space_id)
        return 0

    async def flush(self) -> None:
        """As an engine asks for it."""
        self.tiers.begin_flush(1)
        flush(self.core, 1)
        await self.tiers.end_flush(self.fingerprint)

    def put(self, numbers: list[int]) -> None:
        """Stores blocks, each with bytes of its own."""
        self.num_calls += 1
        name = f"store {self.num_calls}"
        store_blocks(self.core, self.arena, self.number, name, numbers)

    async def until_copied(self, count: int) -> None:
        await until(lambda: self.shared.out.num_copied >= count, "blocks are not copied")

    async def looked_up(self, numbers: list[int]) -> list[bool]:
        lists = [HashList(0, words_of(numbers))]
        if self.tiers.lookups.must_ask(self.session, lists):
            await self.tiers.lookups.ask(self.session, 1, lists)
        ready = self.core.lookup(1, lists)
        here = ready[0] | self.tiers.lookups.lies_elsewhere(1, lists, ready)[0]
        found: list[bool] = here.tolist()
        return found

    async def leased(self, numbers: list[int]) -> list[bool]:
        """Brings blocks in and leases them, as the rpc does; checks the bytes of what is pinned."""
        self.num_calls += 1
        lists = [HashList(0, words_of(numbers))]
        name = f"lease {self.num_calls}"
        held = None
        if self.tiers.has_some(self.session, lists):
            held = await self.tiers.bring_up(self.session, lists)
        grant = self.core.acquire(self.number, name, lists, 10.0, time.monotonic())
        if held is not None:
            self.tiers.let_go(held)
        (offsets,) = self.core.slot_offsets(self.number, name)
        for number, offset in zip(numbers, offsets.tolist(), strict=True):
            if offset >= 0:
                there = self.memory[offset : offset + SLOT_ALIGN]
                assert np.array_equal(there, content(number)), f"block {number} has other bytes"
        self.core.release(self.number, name)
        self.core.check_invariants()
        pinned: list[bool] = grant.pinned[0].tolist()
        return pinned


async def until(holds: Any, why: str) -> None:
    until_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until_s, why
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_copies, "LINGER_S", 0.05)
    monkeypatch.setattr(tier_copies, "AGAIN_S", 0.05)
    for name in ("POLL_S", "RETRY_S", "FLUSH_WAIT_S"):
        monkeypatch.setattr(shared_epochs, name, 0.05)


@contextlib.asynccontextmanager
async def nodes(
    count: int = 2, lookup_wait_s: float = 10.0, store: MemoryStore | None = None
) -> AsyncIterator[list[SharedNode]]:
    store = store or MemoryStore(places=False)
    made = [SharedNode(store, lookup_wait_s) for _ in range(count)]
    for one in made:
        one.tiers.start(Health(), one.core.take_effects, one.flushed_here)
    try:
        yield made
    finally:
        for one in made:
            await one.tiers.close()
            one.core.check_invariants()
            assert not len(one.core.moves)
            assert not one.core.space.index.pins.any()


def test_one_node_stores_and_another_finds() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up([*BLOCKS, 99]) == [True] * 6 + [False]
            assert await b.leased([*BLOCKS, 99]) == [True] * 6 + [False]
            assert b.shared.num_fetched == 6 and b.tier.figures().read_blocks == 6
            # Now they are in host memory, and nobody is asked.
            assert not b.tiers.lookups.must_ask(b.session, [HashList(0, words_of(BLOCKS))])
            assert await b.leased(BLOCKS) == [True] * 6
            assert b.tier.figures().read_blocks == 6

    asyncio.run(run())


def test_what_is_leased_without_a_lookup_is_asked_for() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            before = b.core.space.used_bytes()
            assert await b.leased([50, 51]) == [False, False]
            assert b.core.space.used_bytes() == before, "slots were taken for what nobody has"
            assert await b.leased(BLOCKS) == [True] * 6

    asyncio.run(run())


def test_after_a_flush_nobody_finds_what_was_there() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert all(await b.leased(BLOCKS[:3]))
            await a.flush()
            # What it has not read yet, at once; what it has in host memory, soon.
            assert not any(await b.leased(BLOCKS[3:]))
            await until(lambda: b.num_flushed_here == 1, "the flush was not heard of")
            assert not any(await b.leased(BLOCKS)) and not any(await a.leased(BLOCKS))
            assert a.num_flushed_here == 0
            a.put(BLOCKS)
            await a.until_copied(12)
            await until(lambda: b.shared.epochs.get(1), "the new epoch is not known")
            assert all(await b.leased(BLOCKS))
            assert b.num_flushed_here == 1

    asyncio.run(run())


def test_a_flush_counts_though_the_store_is_away() -> None:
    """The engine does not wait for it; the store is told when it is back."""

    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up(BLOCKS[:1]) == [True]
            a.tier.faults.problem = "gone"
            began_s = time.monotonic()
            await a.flush()
            assert time.monotonic() - began_s < 5.0
            assert not any(await a.looked_up(BLOCKS))
            # Blocks that are stored now must not come under the old epoch.
            a.put([20])
            await asyncio.sleep(0.2)
            assert not any(b"/0/" in key and key.endswith(words_of([20])[0].tobytes())
                           for key in a.tier._store.content if isinstance(key, bytes))  # fmt: skip
            a.tier.faults.problem = ""
            await until(lambda: a.shared.epochs.get(1), "the flush was forgotten")
            assert not any(await a.leased(BLOCKS))
            await until(lambda: b.num_flushed_here == 1, "the flush was not heard of")
            assert not any(await b.leased(BLOCKS))

    asyncio.run(run())


def test_what_is_stored_while_a_flush_is_told_is_copied_after_it() -> None:
    """Its epoch is not known yet as its copy begins."""

    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            a.tiers.begin_flush(1)
            flush(a.core, 1)
            a.put([20])
            stored_here = a.shared.out._copies.lanes[STORED]
            await until(lambda: not len(stored_here), "its copy does not begin")
            await a.tiers.end_flush(a.fingerprint)
            await a.until_copied(7)
            assert a.shared.out.num_refused == 0
            known = a.shared.epochs.get(1)
            await until(lambda: b.shared.epochs.get(1) == known, "the flush is not heard of")
            assert await b.leased([20]) == [True]

    asyncio.run(run())


def test_a_flush_elsewhere_counts_while_the_store_waits_to_be_told_of_one_here() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up(BLOCKS[:1]) == [True]
            a.tier.faults.problem = "gone"
            await a.flush()
            a.put([20, 21])
            await b.flush()
            a.put([22])
            a.tier.faults.problem = ""
            await until(lambda: a.shared.epochs.get(1), "the flush was forgotten")
            assert a.num_flushed_here == 1
            assert not any(await a.leased([20, 21]))

    asyncio.run(run())


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_flush_elsewhere_counts_where_the_store_was_never_reached(is_flushed: bool) -> None:
    """What is stored here meanwhile is of before a flush, or it is not: if there was none, it stays
    and is copied."""

    async def run() -> None:
        store = MemoryStore(places=False)
        async with nodes(store=store) as (a, b):
            a.tier.faults.problem = "gone"
            a.put(BLOCKS)
            b.put([20])
            await b.until_copied(1)
            if is_flushed:
                await b.flush()
            assert all(await a.leased(BLOCKS))
            a.tier.faults.problem = ""
            await until(lambda: a.shared.epochs.get(1), "the epoch is not learned")
            assert a.num_flushed_here == is_flushed
            assert await a.leased(BLOCKS) == [not is_flushed] * 6
            if not is_flushed:
                await a.until_copied(6)
            a.put([30])
            await a.until_copied(1 if is_flushed else 7)
            assert await b.leased([*BLOCKS, 30]) == [not is_flushed] * 6 + [True]

    asyncio.run(run())


def test_a_store_that_lost_its_epochs_counts_as_flushed() -> None:
    async def run() -> None:
        store = MemoryStore(places=False)
        async with nodes(store=store) as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert all(await b.leased(BLOCKS))
            store.epochs.clear()
            await until(lambda: b.num_flushed_here == 1, "the loss was not noticed")
            await until(lambda: a.num_flushed_here == 1, "the loss was not noticed")
            assert not any(await b.leased(BLOCKS))

    asyncio.run(run())


def test_a_dead_store_is_a_miss_at_once_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up(BLOCKS[:1]) == [True]
            b.tier.faults.problem = "gone"
            b.put([30])
            # One trial is due; after it nobody waits.
            await b.leased(BLOCKS)
            monkeypatch.setattr(breaker, "RETRY_S", 0.1)
            began_s = time.monotonic()
            assert not any(await b.leased(BLOCKS)) and await b.leased([30]) == [True]
            assert time.monotonic() - began_s < 5.0
            b.tier.faults.problem = ""
            await until(lambda: b.shared.breaker.lets_pass, "it is not tried again")
            assert all(await b.leased(BLOCKS))

    asyncio.run(run())


def test_a_hung_store_costs_a_bounded_wait() -> None:
    async def run() -> None:
        async with nodes(lookup_wait_s=0.2) as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up(BLOCKS) == [True] * 6
            b.tier.faults.is_hung = True
            began_s = time.monotonic()
            assert not any(await b.leased(BLOCKS))
            assert 0.2 <= time.monotonic() - began_s < 5.0
            b.put([40])
            assert await b.leased([40]) == [True]
            b.tier.faults.is_hung = False
            # What is read at last is there for the next one.
            await until(lambda: b.shared.num_fetched == 6, "the read did not end")
            assert all(await b.leased(BLOCKS))

    asyncio.run(run())


def test_a_full_store_goes_on_answering() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            a.tier.faults.is_full = True
            a.put([20, 21])
            await until(lambda: a.shared.out.num_refused == 2, "nothing was refused")
            assert await b.leased([*BLOCKS, 20]) == [True] * 6 + [False]

    asyncio.run(run())


def test_a_damaged_block_is_a_miss() -> None:
    async def run() -> None:
        store = MemoryStore(places=False)
        async with nodes(store=store) as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            for key in list(store.content):
                if isinstance(key, bytes) and key.endswith(words_of([2])[0].tobytes()):
                    store.damage(key, 77)
            assert await b.leased(BLOCKS) == [True, True, False, True, True, True]
            assert b.tier.figures().corrupt_blocks == 1

    asyncio.run(run())


def test_bytes_that_changed_in_host_memory_are_not_written() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.tier.faults.problem = "not yet"
            a.put(BLOCKS)
            words = a.core.space.index.find(1, 0, words_of([2]))
            a.memory[int(a.core.space.index.offsets(words)[0]) + 7] ^= 1
            a.tier.faults.problem = ""
            await a.until_copied(5)
            assert await b.leased(BLOCKS) == [True, True, False, True, True, True]

    asyncio.run(run())


def test_a_block_is_written_once_and_not_with_each_use() -> None:
    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            for _ in range(3):
                assert all(await a.leased(BLOCKS))
            await asyncio.sleep(0.2)
            assert a.tier.figures().written_blocks == 6 and a.shared.out.num_copied == 6
            # What came from there is not written back.
            assert all(await b.leased(BLOCKS))
            await asyncio.sleep(0.2)
            assert b.shared.out.num_copied == 0

    asyncio.run(run())


def test_many_nodes_and_flushes_never_serve_what_was_flushed() -> None:
    """Each node puts, leases and flushes at random. A block that was flushed is found again only if
    it was put again since."""

    async def run() -> None:
        store, dice = MemoryStore(places=False), np.random.default_rng(3)
        async with nodes(3, store=store) as made:
            put_since: set[int] = set()

            def knows(node: SharedNode) -> bool:
                """Whether it has the epoch that the store has."""
                (epoch,) = store.epochs.values()
                return node.shared.epochs.get(1) == epoch

            for _ in range(120):
                one, numbers = made[dice.integers(3)], dice.integers(0, 12, 3).tolist()
                numbers = list(dict.fromkeys(numbers))
                what = dice.random()
                if what < 0.4:
                    one.put(numbers)
                    put_since |= set(numbers)
                elif what < 0.9:
                    got = await one.leased(numbers)
                    for number, is_there in zip(numbers, got, strict=True):
                        assert not is_there or number in put_since, "a flushed block was served"
                elif what < 0.95:
                    evict(one.core, 1, 0, words_of(numbers))
                else:
                    await one.flush()
                    await until(lambda: all(map(knows, made)), "the flush was not heard of")
                    put_since.clear()
                await asyncio.sleep(0.005)

    asyncio.run(run())


def test_what_is_known_to_be_there_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_shared, "MAX_FOUND", 4)
    monkeypatch.setattr(tier_shared, "MAX_PROBED", 5)

    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            assert await b.looked_up(BLOCKS) == [False, True, True, True, True, False]
            assert len(b.shared._found) == 4

    asyncio.run(run())


def test_what_was_found_long_ago_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_shared, "FOUND_S", 0.1)

    async def run() -> None:
        async with nodes(lookup_wait_s=0.05) as (a, b):
            a.put(BLOCKS)
            await a.until_copied(6)
            for _ in range(3):
                await until(lambda: b.shared.epochs.get(1), "no epoch")
                assert await b.looked_up(BLOCKS) == [True] * 6
                await asyncio.sleep(0.2)
            assert await b.looked_up(BLOCKS) == [True] * 6

    asyncio.run(run())


def test_what_is_being_copied_as_a_flush_begins_is_found_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks whose bytes are still compared must not be written under the new epoch."""
    compared, agreeing = asyncio.Event(), tier_copies.agreeing

    async def late(*arguments: Any) -> Any:
        await compared.wait()
        return await agreeing(*arguments)

    monkeypatch.setattr(tier_copies, "agreeing", late)

    async def run() -> None:
        async with nodes() as (a, b):
            a.put(BLOCKS)
            await until(lambda: len(a.core.moves) == 1, "nothing is copied")
            a.tiers.begin_flush(1)
            compared.set()
            await until(lambda: not len(a.core.moves), "the copy did not end")
            flush(a.core, 1)
            await a.tiers.end_flush(a.fingerprint)
            assert not any(await b.leased(BLOCKS)) and not any(await a.leased(BLOCKS))

    asyncio.run(run())
