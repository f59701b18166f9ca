"""Tests how blocks move between host memory and a faulty disk tier (`tiers.drive`): callers wait
at most `lookup_wait_ms`, and leases pin only right bytes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.room import space as room
from hotkv_server.cache.values import Entries, HashList, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.node import event_loop as slices
from hotkv_server.node.health import Health
from hotkv_server.tiers.book import generations as generation_book
from hotkv_server.tiers.drive import breaker
from hotkv_server.tiers.drive import flushes as tier_generations
from hotkv_server.tiers.drive import lookups as tier_lookups
from hotkv_server.tiers.drive import tiers as tier_drive
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.tasks import checksums
from hotkv_server.tiers.protocol import (
    OnWrite,
    PlacedBlocks,
    Read,
    Write,
)
from tests.core.support import begin_store, evict, words_of
from tests.doubles.memory_tier import MemoryStore, MemoryTier
from tests.support.waiting import WAIT_S, eventually
from tests.tiers.nodes import (
    BLOCKS,
    NUM_SLOTS,
    Node,
    Setup,
    SharedNode,
    lists_of,
    made,
    nodes,
    running,
)


async def test_move_ends_although_its_listener_breaks() -> None:
    one = Setup(1.0)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    one.put([50])
    below, entries, tells = (
        one.tiers.below,
        one.core.space.index.find(1, 0, words_of([50])),
        [one.tell],
    )
    assert below is not None
    for move in await below._begin(entries, lambda: tells.pop()()):
        await below._write(move, one.tell)
    one.tiers.start(Health(), one.tell, one.flushed_here, lambda *_: 1 // 0)
    await one.lie_below(BLOCKS)
    assert all(await one.leased(BLOCKS))
    await one.tiers.close()
    one.check_end()


async def test_read_ends_although_blocks_cant_be_checked(monkeypatch: Any) -> None:
    async with made() as one:
        await one.lie_below(BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(tier_drive, "checksums", lambda *_: 1 // 0)
            assert not any(await asyncio.wait_for(one.leased(BLOCKS), 5.0))
        assert all(await one.leased(BLOCKS)) and not one.lower.counters.lost


async def test_broken_tiers_trial_read_is_no_hit() -> None:
    """Nobody may wait for the single read with which a broken tier is tried."""
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.problem, one.tier.faults.is_hung = "gone", True
        leasing = asyncio.create_task(one.leased(BLOCKS))
        await eventually(lambda: len(one.books.moves) > 0, "nothing is read")
        assert not any(one.in_lower_tiers(BLOCKS)) and not any(await one.leased(BLOCKS))
        one.tier.faults.is_hung, one.tier.faults.problem = False, ""
        await leasing


async def test_confirmation_ended_during_making_room_is_none(monkeypatch: Any) -> None:
    confirmed = [True]
    async with made() as one:
        await one.lie_below(BLOCKS)
        monkeypatch.setattr(FlushDriver, "are_all_confirmed", lambda *_: bool(confirmed))
        monkeypatch.setattr(one.core, "make_room_above", lambda *_: iter(confirmed.clear() or ()))
        assert not any(await one.leased(BLOCKS))


async def test_room_below_is_made_in_parts(monkeypatch: Any) -> None:
    """With compression each choice of a victim reads all entries."""
    monkeypatch.setattr(room, "EVICTED_PER_PART", 1)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with made() as one:
        most, num_evicted = 0, 0
        for first in range(0, 320, 32):
            one.put(list(range(first, first + 32)))
            while one.lower.counters.demoted < first + 32:
                before = one.lower.space.removal.evicted_blocks
                await asyncio.sleep(0)
                num_evicted = one.lower.space.removal.evicted_blocks
                most = max(most, num_evicted - before)
        assert num_evicted >= 64 and most <= 2, f"{most} blocks were evicted in one turn"
        assert all(await one.leased(list(range(310, 320))))


@pytest.mark.parametrize("came", ["a key space", "a flush"])
async def test_blocks_wait_for_what_came_meanwhile(monkeypatch: Any, came: str) -> None:
    async with made() as one:
        below, waiting = one.tiers.below, [0]
        assert below is not None

        def are_kept() -> bool:
            waiting.append(len(below.lower.down.waiting))
            return waiting[-2:] != [len(BLOCKS), 0] or waiting.count(len(BLOCKS)) > 1

        if came == "a flush":
            monkeypatch.setattr(FlushDriver, "are_seals_saved", property(lambda _: are_kept()))
        else:
            monkeypatch.setattr(below, "_keep_key_spaces", are_kept)
        one.put(BLOCKS)
        await one.until_down(len(BLOCKS))
        assert waiting.count(len(BLOCKS)) > 1
        ((_, num_bytes),) = one.lower.down.gate.written(time.monotonic())
        assert num_bytes == len(BLOCKS) * SLOT_ALIGN, "blocks count twice in the budget"


async def test_stores_evict_no_block_of_promoting_prompt() -> None:
    prompt, others = list(range(12)), list(range(100, 100 + NUM_SLOTS - 12))
    async with made() as one:
        await one.lie_below(prompt[6:])
        one.put(prompt[:6])
        one.put(others)
        await one.until_down(12 + len(others))
        one.tier.faults.is_hung = True
        leasing = asyncio.create_task(one.leased(prompt))
        await eventually(lambda: len(one.books.moves) > 0, "nothing comes up")
        one.put(list(range(200, 210)))
        one.tier.faults.is_hung = False
        assert all(await leasing)


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_promoted_blocks_evict_none_of_their_prompt(is_ahead: bool) -> None:
    prompt, others = list(range(12)), range(100, 100 + NUM_SLOTS - 6)
    async with made() as one:
        await one.lie_below(prompt[6:])
        one.put(prompt[:6])
        for at in others[::29]:
            # Used later than the prompt's beginning.
            one.put(list(range(at, at + 29)))
            await one.until_down(12 + at + 29 - others.start)
        if is_ahead:
            ready = one.core.lookup(1, lists_of(prompt))
            elsewhere = one.tiers.lookups.in_lower_tiers(1, lists_of(prompt), ready)
            one.tiers.fetch_ahead(one.session, lists_of(prompt), ready, elsewhere)
            await eventually(lambda: one.has(prompt[6:]), "not loaded")
        assert all(await one.leased(prompt)) and one.tier.figures().read_blocks == 6


@pytest.mark.parametrize("move_blocks", [1, 4, tier_drive.MOVE_BLOCKS])
async def test_many_ask_each_block_is_read_once(monkeypatch: Any, move_blocks: int) -> None:
    """Other tasks run between two moves, each of `move_blocks` at most."""
    monkeypatch.setattr(tier_drive, "MOVE_BLOCKS", move_blocks)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with made() as one:
        await one.lie_below(BLOCKS)
        begin, turn, moves = one.below.begin_up, [0], list[tuple[int, int]]()

        def begin_up(*arguments: Any) -> Any:
            move = begin(*arguments)
            moves.append((0 if move is None else len(move), turn[0]))
            asyncio.get_running_loop().call_soon(lambda: turn.append(turn.pop() + 1))
            return move

        monkeypatch.setattr(one.below, "begin_up", begin_up)
        answers = await asyncio.gather(*(one.leased(BLOCKS[at:]) for at in range(5)))
        assert all(all(answer) for answer in answers)
        assert one.tier.figures().read_blocks == len(BLOCKS)
        assert max(size for size, _ in moves) <= move_blocks
        if move_blocks == 1:
            assert len({at for _, at in moves}) >= len(BLOCKS), "several moves in one turn"


async def test_first_moves_blocks_stay_during_last_ones(monkeypatch: Any) -> None:
    monkeypatch.setattr(tier_drive, "MOVE_BLOCKS", 1)
    async with made() as one:
        await one.lie_below(BLOCKS)

        async def until_ended(_: Any) -> None:
            moves = one.tiers._coming.values()
            await eventually(lambda: all(move.done.done() for move in moves), "a move goes on")

        monkeypatch.setattr(tier_drive.Breaks, "between", until_ended)
        held = await one.tiers.promote(one.session, lists_of(BLOCKS))
        index = one.core.space.index
        assert index.pins[index.find(1, 0, words_of(BLOCKS))].tolist() == [1] * len(BLOCKS)
        one.tiers.unpin(held)


async def test_blocks_that_callers_hold_count_as_moving(monkeypatch: Any) -> None:
    """An eighth of host memory may be in promotion; blocks pinned while their caller waits for
    another tier still count."""
    monkeypatch.setattr(tier_drive, "PREFETCH_PAUSE_S", 0.0)
    lost, *first = range(NUM_SLOTS // 8 + 1)
    async with made() as one:
        await one.lie_below([lost, *first, 100, 101])
        place = one.lower.up.find(1, HashList(0, words_of([lost])))
        one.store.damage(int(one.lower.space.index.offsets(place)[0]))
        held = await one.tiers.promote(one.session, lists_of([lost, *first[:-1]]))
        assert await one.leased([100]) == [True]
        other = await one.tiers.promote(one.session, lists_of(first[-1:]))
        assert await one.leased([101]) == [False]
        prefetching = one.prefetching([101])
        await one.prefetching([101], within_s=0.0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not prefetching.done() and not one.has([101])
        one.tiers.unpin(held)
        await prefetching
        assert one.has([101])
        one.tiers.unpin(other)


async def test_large_prefetch_leaves_room_for_stores() -> None:
    """An eighth of the arena may be in promotion."""
    many = list(range(NUM_SLOTS // 2))
    async with made() as one:
        await one.lie_below(many)
        one.tier.faults.is_hung = True
        prefetching = one.prefetching(many)
        await eventually(lambda: len(one.books.moves) > 0, "nothing comes up")
        others = list(range(100, 100 + NUM_SLOTS * 7 // 8))
        one.put(others)
        assert one.has(others)
        one.tier.faults.is_hung = False
        await prefetching
        assert one.has(many)


async def test_a_prefetch_leaves_room_for_loads_of_leases() -> None:
    many = list(range(NUM_SLOTS // 2))
    async with made() as one:
        await one.lie_below([*many, 100])
        one.tier.faults.is_hung = True
        prefetching = one.prefetching(many)
        await eventually(lambda: len(one.books.moves) > 0, "nothing comes up")
        leasing = asyncio.create_task(one.leased([100]))
        find = one.core.space.index.find
        await eventually(lambda: leasing.done() or find(1, 0, words_of([100])).any())
        one.tier.faults.is_hung = False
        assert await leasing == [True]
        await prefetching
        assert one.has(many)


@pytest.mark.parametrize("coming_bytes", [1 << 40, len(BLOCKS) * SLOT_ALIGN])
@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_prefetch_waits_for_memory_that_comes(is_shared: bool, coming_bytes: int) -> None:
    """Nothing is evicted for promotions while the arena still grows."""
    async with nodes() as (other, a), made() as one:
        at: Node = a if is_shared else one
        await (other.share(BLOCKS) if is_shared else one.lie_below(BLOCKS))
        at.put(list(range(100, 100 + NUM_SLOTS)))
        room_above = at.core.space.room
        room_above.coming_bytes = coming_bytes
        prefetching = at.prefetching(BLOCKS)
        await eventually(lambda: room_above.coming_bytes < coming_bytes, "no block is refused")
        room_above.coming_bytes = 0
        await prefetching
        assert at.has(BLOCKS)


async def test_a_prefetch_ends_when_the_node_drains() -> None:
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.put(list(range(100, 100 + NUM_SLOTS)))
        room_above = one.core.space.room
        room_above.coming_bytes = coming_bytes = 1 << 40
        prefetching = one.prefetching(BLOCKS, within_s=3600.0)
        await eventually(lambda: room_above.coming_bytes < coming_bytes, "no block is refused")
        one.core.draining = True
        await asyncio.wait_for(prefetching, WAIT_S)


async def test_prefetch_loads_from_each_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first store's moves take all the room of prefetches."""
    store, other, wanted = MemoryStore(False), MemoryStore(False), [0, 1, 2, 3]
    a, b = (SharedNode(store, 10.0, other=other) for _ in range(2))
    async with running(a, b):
        await a.share([*wanted, 10])
        copied = a.tiers.shared[1].out
        await eventually(lambda: copied.num_copied == 5, "blocks are not copied")
        for one, numbers in ((store, [3]), (other, [0, 1, 2, 10])):
            for key in [*one.content]:
                assert isinstance(key, bytes)
                if any(key.endswith(words_of([number])[0].tobytes()) for number in numbers):
                    del one.content[key]
        read, held = b.tier.read, list[Any]()
        monkeypatch.setattr(b.tier, "read", lambda *call: held.append(call))
        leasing = asyncio.create_task(b.leased([10]))
        await eventually(lambda: len(held) == 1, "nothing comes up")
        prefetching = b.prefetching(wanted)
        await eventually(lambda: len(held) == 2, "nothing comes up")
        for call in held:
            read(*call)
        assert all(await leasing)
        await prefetching
        assert b.has(wanted)


