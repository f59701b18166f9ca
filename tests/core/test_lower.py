"""Tests what the core decides about a tier that fails, is slow, loses blocks, and can't compress
some."""

import tracemalloc
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from bench.policies import POLICIES
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import inspect
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import FIRST_MOVE, BoolMask, Cause, Entries, HashList
from hotkv_server.hints.book.actions import demote
from hotkv_server.tiers.book import waiting
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.write_gate import Offered
from tests.core.lower_machine import LowerMachine, SharedMachine
from tests.core.support import SLAB, World, evict, flush, make_table, words_of
from tests.support.memory import allocated_bytes

TestLowerMachine: Any = LowerMachine.TestCase
TestLowerMachine.settings = settings(max_examples=80, deadline=None)
TestSharedMachine: Any = SharedMachine.TestCase
TestSharedMachine.settings = settings(max_examples=60, deadline=None)


class Tiered(World):
    """A core with a tier that has room for 32 blocks."""

    def __init__(self, num_slabs: int = 6, capacity: int = 40) -> None:
        super().__init__(num_slabs, capacity)
        below = Space(make_table(40), 8 * SLAB, SLAB, POLICIES["lru"](40))
        lower = TierBooks(self.core, below).lower
        assert lower is not None
        self.lower, self.down, self.session = lower, lower.down, self.open()

    def add(self, numbers: list[int], parent: int | None = None, depth: int = 0) -> None:
        self.store(self.session, numbers, parent=parent, depth=depth)

    def taken(self, num_bytes: int) -> list[int]:
        entries = finished(self.down.take(num_bytes, 1.0)).tolist()
        return [number for number in range(30) if self.entries([number])[0] in entries]


def test_waiting_is_taken_in_order_once() -> None:
    tiered = Tiered(capacity=6)
    down = tiered.down
    for number in range(4):
        tiered.add([number])
    assert [tiered.taken(num_bytes) for num_bytes in (0, 1, 2 * SLOT_ALIGN)] == [[], [0], [1, 2]]
    assert down.waiting.num_bytes == SLOT_ALIGN
    evict(tiered.core, 1, 0, words_of([3]))
    assert tiered.taken(SLOT_ALIGN) == [] and not len(down.waiting)
    # Some blocks were evicted while they waited.
    for number in range(10, 20):
        tiered.add([number])
    assert (len(down.waiting), down.waiting.num_bytes) == (6, 6 * SLOT_ALIGN)
    (move,) = down.begin(finished(down.take(100 * SLOT_ALIGN, 1.0)))
    assert len(move) == 6
    down.end(move, np.ones(6, np.bool_), np.full(6, 7, np.uint64), 2.0)
    down.waiting.add(move.entries)
    again = finished(down.take(100 * SLOT_ALIGN, 1.0))
    assert not len(again), "what is below was to be written again"


def test_blocks_nobody_else_finds_go_to_no_tier() -> None:
    tiered = Tiered()
    copies = Copies(tiered.lower.moves)
    books_of(tiered.core).copies.append(copies)
    for _ in range(2):
        # The second round only marks present blocks as used.
        for number, is_private in enumerate((True, False)):
            tiered.store(tiered.session, [number], is_private=is_private)
        assert tiered.taken(1 << 30) == [1] and copies.num_waiting == 1


