"""Tests `SlabPool`, which forms runs: adjacent slabs with slots of one size. Slots never
overlap, and have memory. An empty run is freed at once, and little is wasted at an end. A
rebuilt pool has the same slots."""

import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.stateful import initialize, invariant, precondition, rule
from pydantic import ByteSize

from bench.shapes import slot_sizes
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room import slabs
from hotkv_server.cache.room.slabs import MOST_LOST, SlabPool, run_slabs
from hotkv_server.cache.values import aligned
from hotkv_server.settings.storage import ArenaSettings
from tests.core.support import RUNS_PER_ARENA, SLAB, AnyRuns

SIZES = [1, SLOT_ALIGN, SLOT_ALIGN + 1, 3 * SLOT_ALIGN, SLAB, SLAB + 1, 2 * SLAB + SLOT_ALIGN]
"""In bytes. A slab has 4, 4, 2, 1 and 1 of the first five; the last two span two and three
slabs."""

Slot = tuple[int, int]
"""Offset and aligned size."""


class NaivePool:
    """A naive pool, which asks the real one only where the runs are."""

    def __init__(self, pool: SlabPool, backed: set[int]) -> None:
        self.pool = pool
        self.backed = backed
        self.used: set[Slot] = set()

    def runs(self) -> list[tuple[int, int, int]]:
        """(First slab, length, slot size) of each run."""
        owners = self.pool.slab_owner().tolist()
        heads = Counter(
            head
            for head, owner in zip(self.pool.slab_head().tolist(), owners, strict=True)
            if owner >= 0
        )
        return [(head, length, owners[head]) for head, length in heads.items()]

    def check_slots(self) -> None:
        """Slots must lie in runs of their size, and no run may be empty."""
        in_use: Counter[int] = Counter()
        for head, length, size in self.runs():
            slots = {(head * SLAB + at * size, size) for at in range(length * SLAB // size)}
            assert set(range(head, head + length)) <= self.backed
            assert slots & self.used, "a run without a used slot"
            in_use[size] += len(slots & self.used)
        assert in_use == Counter(size for _, size in self.used)

    def free_slots(self, size: int) -> int:
        num_slots = sum(length * SLAB // of for _, length, of in self.runs() if of == size)
        return num_slots - sum(of == size for _, of in self.used)

    def room(self, size: int) -> int:
        """Free slots in runs, and those that gaps could have. A gap becomes runs of full length;
        its rest is a shorter run, or lengthens the one before it."""
        length, lengths = run_slabs(size, SLAB, self.pool.num_slabs), self.lengths(size)
        longest = -(-size // SLAB) + slabs.LONGEST_END
        room = self.free_slots(size)
        for start, gap in self.gaps():
            num_runs, rest = divmod(gap, length)
            before = length if num_runs else lengths.get(start, 0)
            longer = min(rest, longest - before) if before else 0
            gain = (before + longer) * SLAB // size - before * SLAB // size
            room += num_runs * (length * SLAB // size) + max(gain, rest * SLAB // size)
        return room

    def lengths(self, size: int) -> dict[int, int]:
        """Length of each run, by the slab behind it."""
        return {head + length: length for head, length, of in self.runs() if of == size}

    def gaps(self) -> list[tuple[int, int]]:
        """(First slab, length) of each sequence of free slabs with memory."""
        lent = {head + at for head, length, _ in self.runs() for at in range(length)}
        free = sorted(self.backed - lent)
        starts = [slab for slab in free if slab - 1 not in free]
        ends = [slab + 1 for slab in free if slab + 1 not in free]
        return [(start, end - start) for start, end in zip(starts, ends, strict=True)]

    def figures(self, sizes: set[int]) -> tuple[int, int, int, int]:
        """Bytes of runs, of their free slots, lost at their ends, and in gaps too short for a
        run. `sizes`: ever requested."""
        lent = sum(length for _, length, _ in self.runs()) * SLAB
        idle = sum(self.free_slots(size) * size for size in sizes)
        tail = lent - idle - sum(size for _, size in self.used)
        widest = max((-(-size // SLAB) for size in sizes), default=1)
        return lent, idle, tail, sum(gap % widest for _, gap in self.gaps()) * SLAB


class SlabMachine(AnyRuns):
    @initialize(
        num_slabs=st.integers(1, 14),
        rest=st.integers(0, SLAB - 1),
        is_backed=st.booleans(),
        runs_per_arena=RUNS_PER_ARENA,
        borders=st.sets(st.integers(1, 13), max_size=2),
    )
    def start(
        self,
        num_slabs: int,
        rest: int,
        is_backed: bool,
        runs_per_arena: tuple[int, int],
        borders: set[int],
    ) -> None:
        self.use_runs(runs_per_arena)
        self.starts = [slab * SLAB for slab in sorted({0, *borders}) if slab < num_slabs]
        self.pool = SlabPool(
            num_slabs * SLAB + rest, SLAB, is_backed=is_backed, part_starts=self.starts
        )
        self.naive = NaivePool(self.pool, set(range(num_slabs)) if is_backed else set())
        self.asked: set[int] = set()

    @rule(num_bytes=st.integers(0, 15 * SLAB))
    def back(self, num_bytes: int) -> None:
        """A smaller number than before changes nothing."""
        self.pool.back(num_bytes)
        self.naive.backed |= {
            slab for slab in range(self.pool.num_slabs) if (slab + 1) * SLAB <= num_bytes
        }

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12), part=st.integers(-1, 2))
    def allocate(self, size: int, count: int, part: int) -> None:
        self.asked.add(aligned(size))
        room = self.naive.room(aligned(size))
        assert self.pool.available_slots(size) == room
        offsets = self.pool.allocate(size, count, min(part, len(self.starts) - 1))
        assert len(offsets) == min(count, room)
        fresh = {(int(offset), aligned(size)) for offset in offsets}
        assert len(fresh) == len(offsets) and not fresh & self.naive.used
        self.naive.used |= fresh

    @precondition(lambda self: self.naive.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        size = data.draw(st.sampled_from(sorted({size for _, size in self.naive.used})))
        slots = sorted(slot for slot in self.naive.used if slot[1] == size)
        going = data.draw(st.lists(st.sampled_from(slots), unique=True))
        self.pool.free(size, np.array([offset for offset, _ in going], np.int64))
        self.naive.used -= set(going)

    @rule(num_known=st.integers(0, 14))
    def restart(self, num_known: int) -> None:
        """Rebuilds the pool: a run then ends after its last used slot. `num_known`: slabs known
        to have memory."""
        rebuilt = SlabPool(
            self.pool.num_slabs * SLAB, SLAB, is_backed=False, part_starts=self.starts
        )
        known = [slab for slab in range(num_known) if set(range(slab + 1)) <= self.naive.backed]
        rebuilt.back(len(known) * SLAB)
        self.asked = {size for _, size in self.naive.used}
        for size in self.asked:
            offsets = [offset for offset, slot_size in self.naive.used if slot_size == size]
            rebuilt.claim(size, np.array(offsets, np.int64))
        before, after = self.pool.slab_owner(), rebuilt.slab_owner()
        assert np.array_equal(before[after >= 0], after[after >= 0])
        self.pool = self.naive.pool = rebuilt
        self.naive.backed = set(known) | set(np.flatnonzero(after >= 0).tolist())

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        check_apart(self.naive.used, self.pool.num_slabs * SLAB)
        self.naive.check_slots()
        assert self.pool.num_free_slabs == sum(gap for _, gap in self.naive.gaps())
        assert self.pool.num_backed == len(self.naive.backed)
        by_size = Counter(size for _, size in self.naive.used)
        assert {row.slot_bytes: row.num_used for row in self.pool.stats()} == by_size
        figures = self.pool.figures()
        found = (figures.lent_bytes, figures.idle_bytes, figures.tail_bytes, figures.stranded_bytes)
        assert found == self.naive.figures(self.asked)
        assert figures.arena_bytes == self.pool.capacity_bytes == len(self.naive.backed) * SLAB
        lent_bytes = max(1, figures.lent_bytes)
        assert figures.fragmentation_ratio == (found[1] + found[2]) / lent_bytes
        lent, used = Counter[int](), sum(size for _, size in self.naive.used)
        for _, length, size in self.naive.runs():
            lent[size] += length * SLAB
        assert figures.shares == tuple(
            (size, lent[size] / figures.arena_bytes, size * by_size[size] / used)
            for size in sorted(lent)
        )
        apart = (abs(lent[size] / lent_bytes - size * by_size[size] / used) for size in lent)
        assert math.isclose(figures.imbalance_ratio, sum(apart) / 2, abs_tol=1e-9)


def check_apart(slots: set[Slot], arena_bytes: int) -> None:
    ordered = sorted(slots)
    assert all(offset % SLOT_ALIGN == 0 for offset, _ in ordered)
    ends = [0, *(offset + size for offset, size in ordered)]
    begins = [*(offset for offset, _ in ordered), arena_bytes]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


TestSlabMachine = SlabMachine.TestCase


UNITS = st.integers(-1, 24) | st.sampled_from([0, 4, 8, 12, 16, 20])
"""Offsets in units of SLOT_ALIGN, some at starts of slabs."""


@given(
    claims=st.lists(
        st.tuples(st.sampled_from(SIZES), st.lists(UNITS, min_size=1, max_size=4)), max_size=4
    )
)
@example(claims=[(SLAB + 1, [0, 4])])
@example(claims=[(3 * SLOT_ALIGN, [0, 4, 7])])
def test_claims_that_contradict_are_refused_and_change_nothing(
    claims: list[tuple[int, list[int]]],
) -> None:
    """A damaged table may have such slots."""
    pool = SlabPool(5 * SLAB, SLAB)
    taken: set[Slot] = set()
    for size, units in claims:
        offsets = np.array(units, np.int64) * SLOT_ALIGN
        before = (pool.stats(), pool.slab_owner().tolist())
        try:
            pool.claim(size, offsets)
        except ValueError:
            assert (pool.stats(), pool.slab_owner().tolist()) == before
        else:
            taken |= {(int(offset), aligned(size)) for offset in offsets}
            assert len(taken) == sum(row.num_used for row in pool.stats())
            check_apart(taken, 5 * SLAB)
        pool.check_invariants()


def test_freeing_with_another_size_or_twice_is_caught() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    offsets = pool.allocate(SLOT_ALIGN, 2)
    with pytest.raises(AssertionError):
        pool.free(SLAB, offsets)
    pool.free(SLOT_ALIGN, offsets)
    with pytest.raises(AssertionError):
        pool.free(SLOT_ALIGN, offsets)


def test_slots_that_were_freed_last_are_used_first() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    first = pool.allocate(SLOT_ALIGN, 6)
    pool.free(SLOT_ALIGN, first[[0, 4]])
    assert (pool.allocate(SLOT_ALIGN, 9) // SLOT_ALIGN).tolist() == [4, 0, *range(6, 13)]


def test_slots_lie_in_the_preferred_part_while_it_has_room() -> None:
    """Then in others. Without a preference, all parts get their share."""
    pool = SlabPool(30 * SLAB, SLAB, part_starts=(0, 10 * SLAB, 20 * SLAB))

    def parts(offsets: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[int]:
        return np.bincount(offsets // (10 * SLAB), minlength=3).tolist()  # type: ignore[no-any-return]

    assert parts(pool.allocate(SLAB, 7, 1)) == [0, 7, 0]
    first = pool.allocate(SLAB, 9)
    assert parts(first) == [3, 3, 3]
    assert parts(pool.allocate(SLAB, 4, 2)) == [0, 0, 4]
    assert parts(pool.allocate(SLAB, 5, 2)) == [2, 0, 3]
    pool.free(SLAB, first)
    assert parts(pool.allocate(SLAB, 3, 1)) == [0, 3, 0]
    pool.check_invariants()


def test_a_short_run_behind_a_longer_one_grows() -> None:
    pool, size = SlabPool(60 * SLAB, SLAB), 3 * SLOT_ALIGN
    pool.allocate(2 * SLAB + SLOT_ALIGN, 1)
    others = pool.allocate(SLAB, 57)
    for slab in (3, 4):
        pool.free(SLAB, others[others == slab * SLAB])
        assert pool.allocate(size, 1).tolist() == [3 * SLAB + (slab - 3) * size]
    pool.check_invariants()


@pytest.mark.parametrize(
    ("arena_bytes", "slab_bytes"),
    [(SLAB, 0), (SLAB, SLOT_ALIGN + 1), (SLAB - 1, SLAB), (SLAB, -SLOT_ALIGN)],
)
def test_sizes_that_make_no_pool_are_refused(arena_bytes: int, slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="_bytes is"):
        SlabPool(arena_bytes, slab_bytes)


@given(
    slot_bytes=st.integers(1, (64 << 20) // SLOT_ALIGN).map(lambda units: units * SLOT_ALIGN),
    slab_bytes=st.sampled_from([1 << 20, 4 << 20, 16 << 20]),
)
@example(slot_bytes=62 << 20, slab_bytes=4 << 20)
def test_runs_lose_little_for_every_slot_size(slot_bytes: int, slab_bytes: int) -> None:
    length = run_slabs(slot_bytes, slab_bytes, 1 << 20)
    lost = length * slab_bytes % slot_bytes
    assert lost <= MOST_LOST * length * slab_bytes
    shortest = -(-slot_bytes // slab_bytes)
    assert length <= shortest + slabs.LONGEST_END
    # In a small arena, a run takes at most a sixteenth of the slabs, unless one slot needs more.
    for num_slabs in (1, 20, 100):
        assert run_slabs(slot_bytes, slab_bytes, num_slabs) <= max(shortest, num_slabs // 16)


@pytest.mark.parametrize("block_tokens", [16, 64, 128])
@pytest.mark.parametrize("gib", [2, 8, 64])
def test_arena_of_one_model_loses_little(gib: int, block_tokens: int) -> None:
    arena = ArenaSettings(bytes=ByteSize(gib << 30))
    for name, slot_bytes in slot_sizes(block_tokens).items():
        pool = SlabPool(arena.bytes, arena.slab_size)
        used = len(pool.allocate(slot_bytes, arena.bytes // slot_bytes)) * slot_bytes
        assert used >= 0.97 * arena.bytes, name


@given(
    promises=st.dictionaries(
        st.sampled_from(SIZES).map(aligned), st.integers(1, 9), min_size=1, max_size=3
    ),
    others=st.lists(st.sampled_from(SIZES), max_size=3),
    held=st.integers(0, 6),
)
def test_promised_room_is_had_whatever_others_take(
    promises: dict[int, int], others: list[int], held: int
) -> None:
    pool = SlabPool(14 * SLAB, SLAB)
    for size, count in promises.items():
        if pool.floors.would_fit({size: count}):
            pool.floors.add(size, count)
            pool.allocate(size, min(held, count))
            fewest = pool.lent_slabs(size) - pool.floors.surplus(size)
            if pool.floors.surplus(size):
                assert fewest // -(-size // SLAB) * max(1, SLAB // size) >= count
    kept = dict(pool.floors._slots)
    for size in others:
        if aligned(size) not in kept:
            pool.allocate(size, 100)
    for size, count in kept.items():
        assert pool.available_slots(size) >= count - min(held, count), "a promise was not kept"
        assert pool.floors.missing(size) <= pool.num_free_slabs
