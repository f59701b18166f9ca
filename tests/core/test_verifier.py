"""Comparing blocks with their check values: what agrees is cleared, what does not is condemned,
what changed meanwhile is left alone."""

import numpy as np
import pytest

from hotkv_proto.errors import HotKVError
from hotkv_proto.keys import Representation
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig, Entries, HashList, LoadPositions, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity import verifier
from hotkv_server.integrity.sums import add_sums
from hotkv_server.integrity.verifier import Case, Verifier
from hotkv_server.node.persistence import UseNotes
from tests.core.support import begin_store, evict, flush, make_key_space, make_table, words_of

SLAB, NUM_SLABS, CAPACITY = 4 * SLOT_ALIGN, 6, 40


class Arena:
    """A core over memory of its own, with ten blocks of random bytes and their check values."""

    def __init__(self) -> None:
        self.memory = np.random.default_rng(0).integers(0, 256, NUM_SLABS * SLAB, np.uint8)
        self.region = Region(self.memory.ctypes.data, self.memory.nbytes, "the arena")
        config = CoreConfig(NUM_SLABS * SLAB, SLAB, CAPACITY, unadmitted_share=1.0, check_stride=1)
        self.core = CacheCore(config, make_table(CAPACITY), POLICIES["lru"](CAPACITY))
        self.session = self.core.open_session(
            "e", "rank", make_key_space("one", SLOT_ALIGN - 100, SLOT_ALIGN), 0.0
        ).number
        self.verifier = Verifier(self.core, self.region)
        self.store(range(10))
        self.core.space.index.unverified[self.entries(range(10))] = True

    def store(self, numbers: range) -> None:
        name = f"s{numbers.start}"
        slots = begin_store(
            self.core, self.session, name, name, [Run(0, words_of(numbers))], 0, 0.0, 1.0
        )
        sums = np.zeros(len(slots[0].offsets), np.uint64)
        add_sums(
            self.region, slots[0].offsets, SLOT_ALIGN - 100, 0, np.ones(len(sums), np.int64), sums
        )
        self.core.end_store(self.session, name, True, 1.0, [sums])
        self.core.take_effects()

    def entries(self, numbers: range) -> np.ndarray:
        return self.core.space.index.find(1, 0, words_of(numbers))

    def spoil(self, number: int) -> None:
        self.memory[
            int(self.core.space.index.offsets(self.entries(range(number, number + 1)))[0]) + 5
        ] ^= 1

    def found(self) -> list[bool]:
        return self.core.lookup(1, [HashList(0, words_of(range(10)))])[0].tolist()


@pytest.fixture
def arena() -> Arena:
    return Arena()


def test_what_agrees_is_cleared_and_what_does_not_is_condemned(arena: Arena) -> None:
    arena.spoil(3)
    assert arena.verifier.verify_for(10.0) == 0
    assert arena.found() == [number != 3 for number in range(10)]
    assert (arena.verifier.verified_blocks, arena.verifier.condemned_blocks) == (9, 1)
    assert [len(notice.hashes) for notice in arena.core.take_effects()] == [1]
    arena.core.check_invariants()


def test_bytes_behind_the_end_of_a_block_do_not_matter(arena: Arena) -> None:
    arena.memory[
        int(arena.core.space.index.offsets(arena.entries(range(1)))[0]) + SLOT_ALIGN - 50
    ] ^= 1
    arena.verifier.verify_for(10.0)
    assert all(arena.found())


def test_a_block_that_went_while_it_was_read_is_no_proof(arena: Arena) -> None:
    """Its slot has another block by then, so that the bytes did not agree says nothing."""
    cases = arena.verifier.cases(arena.entries(range(10)))
    evict(arena.core, 1, 0, words_of([3]))
    arena.spoil(4)
    evict(arena.core, 1, 0, words_of([4]))
    arena.store(range(20, 22))
    assert len(arena.verifier.settle(cases, arena.verifier.judge(cases))) == 0
    assert arena.found() == [number not in (3, 4) for number in range(10)]
    assert arena.core.lookup(1, [HashList(0, words_of([20, 21]))])[0].all()


def test_a_condemned_block_that_is_pinned_keeps_its_slot(arena: Arena) -> None:
    arena.core.acquire(arena.session, "held", [HashList(0, words_of([3]))], 0.0, 1.0)
    arena.spoil(3)
    arena.verifier.verify_for(10.0)
    assert not arena.found()[3] and arena.core.space.used_bytes() == 10 * SLOT_ALIGN
    arena.core.release(arena.session, "held")
    assert arena.core.space.used_bytes() == 9 * SLOT_ALIGN
    arena.core.check_invariants()


def test_a_block_that_was_condemned_under_a_lease_fails_each_load(arena: Arena) -> None:
    """Two ranks load under one lease, both compared before either is settled; a third begins when
    the block is condemned already."""
    arena.core.acquire(arena.session, "held", [HashList(0, words_of(range(10)))], 0.0, 1.0)
    arena.spoil(3)
    slots = [
        arena.core.begin_load(arena.session, f"t{at}", "held", [LoadPositions(0, np.arange(10))])
        for at in range(3)
    ]
    bad = arena.entries(range(3, 4)).tolist()
    early = [arena.verifier.unverified(slots[at]) for at in range(2)]
    verdicts = [arena.verifier.judge(cases) for cases in early]
    for cases, verdict in zip(early, verdicts, strict=True):
        assert arena.verifier.settle(cases, verdict).tolist() == bad
    late = arena.verifier.unverified(slots[2])
    assert arena.verifier.settle(late, arena.verifier.judge(late)).tolist() == bad
    assert arena.verifier.condemned_blocks == 1 == arena.core.counters.condemned_blocks
    arena.core.check_invariants()