@pytest.mark.parametrize("begins_late", [False, True])
@pytest.mark.parametrize("ends_early", [False, True])
def test_flush_changes_neither_chain_nor_demand(
    monkeypatch: pytest.MonkeyPatch, *, begins_late: bool, ends_early: bool
) -> None:
    """Another key space's block uses up the first turn's bytes, so the chain's last two wait; a
    flush begins or ends meanwhile. The gate sees the chain in order, and waiting blocks only
    once as demand."""
    monkeypatch.setattr(waiting, "SHARED_BLOCKS", 0)
    tiered = Tiered()
    down, index = tiered.down, tiered.core.space.index
    # With it, the gate admits only a part if it counts more than 8 blocks.
    down.gate.set_budget(3200 * SLOT_ALIGN)
    session, other = tiered.session, tiered.open(model="other")
    for number in range(6):
        if number == 4:
            tiered.store(other, [20])
        tiered.store(session, [number], depth=number, parent=number - 1 if number else None)
    written: list[int] = []

    def write(entries: Entries) -> None:
        written.extend(index.keys(entries)[2][:, 0].tolist())
        for move in down.begin(entries):
            down.end(move, np.ones(len(move), np.bool_), np.zeros(len(move), np.uint64), 1.0)

    with ExitStack() as flushed:
        taking = down.take((1 + begins_late) * SLOT_ALIGN, 1.0)
        if begins_late:
            next(taking)
        flushed.enter_context(tiered.lower.moves.stopped(1))
        next(taking)
        if ends_early:
            flushed.close()
        write(finished(taking))
        for _ in range(0 if ends_early else 20):
            assert not tiered.taken(1 << 30)
    write(finished(down.take(1 << 30, 1.0)))
    chain = words_of(range(6))[:, 0].tolist()
    assert [word for word in written if word in chain] == chain
    assert len(written) == 7 and down.gate.share(1.0) == 1.0
    ((_, num_bytes),) = down.gate.written(1.0)
    assert num_bytes == 7 * SLOT_ALIGN


def test_blocks_waiting_for_a_flush_may_be_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "SHARED_BLOCKS", 0)
    tiered = Tiered(capacity=6)
    queue = tiered.down.waiting
    for number in range(4):
        tiered.add([number])
    first = tiered.entries([0])
    with tiered.lower.moves.stopped(1):
        taking = tiered.down.take(1 << 30, 1.0)
        for _ in range(4):
            next(taking)
        evict(tiered.core, 1, 0, words_of([0]))
        tiered.add([9])
        assert np.array_equal(tiered.entries([9]), first)
        evict(tiered.core, 1, 0, words_of([1]))
        finished(taking)
        # Block 0's entry now belongs to block 9.
        assert len(queue) == 3 and queue.num_bytes == 3 * SLOT_ALIGN
    ready = finished(tiered.down.take(1 << 30, 1.0))
    assert np.array_equal(ready, tiered.entries([2, 3, 9]))
    for _ in range(3):
        queue.add_first(ready)
    assert len(queue) == 6 and queue.num_bytes == 6 * SLOT_ALIGN


def test_restored_blocks_of_flushed_move_are_written_later() -> None:
    """The new copy may begin only after the old one has ended."""
    tiered = Tiered()
    tiered.add([3])
    (move,) = tiered.down.begin(finished(tiered.down.take(1 << 30, 1.0)))
    flush(tiered.core, 1)
    tiered.add([3])
    assert not tiered.taken(1 << 30)
    tiered.down.end(move, np.ones(1, np.bool_), np.full(1, 7, np.uint64), 2.0)
    assert tiered.taken(1 << 30) == [3]


def test_earlier_servers_blocks_are_written_when_used() -> None:
    """The unverified block was offered before, but its use must queue it again."""
    tiered = Tiered()
    tiered.add([3])
    assert tiered.taken(1 << 30) == [3]
    tiered.core.space.index.unverified[tiered.entries([3])] = True
    tiered.core.touch(tiered.session.number, [HashList(0, words_of([3]))], 2.0)
    assert tiered.taken(1 << 30) == [3]


