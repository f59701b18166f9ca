"""Tests how nodes use a shared store (`tiers.drive`): right bytes, none from before a flush, no
wait for a dead store."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from hotkv_proto import table
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.values import HashList
from hotkv_server.tiers.book import generations as generation_book
from hotkv_server.tiers.drive import breaker, generation_notes
from hotkv_server.tiers.drive import copies as tier_copies
from hotkv_server.tiers.drive import flushes as tier_generations
from hotkv_server.tiers.drive import shared as tier_shared
from hotkv_server.tiers.drive import tiers as tier_drive
from hotkv_server.tiers.protocol import NO_GENERATION, OnGeneration
from tests.core.support import evict, make_key_space, words_of
from tests.doubles.memory_tier import MemoryStore
from tests.support.waiting import WAIT_S, eventually
from tests.tiers.nodes import (
    BLOCKS,
    NUM_SLOTS,
    SharedNode,
    lists_of,
    nodes,
    patient_flushes,
    running,
)


async def test_one_node_stores_and_another_finds() -> None:
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        assert await b.looked_up([*BLOCKS, 99]) == [True] * 6 + [False]
        assert await b.leased([*BLOCKS, 99]) == [True] * 6 + [False]
        assert b.shared.num_fetched == 6 and b.tier.figures().read_blocks == 6
        lists = [HashList(group, words_of([98])) for group in (0, 1)]
        b.tiers.unpin(await b.tiers.promote(b.session, lists))
        assert not b.tiers.lookups.must_ask(b.session, lists_of(BLOCKS))
        assert await b.leased(BLOCKS) == [True] * 6
        assert b.tier.figures().read_blocks == 6


async def test_prompts_rest_is_fetched_with_its_depths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two moves, behind what node B has; parents too."""
    monkeypatch.setattr(tier_drive, "MOVE_BLOCKS", 2)
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        b.put(BLOCKS[:3])
        await b.looked_up(BLOCKS)
        lists = lists_of(BLOCKS)
        ready = b.core.lookup(1, lists)
        b.tiers.fetch_ahead(
            b.session, lists, ready, b.tiers.lookups.in_lower_tiers(1, lists, ready)
        )
        await eventually(lambda: b.shared.num_fetched == 3, "the rest is not fetched")
        index = b.core.space.index
        entries = index.find(1, 0, words_of(BLOCKS))
        assert index.depths(entries).tolist() == [*range(len(BLOCKS))]
        parents = index.table.records[entries, table.W_PARENT]
        assert parents[3:].tolist() == entries[2:-1].tolist()


