"""Tests residencies beyond the state machine: sketches, tenants, condemned blocks, damaged
tables, and others' pins."""

import re
from functools import partial

import numpy as np
import pytest

from hotkv_proto import table
from hotkv_proto.blocks import BlockResult, ResidencyOpened, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import Sketch
from hotkv_proto.table import SLOT_ALIGN
from hotkv_proto.words import LATEST_START, MAX_SESSION_WORD, OLDEST_START
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.readers import ReaderWords, no_readers
from hotkv_server.cache.values import EvictionNotice, HashList, SessionRecord, TenantShare
from hotkv_server.integrity.evidence import condemn
from hotkv_sparse.server.residency.book.residencies import MAX_POSITION
from tests.core.cache_model import refused
from tests.core.support import (
    SLAB,
    World,
    evict,
    expire,
    flush,
    grants,
    reason_of,
    residencies,
    taken_over,
    words_of,
)

NUM_SLABS, CAPACITY = 16, 400
NUM_SLOTS = 4 * NUM_SLABS
MEAN = Sketch(0, "mean", 1, (SLOT_ALIGN,))


class Place(World):
    """A core of 64 slots. `words` says whether residencies are still valid."""

    def __init__(self, **config: object) -> None:
        memory = no_readers(CAPACITY)
        super().__init__(NUM_SLABS, CAPACITY, memory=memory, **config)
        self.words = memory.words

    def promise(self, session: SessionRecord, name: str, count: int) -> ResidencyOpened:
        return residencies(self.core).open(session.number, name, {0: count}, 0.0)

    def make_room(self, session: SessionRecord, name: str, count: int) -> list[EvictionNotice]:
        for _ in residencies(self.core).make_room(session.number, name, {0: count}):
            pass
        return self.core.take_effects()

    def extend(
        self, session: SessionRecord, name: str, numbers: list[int], first: int = 0
    ) -> list[int]:
        found = residencies(self.core).extend(
            session.number, name, 0, first, words_of(numbers), 1.0
        )
        self.core.check_invariants()
        return list(found.tolist())

    def close(self, session: SessionRecord, name: str) -> None:
        residency = residencies(self.core).book.named(session, name)
        assert residency is not None
        for _ in residencies(self.core).closing(residency):
            residencies(self.core).check_invariants(self.core.sessions.records)
        self.core.check_invariants()

    def restarted(self) -> CacheCore:
        self.core, self.restored = taken_over(self.core, "lru", None, 1.0)
        self.core.space.index.unverified[:] = False
        self.core.check_invariants()
        return self.core

    def holds(self, opened: ResidencyOpened) -> bool:
        words = self.words
        is_of_now = words[OLDEST_START] <= opened.start_number
        return bool(is_of_now and words[opened.word_index] == opened.word_value)


def test_sketches_are_promised_and_pinned_with_their_blocks() -> None:
    kind, foreign = Sketch(0, "mean", 1, (SLAB,)), Sketch(0, "max", 1, (SLAB,))
    place = Place()
    session, other = place.open(kinds=(kind,)), place.open("f", kinds=(foreign,))
    place.promise(session, "r", 3)
    bound = residencies(place.core).bound
    assert bound.promised_bytes == 3 * (SLOT_ALIGN + SLAB)
    place.store(session, [1, 2], residency_id="r")
    place.store(session, [1, 2], group=session.sketches[0], residency_id="r")
    assert bound.pinned_bytes == 2 * (SLOT_ALIGN + SLAB)
    assert bound.promised_bytes == SLOT_ALIGN + SLAB
    place.store(session, [3])
    assert place.store(other, [3], group=other.sketches[0]) == [BlockResult.STORED]
    place.extend(session, "r", [1, 2, 3])
    assert bound.promised_bytes == SLAB, "a kind that the session does not declare is nobody's"
    place.close(session, "r")
    assert bound.pinned_bytes == 0


def test_retention_and_leases_leave_room_for_stores() -> None:
    """Of 64 slots, 40 are reserved, a lease pins its maximum of 16, and a sixteenth stays free
    for stores: 4 are left for retention, and its own maximum of 16 once the residency is closed."""
    place = Place(unadmitted_share=0.25, held_share=0.25)
    session, core = place.open(), place.core
    place.store(session, range(60))
    place.promise(session, "r", 40)
    listed = HashList(0, words_of(range(60)))
    (mask,) = core.acquire(session.number, "l", [listed], 100.0, 1.0).pinned
    assert int(mask.sum()) == 16, "a quarter"
    for held_slots, what in ((4, "60 - 40 - 16"), (16, "its own share again")):
        core._uses.hold(session, listed, 100.0)
        assert core.retention_pins.held_bytes == held_slots * SLOT_ALIGN, what
        if held_slots == 4:
            place.close(session, "r")
    room = residencies(core).bound.room_bytes(0)
    assert room == (60 - 32) * SLOT_ALIGN, "what they pin can't be promised"