def test_what_the_scrubber_condemns_is_not_loaded_under_a_lease(arena: Arena) -> None:
    """Also where it was compared before, and where the load is on its way."""
    arena.verifier.verify_for(10.0)
    arena.core.acquire(arena.session, "held", [HashList(0, words_of(range(10)))], 0.0, 1.0)
    slots = arena.core.begin_load(arena.session, "t", "held", [LoadPositions(0, np.arange(5))])
    assert not arena.verifier.unverified(slots)
    arena.spoil(3)
    batch = arena.verifier.next_batch()
    assert batch is not None
    scrubbed = arena.verifier.cases(batch)
    arena.verifier.settle(scrubbed, arena.verifier.judge(scrubbed))
    again = arena.verifier.unverified(slots)
    assert len(arena.verifier.settle(again, arena.verifier.judge(again))) == 1
    arena.core.end_load(arena.session, "t", False)
    arena.core.release(arena.session, "held")
    assert not arena.core.space.index.unverified.any()


def test_a_block_that_is_flushed_under_a_lease_is_still_compared(arena: Arena) -> None:
    arena.core.acquire(arena.session, "held", [HashList(0, words_of(range(10)))], 0.0, 1.0)
    slots = arena.core.begin_load(arena.session, "t", "held", [LoadPositions(0, np.arange(10))])
    arena.spoil(3)
    flush(arena.core, 1)
    cases = arena.verifier.unverified(slots)
    assert len(arena.verifier.settle(cases, arena.verifier.judge(cases))) == 1
    assert int(arena.core.space.index.unverified.sum()) == 1, "what agrees is cleared"


def test_a_block_that_comes_twice_is_condemned_once(arena: Arena) -> None:
    arena.core.acquire(arena.session, "held", [HashList(0, words_of(range(10)))], 0.0, 1.0)
    for twice in ([3, 3], [3], [4, 0]):
        with pytest.raises(HotKVError, match="lease_positions name a block twice"):
            arena.core.begin_load(
                arena.session,
                "t",
                "held",
                [LoadPositions(0, np.arange(5)), LoadPositions(0, np.array(twice))],
            )
    slots = [
        *arena.core.begin_load(arena.session, "t", "held", [LoadPositions(0, np.arange(5))]),
        *arena.core.begin_load(arena.session, "u", "held", [LoadPositions(0, np.array([3]))]),
    ]
    arena.spoil(3)
    cases = arena.verifier.unverified(slots)
    assert len(arena.verifier.settle(cases, arena.verifier.judge(cases))) == 1
    arena.core.check_invariants()


def test_what_went_with_a_condemned_block_is_not_looked_at(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says nothing any more: the number is free, and in the place of its slot stands the
    next free number."""
    kind = Representation(0, "rot2u", 7, (SLOT_ALIGN,))
    session = arena.core.open_session(
        "e", "rank", make_key_space("one", SLOT_ALIGN - 100, SLOT_ALIGN), 2.0, (kind,)
    )
    group = session.representations[0]
    slots = begin_store(
        arena.core, session.number, "r", "r", [Run(group, words_of(range(10)))], 0, 0.0, 2.0
    )
    sums = np.zeros(10, np.uint64)
    add_sums(arena.region, slots[0].offsets, SLOT_ALIGN, 0, np.ones(10, np.int64), sums)
    arena.core.end_store(session.number, "r", True, 2.0, [sums])
    index = arena.core.space.index
    index.unverified[slots[0].entries] = True
    for number in range(10):
        arena.spoil(number)
    cases = arena.verifier.cases

    def cases_of_live(entries: Entries) -> list[Case]:
        assert index.states()[entries].all()
        return cases(entries)

    monkeypatch.setattr(arena.verifier, "cases", cases_of_live)
    monkeypatch.setattr(arena.verifier, "_batch_length", lambda entries: 1)
    assert arena.verifier.verify_for(10.0) == 0
    assert arena.verifier.condemned_blocks == 10 and not index.num_entries


@pytest.mark.parametrize("scanned", [1, 3, 10, 1 << 17])
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_a_pass_of_the_scrubber_sees_every_block_once(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, scanned: int, batch_bytes: int
) -> None:
    """However little it looks at in one go, so that millions of entries hold up nobody."""
    monkeypatch.setattr(verifier, "SCANNED_ENTRIES", scanned)
    monkeypatch.setattr(verifier, "BATCH_BYTES", max(batch_bytes, SLOT_ALIGN))
    arena.verifier._next_entry = 4
    seen: list[int] = []
    for _ in range(2):
        while (batch := arena.verifier.next_batch()) is not None:
            assert len(batch) <= scanned
            seen += batch.tolist()
    assert arena.verifier.passes == 2 and sorted(seen) == sorted([*range(4, 11), *range(1, 11)])


@pytest.mark.parametrize("num_parts", [1, 3, 7, 50])
def test_times_of_last_use_are_taken_in_parts(arena: Arena, num_parts: int) -> None:
    """What comes while they are taken is not known yet; what goes is no ready block."""
    notes = UseNotes(arena.core)
    taken = [notes.take(num_parts) for _ in range(num_parts)]
    assert all(part is None for part in taken[:-1]) and taken[-1] is not None
    assert taken[-1][arena.entries(range(10))] == pytest.approx(1.0, abs=0.001)
    evict(arena.core, 1, 0, words_of([3]))
    again = [notes.take(num_parts) for _ in range(num_parts)][-1]
    assert again is not None and int(np.isnan(again).sum()) == len(again) - 9
