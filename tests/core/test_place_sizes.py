"""Tests a tier that compresses: which groups get smaller places, how they count in the budget,
and how records are restored."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from bench.policies import POLICIES
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.restore import BelowSpace, Restored, restore_below
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import Entries, HashList, KeySpaceRecord
from hotkv_server.tiers.book.books import TierBooks
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.book.place_sizes import MIN_TRIED, RETRY_BLOCKS, PlaceSizes
from tests.core.lower_machine import encoded_bytes
from tests.core.old_tables import damage
from tests.core.support import World, evict, make_key_space, make_table, words_of

SLAB, CAPACITY = 6 * SLOT_ALIGN, 40
LARGE, SMALL, PLAIN = 3 * SLOT_ALIGN, 2 * SLOT_ALIGN, SLOT_ALIGN
KEY_SPACE = make_key_space("model", LARGE, PLAIN)
DAY_BYTES = 1 << 30


def sizes_of() -> PlaceSizes:
    made = PlaceSizes(encoded_bytes)
    made.add_key_space(KeySpaceRecord(1, KEY_SPACE))
    return made


def below() -> Space:
    return Space(make_table(CAPACITY), 8 * SLAB, SLAB, POLICIES["lru"](CAPACITY))


def test_places_are_small_only_where_that_wins_something() -> None:
    sizes, none = sizes_of(), PlaceSizes()
    none.add_key_space(KeySpaceRecord(1, KEY_SPACE))
    for one, group, slot_bytes, place_bytes in (
        (sizes, 0, LARGE, SMALL),
        (sizes, 1, PLAIN, PLAIN),
        (none, 0, LARGE, LARGE),
    ):
        assert (one.slot_bytes(1, group), one.place_bytes(1, group)) == (slot_bytes, place_bytes)


def test_group_that_hardly_fits_rests_a_while() -> None:
    sizes = sizes_of()
    for tried, kept_plain, place_bytes in (
        ((0, MIN_TRIED - 1), 0, SMALL),
        ((0, 1), 0, LARGE),
        ((0, 0), RETRY_BLOCKS - 1, LARGE),
        ((0, 0), 1, SMALL),
        # A quarter of these could be compressed.
        ((MIN_TRIED // 4, MIN_TRIED), 0, SMALL),
    ):
        if tried[1]:
            sizes.tried(1, 0, *tried)
        if kept_plain:
            sizes.kept_plain(1, 0, kept_plain)
        assert sizes.place_bytes(1, 0) == place_bytes


def test_what_was_tried_long_ago_is_forgotten() -> None:
    """After a million successes, 40,000 failures must suffice."""
    sizes, num_blocks = sizes_of(), 0
    for _ in range(1000):
        sizes.tried(1, 0, 1000, 1000)
    while sizes.place_bytes(1, 0) == SMALL:
        sizes.tried(1, 0, 0, 100)
        num_blocks += 100
    assert num_blocks < 40_000


class Node(World):
    """A core whose tier compresses, and has a daily budget."""

    def __init__(self) -> None:
        super().__init__(12, CAPACITY)
        books = TierBooks(self.core, below(), DAY_BYTES, encoded_bytes)
        self.session = self.open(sizes=(LARGE, PLAIN))
        assert books.lower is not None
        self.lower, self.down = books.lower, books.lower.down

    def offer(self, group: int, numbers: list[int]) -> None:
        self.store(self.session, numbers, group=group)

    def begun(self) -> Move:
        (move,) = self.down.begin(finished(self.down.take(1 << 30, 1.0)))
        return move

    def end(self, move: Move, unfit: list[int]) -> Entries:
        """The entries to move again as they are. `unfit`: positions that could not be
        compressed."""
        is_unfit = np.isin(np.arange(len(move)), unfit)
        seals = np.full(len(move), 7, np.uint64)
        return self.down.end(move, ~is_unfit, seals, 1.0, is_unfit)

    def write(self, group: int, numbers: list[int], unfit: list[int]) -> Entries:
        """Unfit blocks are moved again, as they are."""
        self.offer(group, numbers)
        again = self.end(self.begun(), unfit)
        for plain in self.down.begin(again, is_plain=True):
            assert not len(self.end(plain, []))
        return again

    def written_bytes(self) -> float:
        return DAY_BYTES - self.down.gate.left_bytes(1.0)


def test_gate_counts_place_bytes_and_repeated_moves() -> None:
    node = Node()
    assert len(node.write(0, [1, 2, 3], [1])) == 1
    assert node.lower.space.used_bytes() == 2 * SMALL + LARGE == node.written_bytes()
    counters = node.lower.counters
    assert (counters.demoted, counters.encoded) == (3, 2)
    sizes = node.down._sizes._groups[1, 0]
    assert (sizes.tried_blocks, sizes.fitted_blocks) == (3, 2), "what is moved plain is not tried"
    assert not len(node.write(1, [1, 2], []))
    assert node.written_bytes() == 2 * SMALL + LARGE + 2 * PLAIN
    assert (counters.demoted, counters.encoded) == (5, 2)
    # What was moved as it is must not be moved again.
    assert not len(node.write(1, [3], [0]))
    node.core.check_invariants()
    evict(node.core, 1, 0, words_of([1, 2]))
    up = node.lower.up.begin(1, [HashList(0, words_of([1, 2]))], 2.0)
    assert up is not None, "a block comes up into a slot of its group whatever its place"
    assert sorted(node.lower.space.index.slot_bytes(up.places).tolist()) == [SMALL, LARGE]
    assert node.core.space.index.slot_bytes(up.entries).tolist() == [LARGE] * 2


def test_blocks_flushed_during_a_trial_stay_away() -> None:
    node = Node()
    node.offer(0, [1, 2])
    move = node.begun()
    move.is_void[0] = True
    assert node.end(move, [0, 1]).tolist() == move.entries[1:].tolist()


def test_key_spaces_that_are_forgotten_leave_nothing() -> None:
    node = Node()
    for name in ("a", "b", "c"):
        session = node.open(name, name)
        node.core.close_session(session.number, 0.0)
        assert node.core.catalog.forget(session.key_space_id)
    assert len(node.down._sizes._groups) == len(node.down._block_tokens) == 2


# Records of an earlier server


def left() -> Space:
    """A tier in which one group has compressed and plain blocks."""
    node = Node()
    node.write(0, [1, 2, 3, 4], [0, 2])
    node.write(1, [1, 2], [])
    return node.lower.space


def restored(records: Words, *, knows: bool = True) -> tuple[Space, Restored]:
    """`knows`: the new server can read compressed blocks."""
    space = below()
    catalog = Catalog(space.books)
    number, _ = catalog.register(KEY_SPACE, (), 0.0)
    spaces = BelowSpace(space, catalog, encoded_bytes if knows else None)
    report = restore_below(spaces, records, {1: number}, 5.0)
    space.check_invariants()
    return space, report


def test_blocks_come_back_in_places_of_both_sizes() -> None:
    """Without compression, only the plain ones may come back."""
    old = left()
    records = old.index.table.records
    space, report = restored(records.copy())
    assert (report.blocks, report.encoded, report.dropped) == (6, 2, {})
    assert space.used_bytes() == old.used_bytes() == 2 * SMALL + 2 * LARGE + 2 * PLAIN
    assert space.tenants.bytes_of(1) == space.used_bytes()
    for group, numbers in ((0, [1, 2, 3, 4]), (1, [1, 2])):
        was, now = (one.index.find(1, group, words_of(numbers)) for one in (old, space))
        assert now.all()
        for of in ("offsets", "slot_bytes", "checks"):
            assert np.array_equal(getattr(old.index, of)(was), getattr(space.index, of)(now)), of
    _, report = restored(records.copy(), knows=False)
    assert (report.blocks, report.dropped) == (4, {"misshapen": 2})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_table_gives_a_consistent_tier(data: st.DataObject) -> None:
    space, _ = restored(damage(left().index.table.records.copy(), data))
    entries = space.index.ready_blocks()
    groups, sizes = space.index.keys(entries)[1], space.index.slot_bytes(entries)
    assert np.isin(sizes[groups == 0], (SMALL, LARGE)).all()
    assert (sizes[groups == 1] == PLAIN).all()
