"""Tests repeated copies to a shared tier: failed ones a bounded number of times, and blocks of
an earlier server or from the disk that the tier lacks."""

import asyncio
import contextlib
import itertools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room.removal import Parts
from hotkv_server.cache.values import Entries, Run
from hotkv_server.tiers.book import generations as generation_book
from hotkv_server.tiers.book.copies import MAX_TRIES, STORED
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive import copies as tier_copies
from hotkv_server.tiers.drive import flushes as tier_generations
from tests.core.support import begin_store, evict, words_of
from tests.doubles.memory_tier import MemoryStore
from tests.support.waiting import eventually
from tests.tiers.nodes import BLOCKS, NUM_SLOTS, SharedNode, nodes, running


async def earlier(
    store: MemoryStore, folder: Path, numbers: list[int], other: MemoryStore | None = None
) -> None:
    """An earlier node with these notes, until its blocks are copied to `store`."""
    node = SharedNode(store, 10.0, folder, other=other)
    async with running(node):
        await node.share(numbers)


async def test_failures_are_retried_until_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two blocks the check before the copy raises, for a third the write fails twice."""
    monkeypatch.setattr(tier_copies, "AGAIN_S", 0.2)
    async with nodes() as (a, b):
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        judge, numbers, tries = a.verifier.judge, itertools.count(), list[bytes]()
        (copies,) = a.books.copies
        begin = copies.begin

        def judges(cases: Any) -> Any:
            if next(numbers) in (0, 6):
                raise MemoryError
            return judge(cases)

        def begins(entries: Entries, lane: int = STORED) -> list[Move]:
            return [begin(entries[at : at + 1], lane)[0] for at in range(len(entries))]

        monkeypatch.setattr(a.verifier, "judge", judges)
        monkeypatch.setattr(copies, "begin", begins)

        def fails(key: bytes) -> bool:
            tries.append(key)
            return tries.count(key) <= 2 and key.endswith(words_of([3])[0].tobytes())

        a.tier.faults.fails = fails
        a.put(BLOCKS)
        await a.until_copied(6)
        # Only the failed block was written again.
        assert a.tier.figures().written_blocks == 6
        assert a.shared.out.num_refused == 0 and a.shared.out.num_waiting == 0
        assert all(await b.leased(BLOCKS))


async def test_tries_are_bounded_and_come_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_copies, "AGAIN_S", 1000.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    later_s, num_turns, told = 0.0, 0, (0, 0, 0)
    monkeypatch.setattr(tier_copies, "time", clock)
    async with nodes(1) as (a,):
        (copies,) = a.books.copies
        whole = copies.lane_to_do

        def turns() -> int | None:
            nonlocal num_turns
            num_turns += 1
            return whole()

        def is_told() -> bool:
            out = a.shared.out
            return told == (a.tier.figures().failed_blocks, out.num_waiting, out.num_refused)

        async def turn() -> None:
            before = num_turns
            await eventually(lambda: num_turns > before + 2, "no turn")

        copies.lane_to_do = turns  # type: ignore[method-assign]
        # Probes still work.
        a.tier.faults.fails_writes = True
        a.put(BLOCKS)
        for number in range(1 + MAX_TRIES):
            told = 6 * (1 + number), 6 * (number < MAX_TRIES), 6 * (number == MAX_TRIES)
            await eventually(is_told, "not tried")
            later_s += 900.0 * 2**number
            await turn()
            assert is_told(), "it was tried too soon"
            later_s += 100.0 * 2**number


async def test_nothing_is_tried_against_a_suspect_store() -> None:
    async with nodes() as (a, b):
        a.tier.faults.fails = lambda key: True
        a.put(BLOCKS)
        out = a.shared.out
        await eventually(lambda: out.num_waiting == 6 and a.tier.figures().failed_blocks, "no try")
        a.tier.faults.problem = "gone"
        a.put([20])
        # Calls from before the problem.
        await eventually(lambda: not len(a.books.moves), "a copy does not end")
        num_failed = a.tier.figures().failed_blocks
        await asyncio.sleep(1.0)
        assert a.tier.figures().failed_blocks == num_failed, "it was asked again and again"
        assert out.num_waiting == 7
        a.tier.faults.fails = lambda key: False
        a.tier.faults.problem = ""
        await a.until_copied(7)
        assert all(await b.leased([*BLOCKS, 20]))


async def test_restored_blocks_are_offered_after_generation_known(
    tmp_path: Path,
) -> None:
    """The store has two of six blocks, one is damaged in host memory."""
    store = MemoryStore(places=False)
    await earlier(store, tmp_path, BLOCKS[:2])
    node, other = SharedNode(store, 10.0, tmp_path, BLOCKS), SharedNode(store, 10.0)
    node.flip(4)
    node.tier.faults.problem = "away"
    async with running(node):
        node.tier.faults.problem = ""
        await node.until_copied(5)
        await asyncio.sleep(0.2)
        # Nor compared.
        assert node.tier.figures().written_blocks == 3
        assert node.core.space.index.unverified.sum() == 2
        async with running(other):
            assert await other.leased(BLOCKS) == [True] * 4 + [False, True]


@pytest.mark.parametrize(
    "noted", ["nothing", "the generation before", "the generation before in another"]
)
async def test_blocks_possibly_before_a_flush_are_withheld(tmp_path: Path, noted: str) -> None:
    """Copied, they would count as stored after the flush. `noted`: what the notes have: no
    generation, or the one before the flush, in this store or another."""
    store, other = MemoryStore(places=False), None
    flushed = store
    if noted == "the generation before in another":
        flushed = other = MemoryStore(places=False)
    if noted != "nothing":
        await earlier(store, tmp_path, [99], other)
        for name in flushed.generations:
            flushed.generations[name] += 1
    before, node = dict(store.content), SharedNode(store, 10.0, tmp_path, BLOCKS, other=other)
    for tier in node.others:
        tier.faults.problem = "away"
    async with running(node):
        await eventually(node.generation, "no generation")
        await asyncio.sleep(0.3)
        for tier in node.others:
            tier.faults.problem = ""
        await eventually(lambda: node.num_flushed_here == 1, "not flushed")
        assert store.content == before
        await node.share([30])


async def test_what_comes_from_the_disk_is_offered() -> None:
    store = MemoryStore(places=False)
    node = SharedNode(store, 10.0, disk=MemoryStore(places=True))
    async with running(node):
        await node.share(BLOCKS)
        await node.until_down(6)
        evict(node.core, 1, 0, words_of(BLOCKS))
        for key in list(store.content)[:4]:
            del store.content[key]
        assert all(await node.leased(BLOCKS))
        assert node.books.lower.counters.promoted == 6
        await node.until_copied(12)
        assert node.tier.figures().written_blocks == 10 and len(store.content) == 6
        other = SharedNode(store, 10.0, disk=MemoryStore(places=True))
        for one, name in ((node, "disk"), (other, "shared")):
            async with running(other) if one is other else contextlib.nullcontext():
                assert all(await one.leased(BLOCKS))
                origins = one.core.space.origins[one.core.space.index.ready_blocks()]
                assert {one.tiers.names[number - 1] for number in origins.tolist()} == {name}


async def test_no_copies_between_stores_during_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second store's flush is late; a node promotes an old block from there by way of its
    disk."""
    for name in ("RAISE_WAIT_S", "SPARE_S", "CALM_S", "MISSED_S"):
        monkeypatch.setattr(generation_book, name, 60.0)
    monkeypatch.setattr(tier_generations, "RAISE_WAIT_S", 60.0)
    store, other = MemoryStore(places=False), MemoryStore(places=False)
    a = SharedNode(store, 10.0, other=other)
    b, c = (SharedNode(store, 10.0, disk=MemoryStore(places=True), other=other) for _ in range(2))
    async with running(a, b):
        await a.share([1])
        await eventually(lambda: len(other.content) == 1, "not copied")
        before, raised, raise_generation = b.generation(), list[Any](), a.others[0].raise_generation
        monkeypatch.setattr(a.others[0], "raise_generation", lambda *one: raised.append(one))
        flushing = asyncio.create_task(a.flush())
        await eventually(lambda: raised and b.generation() not in (0, before), "no new generation")
        assert await b.leased([1]) == [True]
        await b.until_down(1)
        evict(b.core, 1, 0, words_of([1]))
        assert await b.leased([1]) == [True] and b.books.lower.counters.promoted
        raise_generation(*raised[0])
        assert not await flushing
        async with running(c):
            assert await c.leased([1]) == [False] and len(store.content) == 1
        monkeypatch.setattr(generation_book, "CALM_S", 0.0)
        await eventually(
            lambda: b.generations.may_offer("shared", 1), "nothing is offered any more"
        )


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_restart_does_not_flood_the_store(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of six old blocks, then a wait of more than an hour, also if a full store refuses it."""
    monkeypatch.setattr(tier_copies, "MIN_OLD_BYTES", SLOT_ALIGN)
    monkeypatch.setattr(tier_copies, "OLD_BYTES_PER_S", 1)
    store = MemoryStore(places=False)
    await earlier(store, tmp_path, [99])
    node = SharedNode(store, 10.0, tmp_path, BLOCKS)
    node.tier._facts = replace(node.tier.facts(), batch_bytes=SLOT_ALIGN)
    node.tier.faults.is_full = is_full
    out = node.shared.out
    out._most_bytes = SLOT_ALIGN
    async with running(node):
        await eventually(lambda: out.num_copied + out.num_refused, "nothing was sent")
        await asyncio.sleep(0.3)
        assert (out.num_copied, out.num_refused) == (1 - is_full, is_full)
        if is_full:
            return
        # New blocks do not wait.
        node.put([40])
        new = words_of([40])[0].tobytes()
        await eventually(lambda: out.num_copied == 2, "not copied")
        assert any(key.endswith(new) for key in store.content)
        monkeypatch.setattr(tier_copies, "OLD_BYTES_PER_S", 1 << 40)
        out._old_at_s = 0.0
        await node.until_copied(7)


async def test_later_copy_holds_blocks_once_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the copy begins, its blocks are evicted and their entries reused; new blocks use up
    the bound of bytes."""
    compared, agreeing = asyncio.Event(), tier_copies.agreeing
    compared.set()

    async def late(*arguments: Any) -> Any:
        await compared.wait()
        return await agreeing(*arguments)

    monkeypatch.setattr(tier_copies, "agreeing", late)
    async with nodes(1) as (a,):
        a.put(BLOCKS)
        await a.until_copied(6)
        a.tier._store.content.clear()
        loop, copies, num_turns = asyncio.get_running_loop(), a.shared.out._copies, 0
        whole = copies.take

        def reuse() -> None:
            evict(a.core, 1, 0, words_of(BLOCKS))
            begin_store(a.core, a.number, "s", "s", [Run(0, words_of(range(50, 60)))], 0, 0.0, 1.0)

        def taken(num_bytes: int, lane: int = STORED) -> Parts[Entries]:
            nonlocal num_turns
            entries = yield from whole(num_bytes, lane)
            num_turns += lane != STORED
            if lane != STORED and len(entries):
                loop.call_soon(reuse)
            return entries

        copies.take = taken  # type: ignore[method-assign]
        old, new = a.core.space.index.ready_blocks(), list(range(70, 70 + NUM_SLOTS // 8))
        compared.clear()
        a.put(new)
        await eventually(lambda: len(a.books.moves) == 1, "nothing is copied")
        a.shared.out.offer_old(1, old)
        await eventually(lambda: num_turns > 3, "no turn")
        assert [len(move) for move in a.books.moves] == [len(new)]
        compared.set()
        await eventually(lambda: len(a.tier._store.content) == 6 + len(new), "not copied")
        assert {key[-32:] for key in a.tier._store.content} == {
            w.tobytes() for w in words_of([*BLOCKS, *new])
        }
        a.core.end_store(a.number, "s", False, 1.0)
