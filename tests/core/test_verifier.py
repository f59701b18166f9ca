"""Tests `Verifier`: a block that differs from its checksum is condemned; one that changed
meanwhile is left alone."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hotkv_proto.errors import Reason
from hotkv_proto.keys import Sketch
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.values import Entries, HashList, LoadPositions, Run, SessionRecord, SlotRun
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity import verifier
from hotkv_server.integrity.sums import add_sums
from hotkv_server.integrity.verifier import Case, Verifier
from hotkv_server.node import persistence
from hotkv_server.node.persistence import UseNotes
from tests.core.support import SLAB, World, begin_store, evict, flush, reason_of, words_of

NUM_SLABS, BLOCK_BYTES = 6, SLOT_ALIGN - 100
SIZES = (BLOCK_BYTES, SLOT_ALIGN)
KIND = Sketch(0, "rot2u", 7, (SLOT_ALIGN,))


class Arena(World):
    """A core with ten unverified blocks, of which `hold` makes a lease."""

    def __init__(self) -> None:
        super().__init__(NUM_SLABS, 40, unadmitted_share=1.0, check_stride=1)
        self.memory = np.random.default_rng(0).integers(0, 256, NUM_SLABS * SLAB, np.uint8)
        self.region = Region(self.memory.ctypes.data, self.memory.nbytes, "the arena")
        self.session = self.open(sizes=SIZES)
        self.verifier = Verifier(self.core, self.region)
        self.fill(self.session, range(10))

    def fill(
        self, session: SessionRecord, numbers: range, group: int = 0, num_bytes: int = BLOCK_BYTES
    ) -> None:
        runs = [Run(group, words_of(numbers))]
        (slots,) = begin_store(self.core, session.number, "s", "s", runs, 0, 0.0, 1.0)
        sums, strides = np.zeros(len(slots.offsets), np.uint64), np.ones(len(numbers), np.int64)
        add_sums(self.region, slots.offsets, num_bytes, 0, strides, sums)
        self.core.end_store(session.number, "s", True, 1.0, [sums])
        self.core.take_effects()
        self.core.space.index.unverified[slots.entries] = True

    def hold(self) -> None:
        listed = [HashList(0, words_of(range(10)))]
        self.core.acquire(self.session.number, "held", listed, 0.0, 1.0)

    def load(self, name: str, *runs: Sequence[int]) -> list[SlotRun]:
        """Under the lease of `hold`."""
        positions = [LoadPositions(0, np.array(run)) for run in runs]
        return self.core.begin_load(self.session.number, name, "held", positions)

    def spoil(self, number: int, at: int = 5) -> None:
        self.memory[int(self.core.space.index.offsets(self.entries([number]))[0]) + at] ^= 1

    def batches(self) -> Iterator[Entries]:
        """Batches that are left of the scrubber's pass."""
        while (batch := self.verifier.next_batch()) is not None:
            yield batch

    def settle(self, cases: list[Case]) -> list[int]:
        """The condemned blocks' entries."""
        return list(self.verifier.settle(cases, self.verifier.judge(cases)).tolist())


@pytest.fixture
def arena() -> Arena:
    return Arena()


def all_but(*gone: int) -> list[int]:
    return [number for number in range(10) if number not in gone]


def test_agreeing_blocks_clear_others_are_condemned(arena: Arena) -> None:
    """A byte after a block's end is no damage."""
    arena.spoil(3)
    arena.spoil(0, SLOT_ALIGN - 50)
    arena.verifier.verify_for(10.0)
    assert not arena.core.space.index.unverified.any()
    assert arena.found(range(10)) == all_but(3)
    assert (arena.verifier.verified_blocks, arena.verifier.condemned_blocks) == (9, 1)
    assert [len(notice.hashes) for notice in arena.core.take_effects()] == [1]
    arena.core.check_invariants()


def test_block_gone_while_read_is_no_proof(arena: Arena) -> None:
    """Another block has the slot meanwhile."""
    cases = arena.verifier.cases(arena.entries(range(10)))
    arena.spoil(4)
    evict(arena.core, 1, 0, words_of([3, 4]))
    arena.fill(arena.session, range(20, 22))
    assert not arena.settle(cases)
    assert arena.found(range(10)) == all_but(3, 4) and arena.found([20, 21]) == [20, 21]


def test_pinned_condemned_block_keeps_its_slot(arena: Arena) -> None:
    arena.core.acquire(arena.session.number, "one", [HashList(0, words_of([3]))], 0.0, 1.0)
    arena.spoil(3)
    entries = arena.entries(range(10))
    for _ in range(2):
        assert asyncio.run(arena.verifier.compare(entries)).tolist() == [entries[3]]
    assert arena.found(range(10)) == all_but(3)
    assert arena.core.space.used_bytes() == 10 * SLOT_ALIGN
    arena.core.release(arena.session.number, "one")
    assert arena.core.space.used_bytes() == 9 * SLOT_ALIGN
    arena.core.check_invariants()