def test_gate_knows_what_precedes_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block follows nothing, a block that the tier has, or one that it has not."""
    monkeypatch.setattr(waiting, "SHARED_BLOCKS", 0)
    tiered = Tiered()
    down, seen = tiered.down, []

    class Admits:
        """Admits chains that begin with an even number."""

        def admit(self, offered: Offered, now_s: float) -> BoolMask:
            first = int(np.flatnonzero(words_of(range(40))[:, 0] == offered.hashes[0, 0])[0])
            flags = (offered.begins, offered.follows, offered.has_gap)
            ends = (offered.ends_tokens // 16).tolist()
            seen.append((first, *(flag.astype(int).tolist() for flag in flags), ends))
            return np.full(len(offered.keys), first % 2 == 0)

    down.gate = Admits()  # type: ignore[assignment]

    def written() -> list[tuple[object, ...]]:
        seen.clear()
        for move in down.begin(finished(down.take(1 << 30, 1.0))):
            down.end(move, np.ones(len(move), np.bool_), np.zeros(len(move), np.uint64), 1.0)
        return list(seen)

    tiered.add([0, 1, 2])
    tiered.add([4, 5], 2, 3)
    assert written() == [
        (0, [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 2, 3]),
        (4, [1, 0], [1, 0], [0, 0], [4, 5]),
    ]
    tiered.add([7, 8], 5, 5)
    tiered.add([10], 8, 7)
    refused = (7, [1, 0], [1, 0], [0, 0], [6, 7])
    assert written() == [refused, (10, [1], [0], [1], [8])]
    # Only blocks that the tier lacks may be offered.
    used = [HashList(0, words_of([0, 1, 2, 4, 5, 7, 8]))]
    tiered.core.touch(tiered.session.number, used, 2.0)
    assert written() == [refused]
    evict(tiered.core, 1, 0, words_of([8]))
    tiered.add([12], 8, 7)
    assert written() == [(12, [1], [0], [0], [8])]


def test_numbers_of_leases_and_moves_never_meet() -> None:
    """Each has half of a range, starts again at its end, and skips numbers in use."""
    tiered = Tiered()
    core, moves = tiered.core, tiered.lower.moves
    core.acquire(tiered.session.number, "first", [HashList(0, words_of([1]))], 10.0, 0.0)
    (lease,) = core.leases.all()
    assert lease.number == 1
    core.leases._next_number = FIRST_MOVE - 1
    assert [core.leases.next_number() for _ in range(2)] == [FIRST_MOVE - 1, 2]
    none = np.empty(0, np.uint32)
    moves.add(moves.next_number(), 1, False, none, none)
    moves._next_number = (1 << 32) - 1
    assert [moves.next_number() for _ in range(2)] == [(1 << 32) - 1, FIRST_MOVE + 1]


def test_key_space_lives_while_a_block_lies_below() -> None:
    tiered = Tiered()
    core, catalog = tiered.core, tiered.core.catalog
    tiered.add([1])
    (move,) = tiered.down.begin(core.space.index.ready_blocks())
    tiered.down.end(move, np.ones(1, np.bool_), np.ones(1, np.uint64), 1.0)
    evict(core, 1, 0, words_of([1]))
    core.close_session(tiered.session.number, 1.0)
    assert catalog.has_blocks(1) and not catalog.forget(1)
    assert not list(catalog.outlived(1e9))
    flush(core, 1)
    assert not catalog.has_blocks(1) and catalog.forget(1)


def test_reason_why_no_tier_has_a_block() -> None:
    """Block 1 was evicted, then found damaged in the tier; 2 was demoted by a hint, then
    flushed; 3 was flushed."""
    tiered = Tiered()
    core, down = tiered.core, tiered.down
    tiered.add([1, 2, 3])
    (move,) = down.begin(finished(down.take(100 * SLOT_ALIGN, 1.0)))
    down.end(move, np.ones(3, np.bool_), np.full(3, 7, np.uint64), 2.0)
    core.space.removal.evict(core.space.index.find(1, 0, words_of([1])))
    finished(demote(core, 1, [HashList(0, words_of([2]))], 3.0))

    def why() -> list[Cause]:
        causes = inspect.prompt_blocks(core, 1, 0, words_of([1, 2, 3])).causes
        return [Cause(cause) for cause in causes.tolist()]

    assert why() == [Cause.ROOM, Cause.HINT, Cause.NONE]
    up = tiered.lower.up.begin(1, [HashList(0, words_of([1]))], 4.0)
    assert up is not None
    tiered.lower.up.end(up, np.zeros(1, np.bool_), np.ones(1, np.bool_), None, 5.0)
    assert why() == [Cause.DAMAGE, Cause.HINT, Cause.NONE]
    flush(core, 1)
    assert why() == [Cause.DAMAGE, Cause.FLUSH, Cause.FLUSH]


def test_promoted_blocks_in_a_chain_break_no_link() -> None:
    tiered = Tiered()
    tiered.add(list(range(8)))
    (move,) = tiered.down.begin(finished(tiered.down.take(1 << 30, 1.0)))
    tiered.down.end(move, np.ones(8, np.bool_), np.zeros(8, np.uint64), 1.0)
    below = tiered.lower.space
    # This block is larger than the whole tier, so nothing is evicted for it.
    finished(below.make_room(1, 0, 9 * SLAB, 2))
    assert not len(below.insert(1, 0, words_of([20]), 9 * SLAB, np.zeros(1, np.int64), FIRST_MOVE))
    deepest = int(below.index.find(1, 0, words_of([7]))[0])
    chain = below.index.keys(below.chains.ancestors(deepest, 100))[2]
    assert np.array_equal(np.sort(chain, 0), np.sort(words_of(range(7)), 0))
    evict(tiered.core, 1, 0, words_of([5, 6]))
    # Leases list only what the engine lacks, as here.
    for listed in ([3, 4, 5], [1, 6, 7]):
        up = tiered.lower.up.begin(1, [HashList(0, words_of(listed))], 2.0)
        assert up is not None and len(up) == 1
        tiered.lower.up.end(up, np.ones(1, np.bool_), np.zeros(1, np.bool_), None, 2.0)
        books_of(tiered.core).arrivals.release(up)
    chain = tiered.core.space.chains.ancestors(int(tiered.entries([7])[0]), 100)
    # No promotion listed both 5 and 6, so 6 has no link.
    assert chain.tolist() == tiered.entries([6]).tolist()
    chain = tiered.core.space.chains.ancestors(int(tiered.entries([5])[0]), 100)
    assert chain.tolist() == tiered.entries(list(range(5))).tolist()


@pytest.mark.parametrize("is_shared", [False, True])
def test_block_replaced_between_parts_is_left_out(
    monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    monkeypatch.setattr(waiting, "SHARED_BLOCKS", 0)
    tiered = Tiered()
    copies = Copies(tiered.lower.moves)
    for number in range(3):
        tiered.add([number])
        copies.add_stored(tiered.entries([number]))
    taking = copies.take(1 << 60) if is_shared else tiered.down.take(1 << 60, 1.0)
    next(taking)
    first = tiered.entries([0])
    evict(tiered.core, 1, 0, words_of([0]))
    tiered.add([9])
    assert np.array_equal(tiered.entries([9]), first)
    # Block 0's entry now belongs to block 9, which is queued for the disk only.
    others = tiered.entries([1, 2] if is_shared else [1, 2, 9])
    assert np.array_equal(finished(taking), others)


def test_write_takes_its_bytes_at_least_one_block() -> None:
    tiered = Tiered()
    tiered.add(list(range(5)))
    queue = tiered.down.waiting
    sizes = (0, 3 * SLOT_ALIGN - 1, SLOT_ALIGN, SLOT_ALIGN)
    assert [len(queue.take(num_bytes)) for num_bytes in sizes] == [1, 2, 1, 1]
    assert not len(queue) and not queue.num_bytes


def test_waiting_blocks_take_few_bytes_each() -> None:
    """Host memory may hold millions of blocks."""
    num_blocks = 20_000
    queue = waiting.WaitingBlocks(BlockIndex(make_table(num_blocks)))
    tracemalloc.start()
    try:
        for number in range(num_blocks):
            queue.add(np.array([number], np.uint32))
        num_bytes = allocated_bytes()
    finally:
        tracemalloc.stop()
    assert len(queue) == num_blocks and num_bytes < 40 * num_blocks
