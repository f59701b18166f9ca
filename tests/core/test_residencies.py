"""Residencies in cases worth telling apart: what is promised is there, what is shared counts once,
and what can't be kept is not kept quietly."""

import numpy as np
import pytest

from hotkv_proto import table
from hotkv_proto.blocks import BlockResult, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import Representation
from hotkv_proto.table import SLOT_ALIGN
from hotkv_proto.words import GENERATION, LATEST, MAX_SESSION_WORD
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.readers import ReaderMemory, ReaderWords, no_readers
from hotkv_server.cache.restore import restore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from hotkv_server.integrity.evidence import condemn
from hotkv_server.residency.book.bound import slot_cost
from tests.core.resident import residencies
from tests.core.support import (
    begin_store,
    evict,
    expire,
    flush,
    make_key_space,
    make_table,
    words_of,
)

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 16
NUM_SLOTS = 4 * NUM_SLABS
CAPACITY = 400
BOUND_SLOTS = int(0.8 * NUM_SLOTS)


class Place:
    """A core of 64 slots, and what readers see."""

    def __init__(self, **settings: object) -> None:
        self.memory = no_readers(CAPACITY)
        self.config = CoreConfig(NUM_SLABS * SLAB, SLAB, CAPACITY, **settings)  # type: ignore[arg-type]
        self.core = CacheCore(self.config, make_table(CAPACITY), LRU(CAPACITY), self.memory)
        self.num_stores = 0

    def open(
        self, engine: str = "e", model: str = "m", kinds: tuple[Representation, ...] = ()
    ) -> int:
        space = make_key_space(model, SLOT_ALIGN, SLOT_ALIGN)
        return self.core.open_session(engine, "worker", space, 0.0, kinds).number

    def store(
        self,
        session: int,
        numbers: list[int],
        residency_id: str = "",
        group: int = 0,
        depth: int = 0,
    ) -> list[int]:
        self.num_stores += 1
        name, runs = f"store {self.num_stores}", [Run(group, words_of(numbers), depth=depth)]
        begin_store(self.core, session, name, name, runs, 0, 0.0, 1.0, residency_id=residency_id)
        results = self.core.end_store(session, name, True, 1.0)[0].tolist()
        self.core.take_effects()
        self.core.check_invariants()
        return list(results)

    def extend(self, session: int, name: str, numbers: list[int], first: int = 0) -> list[int]:
        found = residencies(self.core).extend(session, name, 0, first, words_of(numbers), 1.0)
        self.core.check_invariants()
        return list(found.tolist())

    def close(self, session: int, name: str) -> None:
        residency = residencies(self.core).book.named(self.core.sessions.record(session), name)
        assert residency is not None
        for _ in residencies(self.core).closing(residency):
            residencies(self.core).check_invariants(self.core.sessions.records)
        self.core.check_invariants()

    def refused(self, session: int, name: str, count: int) -> HotKVError:
        with pytest.raises(HotKVError) as caught:
            residencies(self.core).open(session, name, {0: count}, 1.0)
        self.core.check_invariants()
        return caught.value

    def restarted(self) -> CacheCore:
        """Another core over what a kill leaves."""
        memory = ReaderMemory(self.memory.words, np.zeros(CAPACITY + 1, np.uint8))
        core = CacheCore(self.config, make_table(CAPACITY), LRU(CAPACITY), memory)
        numbers = {}
        for number, record in self.core.key_spaces.items():
            numbers[number] = core.catalog.register(record.key_space, record.representations, 0.0)[
                0
            ]
        old = self.core.space.index.table.records.copy()
        self.restored = restore(core, old, numbers, None, 1.0, self.memory.marks.copy())
        core.space.index.unverified[:] = False
        core.check_invariants()
        self.core, self.memory = core, memory
        return core

    def holds(self, opened: object) -> bool:
        words = self.memory.words
        return bool(
            words[GENERATION] <= opened.generation  # type: ignore[attr-defined]
            and words[opened.word_index] == opened.word_value  # type: ignore[attr-defined]
        )