async def test_a_lease_waits_for_its_own_blocks_only() -> None:
    async with made(60.0) as one:
        await one.lie_below([*BLOCKS, 30])
        held_back = one.tier.faults
        held_back.is_hung = True
        waiting = asyncio.create_task(one.leased(BLOCKS))
        await asyncio.sleep(0.05)
        one.put([40, 41])
        assert not one.tiers.must_promote(one.session, lists_of([40, 41]))
        assert await one.leased([40, 41]) == [True, True]
        # In neither place: a miss.
        begin_store(one.core, one.number, "s", "s", [Run(0, words_of([60]))], 0, 0.0, 1.0)
        assert one.in_lower_tiers([60, *BLOCKS]) == [False] + [True] * len(BLOCKS)
        one.core.end_store(one.number, "s", True, 1.0)
        assert not waiting.done()
        held_back.is_hung = False
        assert all(await waiting)


async def test_caller_giving_up_while_waiting_pins_nothing() -> None:
    """gRPC cancels a unary call so."""
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.is_hung = True
        waiting = asyncio.create_task(one.tiers.promote(one.session, lists_of(BLOCKS)))
        await eventually(lambda: len(one.books.moves) > 0, "nothing is read")
        waiting.cancel()
        await asyncio.wait([waiting])
        one.tier.faults.is_hung = False
        await eventually(lambda: not len(one.books.moves), "a move up never ends")
        assert all(await one.leased(BLOCKS))


