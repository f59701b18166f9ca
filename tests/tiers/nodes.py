"""The server's code for tiers, in the test's process, over tiers in memory that can be slow or
fail."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.policies.lru import LRU
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import CoreConfig, HashList
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.capability import NodeEvents, Offers
from hotkv_server.node.health import Health
from hotkv_server.tiers.book import generations as generation_book
from hotkv_server.tiers.book.books import TierBooks
from hotkv_server.tiers.book.place_sizes import EncodedBytes
from hotkv_server.tiers.drive import flushes as tier_generations
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.flushes import FlushDriver, GenerationRelay
from hotkv_server.tiers.drive.generation_notes import GenerationNotes, NotesFolder
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tiers import Tiers, moving_bytes
from tests.core.support import evict, flush, make_key_space, make_table, words_of
from tests.doubles.memory_tier import MemoryStore, MemoryTier, SharedMemoryTier
from tests.support.waiting import eventually
from tests.tiers.support import content, store_blocks

SLAB = 4 * SLOT_ALIGN
NUM_SLOTS = 64
ARENA_BYTES = NUM_SLOTS * SLOT_ALIGN
BLOCKS = list(range(6))


def lists_of(numbers: list[int]) -> list[HashList]:
    return [HashList(0, words_of(numbers))]


class Node:
    """A `CacheCore` with its arena in the test's memory. `has_disk`: it also manages a disk
    tier's space."""

    def __init__(
        self,
        has_disk: bool,
        check_stride: int = 1,
        slot_bytes: int = SLOT_ALIGN,
        encoded_bytes: EncodedBytes | None = None,
    ) -> None:
        self.slot_bytes = slot_bytes
        places = Space(make_table(200), 256 * SLOT_ALIGN, SLAB, LRU(200)) if has_disk else None
        config = CoreConfig(ARENA_BYTES, SLAB, 200, check_stride=check_stride)
        self.core = CacheCore(config, make_table(200), LRU(200))
        self.books = TierBooks(self.core, places, encoded_bytes=encoded_bytes)
        self.memory = np.zeros(ARENA_BYTES, np.uint8)
        self.arena = Region(self.memory.ctypes.data, ARENA_BYTES, "arena")
        self.verifier = Verifier(self.core, self.arena)
        self.events, self.offers = NodeEvents(), Offers()
        self.num_calls = self.num_flushed_here = 0
        self.tiers: Tiers

    def open(self) -> None:
        key_space = make_key_space("m", self.slot_bytes, SLOT_ALIGN)
        self.number = self.core.open_session("e", "worker", key_space, 0.0).number
        record = self.core.sessions.record(self.number)
        self.session: Any = SimpleNamespace(record=record, knows_tiers=True)

    async def flushed_here(self, key_space_id: int, *, elsewhere: bool = False) -> int:
        self.num_flushed_here += 1
        flush(self.core, key_space_id)
        return 0

    def put(self, numbers: list[int]) -> None:
        """A block's content follows from its number."""
        self.num_calls += 1
        name = f"store {self.num_calls}"
        store_blocks(self.core, self.arena, self.number, name, numbers)

    def has(self, numbers: list[int]) -> bool:
        """Are all ready in host memory?"""
        return bool(self.core.lookup(1, lists_of(numbers))[0].all())

    def prefetching(self, numbers: list[int], within_s: float = 60.0) -> "asyncio.Task[None]":
        until_s = time.monotonic() + within_s
        return asyncio.create_task(self.tiers.prefetch(1, lists_of(numbers), until_s))

    def flip(self, number: int) -> None:
        index = self.core.space.index
        entries = index.find(1, 0, words_of([number]))
        self.memory[int(index.offsets(entries)[0]) + 7] ^= 1

    def check_end(self) -> None:
        """After the tiers were closed: no move is unfinished, no block pinned."""
        self.core.check_invariants()
        assert not len(self.books.moves)
        drivers = [*self.tiers.shared, *([self.tiers.below] if self.tiers.below else [])]
        assert not any(one.reads.queued_bytes for one in drivers)
        assert self.tiers.below is None or not self.tiers.below._down_bytes
        assert not any(one.out._out_bytes for one in self.tiers.shared)
        assert not self.core.space.index.pins.any()