def test_tenant_gets_its_share_of_its_guarantee() -> None:
    arena = NUM_SLABS * SLAB
    shares = {"a": TenantShare(arena // 2), "b": TenantShare(0, arena // 4), "c": TenantShare()}
    bound = residencies(Place(tenants=shares).core).bound
    most = [int(0.8 * arena), int(0.8 * arena // 4), int(0.8 * arena) - int(0.8 * arena // 2)]
    assert [bound.most_bytes(tenant) for tenant in range(3)] == most
    for tenant in (1, 2):
        bound.promise(tenant, {SLOT_ALIGN: bound.room_bytes(tenant) // SLOT_ALIGN})
    assert bound.room_bytes(1) < SLOT_ALIGN
    assert bound.room_bytes(0) >= int(0.8 * arena // 2)


def test_condemned_block_ends_its_readers_residencies() -> None:
    place = Place()
    sessions = [place.open("one"), place.open("two")]
    opened = [place.promise(session, "r", 4) for session in sessions]
    place.store(sessions[0], [1, 2], residency_id="r")
    place.store(sessions[1], [3], residency_id="r")
    condemn(place.core, place.entries([2]))
    place.core.take_effects()
    place.core.check_invariants()
    assert [place.holds(each) for each in opened] == [False, True]
    assert reason_of(lambda: place.extend(sessions[0], "r", [1])) is Reason.UNKNOWN_RESIDENCY
    again = place.promise(sessions[0], "r", 4)
    assert place.holds(again) and not place.holds(opened[0])
    # It no longer knows which residency had a block, so all end.
    place.restarted()
    for block, holds in ((1, True), (3, False)):
        condemn(place.core, place.entries([block]))
        assert [place.holds(each) for each in (opened[1], again)] == [holds] * 2


def test_blocks_flushed_under_readers_survive_kills() -> None:
    place = Place(check_stride=64)
    session = place.open()
    opened = place.promise(session, "r", 9)
    slots = []
    for first in (0, 3, 6):
        # The residency still pins the flushed blocks' slots.
        place.store(session, [1, 2, 3])
        slots += place.extend(session, "r", [1, 2, 3], first)
        if first < 6:
            flush(place.core, 1)
            place.core.take_effects()
    assert len(set(slots)) == 9
    for number in range(3):
        core = place.restarted()
        assert place.restored.kept == 9 and not place.restored.lost_readers
        assert core.grace.num_bytes == 9 * SLOT_ALIGN
        assert place.holds(opened)
        assert sorted(core.space.index.offsets(core.grace.entries).tolist()) == sorted(slots)
        assert core.words.start_number == opened.start_number + 1 + number
    results = place.store(place.open("other", "n"), range(100, 100 + NUM_SLOTS))
    assert results.count(BlockResult.STORED) == NUM_SLOTS - 9
    place.core.grace.until_s = 5.0
    expire(place.core, 4.9)
    assert place.holds(opened)
    expire(place.core, 5.0)
    place.core.check_invariants()
    assert not place.holds(opened) and not place.core.grace.is_on
    assert place.words[opened.word_index] > opened.word_value, "no value comes again"
    assert place.words[OLDEST_START] == place.words[LATEST_START]


def test_readers_are_notified_of_lost_blocks() -> None:
    place = Place()
    session = place.open()
    opened = place.promise(session, "r", 3)
    place.store(session, [1, 2, 3], residency_id="r")
    flush(place.core, 1)
    spoiled = np.flatnonzero(place.core.marks)[0]
    place.core.space.index.table.records[spoiled, table.W_SIZE] += 1
    core = place.restarted()
    assert place.restored.lost_readers and place.restored.kept == 0
    assert not place.holds(opened) and not core.grace.is_on
    assert core.space.used_bytes() == 0, "nothing is kept for nobody"


def test_words_run_out_and_come_back() -> None:
    words = ReaderWords(no_readers(1).words)
    given = [words.of_session(number) for number in range(MAX_SESSION_WORD)]
    assert len(set(given)) == MAX_SESSION_WORD
    assert reason_of(lambda: words.check_room(MAX_SESSION_WORD)) is Reason.OVERLOADED
    words.revoke(7)
    index, value = words.of_session(MAX_SESSION_WORD)
    assert (index, value) == (given[7][0], given[7][1] + 2)


def test_the_smallest_share_refuses_every_residency() -> None:
    place = Place(residency_share=5e-324)
    session = place.open()
    refused(place.core, lambda: place.promise(session, "r", 1), Reason.RESIDENCY_TOO_LARGE)
    for count in (0, MAX_POSITION):
        refused(place.core, lambda n=count: place.promise(session, "r", n), Reason.INVALID_FIELD)


def test_a_refusal_names_an_arena_that_suffices() -> None:
    place = Place(residency_share=0.3)
    session = place.open()
    with pytest.raises(HotKVError, match=r"to [0-9]+ bytes at least") as error:
        place.promise(session, "r", NUM_SLOTS)
    num_bytes = int(re.search(r"to ([0-9]+) bytes", error.value.message)[1])  # type: ignore[index]
    least = -(-num_bytes // SLAB)
    for num_slabs, is_enough in ((least, True), (least - 1, False)):
        bound = residencies(World(num_slabs, CAPACITY, residency_share=0.3).core).bound
        assert (bound.most_bytes(0) >= NUM_SLOTS * SLOT_ALIGN) == is_enough
    half = Place(residency_share=0.5)
    half.promise(half.open(), "all of the share", NUM_SLOTS // 2)


def test_positions_numbers_and_memory_of_residencies_are_bounded() -> None:
    narrow = Place(client_memory_bytes=1 << 11)
    session = narrow.open()
    refused(narrow.core, lambda: narrow.promise(session, "r", 1), Reason.RESIDENCY_TOO_LARGE)
    for names, reason in (("r", Reason.RESIDENCY_TOO_LARGE), ("rs", Reason.OVERLOADED)):
        narrow = Place(client_memory_bytes=3200 * len(names))
        session, largest = narrow.open(), 1 + 3 * len(names)
        for name in names:
            narrow.promise(session, name, 1)
        refused(narrow.core, partial(narrow.promise, session, "r", largest + 1), reason)
        narrow.promise(session, "r", largest)
    place = Place(client_memory_bytes=1 << 16)
    session = place.open()
    count = grants(lambda number: place.promise(session, f"{number}", 1))
    assert 5 < count < 40
    assert residencies(place.core).book.num_opened == count
    place.store(place.open("f", "wide", (SLAB, SLOT_ALIGN)), range(NUM_SLABS))
    assert not place.make_room(session, "another", 8), "blocks are evicted for what is refused"
    for first, is_refused in ((-1, True), (MAX_POSITION - 2, True), (MAX_POSITION - 3, False)):
        call = partial(place.extend, session, "0", [1, 2], first)
        assert call() == [-1, -1] if not is_refused else reason_of(call) is Reason.INVALID_FIELD
    place.core.check_invariants()


def test_promised_sketches_take_the_room_of_others() -> None:
    """No slab can be emptied, so another session's sketches must go."""
    place = Place()
    mine, theirs = (
        place.open(name, name, (SLAB // 2, 1), kinds=(MEAN,)) for name in ("mine", "theirs")
    )
    for number in range(13):
        place.store(mine, [number])
        place.store(theirs, [number])
    place.store(theirs, range(12), group=theirs.sketches[0])
    place.promise(mine, "r", 12)
    place.extend(mine, "r", list(range(12)))
    place.core.acquire(theirs.number, "l", [HashList(0, words_of([12]))], 100.0, 1.0)
    assert not place.core.space.pool.num_free_slabs
    results = place.store(mine, range(12), group=mine.sketches[0], residency_id="r")
    assert results == [BlockResult.STORED] * 12
    assert residencies(place.core).bound.promised_bytes == 0


@pytest.mark.parametrize("pin", [False, True])
def test_use_keeps_all_blocks_as_asked(pin: bool) -> None:
    place = Place()
    session = place.open()
    place.store(session, [1, 2, 3])
    listed = HashList(0, words_of([1, 2, 3]))
    for _ in place.core.use(session.number, listed, 2.0, Retention(ttl_s=50.0, pin=pin)):
        pass
    assert evict(place.core, 1, 0, words_of([1, 2, 3])) == ((0, 3) if pin else (3, 0))


def test_a_block_is_pinned_while_it_is_compared() -> None:
    place = Place()
    session = place.open()
    place.promise(session, "r", 8)
    place.store(session, [1, 2])
    place.core.space.index.unverified[place.entries([2])] = True
    waiting = residencies(place.core).begin_comparing(session, "r", 0, words_of([1, 2]))
    assert waiting.tolist() == place.entries([2]).tolist()
    place.core.check_invariants()
    assert evict(place.core, 1, 0, words_of([2])) == (0, 1)
    residencies(place.core).resident.release_held(waiting)
    place.core.check_invariants()
    assert evict(place.core, 1, 0, words_of([2])) == (1, 0)


def test_sketch_has_no_place_before_comparison() -> None:
    place = Place()
    session = place.open(kinds=(MEAN,))
    place.promise(session, "r", 4)
    place.store(session, [1], residency_id="r")
    place.store(session, [1], group=session.sketches[0], residency_id="r")
    book = residencies(place.core)
    residency = book.book.named(session, "r")
    assert residency is not None
    offsets = partial(book.resident.sketch_offsets, residency, 0, 0, 1)
    assert offsets()[0] >= 0
    linked = place.core.space.sketches.of(place.entries([1]))
    place.core.space.index.unverified[linked] = True
    assert offsets()[0] == -1


def test_readers_are_told_if_a_sketch_is_lost() -> None:
    place = Place()
    session = place.open(kinds=(MEAN,))
    place.promise(session, "r", 4)
    place.store(session, [1], residency_id="r")
    place.store(session, [1], group=session.sketches[0], residency_id="r")
    place.core.space.index.table.records[place.entries([1]), table.W_SKETCH] = 0
    place.restarted()
    assert place.restored.lost_readers and place.restored.kept == 0