async def test_session_with_enough_waits_gets_no_more(monkeypatch: Any) -> None:
    monkeypatch.setattr(tier_lookups, "MAX_WAITING", 2)
    async with made(60.0) as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.is_hung = True
        lists = lists_of(BLOCKS)
        first = asyncio.create_task(one.tiers.promote(one.session, lists))
        await eventually(lambda: len(one.tiers._waiting) == 1, "it does not wait")
        assert one.tiers.must_promote(one.session, lists)
        second = asyncio.create_task(one.tiers.promote(one.session, lists))
        await eventually(lambda: len(one.tiers._waiting) == 2, "it does not wait")
        assert not one.tiers.must_promote(one.session, lists)
        one.tier.faults.is_hung = False
        for waiting in (first, second):
            one.tiers.unpin(await waiting)
        assert not one.tiers._waiting


async def test_blocks_slower_than_computing_are_left() -> None:
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.below.reads.add(60.0, 1 << 20)
        for tokens_per_s, is_hit in ((0.0, True), (0.1, True), (1e6, False)):
            assert set(one.in_lower_tiers(BLOCKS, tokens_per_s)) == {is_hit}
        assert one.below.reads.left_blocks == len(BLOCKS)


@contextlib.asynccontextmanager
async def locations(where: str, lookup_wait_s: float = 10.0) -> AsyncIterator[Setup | SharedNode]:
    """BLOCKS lie only on its disk, or ("shared") in a store to which another node has copied
    them."""
    if where == "disk":
        async with made(lookup_wait_s) as one:
            await one.lie_below(BLOCKS)
            yield one
        return
    async with nodes(lookup_wait_s=lookup_wait_s) as (other, one):
        await other.share(BLOCKS)
        # The next lookup uses a late answer.
        until_s = time.monotonic() + WAIT_S
        while not all(await one.looked_up(BLOCKS)):
            assert time.monotonic() < until_s, "the blocks are not found"
        yield one