def test_representations_are_promised_and_pinned_with_their_blocks() -> None:
    kind, foreign = Representation(0, "mean", 1, (SLAB,)), Representation(0, "max", 1, (SLAB,))
    place = Place()
    session, other = place.open(kinds=(kind,)), place.open("f", kinds=(foreign,))
    residencies(place.core).open(session, "r", {0: 3}, 0.0)
    bound = residencies(place.core).bound
    assert bound.promised_bytes == 3 * (SLOT_ALIGN + SLAB)
    group = place.core.sessions.record(session).representations[0]
    name = "s"
    runs = [Run(0, words_of([1, 2])), Run(group, words_of([1, 2]))]
    begin_store(place.core, session, name, name, runs, 0, 0.0, 1.0, residency_id="r")
    place.core.end_store(session, name, True, 1.0)
    place.core.check_invariants()
    assert bound.pinned_bytes == 2 * (SLOT_ALIGN + SLAB)
    assert bound.promised_bytes == SLOT_ALIGN + SLAB
    place.store(session, [3])
    foreign_group = place.core.sessions.record(other).representations[0]
    assert place.store(other, [3], "", foreign_group) == [BlockResult.STORED]
    place.extend(session, "r", [1, 2, 3])
    assert bound.promised_bytes == SLAB, "a kind that the session does not declare is nobody's"
    place.close(session, "r")
    assert bound.pinned_bytes == 0


def test_refusals_say_who_holds_the_room_and_are_remembered_until_it_is_had() -> None:
    place = Place()
    session = place.open()
    assert place.refused(session, "s", BOUND_SLOTS + 1).reason is Reason.RESIDENCY_TOO_LARGE
    residencies(place.core).open(session, "a", {0: BOUND_SLOTS - 4}, 0.0)
    for _ in range(3):
        error = place.refused(session, "r", 5)
        assert error.reason is Reason.NO_ROOM_FOR_RESIDENCY
    assert str(5 * SLOT_ALIGN) in error.message
    (refusal,) = residencies(place.core).book.refusals()
    assert (refusal.num_attempts, refusal.asked_bytes) == (3, 5 * SLOT_ALIGN)
    assert refusal.available_bytes < 5 * SLOT_ALIGN
    place.close(session, "a")
    residencies(place.core).open(session, "r", {0: 5}, 0.0)
    assert not residencies(place.core).book.refusals()