async def test_stored_blocks_go_to_the_store_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may soon want them: no pause between copies."""
    monkeypatch.setattr(tier_copies, "PAUSE_S", 3600.0)
    async with nodes() as (a, b):
        for number in BLOCKS:
            await a.share([number])
        assert await b.leased(BLOCKS) == [True] * 6


async def test_leased_blocks_without_lookup_are_asked_for() -> None:
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        before = b.core.space.used_bytes()
        assert await b.leased([50, 51]) == [False, False]
        assert b.core.space.used_bytes() == before, "slots were taken for what nobody has"
        both = await asyncio.gather(b.leased(BLOCKS), b.leased(BLOCKS))
        assert both == [[True] * 6] * 2 and b.tier.figures().read_blocks == 6


async def test_lookup_that_may_not_wait_helps_next() -> None:
    async with nodes(lookup_wait_s=0.0) as (a, b):
        await a.share(BLOCKS)
        await b.looked_up(BLOCKS)
        await eventually(
            lambda: b.generations.is_confirmed("shared", 1), "no generation is asked for"
        )
        # A busy store may answer too late (PROBE_S).
        until_s = time.monotonic() + WAIT_S
        while len(b.shared._found) < len(BLOCKS):
            assert time.monotonic() < until_s, "no block is asked for"
            await b.looked_up(BLOCKS)
            await asyncio.sleep(0.001)


async def test_a_flush_counts_though_the_store_is_away() -> None:
    """It reaches the store and the other node later."""
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        assert await b.looked_up(BLOCKS[:1]) == [True]
        a.tier.faults.problem = "gone"
        began_s = time.monotonic()
        assert await a.flush() == ("shared",)
        assert time.monotonic() - began_s < 30.0
        assert not any(await a.looked_up(BLOCKS))
        # Not under the old generation (0).
        a.put([20])
        await asyncio.sleep(0.2)
        assert not any(b"/0/" in key and key.endswith(words_of([20])[0].tobytes())
                       for key in a.tier._store.content if isinstance(key, bytes))  # fmt: skip
        a.tier.faults.problem = ""
        await eventually(a.generation, "the flush was forgotten")
        assert not any(await a.leased(BLOCKS))
        await eventually(lambda: b.generation() == a.generation(), "the flush was not heard of")
        assert not any(await b.leased(BLOCKS))


@pytest.mark.parametrize("is_flushed", [False, True])
async def test_blocks_before_the_stores_contact_are_unverified(
    is_flushed: bool,
) -> None:
    """Served until the store is reached, then dropped: another node may have flushed
    (`is_flushed`)."""
    made = [SharedNode(MemoryStore(places=False), 10.0)]
    made.append(SharedNode(made[0].tier._store, 10.0))
    a, b = made
    a.tier.faults.problem = "gone"
    for one in made:
        await one.start()
    a.put(BLOCKS)
    await b.share([20])
    if is_flushed:
        await b.flush()
    assert all(await a.leased(BLOCKS))
    a.tier.faults.problem = ""
    await eventually(a.generation, "the generation is not learned")
    assert not any(await a.leased(BLOCKS))
    await a.share([30])
    assert await b.leased([*BLOCKS, 30]) == [False] * 6 + [True]
    for one in made:
        await one.tiers.close()


async def test_fetched_blocks_wait_for_an_untrusted_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that has just restarted may have old generations. Host memory serves meanwhile."""
    monkeypatch.setattr(generation_book, "USED_S", 3600.0)
    store = MemoryStore(places=False)
    async with nodes(1, store=store) as (a,):
        await a.share(BLOCKS)
        store.restored_below = max(store.generations.values()) + 1
        b = SharedNode(store, 10.0)
        # Without a generation yet; the store must be asked.
        key_space = make_key_space("n", SLOT_ALIGN, SLOT_ALIGN)
        b.core.open_session("f", "worker", key_space, 0.0)
        assert not b.generations.may_serve(1) and not b.generations.may_serve(2)
        await b.start(tells=False)
        b.put([50])
        assert await b.leased([50]) == [True], "a store that is not trusted counts as away"
        fetch = b.prefetching(BLOCKS)
        await asyncio.sleep(0.2)
        assert not fetch.done()
        store.restored_below = 0
        await fetch
        assert b.has(BLOCKS)
        await b.tiers.close()


async def test_flushes_without_the_store_answer_at_once() -> None:
    """With few tasks left, and one raise once the store is back."""
    async with nodes(1) as (a,):
        a.tier.faults.problem = "gone"
        raises, raise_generation = list[int](), a.tier.raise_generation

        def counted(fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool) -> None:
            def done(generation: int | None) -> None:
                raises.extend([generation] if generation else [])
                on_done(generation)

            raise_generation(fingerprint, floor, done, is_retry)

        a.tier.raise_generation = counted  # type: ignore[method-assign]
        await asyncio.gather(*(a.flush() for _ in range(200)))
        assert len(a.tiers._tasks._tasks) < 20
        a.tier.faults.problem = ""
        await eventually(a.generation, "the flushes were forgotten")
        assert len(raises) == 1


async def test_disk_serves_only_store_confirmed_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = SharedNode(MemoryStore(places=False), 10.0, disk=MemoryStore(places=True))
    await node.start()
    await node.share(BLOCKS)
    await node.until_down(6)
    # An idle key space is not confirmed regularly, so the next lease asks first.
    with monkeypatch.context() as patch:
        patch.setattr(generation_book, "USED_S", 0.0)
        await eventually(lambda: not node.generations.are_all_confirmed(1), "it is still asked")
    node.tier._store.content.clear()
    evict(node.core, 1, 0, words_of(BLOCKS[:3]))
    on_disk = lists_of(BLOCKS[:3])
    assert node.tiers.lookups.must_ask(node.session, on_disk), (
        "the store must confirm the generation"
    )
    assert all(await node.leased(BLOCKS))
    evict(node.core, 1, 0, words_of(BLOCKS[:3]))
    before = node.shared.reads.asked_blocks
    await node.looked_up([*BLOCKS, 99])
    assert node.shared.reads.asked_blocks == before + 1, "it is asked for what the disk has"
    node.tier.faults.problem = "gone"
    await eventually(lambda: not node.generations.are_all_confirmed(1), "it stays confirmed")
    assert await node.leased(BLOCKS) == [False] * 3 + [True] * 3
    node.tier.faults.problem = ""
    await eventually(lambda: node.generations.are_all_confirmed(1), "it is not asked")
    assert all(await node.leased(BLOCKS))
    await node.tiers.close()


