"""Places below that are smaller than slots: which groups get them, what the write gate counts, and
which records of an earlier server come back."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto import table
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore import BelowSpace, Restored, restore_below
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import CoreConfig, Entries, HashList, KeySpaceRecord, Run
from hotkv_server.tiers.book.books import TierBooks
from hotkv_server.tiers.book.place_sizes import MIN_TRIED, RETRY_BLOCKS, PlaceSizes
from tests.core.lower_machine import encoded_bytes
from tests.core.old_tables import damage
from tests.core.support import begin_store, evict, make_key_space, make_table, words_of

SLAB, CAPACITY = 6 * SLOT_ALIGN, 40
KEY_SPACE = make_key_space("m", 3 * SLOT_ALIGN, SLOT_ALIGN)
LARGE, SMALL, PLAIN = 3 * SLOT_ALIGN, 2 * SLOT_ALIGN, SLOT_ALIGN
DAY_BYTES = 1 << 30


def sizes_of() -> PlaceSizes:
    made = PlaceSizes(encoded_bytes)
    made.add_key_space(KeySpaceRecord(1, KEY_SPACE))
    return made


def test_places_are_small_only_where_that_wins_something() -> None:
    sizes = sizes_of()
    assert (sizes.slot_bytes(1, 0), sizes.place_bytes(1, 0)) == (LARGE, SMALL)
    assert (sizes.slot_bytes(1, 1), sizes.place_bytes(1, 1)) == (PLAIN, PLAIN)
    none = PlaceSizes()
    none.add_key_space(KeySpaceRecord(1, KEY_SPACE))
    assert (none.slot_bytes(1, 0), none.place_bytes(1, 0)) == (LARGE, LARGE)


def test_a_group_of_which_hardly_any_block_fits_is_left_alone_for_a_while() -> None:
    sizes = sizes_of()
    sizes.tried(1, 0, 0, MIN_TRIED - 1)
    assert sizes.place_bytes(1, 0) == SMALL, "judged by too few"
    sizes.tried(1, 0, 0, 1)
    assert sizes.place_bytes(1, 0) == LARGE
    sizes.kept_plain(1, 0, RETRY_BLOCKS - 1)
    assert sizes.place_bytes(1, 0) == LARGE
    sizes.kept_plain(1, 0, 1)
    assert sizes.place_bytes(1, 0) == SMALL, "never tried again"
    sizes.tried(1, 0, MIN_TRIED // 4, MIN_TRIED)
    assert sizes.place_bytes(1, 0) == SMALL, "a quarter is worth it"


def test_what_was_tried_long_ago_is_forgotten() -> None:
    """A group that has always been encoded is judged within some thousand blocks."""
    sizes, num_blocks = sizes_of(), 0
    for _ in range(1000):
        sizes.tried(1, 0, 1000, 1000)
    while sizes.place_bytes(1, 0) == SMALL:
        sizes.tried(1, 0, 0, 100)
        num_blocks += 100
    assert num_blocks < 40_000


def test_key_spaces_that_are_forgotten_leave_nothing() -> None:
    node = Node()
    for name in ("a", "b", "c"):
        session = node.core.open_session(name, "worker", make_key_space(name, LARGE, PLAIN), 0.0)
        node.core.close_session(session.number, 0.0)
        assert node.core.catalog.forget(session.key_space_id)
    assert repr(node.down._sizes).endswith("of 2 groups are encoded)")
    assert len(node.down._block_tokens) == 2


class Node:
    """A core over a tier that encodes, with a budget of writes."""

    def __init__(self) -> None:
        below = Space(make_table(CAPACITY), 8 * SLAB, SLAB, POLICIES["lru"](CAPACITY))
        config = CoreConfig(8 * SLAB, SLAB, CAPACITY)
        self.core = CacheCore(config, make_table(CAPACITY), POLICIES["lru"](CAPACITY))
        books = TierBooks(self.core, below, DAY_BYTES, encoded_bytes)
        self.session = self.core.open_session("e", "worker", KEY_SPACE, 0.0).number
        assert books.lower is not None
        self.lower, self.down = books.lower, books.lower.down

    def store(self, group: int, numbers: list[int]) -> None:
        name = f"{group} {numbers}"
        runs = [Run(group, words_of(numbers))]
        begin_store(self.core, self.session, name, name, runs, 0, 0.0, 1.0)
        self.core.end_store(self.session, name, True, 1.0)

    def write(self, unfit: list[int]) -> Entries:
        """Moves what waits; rows `unfit` can't be encoded. Returns what is to be moved plain."""
        (move,) = self.down.begin(self.down.take(1 << 30, 1.0))
        is_unfit = np.isin(np.arange(len(move)), unfit)
        seals = np.full(len(move), 7, np.uint64)
        return self.down.end(move, ~is_unfit, seals, 1.0, is_unfit)

    def written_bytes(self) -> float:
        return DAY_BYTES - self.down.gate.left_bytes(1.0)