def test_condemned_block_under_lease_fails_each_load(arena: Arena) -> None:
    """Two loads are compared at the same time, the third afterwards."""
    arena.hold()
    arena.spoil(3)
    slots = [arena.load(f"t{at}", range(10)) for at in range(3)]
    bad = arena.entries([3]).tolist()
    early = [arena.verifier.unverified(slots[at]) for at in range(2)]
    verdicts = [arena.verifier.judge(cases) for cases in early]
    for cases, verdict in zip(early, verdicts, strict=True):
        assert arena.verifier.settle(cases, verdict).tolist() == bad
    assert arena.settle(arena.verifier.unverified(slots[2])) == bad
    assert arena.verifier.condemned_blocks == 1 == arena.core.counters.condemned_blocks
    arena.core.check_invariants()


def test_scrubbers_condemned_block_is_not_loaded(arena: Arena) -> None:
    """The block was verified before. Loads of other blocks go on."""
    arena.verifier.verify_for(10.0)
    arena.hold()
    slots, good = arena.load("t", range(5)), arena.load("u", range(5, 9))
    assert not arena.verifier.unverified(slots)
    arena.spoil(3)
    batch = arena.verifier.next_batch()
    assert batch is not None
    arena.settle(arena.verifier.cases(batch))
    assert len(arena.settle(arena.verifier.unverified(slots))) == 1
    assert arena.verifier.is_doubtful([*good, *slots]) and not arena.verifier.is_doubtful(good)
    for load in "tu":
        arena.core.end_load(arena.session.number, load, False)
    arena.core.release(arena.session.number, "held")
    assert not arena.core.space.index.unverified.any()


def test_block_flushed_under_a_lease_is_compared(arena: Arena) -> None:
    arena.hold()
    slots = arena.load("t", range(10))
    arena.spoil(3)
    flush(arena.core, 1)
    assert len(arena.settle(arena.verifier.unverified(slots))) == 1
    assert int(arena.core.space.index.unverified.sum()) == 1, "what agrees is cleared"


def test_a_block_that_comes_twice_is_condemned_once(arena: Arena) -> None:
    arena.hold()
    for twice in ([3, 3], [3], [4, 0]):
        assert reason_of(lambda run=twice: arena.load("t", range(5), run)) is Reason.INVALID_FIELD  # type: ignore[misc]
    slots = [*arena.load("t", range(5)), *arena.load("u", [3])]
    arena.spoil(3)
    assert len(arena.settle(arena.verifier.unverified(slots))) == 1
    arena.core.check_invariants()


def test_companions_of_a_condemned_block_are_skipped(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sketches go with their blocks. A removed record refers to no slot."""
    session = arena.open(sizes=SIZES, kinds=(KIND,), now_s=2.0)
    arena.fill(session, range(10), session.sketches[0], SLOT_ALIGN)
    for number in range(10):
        arena.spoil(number)
    index, cases = arena.core.space.index, arena.verifier.cases

    def cases_of_live(entries: Entries) -> list[Case]:
        assert index.states()[entries].all()
        return cases(entries)

    monkeypatch.setattr(arena.verifier, "cases", cases_of_live)
    monkeypatch.setattr(arena.verifier, "_batch_length", lambda entries: 1)
    arena.verifier.verify_for(10.0)
    assert not index.unverified.any()
    assert arena.verifier.condemned_blocks == 10 and not index.num_entries


@pytest.mark.parametrize("scanned", [1, 3, 10, 1 << 17])
@pytest.mark.parametrize("batch_bytes", [SLOT_ALIGN, 1 << 20])
def test_scrubber_sees_every_block_once_a_pass(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, scanned: int, batch_bytes: int
) -> None:
    """Its steps are small, so that no caller is delayed."""
    monkeypatch.setattr(verifier, "SCANNED_ENTRIES", scanned)
    monkeypatch.setattr(verifier, "BATCH_BYTES", batch_bytes)
    arena.verifier._next_entry = 4
    for expected in (range(4, 11), range(1, 11)):
        batches = [*arena.batches()]
        assert np.concatenate(batches).tolist() == [*expected]
        assert max(map(len, batches)) <= scanned
    assert arena.verifier.passes == 2


def test_scrubbers_pass_does_not_follow_stores(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "SCANNED_ENTRIES", 6)
    first = arena.verifier.next_batch()
    arena.fill(arena.session, range(10, 14))
    assert first is not None
    assert [*first.tolist(), *np.concatenate([*arena.batches()])] == [*range(1, 11)]
    assert np.concatenate([*arena.batches()]).tolist() == [*range(1, 15)]
    assert arena.verifier.passes == 2


@pytest.mark.parametrize("part_entries", [1, 4, 1 << 14])
@pytest.mark.parametrize("num_parts", [1, 3, 7, 50])
def test_times_of_last_use_are_taken_in_parts(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, num_parts: int, part_entries: int
) -> None:
    """Entries that are not ready blocks have NaN."""
    monkeypatch.setattr(persistence, "PART_ENTRIES", part_entries)
    notes = UseNotes(arena.core.space)
    taken = [notes.take(num_parts) for _ in range(num_parts)]
    assert all(part is None for part in taken[:-1]) and taken[-1] is not None
    assert taken[-1][arena.entries(range(10))] == pytest.approx(1.0, abs=0.001)
    evict(arena.core, 1, 0, words_of([3]))
    again = [notes.take(num_parts) for _ in range(num_parts)][-1]
    assert again is not None and int(np.isnan(again).sum()) == len(again) - 9
