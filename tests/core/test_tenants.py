"""Shares of tenants: bounds that hold, guarantees that nobody else's blocks take, claims that are met."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv.errors import HotKVError, Reason
from hotkv.table import SLOT_ALIGN
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.space import Space
from hotkv_server.core.tenants import TenantBook
from hotkv_server.core.values import TenantShare
from tests.core.support import make_table, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 10
ARENA = NUM_SLABS * SLAB
SHARES = {"a": TenantShare(3 * SLAB, 6 * SLAB), "b": TenantShare(4 * SLAB), "c": TenantShare(0, 5 * SLAB)}
TENANTS = ("a", "b", "c", "somebody")
SIZES = [SLOT_ALIGN, 2 * SLOT_ALIGN, 3 * SLOT_ALIGN, SLAB + 1]


def make_space(policy: str = "lru", shares: dict[str, TenantShare] = SHARES) -> Space:
    """Key space n is that of the n-th tenant."""
    space = Space(make_table(100), ARENA, SLAB, POLICIES[policy](100), shares)
    for number, tenant in enumerate(TENANTS, 1):
        space.tenants.add_key_space(number, tenant)
        space.index.add_key_space(number, [7 * number])
    return space


class TenantMachine(RuleBasedStateMachine):
    """Four tenants with blocks of all sizes; one has no share."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.space = make_space(policy)
        self.next_block = 0
        self.now_s = 0.0
        self.pinned: list[np.ndarray] = []

    def used(self) -> list[int]:
        return self.space.tenants.used.tolist()

    @rule(number=st.integers(1, 4), size=st.sampled_from(SIZES), count=st.integers(1, 12), publish=st.booleans())
    def insert(self, number: int, size: int, count: int, publish: bool) -> None:
        before, claims = self.used(), self.space.tenants.may_claim(number - 1, count * -(-size // SLOT_ALIGN) * SLOT_ALIGN)
        hashes = words_of(range(self.next_block, self.next_block + count))
        self.next_block += count
        entries = self.space.insert(number, 0, hashes, size, np.arange(count), 1)
        for other, share in enumerate(SHARES.values()):
            if other != number - 1 and not claims:
                assert self.used()[other] >= min(before[other], share.guaranteed_bytes), "a guarantee was broken"
        if publish:
            self.now_s += 1.0
            self.space.publish(entries, self.now_s)
        else:
            self.space.drop(entries)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = self.space.index.ready_blocks()
        if len(blocks):
            self.now_s += 1.0
            chosen = data.draw(st.lists(st.sampled_from(blocks.tolist()), unique=True, max_size=5))
            self.space.touch(np.array(chosen, np.uint32), self.now_s)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        blocks = self.space.index.ready_blocks()
        if len(blocks) and len(self.pinned) < 4:
            self.pinned.append(np.array([data.draw(st.sampled_from(blocks.tolist()))], np.uint32))
            self.space.index.pin(self.pinned[-1], 1)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.space.index.pin(self.pinned.pop(), -1)

    @invariant()
    def settles(self) -> None:
        self.space.check_invariants()
        self.space.effects = []


TestTenantMachine = TenantMachine.TestCase


def fill(space: Space, number: int, count: int, size: int = SLOT_ALIGN, first: int = 0) -> int:
    """Stores blocks one by one; how many were taken."""
    taken = 0
    for at in range(count):
        entries = space.insert(number, 0, words_of([1000 * number + first + at]), size, np.zeros(1, np.int64), 1)
        space.publish(entries, 1.0 + at)
        taken += len(entries)
    space.effects = []
    return taken


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("size", [SLOT_ALIGN, 2 * SLOT_ALIGN])
def test_who_comes_late_gets_its_guarantee(policy: str, size: int) -> None:
    """Somebody fills the arena and goes on using it; a tenant with a guarantee comes, with blocks of this or of another size."""
    space = make_space(policy)
    assert fill(space, 4, 60) == 60
    for round_ in range(3):
        space.touch(space.index.ready_blocks(4), 100.0 + round_)
        fill(space, 2, 6, size, 10 * round_)
        fill(space, 4, 10, SLOT_ALIGN, 100 + 10 * round_)
    fill(space, 2, 16 * SLOT_ALIGN // size, size, 50)
    assert space.tenants.used[1] >= 4 * SLAB
    assert fill(space, 4, 200, SLOT_ALIGN, 500) == 200
    assert space.tenants.used[1] >= 4 * SLAB, "what is guaranteed was taken"
    space.check_invariants()


def test_a_bound_is_kept_by_the_own_coldest_blocks() -> None:
    space = make_space()
    assert fill(space, 1, 24) == 24
    space.touch(space.index.find(1, 0, words_of([1000])), 90.0)
    assert fill(space, 1, 5, SLOT_ALIGN, 24) == 5
    assert space.tenants.used[0] == 6 * SLAB and space.evicted_blocks == 5
    there = space.index.find(1, 0, words_of(range(1000, 1007))) != 0
    assert there.tolist() == [True, False, False, False, False, False, True]
    big = space.insert(1, 0, words_of([5000, 5001]), 4 * SLAB, np.zeros(2, np.int64), 1)
    assert len(big) == 1, "two of them are beyond the bound"
    space.check_invariants()


def test_shares_that_cannot_be_kept_are_refused() -> None:
    for shares in ({"a": TenantShare(ARENA), "b": TenantShare(1)}, {"a": TenantShare(5, 4)}, {"a": TenantShare(-1)}):
        with pytest.raises(HotKVError) as raised:
            TenantBook(shares, ARENA)
        assert raised.value.reason is Reason.INVALID_FIELD and "guaranteed_bytes" in raised.value.message
