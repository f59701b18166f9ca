"""Slots are never shared, slabs go back at once, a pool rebuilt from its slots is the pool that was."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv.table import SLOT_ALIGN
from hotkv_server.core.slabs import SlabPool, aligned

SLAB = 4 * SLOT_ALIGN
SIZES = [1, SLOT_ALIGN, SLOT_ALIGN + 1, 3 * SLOT_ALIGN, SLAB, SLAB + 1, 2 * SLAB + SLOT_ALIGN]
"""In slots a slab: 4, 4, 2, 1, 1; the last two span two and three slabs."""

Slot = tuple[int, int]
"""Offset and aligned size."""


class NaivePool:
    """Used slots as a set; everything else is counted anew from it."""

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.used: set[Slot] = set()

    def owners(self) -> list[int]:
        """Size that each slab is lent to, -1 for none: a slab is lent exactly while one of its slots is used."""
        owners = [-1] * self.num_slabs
        for offset, size in self.used:
            for slab in range(offset // SLAB, -(-(offset + size) // SLAB)):
                assert owners[slab] in (-1, size), "two sizes in one slab"
                owners[slab] = size
        return owners

    def room(self, size: int) -> int:
        """Slots of this size that may still be taken."""
        owners = self.owners()
        if size <= SLAB:
            lent = sum(owner == size for owner in owners)
            used = sum(slot_size == size for _, slot_size in self.used)
            return (lent + owners.count(-1)) * (SLAB // size) - used
        span = -(-size // SLAB)
        gaps = "".join("." if owner == -1 else "x" for owner in owners).split("x")
        return sum(len(gap) // span for gap in gaps)


class SlabMachine(RuleBasedStateMachine):
    """Allocates, frees and rebuilds; after each step the pool agrees with `NaivePool`."""

    @initialize(num_slabs=st.integers(1, 9), rest=st.integers(0, SLAB - 1))
    def start(self, num_slabs: int, rest: int) -> None:
        self.pool = SlabPool(num_slabs * SLAB + rest, SLAB)
        self.naive = NaivePool(num_slabs)

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12))
    def allocate(self, size: int, count: int) -> None:
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

    @rule()
    def restart(self) -> None:
        """Goes on with a pool rebuilt by `claim`, as the server does after a restart."""
        rebuilt = SlabPool(self.pool.num_slabs * SLAB, SLAB)
        for size in {size for _, size in self.naive.used}:
            rebuilt.claim(size, np.array([offset for offset, slot_size in self.naive.used if slot_size == size], np.int64))
        assert rebuilt.stats() == self.pool.stats()
        assert np.array_equal(rebuilt.slab_owner(), self.pool.slab_owner())
        self.pool = rebuilt

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        slots = sorted(self.naive.used)
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(slots))
        assert all(offset % SLOT_ALIGN == 0 and offset >= 0 and offset + size <= self.pool.num_slabs * SLAB for offset, size in slots)
        assert self.pool.slab_owner().tolist() == self.naive.owners()
        assert self.pool.num_free_slabs == self.naive.owners().count(-1)
        by_size = {size: sum(slot_size == size for _, slot_size in slots) for size in {size for _, size in slots}}
        assert {row.slot_bytes: row.num_used for row in self.pool.stats()} == by_size


TestSlabMachine = SlabMachine.TestCase


UNITS = st.integers(-1, 24) | st.sampled_from([0, 4, 8, 12, 16, 20])
"""Offsets in SLOT_ALIGN; the second half starts slabs."""


@given(claims=st.lists(st.tuples(st.sampled_from(SIZES), st.lists(UNITS, min_size=1, max_size=4)), max_size=4))
@example(claims=[(SLAB + 1, [0, 4])])
def test_claims_that_contradict_are_refused_and_change_nothing(claims: list[tuple[int, list[int]]]) -> None:
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
            slots = sorted(taken)
            assert len(slots) == sum(row.num_used for row in pool.stats())
            assert all(start + slot_size <= following for (start, slot_size), (following, _) in itertools.pairwise(slots))
        pool.check_invariants()


def test_freeing_with_another_size_or_twice_is_caught() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    offsets = pool.allocate(SLOT_ALIGN, 2)
    with pytest.raises(AssertionError):
        pool.free(SLAB, offsets)
    pool.free(SLOT_ALIGN, offsets)
    with pytest.raises(AssertionError):
        pool.free(SLOT_ALIGN, offsets)


@pytest.mark.parametrize(("arena_bytes", "slab_bytes"), [(SLAB, 0), (SLAB, SLOT_ALIGN + 1), (SLAB - 1, SLAB), (SLAB, -SLOT_ALIGN)])
def test_sizes_that_make_no_pool_are_refused(arena_bytes: int, slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="_bytes is"):
        SlabPool(arena_bytes, slab_bytes)
