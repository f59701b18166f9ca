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
from hotkv_server.tiers.book.books import TierBooks
from hotkv_server.tiers.book.lower import LowerTier
from hotkv_server.tiers.book.write_gate import Offered
from tests.core.lower_machine import SLAB, LowerMachine
from tests.core.support import begin_store, evict, flush, make_key_space, make_table, words_of

TestLowerMachine: Any = LowerMachine.TestCase
TestLowerMachine.settings = settings(max_examples=80, deadline=None)


def tiered(capacity: int = 40, num_slabs: int = 6) -> tuple[CacheCore, int, LowerTier]:
    """Returns a core over a tier of 40 blocks, the number of a session, and the tier's books."""
    below = Space(make_table(40), 8 * SLAB, SLAB, POLICIES["lru"](40))
    config = CoreConfig(num_slabs * SLAB, SLAB, capacity)
    core = CacheCore(config, make_table(capacity), POLICIES["lru"](capacity))
    lower = TierBooks(core, below).lower
    assert lower is not None
    key_space = make_key_space("m", SLOT_ALIGN, SLOT_ALIGN)
    return core, core.open_session("e", "worker", key_space, 0.0).number, lower


def store(
    core: CacheCore, session: int, numbers: list[int], parent: int | None = None, depth: int = 0
) -> None:
    name, root = f"store {numbers}", None if parent is None else words_of([parent])[0]
    begin_store(core, session, name, name, [Run(0, words_of(numbers), root, depth)], 0, 0.0, 1.0)
    core.end_store(session, name, True, 1.0)


def test_what_waits_is_taken_in_order_once_and_only_while_it_is_there() -> None:
    core, session, lower = tiered(capacity=6)
    down = lower.down

    def taken(num_bytes: int) -> list[int]:
        entries = down.take(num_bytes, 1.0)
        return sorted(
            number
            for number in range(30)
            if core.space.index.find(1, 0, words_of([number])) in entries
        )

    for number in range(4):
        store(core, session, [number])
    assert taken(0) == [] and taken(1) == [0] and taken(2 * SLOT_ALIGN) == [1, 2]
    evict(core, 1, 0, words_of([3]))
    assert taken(SLOT_ALIGN) == [] and not len(down.waiting)
    # Those that wait longest are forgotten, once more wait than the index has entries.
    for number in range(10, 20):
        store(core, session, [number])
    assert len(down.waiting) == 6
    (move,) = down.begin(down.take(100 * SLOT_ALIGN, 1.0))
    assert len(move) == 6
    down.end(move, np.ones(6, np.bool_), np.full(6, 7, np.uint64), 2.0)
    down.waiting.add(move.entries)
    assert not len(down.take(100 * SLOT_ALIGN, 1.0)), "what is below was to be written again"


def test_the_gate_is_told_what_is_before_each_block() -> None:
    """A part that goes on after one that is below, or goes there first; one that follows a gap; one
    whose beginning is gone."""
    core, session, lower = tiered()
    down, seen = lower.down, []

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

    def written() -> list[tuple[object, ...]]:
        seen.clear()
        for move in down.begin(down.take(1 << 30, 1.0)):
            down.end(move, np.ones(len(move), np.bool_), np.zeros(len(move), np.uint64), 1.0)
        return list(seen)

    store(core, session, [0, 1, 2])
    store(core, session, [4, 5], 2, 3)
    yes, no = True, False
    assert written() == [
        (0, [yes, no, no], [no, no, no], [no, no, no], [1, 2, 3]),
        (4, [yes, no], [yes, no], [no, no], [4, 5]),
    ]
    store(core, session, [7, 8], 5, 5)
    store(core, session, [10], 8, 7)
    assert written() == [
        (7, [yes, no], [yes, no], [no, no], [6, 7]),
        (10, [yes], [no], [yes], [8]),
    ]
    # What was used is offered again; what is below is not.
    core.touch(session, [HashList(0, words_of([0, 1, 2, 4, 5, 7, 8]))], 2.0)
    assert written() == [(7, [yes, no], [yes, no], [no, no], [6, 7])]
    evict(core, 1, 0, words_of([8]))
    store(core, session, [12], 8, 7)
    assert written() == [(12, [yes], [no], [no], [8])]


def test_numbers_of_leases_and_moves_never_meet() -> None:
    """Both begin again at the end of their half, and leave out those in use."""
    core, session, lower = tiered(4, 2)
    core.acquire(session, "first", [HashList(0, words_of([1]))], 10.0, 0.0)
    (lease,) = core.leases.all()
    assert lease.number == 1
    core.leases._next_number = FIRST_MOVE - 1
    assert [core.leases.next_number() for _ in range(2)] == [FIRST_MOVE - 1, 2]
    none = np.empty(0, np.uint32)
    moves = lower.moves
    moves.add(moves.next_number(), 1, False, none, none)
    moves._next_number = (1 << 32) - 1
    assert [moves.next_number() for _ in range(2)] == [(1 << 32) - 1, FIRST_MOVE + 1]


def test_a_key_space_is_known_as_long_as_it_has_a_block_below() -> None:
    core, session, lower = tiered(4, 2)
    store(core, session, [1])
    (move,) = lower.down.begin(core.space.index.ready_blocks())
    lower.down.end(move, np.ones(1, np.bool_), np.ones(1, np.uint64), 1.0)
    evict(core, 1, 0, words_of([1]))
    core.close_session(session, 1.0)
    assert core.catalog.has_blocks(1) and not core.catalog.forget(1)
    assert not list(core.catalog.outlived(1e9))
    flush(core, 1)
    assert not core.catalog.has_blocks(1) and core.catalog.forget(1)