def test_the_gate_counts_the_bytes_of_places_and_what_is_moved_again() -> None:
    node = Node()
    node.store(0, [1, 2, 3])
    again = node.write([1])
    assert len(again) == 1
    assert node.lower.space.used_bytes() == 2 * SMALL
    assert node.written_bytes() == 2 * SMALL + LARGE
    (move,) = node.down.begin(again, is_plain=True)
    assert not len(
        node.down.end(move, np.ones(1, np.bool_), np.ones(1, np.uint64), 1.0, np.zeros(1, np.bool_))
    )
    assert node.lower.space.used_bytes() == 2 * SMALL + LARGE == node.written_bytes()
    counters = node.lower.counters
    assert (counters.demoted, counters.encoded) == (3, 2)
    node.store(1, [1, 2])
    assert not len(node.write([]))
    assert node.written_bytes() == 2 * SMALL + LARGE + 2 * PLAIN
    assert (counters.demoted, counters.encoded) == (5, 2)
    node.core.check_invariants()


def test_what_was_flushed_while_it_was_tried_is_not_moved_again() -> None:
    node = Node()
    node.store(0, [1, 2])
    (move,) = node.down.begin(node.down.take(1 << 30, 1.0))
    move.is_void[0] = True
    unfit = np.ones(2, np.bool_)
    again = node.down.end(move, ~unfit, np.zeros(2, np.uint64), 1.0, unfit)
    assert again.tolist() == move.entries[1:].tolist()


def test_what_was_moved_plain_is_not_moved_again() -> None:
    """Whatever the tier says."""
    node = Node()
    node.store(1, [1])
    assert not len(node.write([0]))
    assert node.written_bytes() == PLAIN and not node.lower.space.used_bytes()


def test_a_group_that_is_not_encoded_any_more_is_written_in_one_go() -> None:
    node = Node()
    sizes = node.down._sizes
    sizes.tried(1, 0, 0, MIN_TRIED)
    node.store(0, [1, 2])
    (move,) = node.down.begin(node.down.take(1 << 30, 1.0))
    assert node.lower.space.index.slot_bytes(move.places).tolist() == [LARGE] * 2
    assert node.written_bytes() == 2 * LARGE


def test_a_block_comes_up_into_a_slot_of_its_group_whatever_its_place() -> None:
    node = Node()
    node.store(0, [1, 2])
    (move,) = node.down.begin(node.write([1]), is_plain=True)
    node.down.end(move, np.ones(1, np.bool_), np.ones(1, np.uint64), 1.0)
    evict(node.core, 1, 0, words_of([1, 2]))
    up = node.lower.up.begin(1, [HashList(0, words_of([1, 2]))], 2.0)
    assert up is not None
    assert sorted(node.lower.space.index.slot_bytes(up.places).tolist()) == [SMALL, LARGE]
    assert node.core.space.index.slot_bytes(up.entries).tolist() == [LARGE] * 2