@pytest.mark.parametrize("where", ["disk", "shared"])
async def test_dead_tier_misses_at_once_comes_back(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # No other trial before the last part.
    monkeypatch.setattr(breaker, "RETRY_S", 3600.0)
    async with locations(where) as one:
        one.tier.faults.problem, num_written = "gone", one.tier.figures().written_blocks
        one.put([30])
        # One read tries the broken tier; later callers must not wait.
        assert not any(await one.leased(BLOCKS))
        assert not one.tiers.must_promote(one.session, lists_of(BLOCKS))
        monkeypatch.setattr(breaker, "RETRY_S", 0.1)
        assert not any(await asyncio.wait_for(one.leased(BLOCKS), 5.0))
        assert await one.leased([30]) == [True]
        one.tier.faults.problem = ""
        (drive,) = (*one.tiers.shared, *([one.tiers.below] if one.tiers.below else []))
        await eventually(lambda: drive.breaker.lets_pass, "it is not tried again")
        # The first may still get the failed read's result.
        until_s = time.monotonic() + WAIT_S
        while not all(await one.leased(BLOCKS)):
            assert time.monotonic() < until_s, "the blocks are not read again"
            await asyncio.sleep(0.001)
        # The block from the broken time is written now.
        await eventually(lambda: one.tier.figures().written_blocks > num_written, "not written")


@pytest.mark.parametrize("where", ["disk", "shared"])
async def test_hung_tier_costs_one_wait(monkeypatch: Any, where: str) -> None:
    # What is not confirmed is not read.
    monkeypatch.setattr(generation_book, "CONFIRMED_S", 60.0)
    async with locations(where, 0.2) as one:
        one.tier.faults.is_hung = True
        lists = lists_of(BLOCKS)
        began_s = time.monotonic()
        assert not any(await asyncio.wait_for(one.leased(BLOCKS), 5.0))
        assert time.monotonic() - began_s >= 0.2
        one.put([40])
        assert await one.leased([40]) == [True]
        monkeypatch.setattr(one.tier, "stalled_s", lambda now_s: breaker.MAX_STALL_S + 1)
        assert not one.tiers.must_promote(one.session, lists_of([50]))
        ready = one.core.lookup(1, lists)
        assert not one.tiers.lookups.in_lower_tiers(1, lists, ready)[0].any()
        # Ready for the next caller.
        one.tier.faults.is_hung = False
        monkeypatch.setattr(one.tier, "stalled_s", lambda now_s: 0.0)
        await eventually(lambda: one.has(BLOCKS), "the read does not end")


async def test_repeatedly_hung_tier_spares_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given-up reads that have not ended keep their slots: an eighth of host memory at most."""
    most_blocks = NUM_SLOTS // 8
    async with made(0.01) as one:
        numbers = list(range(4 * most_blocks))
        await one.lie_below(numbers)
        one.tier.faults.is_hung = True
        for begin in range(0, len(numbers), most_blocks):
            assert not any(await one.leased(numbers[begin : begin + most_blocks]))
            with monkeypatch.context() as hanging:
                hanging.setattr(one.tier, "stalled_s", lambda now_s: breaker.MAX_STALL_S + 1)
                await eventually(
                    lambda: not any(len(move.entries) for move in one.books.moves), "not given up"
                )
        given_up = sum(len(move.forsaken) for move in one.books.moves)
        assert most_blocks <= given_up <= 2 * most_blocks
        one.tier.faults.is_hung = False
        await eventually(lambda: not len(one.books.moves), "the reads do not end")
        await one.leased(numbers[:1])
        await eventually(lambda: one.has(numbers[:1]), "nothing is read any more")


async def test_only_writes_that_succeed_spend_the_budget(monkeypatch: Any) -> None:
    async with made() as one:
        gate, index = one.lower.down.gate, one.core.space.index
        gate.set_budget(1 << 30)
        one.tier.faults.fails_writes = True
        one.put(BLOCKS)
        await eventually(
            lambda: one.tier.figures().failed_blocks and not len(one.books.moves), "no write fails"
        )
        assert gate.left_bytes(time.monotonic()) == 1 << 30
        with monkeypatch.context() as patch:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            judged = list[object]()
            patch.setattr(one.verifier, "judge", lambda cases: judged.append(cases) or 1 // 0)
            one.books.offer_used(index.find(1, 0, words_of(BLOCKS)))
            await eventually(lambda: judged, "nothing is written")
            await eventually(lambda: not len(one.books.moves), "the write does not end")
        assert gate.left_bytes(time.monotonic()) == 1 << 30
        one.tier.faults.fails_writes = False
        one.books.offer_used(index.find(1, 0, words_of(BLOCKS)))
        await one.until_down(len(BLOCKS))
        assert gate.left_bytes(time.monotonic()) == (1 << 30) - len(BLOCKS) * SLOT_ALIGN


async def test_clean_blocks_leave_broken_disk_its_trial() -> None:
    async with made() as one:
        one.put(BLOCKS)
        await one.until_down(len(BLOCKS))
        entries = one.core.space.index.find(1, 0, words_of(BLOCKS))
        one.tier.faults.problem = "gone"
        one.books.offer_used(entries)
        await eventually(lambda: not len(one.lower.down.waiting), "the queue is not read")
        assert one.below.breaker.lets_pass


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("why", ["dead", "drains", "closes"])
async def test_nothing_is_evicted_for_a_dead_tier(
    monkeypatch: Any, why: str, is_early: bool
) -> None:
    """Not `is_early`: dead, draining or closing only after room was made."""
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.put(list(range(100, 100 + NUM_SLOTS)))
        await one.until_down(len(BLOCKS) + NUM_SLOTS)
        one.removed.clear()
        lists, make_room = lists_of(BLOCKS), one.core.make_room_above

        def spoil() -> None:
            one.core.draining = why == "drains"
            one.tiers._tasks.is_closing = why == "closes"
            one.tier.faults.problem = "gone" if why == "dead" else ""
            assert one.below.breaker.take_turn()

        def making(*arguments: Any) -> Any:
            yield from make_room(*arguments)
            spoil()

        if is_early:
            spoil()
        monkeypatch.setattr(one.core, "make_room_above", making)
        await one.tiers._begin_up(1, lists)
        assert one.tier.figures().read_blocks == 0 and not len(one.books.moves)
        assert bool(one.removed) is not is_early
        one.tiers._tasks.is_closing = False


async def test_reads_that_fail_lose_nothing_below() -> None:
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.fails = lambda key: key.endswith(words_of([3])[0].tobytes())
        assert await one.leased(BLOCKS) == [True, True, True, False, True, True]
        one.tier.faults.fails = lambda key: False
        assert all(await one.leased(BLOCKS))


async def test_blocks_encoding_too_large_are_written_plain(monkeypatch: Any) -> None:
    """Without checksums of the server, only the tier's seals are compared."""
    size = 2 * SLOT_ALIGN
    async with made(check_stride=0, slot_bytes=size, encoded_bytes=lambda size: size // 2) as one:
        write, sizes = one.tier.write, list[int]()

        def unfit(blocks: PlacedBlocks, on_done: OnWrite) -> None:
            sizes.extend(blocks.stored_bytes.tolist())
            is_unfit = blocks.stored_bytes < blocks.num_bytes
            if not is_unfit.any():
                write(blocks, on_done)
                return
            codes = np.full(len(blocks), Write.UNFIT, np.uint8)
            on_done(codes, np.zeros(len(blocks), np.uint64))

        monkeypatch.setattr(one.tier, "write", unfit)
        await one.lie_below(BLOCKS)
        assert sorted(sizes) == [size // 2] * len(BLOCKS) + [size] * len(BLOCKS)
        assert all(await one.leased(BLOCKS))


async def test_a_full_tier_goes_on_reading() -> None:
    async with made() as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.is_full = True
        one.put([20, 21])
        await asyncio.sleep(0.2)
        assert all(await one.leased(BLOCKS))
        evict(one.core, 1, 0, words_of([20, 21]))
        assert not any(await one.leased([20, 21]))


async def test_blocks_changed_in_memory_are_not_written() -> None:
    async with made() as one:
        one.tier.faults.problem = "not yet"
        one.put(BLOCKS)
        one.flip(2)
        one.tier.faults.problem = ""
        await one.until_down(len(BLOCKS) - 1)
        evict(one.core, 1, 0, words_of(BLOCKS))
        assert await one.leased(BLOCKS) == [True, True, False, True, True, True]


async def test_a_close_ends_what_is_under_way() -> None:
    async with made(0.05) as one:
        await one.lie_below(BLOCKS)
        one.tier.faults.is_hung = True
        one.put([20, 21])
        await asyncio.sleep(0.1)
        assert not any(await one.leased(BLOCKS))


async def test_a_flush_waits_for_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_generations, "TICK_S", 3600.0)
    async with made() as one:
        flushed = await asyncio.wait_for(one.tiers.generations.flush(1), 60)
        assert not flushed.pending_tiers and one.num_flushed_here == 1


async def test_move_is_given_up_during_its_checksums() -> None:
    """As the event loop does for a hung tier, while a thread computes."""
    async with made() as one:
        await one.lie_below(BLOCKS)
        lists = lists_of(BLOCKS)
        move = one.below.begin_up(1, lists, 1.0)
        index = one.core.space.index
        keys = index.keys

        def given_up(entries: Entries) -> tuple[Entries, Entries, Words]:
            found = keys(entries)
            if len(move.entries):
                one.books.arrivals.forsake(move)
            return found

        index.keys = given_up  # type: ignore[method-assign]
        assert len(checksums(one.core, one.arena, move)) == len(BLOCKS)
        index.keys = keys  # type: ignore[method-assign]
        codes, none = np.full(len(BLOCKS), Read.FOUND, np.uint8), np.zeros(0, np.uint64)
        one.below.end_promotion(move, codes, none, 1.0)
        one.books.arrivals.release(move)
        one.core.check_invariants()


def test_broken_tier_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each change is logged once."""
    caplog.set_level("INFO", breaker.__name__)
    memory = np.zeros(SLOT_ALIGN, np.uint8)
    arena = Region(memory.ctypes.data, memory.nbytes, "arena")
    tier = MemoryTier(arena, MemoryStore(places=True), is_manual=True)
    guard, lines = breaker.Breaker(tier), list[str]()
    for problem in ("", "gone", ""):
        tier.faults.problem = problem
        for _ in range(2):
            guard.say()
        said = [record for record in caplog.records if record.name == breaker.log.name]
        lines.append(" ".join(record.getMessage() for record in said))
        caplog.clear()
    assert lines[0] == "" and lines[2] == "tier=memory answers again"
    assert lines[1] == "tier=memory is passed by, so its blocks are misses: gone"