class Setup(Node):
    def __init__(self, lookup_wait_s: float, **of_node: Any) -> None:
        super().__init__(True, **of_node)
        assert self.books.lower is not None
        self.lower = self.books.lower
        self.removed: list[bytes] = []
        self.store = MemoryStore(places=True)
        self.tier = MemoryTier(self.arena, self.store)
        generations = FlushDriver(self.core)
        self.below = TierBelow(
            self.core, self.tier, self.verifier, generations, moving_bytes(self.core)
        )
        self.tiers = Tiers(self.core, self.arena, lookup_wait_s, generations, self.below)
        self.open()

    def tell(self) -> None:
        """`removed` gets the hashes of removed blocks."""
        for notice in self.core.take_effects():
            self.removed += [words.tobytes() for words in notice.hashes]

    async def until_down(self, count: int) -> None:
        await eventually(lambda: self.lower.counters.demoted >= count, "blocks are not moved down")

    async def lie_below(self, numbers: list[int]) -> None:
        """Stores blocks, and waits until only the disk has them."""
        self.put(numbers)
        await self.until_down(len(numbers))
        evict(self.core, 1, 0, words_of(numbers))

    def in_lower_tiers(self, numbers: list[int], tokens_per_s: float = 0.0) -> list[bool]:
        """Per block: has only a tier it?"""
        lists = lists_of(numbers)
        ready = self.core.lookup(1, lists)
        (found,) = self.tiers.lookups.in_lower_tiers(1, lists, ready, tokens_per_s)
        told: list[bool] = found.tolist()
        return told

    async def leased(self, numbers: list[int]) -> list[bool]:
        """As `AcquireLease`: promotes, leases, and checks bytes. Per block: was it pinned?"""
        lists = lists_of(numbers)
        return lease(self, lists, numbers, await self.tiers.promote(self.session, lists))


@contextlib.asynccontextmanager
async def made(lookup_wait_s: float = 10.0, **of_node: Any) -> AsyncIterator[Setup]:
    """With a disk tier. `lookup_wait_s`: how long a lookup waits for a tier."""
    one = Setup(lookup_wait_s, **of_node)
    one.tiers.start(Health(), one.tell, one.flushed_here)
    try:
        yield one
    finally:
        await one.tiers.close()
        one.check_end()


