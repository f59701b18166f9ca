"""Slots are never shared or without memory, slabs go back at once, a pool rebuilt from its slots is
the pool that was."""

import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room.slabs import SlabPool, aligned

SLAB = 4 * SLOT_ALIGN
SIZES = [1, SLOT_ALIGN, SLOT_ALIGN + 1, 3 * SLOT_ALIGN, SLAB, SLAB + 1, 2 * SLAB + SLOT_ALIGN]
"""In slots a slab: 4, 4, 2, 1, 1; the last two span two and three slabs."""

Slot = tuple[int, int]
"""Offset and aligned size."""


class NaivePool:
    """Used slots and slabs with memory as sets; everything else is counted anew from them."""

    def __init__(self, num_slabs: int, backed: set[int]) -> None:
        self.num_slabs = num_slabs
        self.backed = backed
        self.used: set[Slot] = set()

    def owners(self) -> list[int]:
        """Size that each slab is lent to, -1 for none, -2 without memory: a slab is lent exactly
        while one of its slots is used."""
        owners = [-1 if slab in self.backed else -2 for slab in range(self.num_slabs)]
        for offset, size in self.used:
            for slab in range(offset // SLAB, -(-(offset + size) // SLAB)):
                assert owners[slab] in (-1, size), "two sizes in one slab"
                owners[slab] = size
        return owners

    def room(self, size: int) -> int:
        """Slots of this size that may still be taken."""
        owners = self.owners()
        if size <= SLAB:
            used = sum(slot_size == size for _, slot_size in self.used)
            return (owners.count(size) + owners.count(-1)) * (SLAB // size) - used
        span = -(-size // SLAB)
        return sum(gap // span for gap in self.gaps())

    def gaps(self) -> list[int]:
        """Lengths of the runs of free slabs."""
        signs = "".join("." if owner == -1 else "x" for owner in self.owners())
        return [len(gap) for gap in signs.split("x")]

    def figures(self, sizes: set[int]) -> tuple[int, int, int, int]:
        """Lent, idle, tail and stranded bytes, slab by slab; `sizes` are those ever asked for."""
        owners = self.owners()
        idle = tail = 0
        for slab, size in enumerate(owners):
            used = sum(
                slot_size
                for offset, slot_size in self.used
                if offset // SLAB == slab and slot_size <= SLAB
            )
            if 0 < size <= SLAB:
                idle += SLAB // size * size - used
                tail += SLAB - SLAB // size * size
        tail += sum(-(-size // SLAB) * SLAB - size for _, size in self.used if size > SLAB)
        widest = max((-(-size // SLAB) for size in sizes), default=1)
        stranded = sum(gap % widest for gap in self.gaps())
        return sum(owner >= 0 for owner in owners) * SLAB, idle, tail, stranded * SLAB


class SlabMachine(RuleBasedStateMachine):
    """Allocates, frees, grows and rebuilds; after each step the pool agrees with `NaivePool`."""

    @initialize(num_slabs=st.integers(1, 9), rest=st.integers(0, SLAB - 1), is_backed=st.booleans())
    def start(self, num_slabs: int, rest: int, is_backed: bool) -> None:
        self.pool = SlabPool(num_slabs * SLAB + rest, SLAB, is_backed=is_backed)
        self.naive = NaivePool(num_slabs, set(range(num_slabs)) if is_backed else set())
        self.asked: set[int] = set()

    @rule(num_bytes=st.integers(0, 10 * SLAB))
    def back(self, num_bytes: int) -> None:
        """Also less than before: what has memory keeps it."""
        self.pool.back(num_bytes)
        self.naive.backed |= {
            slab for slab in range(self.naive.num_slabs) if (slab + 1) * SLAB <= num_bytes
        }

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12))
    def allocate(self, size: int, count: int) -> None:
        self.asked.add(aligned(size))
        room = self.naive.room(aligned(size))
        assert self.pool.available_slots(size) == room
        offsets = self.pool.allocate(size, count)
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

    @rule(num_known=st.integers(0, 9))
    def restart(self, num_known: int) -> None:
        """Goes on with a pool rebuilt by `claim`, as the server does after a restart; of free slabs
        it knows that the first have memory."""
        rebuilt = SlabPool(self.pool.num_slabs * SLAB, SLAB, is_backed=False)
        known = [slab for slab in range(num_known) if set(range(slab + 1)) <= self.naive.backed]
        rebuilt.back(len(known) * SLAB)
        self.naive.backed = {
            slab for slab, owner in enumerate(self.naive.owners()) if owner >= 0
        } | set(known)
        self.asked = {size for _, size in self.naive.used}
        for size in self.asked:
            offsets = [offset for offset, slot_size in self.naive.used if slot_size == size]
            rebuilt.claim(size, np.array(offsets, np.int64))
        assert rebuilt.stats() == self.pool.stats()
        self.pool = rebuilt

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        check_apart(self.naive.used, self.pool.num_slabs * SLAB)
        assert self.pool.slab_owner().tolist() == self.naive.owners()
        assert self.pool.num_free_slabs == self.naive.owners().count(-1)
        assert self.pool.num_backed == len(self.naive.backed)
        by_size = Counter(size for _, size in self.naive.used)
        assert {row.slot_bytes: row.num_used for row in self.pool.stats()} == by_size
        figures = self.pool.figures()
        found = (figures.lent_bytes, figures.idle_bytes, figures.tail_bytes, figures.stranded_bytes)
        assert found == self.naive.figures(self.asked)
        assert figures.arena_bytes == self.pool.capacity_bytes == len(self.naive.backed) * SLAB
        assert 0 <= figures.fragmentation_ratio < 1 and 0 <= figures.imbalance_ratio < 1
        of_arena = sum(share for _, share, _ in figures.shares)
        assert math.isclose(of_arena * figures.arena_bytes, figures.lent_bytes)
        of_used = sum(share for _, _, share in figures.shares)
        assert not figures.shares or math.isclose(of_used, 1)


def check_apart(slots: set[Slot], arena_bytes: int) -> None:
    """Slots lie in the arena, and none on another."""
    ordered = sorted(slots)
    assert all(offset % SLOT_ALIGN == 0 for offset, _ in ordered)
    ends = [0, *(offset + size for offset, size in ordered)]
    begins = [*(offset for offset, _ in ordered), arena_bytes]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


TestSlabMachine = SlabMachine.TestCase


UNITS = st.integers(-1, 24) | st.sampled_from([0, 4, 8, 12, 16, 20])
"""Offsets in SLOT_ALIGN; the second half starts slabs."""


@given(
    claims=st.lists(
        st.tuples(st.sampled_from(SIZES), st.lists(UNITS, min_size=1, max_size=4)), max_size=4
    )
)
@example(claims=[(SLAB + 1, [0, 4])])
def test_claims_that_contradict_are_refused_and_change_nothing(
    claims: list[tuple[int, list[int]]],
) -> None:
    """Whatever a damaged table says, claims end in a consistent pool or in ValueError."""
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


@pytest.mark.parametrize(
    ("arena_bytes", "slab_bytes"),
    [(SLAB, 0), (SLAB, SLOT_ALIGN + 1), (SLAB - 1, SLAB), (SLAB, -SLOT_ALIGN)],
)
def test_sizes_that_make_no_pool_are_refused(arena_bytes: int, slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="_bytes is"):
        SlabPool(arena_bytes, slab_bytes)


def test_figures_of_a_pool() -> None:
    """Two sizes: one fills its slab, of the other one slot of two is free. Then a size that needs
    two slabs side by side."""
    pool = SlabPool(8 * SLAB, SLAB)
    assert pool.figures().fragmentation_ratio == pool.figures().imbalance_ratio == 0
    pool.allocate(SLAB, 1)
    assert (pool.figures().fragmentation_ratio, pool.figures().imbalance_ratio) == (0, 0)
    pool.allocate(SLAB // 4 + 1, 1)
    figures = pool.figures()
    assert (figures.lent_bytes, figures.idle_bytes, figures.tail_bytes) == (2 * SLAB, SLAB // 2, 0)
    assert figures.fragmentation_ratio == 0.25
    assert figures.shares == ((SLAB // 2, 1 / 8, 1 / 3), (SLAB, 1 / 8, 2 / 3))
    assert math.isclose(figures.imbalance_ratio, 1 / 2 - 1 / 3)
    lent = pool.allocate(SLAB, 6)
    pool.free(SLAB, lent[::2])
    assert pool.figures().stranded_bytes == 0
    assert pool.available_slots(2 * SLAB) == 0
    assert pool.figures().stranded_bytes == 3 * SLAB