async def test_store_serves_while_another_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys show that no flush of this store came after them; what the disk has may be older
    than a flush that only the other store knows."""
    node = SharedNode(
        MemoryStore(places=False),
        10.0,
        disk=MemoryStore(places=True),
        other=MemoryStore(places=False),
    )
    async with running(node):
        await node.share(BLOCKS)
        await node.until_down(6)
        node.others[0].faults.problem = "gone"
        await eventually(lambda: not node.generations.are_all_confirmed(1), "it stays confirmed")
        evict(node.core, 1, 0, words_of(BLOCKS))
        assert all(await node.looked_up(BLOCKS))
        # Its last answer counts until the test's end.
        monkeypatch.setattr(
            node.generations.book, "is_fresh", lambda _, name, at_s: name == "shared"
        )
        node.tier.faults.is_hung = True
        leasing = asyncio.create_task(node.leased(BLOCKS))
        await eventually(lambda: len(node.books.moves) > 0, "nothing is read")
        assert node.tiers.shared[1].breaker.take_turn()
        assert all(await node.looked_up(BLOCKS)), "blocks on their way up are no hits"
        node.tier.faults.is_hung = False
        assert all(await leasing) and node.shared.num_fetched == 6


async def test_store_ignoring_generation_questions_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store reports no problem otherwise."""
    async with nodes(1, lookup_wait_s=0.2) as (a,):
        await a.share(BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(a.tier, "generations", lambda names, until_s, on_done: on_done(None))
            await eventually(
                lambda: not a.generations.is_confirmed("shared", 1), "it stays confirmed"
            )

            async def served() -> None:
                while not all(await a.leased(BLOCKS)):
                    continue

            await asyncio.wait_for(served(), 60)
        await eventually(lambda: a.generations.is_confirmed("shared", 1), "it is not asked")


async def test_wait_for_silent_store_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts as away long before the lookup's ten minutes."""
    one = SharedNode(MemoryStore(places=False), 600.0)
    monkeypatch.setattr(one.tier, "generations", lambda names, until_s, on_done: None)
    async with running(one, tells=False):
        one.put([1])
        assert await asyncio.wait_for(one.looked_up([1, 2]), 60.0) == [True, False]


async def test_no_wait_for_store_without_generation_room() -> None:
    store = MemoryStore(places=False)
    one = SharedNode(store, 600.0)
    store.generations[one.generations.fingerprint(1)] = NO_GENERATION
    async with running(one, tells=False):
        one.put([1])
        must_ask, lists = one.tiers.lookups.must_ask, lists_of([1, 2])
        assert must_ask(one.session, lists) and not must_ask(None, lists)
        one.session.knows_tiers = False
        assert not must_ask(one.session, lists)
        one.session.knows_tiers = True
        found = await asyncio.wait_for(one.looked_up([1, 2]), 60.0)
        assert found == await asyncio.wait_for(one.leased([1, 2]), 60.0) == [True, False]


async def test_block_is_written_once_not_per_use() -> None:
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        for _ in range(3):
            assert all(await a.leased(BLOCKS))
        await asyncio.sleep(0.2)
        assert a.tier.figures().written_blocks == 6 and a.shared.out.num_copied == 6
        # Fetched blocks are not written back.
        assert all(await b.leased(BLOCKS))
        await asyncio.sleep(0.2)
        assert b.shared.out.num_copied == 0


async def test_nodes_never_serve_what_was_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random stores, leases, evictions and flushes."""
    patient_flushes(monkeypatch)
    store, dice = MemoryStore(places=False), np.random.default_rng(3)
    async with nodes(3, store=store) as made:
        put_since: set[int] = set()

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
                assert not await one.flush()
                put_since.clear()
            await asyncio.sleep(0.005)


def probes_of(node: SharedNode, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[bytes]]:
    """Gets the keys of each later probe."""
    asked, probe = list[Sequence[bytes]](), node.tier.probe

    def probed(keys: Sequence[bytes], *arguments: Any) -> None:
        asked.append(keys)
        probe(keys, *arguments)

    monkeypatch.setattr(node.tier, "probe", probed)
    return asked


async def test_what_is_known_to_be_there_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_shared, "MAX_FOUND", 4)
    monkeypatch.setattr(tier_shared, "MAX_PROBED", 5)
    async with nodes() as (a, b):
        await a.share(BLOCKS)
        assert await b.looked_up(BLOCKS) == [False, True, True, True, True, False]
        assert len(b.shared._found) == 4
        monkeypatch.undo()
        # A hit needs all groups, so they share the bound.
        monkeypatch.setattr(tier_shared, "MAX_PROBED", 5)
        asked = probes_of(b, monkeypatch)
        lists = [HashList(group, words_of(range(50, 55))) for group in (0, 1)]
        await b.tiers.lookups.find(1, lists)
        assert [[key.split(b"/")[4] for key in keys] for keys in asked] == [
            [b"0", b"0", b"1", b"1"]
        ]


async def test_blocks_found_long_ago_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a lookup's wait is left of FOUND_S."""
    monkeypatch.setattr(tier_shared, "FOUND_S", 10.05)
    async with nodes(lookup_wait_s=10.0) as (a, b):
        await a.share(BLOCKS)
        asked = probes_of(b, monkeypatch)
        for count in (1, 2):
            assert await b.looked_up(BLOCKS) == [True] * 6
            assert len(asked) == count
            await asyncio.sleep(0.1)


async def test_copies_under_way_at_flush_stay_unfound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flush comes while their checksums are compared."""
    compared, agreeing = asyncio.Event(), tier_copies.agreeing

    async def late(*arguments: Any) -> Any:
        await compared.wait()
        return await agreeing(*arguments)

    monkeypatch.setattr(tier_copies, "agreeing", late)
    patient_flushes(monkeypatch)
    async with nodes() as (a, b):
        a.put(BLOCKS)
        await eventually(lambda: len(a.books.moves) == 1, "nothing is copied")
        flushing = asyncio.create_task(a.flush())
        await eventually(lambda: a.num_flushed_here, "it is not flushed")
        compared.set()
        await eventually(lambda: not len(a.books.moves), "the copy did not end")
        assert not await flushing
        assert not any(await b.leased(BLOCKS)) and not any(await a.leased(BLOCKS))


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_disks_blocks_stay_while_store_is_slow(
    monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    """Promoted blocks must stay while the lease waits for the store. `is_ahead`: a prefetch has
    begun."""
    monkeypatch.setattr(generation_book, "CONFIRMED_S", 60.0)
    async with running(
        one := SharedNode(MemoryStore(places=False), 60.0, disk=MemoryStore(places=True))
    ):
        await one.share(BLOCKS)
        await one.until_down(len(BLOCKS))
        evict(one.core, 1, 0, words_of(BLOCKS))
        assert not any(await one.leased([50]))
        one.tier.faults.is_hung = True
        below, asked = one.tiers.below, asyncio.Event()
        assert below is not None
        below.tier.faults.is_hung = is_ahead
        if is_ahead:
            ahead = one.prefetching(BLOCKS)
            await eventually(lambda: len(one.books.moves) > 0, "nothing is loaded ahead")
        look = one.shared.look

        async def looked(*arguments: Any) -> None:
            asked.set()
            await look(*arguments)

        monkeypatch.setattr(one.shared, "look", looked)
        leasing = asyncio.create_task(one.leased([*BLOCKS, 99]))
        await asked.wait()
        below.tier.faults.is_hung = False
        await eventually(lambda: one.has(BLOCKS), "the disk's blocks do not come")
        one.put(list(range(100, 100 + NUM_SLOTS - len(BLOCKS))))
        one.put(list(range(200, 220)))
        assert one.has(BLOCKS) and not leasing.done()
        one.tier.faults.is_hung = False
        assert await leasing == [True] * len(BLOCKS) + [False]
        if is_ahead:
            await ahead


async def test_a_hung_disk_leaves_the_store_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    many = list(range(NUM_SLOTS // 8))
    async with running(
        one := SharedNode(MemoryStore(places=False), 60.0, disk=MemoryStore(places=True))
    ):
        await one.share(many)
        await one.until_down(len(many))
        evict(one.core, 1, 0, words_of(many))
        lists, index, below = lists_of(many), one.core.space.index, one.tiers.below
        assert below is not None
        below.tier.faults.is_hung = True
        waiting = asyncio.create_task(one.tiers.promote(one.session, lists))
        await eventually(lambda: index.find(1, 0, words_of(many)).all(), "nothing is read")
        with monkeypatch.context() as hanging:
            hanging.setattr(below.tier, "stalled_s", lambda now_s: breaker.MAX_STALL_S + 1)
            await eventually(lambda: not index.find(1, 0, words_of(many)).any(), "not given up")
            assert all(await one.leased(many))
        below.tier.faults.is_hung = False
        one.tiers.unpin(await waiting)


async def test_read_seeing_another_generation_asks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_book, "CONFIRMED_S", 60.0)
    monkeypatch.setattr(generation_book, "ASK_EVERY_S", 60.0)
    store = MemoryStore(places=False)
    async with nodes(store=store) as (a, b):
        await b.share(BLOCKS)
        assert all(await a.looked_up(BLOCKS))
        (fingerprint,) = store.generations
        store.generations[fingerprint] += 1
        assert not any(await a.leased(BLOCKS))
        await eventually(
            lambda: a.generation() == store.generations[fingerprint], "it is not asked"
        )


@pytest.mark.parametrize("is_noted", [True, False])
async def test_a_flush_that_breaks_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noted: bool
) -> None:
    """Not `is_noted`: saving fails too, so the notes are pending."""
    patient_flushes(monkeypatch)
    monkeypatch.setattr(tier_generations, "RAISE_WAIT_S", 60.0 if is_noted else 0.1)
    monkeypatch.setattr(tier_generations, "AGAIN_S", 0.1)
    async with running(one := SharedNode(MemoryStore(places=False), 10.0, tmp_path)):
        flushed_here, broken = one.generations._flush, list[int]()

        async def flush_here(key_space_id: int, *, elsewhere: bool) -> int:
            if not broken:
                broken.append(key_space_id)
                raise OSError("broken")
            return await flushed_here(key_space_id, elsewhere=elsewhere)

        one.generations._flush = flush_here
        seen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: seen.append(str(context.get("exception")))
        )
        one.put(BLOCKS)
        with monkeypatch.context() as full:
            if not is_noted:
                full.setattr(generation_notes, "replace_file", failing)
            assert await one.flush() == (() if is_noted else (tier_generations.NOTES,))
            assert broken == [1] and not any(await one.leased(BLOCKS))
            assert seen == ["broken"]
        await eventually(lambda: one.generations.are_seals_saved, "it is not noted")
        one.tier.faults.is_hung = True
        flushing = asyncio.create_task(one.flush())
        await asyncio.sleep(0)
        closing = asyncio.create_task(one.tiers.close())
        assert await flushing == ("shared", tier_generations.NOTES)
        await closing


async def test_broken_flush_does_not_restart_each_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_generations, "AGAIN_S", 60.0)
    async with running(one := SharedNode(MemoryStore(places=False), 10.0)):
        flush_here = AsyncMock(side_effect=OSError("broken"))
        one.generations._flush = flush_here
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        one.put(BLOCKS)
        flushing = asyncio.create_task(one.flush())
        await eventually(lambda: flush_here.called, "it does not begin")
        for _ in range(20):
            await asyncio.sleep(0)
            one.generations._work()
        assert flush_here.await_count == 1
    await flushing


async def test_slowly_written_book_isnt_written_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung disk would get another write at each tick."""
    writes, goes_on = list[Any](), threading.Event()

    def slow(*arguments: Any, **named: Any) -> None:
        writes.append(arguments)
        goes_on.wait(60.0)

    monkeypatch.setattr(generation_notes, "replace_file", slow)
    async with running(one := SharedNode(MemoryStore(places=False), 10.0, tmp_path)):
        flushing = asyncio.create_task(one.flush())
        await eventually(lambda: writes, "the flush is not noted")
        for _ in range(20):
            one.generations._work()
        goes_on.set()
        await flushing
    assert len(writes) < 10


def failing(*arguments: Any, **named: Any) -> None:
    raise OSError("no room")