class SharedNode(Node):
    """A node with a shared tier.

    lookup_wait_s: how long a lookup waits for a tier.
    folder: for the notes on flushes; None: none are saved.
    left: blocks that an earlier server left in host memory.
    disk, other: stores of a disk tier and of a second shared tier.
    """

    def __init__(
        self,
        store: MemoryStore,
        lookup_wait_s: float,
        folder: Path | None = None,
        left: list[int] | None = None,
        disk: MemoryStore | None = None,
        other: MemoryStore | None = None,
    ) -> None:
        super().__init__(disk is not None)
        relay = GenerationRelay()
        self.tier = SharedMemoryTier(self.arena, store, on_generation=relay)
        if left is not None:
            self.open()
            self.put(left)
            index = self.core.space.index
            index.unverified[index.ready_blocks()] = True
        most_bytes = moving_bytes(self.core)
        folders = [] if folder is None else [NotesFolder(folder, left is not None)]
        self.others = [
            SharedMemoryTier(self.arena, one, name="other") for one in [other] if one is not None
        ]
        stores = [(self.tier, relay), *((one, GenerationRelay()) for one in self.others)]
        self.generations = generations = FlushDriver(self.core, stores, GenerationNotes(folders))
        below = None
        if disk is not None:
            tier = MemoryTier(self.arena, disk)
            below = TierBelow(self.core, tier, self.verifier, generations, most_bytes)
        self.shared = TierShared(self.core, self.tier, self.verifier, generations, most_bytes)
        shared = [
            TierShared(self.core, one, self.verifier, generations, most_bytes)
            for one in self.others
        ]
        self.tiers = Tiers(
            self.core, self.arena, lookup_wait_s, generations, below, [self.shared, *shared]
        )
        if left is None:
            self.open()

    async def start(self, *, tells: bool = True) -> None:
        """tells: waits until each store has told its generation. The product waits only
        NEW_SESSION_WAIT_S, and deletes blocks stored before the answer (`FlushDriver.confirm`)."""
        self.tiers.start(Health(), self.core.take_effects, self.flushed_here)
        await (self.until_told() if tells else self.generations.confirm_new(1))

    async def until_told(self) -> None:
        """Blocks that are stored earlier are deleted at the answer (`FlushDriver.confirm`)."""

        def are_told() -> bool:
            # Stores are asked only about key spaces in use.
            self.generations.may_serve(1)
            stores = self.tiers.shared
            return all(self.generations.get(one.name, 1) or one.tier.problem() for one in stores)

        await eventually(are_told, "a store's generation is not known")

    async def flush(self) -> tuple[str, ...]:
        """Returns the pending tiers."""
        return (await self.generations.flush(1)).pending_tiers

    def generation(self) -> int:
        """Of the node's blocks in the shared store; 0: not known."""
        return self.generations.get("shared", 1)

    async def until_down(self, count: int) -> None:
        assert self.tiers.below is not None
        counters = self.tiers.below.lower.counters
        await eventually(lambda: counters.demoted == count, "blocks are not moved down")

    async def share(self, numbers: list[int]) -> None:
        """Until all are in the shared tier; a busy store may refuse blocks, which are then
        stored again."""
        await self.until_told()
        for _ in range(3):
            if await self._copied(numbers):
                return
            evict(self.core, 1, 0, words_of(numbers))
        raise AssertionError("the store has refused blocks again and again")

    async def _copied(self, numbers: list[int]) -> bool:
        """False if the store has refused some after all tries."""
        out = self.shared.out
        count, refused = out.num_copied + len(numbers), out.num_refused
        self.put(numbers)
        await eventually(
            lambda: out.num_copied >= count or out.num_refused > refused,
            "blocks are neither copied nor refused",
        )
        return out.num_copied >= count

    async def until_copied(self, count: int) -> None:
        await eventually(lambda: self.shared.out.num_copied >= count, "blocks are not copied")

    async def looked_up(self, numbers: list[int]) -> list[bool]:
        lists = lists_of(numbers)
        if self.tiers.lookups.must_ask(self.session, lists):
            await self.tiers.lookups.ask(self.session, 1, lists)
        ready = self.core.lookup(1, lists)
        here = ready[0] | self.tiers.lookups.in_lower_tiers(1, lists, ready)[0]
        found: list[bool] = here.tolist()
        return found

    async def leased(self, numbers: list[int]) -> list[bool]:
        """As `AcquireLease`: promotes, leases, and checks bytes. Per block: was it pinned?"""
        lists = lists_of(numbers)
        held = None
        if self.tiers.must_promote(self.session, lists) or not self.generations.may_serve(1):
            held = await self.tiers.promote(self.session, lists)
            if not await self.generations.wait_to_serve(1):
                lists = [HashList(0, words_of([1000 + number for number in numbers]))]
        return lease(self, lists, numbers, held)


def lease(node: Any, lists: list[HashList], numbers: list[int], held: Any) -> list[bool]:
    """Leases, compares bytes, releases. Per block: was it pinned? `held`: pins of promoted
    blocks, released once the lease has its own."""
    node.num_calls += 1
    core, name = node.core, f"lease {node.num_calls}"
    grant = core.acquire(node.number, name, lists, 10.0, time.monotonic())
    if held is not None:
        node.tiers.unpin(held)
    (offsets,) = core.slot_offsets(node.number, name)
    for number, offset in zip(numbers, offsets.tolist(), strict=True):
        if offset >= 0:
            there = node.memory[offset : offset + SLOT_ALIGN]
            assert np.array_equal(there, content(number)), f"block {number} has other bytes"
    core.release(node.number, name)
    core.check_invariants()
    pinned: list[bool] = grant.pinned[0].tolist()
    return pinned


@contextlib.asynccontextmanager
async def nodes(
    count: int = 2, lookup_wait_s: float = 10.0, store: MemoryStore | None = None
) -> AsyncIterator[list[SharedNode]]:
    store = store or MemoryStore(places=False)
    made = [SharedNode(store, lookup_wait_s) for _ in range(count)]
    async with running(*made):
        yield made


def patient_flushes(patch: pytest.MonkeyPatch) -> None:
    """On a busy machine no tier may be pending."""
    for module, name in (
        (generation_book, "RAISE_WAIT_S"),
        (generation_book, "SPARE_S"),
        (tier_generations, "RAISE_WAIT_S"),
    ):
        patch.setattr(module, name, 60.0)


@contextlib.asynccontextmanager
async def running(*made: SharedNode, tells: bool = True) -> AsyncIterator[None]:
    """Afterwards closes the tiers; no move may be unfinished."""
    for one in made:
        await one.start(tells=tells)
    try:
        yield
    finally:
        for one in made:
            await one.tiers.close()
            one.check_end()