# Records of an earlier server


def left() -> Node:
    """Returns a tier with blocks of both sizes in one group, and of another group."""
    node = Node()
    node.store(0, [1, 2, 3, 4])
    again = node.write([0, 2])
    for move in node.down.begin(again, is_plain=True):
        all_of = np.ones(len(move), np.bool_)
        node.down.end(move, all_of, np.full(len(move), 7, np.uint64), 1.0)
    node.store(1, [1, 2])
    node.write([])
    return node


def restored(records: Words, *, knows: bool = True) -> tuple[Space, Restored]:
    """Returns a space filled with what records say, by a server that knows of encoded blocks or
    not."""
    space = Space(make_table(CAPACITY), 8 * SLAB, SLAB, POLICIES["lru"](CAPACITY))
    catalog = Catalog(space.books)
    number, _ = catalog.register(KEY_SPACE, (), 0.0)
    below = BelowSpace(space, catalog, encoded_bytes if knows else None)
    report = restore_below(below, records, {1: number}, 5.0)
    space.check_invariants()
    return space, report


def test_blocks_come_back_in_places_of_both_sizes() -> None:
    old = left().lower.space
    space, report = restored(old.index.table.records.copy())
    assert (report.blocks, report.encoded, report.dropped) == (6, 2, {})
    assert space.used_bytes() == old.used_bytes() == 2 * SMALL + 2 * LARGE + 2 * PLAIN
    assert space.tenants.bytes_of(1) == space.used_bytes()
    for group, numbers in ((0, [1, 2, 3, 4]), (1, [1, 2])):
        was, now = (one.index.find(1, group, words_of(numbers)) for one in (old, space))
        assert now.all()
        for of in ("offsets", "slot_bytes", "checks"):
            assert np.array_equal(getattr(old.index, of)(was), getattr(space.index, of)(now)), of


def test_a_server_that_knows_nothing_of_it_drops_encoded_blocks() -> None:
    """As servers did before there were any."""
    _, report = restored(left().lower.space.index.table.records.copy(), knows=False)
    assert (report.blocks, report.dropped) == (4, {"misshapen": 2})


@pytest.mark.parametrize(
    "was, size", [(SMALL, 0), (SMALL, 1), (SMALL, 4), (SMALL, 5), (SMALL, 1 << 20), (PLAIN, 2)]
)
def test_records_of_any_other_size_are_dropped(was: int, size: int) -> None:
    """Also of places in which a block would win nothing."""
    records = left().lower.space.index.table.records.copy()
    at = np.flatnonzero(records[:, table.W_SIZE] == was // SLOT_ALIGN)[0]
    records[at, table.W_SIZE] = size
    _, report = restored(records)
    assert (report.blocks, report.dropped) == (5, {"misshapen": 1})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_table_gives_a_consistent_tier(data: st.DataObject) -> None:
    records = damage(left().lower.space.index.table.records.copy(), data)
    space, _ = restored(records)
    entries = space.index.ready_blocks()
    groups = space.index.keys(entries)[1]
    sizes = space.index.slot_bytes(entries)
    assert np.isin(sizes[groups == 0], (SMALL, LARGE)).all()
    assert (sizes[groups == 1] == PLAIN).all()


def test_one_block_in_two_places_comes_back_once() -> None:
    """Of two records of a block, one encoded and one not, either is right."""
    records = left().lower.space.index.table.records.copy()
    small = np.flatnonzero(records[:, table.W_SIZE] == SMALL // SLOT_ALIGN)[0]
    large = np.flatnonzero(records[:, table.W_SIZE] == LARGE // SLOT_ALIGN)[0]
    records[small, :8] = records[large, :8]
    _, report = restored(records)
    assert (report.blocks, report.dropped) == (5, {"duplicate or beyond capacity": 1})
