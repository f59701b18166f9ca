"""A tier below host memory, in the core: blocks move down and up while stores, leases, evictions
and flushes go on, and the tier fails, lags and loses what it had, and can't encode some blocks.

The model remembers which block's bytes each slot and each place holds, in which form, and how often
the key space was flushed when they were stored.
"""

from typing import Any

import numpy as np
from hypothesis import settings

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import FIRST_MOVE, BoolMask, CoreConfig, HashList, Run
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.write_gate import Offered
from tests.core.lower_machine import SLAB, LowerMachine
from tests.core.support import begin_store, evict, flush, make_key_space, make_table, words_of

TestLowerMachine: Any = LowerMachine.TestCase
TestLowerMachine.settings = settings(max_examples=80, deadline=None)


def test_what_waits_is_taken_in_order_once_and_only_while_it_is_there() -> None:
    below = Space(make_table(40), 8 * SLAB, SLAB, POLICIES["lru"](40))
    config = CoreConfig(6 * SLAB, SLAB, 6)
    core = CacheCore(config, make_table(6), POLICIES["lru"](6))
    TierBooks(core, below)
    session = core.open_session(
        "e", "worker", make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    assert books_of(core).lower is not None
    down = books_of(core).lower.down

    def store(number: int) -> None:
        name = f"store {number}"
        begin_store(core, session, name, name, [Run(0, words_of([number]))], 0, 0.0, 1.0)
        core.end_store(session, name, True, 1.0)

    def taken(num_bytes: int) -> list[int]:
        entries = down.take(num_bytes, 1.0)
        return sorted(
            number
            for number in range(30)
            if core.space.index.find(1, 0, words_of([number])) in entries
        )

    for number in range(4):
        store(number)
    assert taken(0) == [] and taken(1) == [0] and taken(2 * SLOT_ALIGN) == [1, 2]
    evict(core, 1, 0, words_of([3]))
    assert taken(SLOT_ALIGN) == [] and not len(down.waiting)
    # Those that wait longest are forgotten, once more wait than the index has entries.
    for number in range(10, 20):
        store(number)
    assert len(down.waiting) == 6
    (move,) = down.begin(down.take(100 * SLOT_ALIGN, 1.0))
    assert len(move) == 6
    down.end(move, np.ones(6, np.bool_), np.full(6, 7, np.uint64), 2.0)
    down.waiting.add(move.entries)
    assert not len(down.take(100 * SLOT_ALIGN, 1.0)), "what is below was to be written again"


def test_the_gate_is_told_what_is_before_each_block() -> None:
    """A part that goes on after one that is below, or goes there first; one that follows a gap; one
    whose beginning is gone."""
    below = Space(make_table(40), 8 * SLAB, SLAB, POLICIES["lru"](40))
    core = CacheCore(CoreConfig(6 * SLAB, SLAB, 40), make_table(40), POLICIES["lru"](40))
    TierBooks(core, below)
    session = core.open_session(
        "e", "worker", make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    assert books_of(core).lower is not None
    down, seen = books_of(core).lower.down, []

    class Admits:
        """Writes what begins with an even number."""

        def admit(self, offered: Offered, now_s: float) -> BoolMask:
            first = int(np.flatnonzero(words_of(range(40))[:, 0] == offered.hashes[0, 0])[0])
            seen.append(
                (first, *(a.tolist() for a in (offered.begins, offered.follows, offered.has_gap)),
                 (offered.ends_tokens // 16).tolist())
            )  # fmt: skip
            return np.full(len(offered.keys), first % 2 == 0)

    down.gate = Admits()  # type: ignore[assignment]

    def store(numbers: list[int], parent: int | None, depth: int) -> None:
        name, root = f"store {numbers}", None if parent is None else words_of([parent])[0]
        runs = [Run(0, words_of(numbers), root, depth)]
        begin_store(core, session, name, name, runs, 0, 0.0, 1.0)
        core.end_store(session, name, True, 1.0)

    def written() -> list[tuple[object, ...]]:
        seen.clear()
        for move in down.begin(down.take(1 << 30, 1.0)):
            down.end(move, np.ones(len(move), np.bool_), np.zeros(len(move), np.uint64), 1.0)
        return list(seen)

    store([0, 1, 2], None, 0)
    store([4, 5], 2, 3)
    yes, no = True, False
    assert written() == [
        (0, [yes, no, no], [no, no, no], [no, no, no], [1, 2, 3]),
        (4, [yes, no], [yes, no], [no, no], [4, 5]),
    ]
    store([7, 8], 5, 5)
    store([10], 8, 7)
    assert written() == [
        (7, [yes, no], [yes, no], [no, no], [6, 7]),
        (10, [yes], [no], [yes], [8]),
    ]
    # What was used is offered again; what is below is not.
    core.touch(session, [HashList(0, words_of([0, 1, 2, 4, 5, 7, 8]))], 2.0)
    assert written() == [(7, [yes, no], [yes, no], [no, no], [6, 7])]
    evict(core, 1, 0, words_of([8]))
    store([12], 8, 7)
    assert written() == [(12, [yes], [no], [no], [8])]


def test_numbers_of_leases_and_moves_never_meet() -> None:
    """Both begin again at the end of their half, and leave out those in use."""
    below = Space(make_table(4), 2 * SLAB, SLAB, POLICIES["lru"](4))
    core = CacheCore(CoreConfig(2 * SLAB, SLAB, 4), make_table(4), POLICIES["lru"](4))
    TierBooks(core, below)
    session = core.open_session("e", "worker", make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), 0.0)
    assert books_of(core).lower is not None
    core.acquire(session.number, "first", [HashList(0, words_of([1]))], 10.0, 0.0)
    (lease,) = core.leases.all()
    assert lease.number == 1
    core.leases._next_number = FIRST_MOVE - 1
    assert [core.leases.next_number() for _ in range(2)] == [FIRST_MOVE - 1, 2]
    none = np.empty(0, np.uint32)
    moves = books_of(core).lower.moves
    moves.add(moves.next_number(), 1, False, none, none)
    moves._next_number = (1 << 32) - 1
    assert [moves.next_number() for _ in range(2)] == [(1 << 32) - 1, FIRST_MOVE + 1]


def test_a_key_space_is_known_as_long_as_it_has_a_block_below() -> None:
    below = Space(make_table(4), 2 * SLAB, SLAB, POLICIES["lru"](4))
    core = CacheCore(CoreConfig(2 * SLAB, SLAB, 4), make_table(4), POLICIES["lru"](4))
    TierBooks(core, below)
    session = core.open_session("e", "worker", make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), 0.0)
    number, lower = session.number, books_of(core).lower
    assert lower is not None
    begin_store(core, number, "s", "s", [Run(0, words_of([1]))], 0, 0.0, 1.0)
    core.end_store(number, "s", True, 1.0)
    (move,) = lower.down.begin(core.space.index.ready_blocks())
    lower.down.end(move, np.ones(1, np.bool_), np.ones(1, np.uint64), 1.0)
    evict(core, 1, 0, words_of([1]))
    core.close_session(number, 1.0)
    assert core.catalog.has_blocks(1) and not core.catalog.forget(1)
    assert not list(core.catalog.outlived(1e9))
    flush(core, 1)
    assert not core.catalog.has_blocks(1) and core.catalog.forget(1)