def test_slots_count_with_what_their_slabs_lose() -> None:
    assert slot_cost(SLOT_ALIGN, SLAB) == SLOT_ALIGN
    assert slot_cost(3 * SLOT_ALIGN, SLAB) == SLAB
    assert slot_cost(SLAB + 1, SLAB) == 2 * SLAB
    assert slot_cost(SLAB // 3 + 1, SLAB) == SLAB // 2


def test_holds_and_leases_leave_room_for_stores() -> None:
    """A sixteenth of the arena stays, whatever the three pin together."""
    place = Place(unadmitted_share=0.25, held_share=0.25)
    session = place.open()
    place.store(session, list(range(60)))
    residencies(place.core).open(session, "r", {0: 40}, 0.0)
    mask = place.core.acquire(session, "l", [HashList(0, words_of(range(60)))], 100.0, 1.0).pinned[
        0
    ]
    assert int(mask.sum()) == 16, "a quarter"
    place.core._uses.hold(
        place.core.sessions.record(session), HashList(0, words_of(range(60))), 100.0
    )
    assert place.core.retention_pins.held_bytes == 4 * SLOT_ALIGN, "60 - 40 - 16"
    place.close(session, "r")
    place.core._uses.hold(
        place.core.sessions.record(session), HashList(0, words_of(range(60))), 100.0
    )
    assert place.core.retention_pins.held_bytes == 16 * SLOT_ALIGN, "its own share again"
    room = residencies(place.core).bound.room_bytes(0)
    assert room == (60 - 32) * SLOT_ALIGN, "what they pin can't be promised"


def test_a_tenant_gets_its_share_of_its_guarantee_whatever_others_have() -> None:
    guaranteed = NUM_SLABS * SLAB // 2
    shares = {
        "a": TenantShare(guaranteed),
        "b": TenantShare(0, NUM_SLABS * SLAB // 4),
        "c": TenantShare(),
    }
    place = Place(tenants=shares)
    bound = residencies(place.core).bound
    assert bound.most_bytes(0) == int(0.8 * NUM_SLABS * SLAB)
    assert bound.most_bytes(1) == int(0.8 * NUM_SLABS * SLAB // 4)
    assert bound.most_bytes(2) == int(0.8 * NUM_SLABS * SLAB) - int(0.8 * guaranteed)
    bound.promise(1, {SLOT_ALIGN: bound.room_bytes(1) // SLOT_ALIGN})
    assert bound.room_bytes(1) < SLOT_ALIGN
    bound.promise(2, {SLOT_ALIGN: bound.room_bytes(2) // SLOT_ALIGN})
    assert bound.room_bytes(0) >= int(0.8 * guaranteed)


def test_a_condemned_block_ends_the_residencies_of_those_who_read_it() -> None:
    place = Place()
    sessions = [place.open("one"), place.open("two")]
    opened = [residencies(place.core).open(s, "r", {0: 4}, 0.0) for s in sessions]
    place.store(sessions[0], [1, 2], "r")
    place.store(sessions[1], [3], "r")
    bad = place.core.space.index.find(1, 0, words_of([2]))
    condemn(place.core, bad)
    place.core.take_effects()
    place.core.check_invariants()
    assert [place.holds(each) for each in opened] == [False, True]
    with pytest.raises(HotKVError) as caught:
        place.extend(sessions[0], "r", [1])
    assert caught.value.reason is Reason.UNKNOWN_RESIDENCY
    again = residencies(place.core).open(sessions[0], "r", {0: 4}, 2.0)
    assert place.holds(again) and not place.holds(opened[0])


def test_what_was_flushed_under_a_reader_survives_a_kill_several_times() -> None:
    place = Place()
    session = place.open()
    opened = residencies(place.core).open(session, "r", {0: 9}, 0.0)
    slots = []
    for first in (0, 3, 6):
        # The same three hashes, each time in other slots: two of three are detached.
        assert set(place.store(session, [1, 2, 3], "")) == {BlockResult.STORED}
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
        used = core.space.index.offsets(core.grace.entries)
        assert sorted(used.tolist()) == sorted(slots)
        assert core.words.generation == opened.generation + 1 + number
    other = place.open("other", "n")
    results = place.store(other, list(range(100, 100 + NUM_SLOTS)))
    assert results.count(BlockResult.STORED) == NUM_SLOTS - 9
    place.core.grace.until_s = 5.0
    expire(place.core, 4.9)
    assert place.holds(opened)
    expire(place.core, 5.0)
    place.core.check_invariants()
    assert not place.holds(opened) and not place.core.grace.is_on
    assert place.memory.words[GENERATION] == place.memory.words[LATEST]


def test_readers_are_told_if_not_all_can_be_kept() -> None:
    place = Place()
    session = place.open()
    opened = residencies(place.core).open(session, "r", {0: 3}, 0.0)
    place.store(session, [1, 2, 3], "r")
    flush(place.core, 1)
    place.core.take_effects()
    entries = np.flatnonzero(place.memory.marks)
    place.core.space.index.table.records[entries[0], table.W_SIZE] += 1
    core = place.restarted()
    assert place.restored.lost_readers and place.restored.kept == 0
    assert not place.holds(opened) and not core.grace.is_on
    assert core.space.used_bytes() == 0, "nothing is kept for nobody"


def test_words_run_out_and_come_back() -> None:
    words = ReaderWords(no_readers(1).words)
    given = [words.of_session(number) for number in range(MAX_SESSION_WORD)]
    assert len(set(given)) == MAX_SESSION_WORD
    with pytest.raises(HotKVError) as caught:
        words.check_room(MAX_SESSION_WORD)
    assert caught.value.reason is Reason.OVERLOADED
    words.revoke(7)
    index, value = words.of_session(MAX_SESSION_WORD)
    assert (index, value) == (given[7][0], given[7][1] + 2)


def test_the_numbers_and_memory_of_residencies_are_bounded() -> None:
    place = Place(client_memory_bytes=1 << 16)
    session = place.open()
    narrow = Place(client_memory_bytes=1 << 11)
    error = narrow.refused(narrow.open(), "r", 1)
    assert error.reason is Reason.RESIDENCY_TOO_LARGE and "client_memory_bytes" in error.message
    count = 0
    with pytest.raises(HotKVError) as caught:
        for count in range(NUM_SLOTS):
            residencies(place.core).open(session, str(count), {0: 1}, 0.0)
    assert caught.value.reason is Reason.OVERLOADED and 5 < count < 40
    place.core.check_invariants()


def test_scattered_pins_of_one_slot_size_leave_slabs_to_another() -> None:
    """Blocks come one by one, between those of others, so that each slab of their size gets a pin
    before the last representation comes."""
    kind = Representation(0, "mean", 1, (SLOT_ALIGN,))
    place = Place()
    space = make_key_space("wide", SLAB // 2, SLOT_ALIGN)
    session = place.core.open_session("e", "worker", space, 0.0, (kind,))
    other = place.core.open_session("f", "worker", make_key_space("n", SLAB // 2, 1), 0.0).number
    place.store(other, list(range(1000, 1000 + 2 * NUM_SLABS)))
    assert not place.core.space.pool.num_free_slabs
    for _ in residencies(place.core).make_room(session.number, "r", {0: 16}):
        pass
    place.core.take_effects()
    residencies(place.core).open(session.number, "r", {0: 16}, 0.0)
    group = session.representations[0]
    for number in range(16):
        runs = [Run(0, words_of([number]), None, number), Run(group, words_of([number]))]
        begin_store(
            place.core, session.number, "s", "s", runs, 0, 0.0, 2.0 + number, residency_id="r"
        )
        results = place.core.end_store(session.number, "s", True, 2.0 + number)
        place.core.take_effects()
        assert [row.tolist() for row in results] == [[BlockResult.STORED]] * 2, number
        place.store(other, [2000 + 2 * number, 2001 + 2 * number])
    place.core.check_invariants()


def test_a_residency_waits_while_pins_lie_in_all_slabs() -> None:
    place = Place()
    first = place.open()
    residencies(place.core).open(first, "r", {0: NUM_SLABS}, 0.0)
    place.store(first, list(range(NUM_SLOTS)))
    # One block of each slab.
    offsets = place.core.space.index.offsets(
        place.core.space.index.find(1, 0, words_of(range(NUM_SLOTS)))
    )
    chosen = np.unique(offsets // SLAB, return_index=True)[1].tolist()
    for at, number in enumerate(chosen):
        place.extend(first, "r", [number], at)
    wide = make_key_space("wide", SLAB, SLOT_ALIGN)
    second = place.core.open_session("f", "worker", wide, 0.0).number
    for _ in residencies(place.core).make_room(second, "w", {0: 2}):
        pass
    assert place.core.space.pool.floors.would_fit({}) and not place.core.take_effects()
    error = place.refused(second, "w", 2)
    assert error.reason is Reason.NO_ROOM_FOR_RESIDENCY and "slabs" in error.message
    place.close(first, "r")
    for _ in residencies(place.core).make_room(second, "w", {0: 2}):
        pass
    place.core.take_effects()
    residencies(place.core).open(second, "w", {0: 2}, 0.0)
    place.core.check_invariants()


def test_no_size_gives_up_slabs_below_what_was_promised() -> None:
    place = Place()
    session, other = place.open(), place.open("other", "n")
    wide = place.core.open_session("w", "worker", make_key_space("w", SLAB, 1), 0.0).number
    place.store(other, list(range(NUM_SLOTS)))
    residencies(place.core).open(session, "r", {0: BOUND_SLOTS}, 0.0)
    results = place.store(wide, list(range(9)))
    assert results.count(BlockResult.STORED) == 3, "16 slabs, of which 13 are promised"
    assert place.core.lookup(2, [HashList(0, words_of(range(NUM_SLOTS)))])[0].sum() == 13 * 4, (
        "nothing was evicted in vain"
    )


def test_promised_representations_take_the_room_of_others() -> None:
    """Every slab of blocks has a pin, and every slot of their size another's representation."""
    kind = Representation(0, "mean", 1, (SLOT_ALIGN,))
    place = Place()
    sessions = [
        place.core.open_session(name, "worker", make_key_space(name, SLAB // 2, 1), 0.0, (kind,))
        for name in ("mine", "theirs")
    ]
    mine, theirs = (session.number for session in sessions)
    for number in range(13):
        place.store(mine, [number])
        place.store(theirs, [number])
    place.store(theirs, list(range(12)), "", sessions[1].representations[0])
    residencies(place.core).open(mine, "r", {0: 12}, 0.0)
    place.extend(mine, "r", list(range(12)))
    place.core.acquire(theirs, "l", [HashList(0, words_of([12]))], 100.0, 1.0)
    assert not place.core.space.pool.num_free_slabs
    group = sessions[0].representations[0]
    assert place.store(mine, list(range(12)), "r", group) == [BlockResult.STORED] * 12
    assert residencies(place.core).bound.promised_bytes == 0


def test_a_use_keeps_the_first_block_of_a_request_too() -> None:
    place = Place()
    session = place.open()
    place.store(session, [1, 2, 3])
    listed = HashList(0, words_of([1, 2, 3]))
    for _ in place.core.use(session, listed, 2.0, Retention(ttl_s=50.0, pin=True)):
        pass
    assert evict(place.core, 1, 0, words_of([1, 2, 3])) == (0, 3)


def test_a_use_that_does_not_ask_for_it_keeps_nothing() -> None:
    place = Place()
    session = place.open()
    place.store(session, [1, 2, 3])
    listed = HashList(0, words_of([1, 2, 3]))
    for _ in place.core.use(session, listed, 2.0, Retention(ttl_s=50.0)):
        pass
    assert evict(place.core, 1, 0, words_of([1, 2, 3])) == (3, 0)


def test_a_block_that_nobody_has_compared_since_a_restart_has_no_place() -> None:
    place = Place()
    session = place.open()
    residencies(place.core).open(session, "r", {0: 8}, 0.0)
    place.store(session, [1, 2], "r")
    index = place.core.space.index
    index.unverified[index.find(1, 0, words_of([2]))] = True
    first, second = place.extend(session, "r", [1, 2])
    assert first >= 0 and second == -1
