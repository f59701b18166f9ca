"""Tests tenants' shares: none exceeds its bound, and each finds room up to its guarantee."""

import pickle
from collections import deque
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from bench.policies import POLICIES
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.room import removal
from hotkv_server.cache.room import space as space_module
from hotkv_server.cache.room.policies import shared
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.shares import TenantBook
from hotkv_server.cache.room.space import Space, keep_bounds
from hotkv_server.cache.values import Entries, HashList, TenantShare, aligned
from tests.core.support import AnyRuns, World, insert, make_table, reason_of, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 10
ARENA = NUM_SLABS * SLAB
SHARES = {
    "a": TenantShare(3 * SLAB, 6 * SLAB),
    "b": TenantShare(4 * SLAB),
    "c": TenantShare(0, 5 * SLAB),
}
TENANTS = ("a", "b", "c", "somebody")
SIZES = [SLOT_ALIGN, 2 * SLOT_ALIGN, 3 * SLOT_ALIGN, SLAB + 1]


def make_space(policy: str = "lru", shares: dict[str, TenantShare] = SHARES) -> Space:
    """Key space n belongs to the n-th tenant."""
    space = Space(make_table(100), ARENA, SLAB, POLICIES[policy](100), shares)
    for number, tenant in enumerate(TENANTS, 1):
        space.tenants.add_key_space(number, tenant)
        space.index.add_key_space(number, [7 * number])
    return space


def share_out(space: Space, shares: dict[str, TenantShare]) -> None:
    space.tenants.share_out(shares)
    deque(keep_bounds(space.books, space.removal), 0)


class TenantMachine(AnyRuns):
    """The last of four tenants has no share at first."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.space, self.shares = make_space(policy), SHARES
        for number in range(1, 5):
            self.space.sketches.declare(number, MAX_GROUPS, 1000 + number)
        self.next_block = 0
        self.now_s = 0.0
        self.pinned: list[np.ndarray] = []

    def used(self) -> list[int]:
        return self.space.tenants.used.tolist()

    @rule(
        number=st.integers(1, 4),
        size=st.sampled_from(SIZES),
        count=st.integers(1, 12),
        publish=st.booleans(),
    )
    def insert(self, number: int, size: int, count: int, publish: bool) -> None:
        hashes = words_of(range(self.next_block, self.next_block + count))
        self.next_block += count
        entries = self.guarded(number, 0, hashes, size)
        tenant = self.space.tenants.number(number)
        self.space.reserve.count(tenant, aligned(size), len(entries))
        if publish:
            self.now_s += 1.0
            self.space.publish(entries, self.now_s)
        else:
            self.space.removal.drop(entries)

    def guarded(self, number: int, group: int, hashes: Words, size: int) -> Entries:
        """Below its guarantee, a tenant may evict others' blocks, also when its bound has first
        evicted its own."""
        before, mine = self.used(), self.shares.get(TENANTS[number - 1], TenantShare())
        own_go = (
            mine.burst_bytes and before[number - 1] + len(hashes) * aligned(size) > mine.burst_bytes
        )
        claims = aligned(size) + (0 if own_go else before[number - 1]) <= mine.guaranteed_bytes
        entries = insert(self.space, number, group, hashes, size, np.arange(len(hashes)))
        for other, tenant in enumerate(TENANTS):
            share = self.shares.get(tenant, TenantShare())
            if other != number - 1 and not claims:
                assert self.used()[other] >= min(before[other], share.guaranteed_bytes), (
                    "a guarantee was broken"
                )
        return entries

    @rule(
        shares=st.dictionaries(
            st.sampled_from(TENANTS),
            st.tuples(st.integers(0, 2), st.integers(0, 6)).map(
                lambda slabs: TenantShare(slabs[0] * SLAB, (slabs[1] and sum(slabs)) * SLAB)
            ),
            min_size=1,
        )
    )
    def share_out(self, shares: dict[str, TenantShare]) -> None:
        """Above a bound stay only pinned blocks and those being written."""
        before = self.used()
        share_out(self.space, shares)
        self.shares = shares
        assert sorted(self.space.tenants._names) == sorted(TENANTS)
        for number, tenant in enumerate(TENANTS, 1):
            bound = shares.get(tenant, TenantShare()).burst_bytes
            if bound and self.used()[number - 1] > bound:
                blocks = self.space.index.ready_blocks(number)
                assert not self.space.index.evictable(blocks).any()
            if not bound or before[number - 1] <= bound:
                assert self.used()[number - 1] == before[number - 1], "blocks went for nothing"

    @rule()
    def make_room_ahead(self) -> None:
        before = self.used()
        finished(self.space.make_room_ahead(self.now_s))
        for used, had, tenant in zip(self.used(), before, TENANTS, strict=True):
            guaranteed = self.shares.get(tenant, TenantShare()).guaranteed_bytes
            assert min(had, guaranteed) <= used <= had, "a guarantee was broken"

    @rule(data=st.data(), number=st.integers(1, 4), size=st.sampled_from(SIZES))
    def represent(self, data: st.DataObject, number: int, size: int) -> None:
        chosen = self.some(data, number)
        chosen = chosen[self.space.sketches.of(chosen) == 0]
        self.space.index.pin(chosen, 1)
        entries = self.guarded(number, MAX_GROUPS, self.space.index.keys(chosen)[2], size)
        self.space.index.pin(chosen, -1)
        self.space.sketches.publish(entries, chosen[: len(entries)])

    def some(self, data: st.DataObject, number: int = 0, most: int = 6) -> Entries:
        blocks = self.space.index.ready_blocks(number).tolist()
        chosen = (
            data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=most))
            if blocks
            else []
        )
        return np.array(chosen, np.uint32)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.now_s += 1.0
        self.space.touch(self.some(data), self.now_s)

    @precondition(lambda self: len(self.pinned) < 4)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pinned.append(self.some(data, most=1))
        self.space.index.pin(self.pinned[-1], 1)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.space.index.pin(self.pinned.pop(), -1)

    @invariant()
    def settles(self) -> None:
        self.space.check_invariants()
        self.space.removal.effects = []


TestTenantMachine = TenantMachine.TestCase


def fill(space: Space, number: int, count: int, size: int = SLOT_ALIGN, first: int = 0) -> int:
    """Stores blocks one by one. How many found room."""
    taken = 0
    for at in range(count):
        hashes = words_of([1000 * number + first + at])
        entries = insert(space, number, 0, hashes, size, np.zeros(1, np.int64))
        space.publish(entries, 1.0 + at)
        taken += len(entries)
    space.removal.effects = []
    return taken


def test_free_and_emptied_slabs_make_room_together() -> None:
    space = make_space("lru", {})
    assert fill(space, 4, 40) == 40
    space.removal.evict(space.index.ready_blocks(4)[:4])
    assert len(insert(space, 2, 0, words_of(range(50, 54)), 2 * SLOT_ALIGN, np.arange(4))) == 4
    assert len(space.index.ready_blocks(4)) == 32


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("size", [SLOT_ALIGN, 2 * SLOT_ALIGN])
def test_who_comes_late_gets_its_guarantee(
    policy: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tenant's blocks stay in use. Heat is compared for few blocks at a time."""
    monkeypatch.setattr(removal, "PART_ENTRIES", 16)
    space = make_space(policy)
    heat = Mock(side_effect=space.policy.heat)
    monkeypatch.setattr(space.policy, "heat", heat)
    assert fill(space, 4, 60) == 60
    for round_ in range(3):
        space.touch(space.index.ready_blocks(4), 100.0 + round_)
        fill(space, 2, 6, size, 10 * round_)
        fill(space, 4, 10, SLOT_ALIGN, 100 + 10 * round_)
    fill(space, 2, 16 * SLOT_ALIGN // size, size, 50)
    assert space.tenants.used[1] >= 4 * SLAB
    assert fill(space, 4, 200, SLOT_ALIGN, 500) == 200
    assert space.tenants.used[1] >= 4 * SLAB, "what is guaranteed was taken"
    assert all(len(call.args[0]) <= removal.PART_ENTRIES for call in heat.call_args_list)
    space.check_invariants()


def test_a_block_that_no_bound_allows_costs_nothing() -> None:
    space = make_space("lru", {"c": TenantShare(0, 2 * SLAB)})
    assert fill(space, 3, 8) == 8
    assert not len(insert(space, 3, 0, words_of([5000]), 3 * SLAB, np.zeros(1, np.int64)))
    assert space.removal.evicted_blocks == 0
    # The tenant's own blocks are pinned. No other tenant's may go.
    space.index.pin(space.index.ready_blocks(3), 1)
    assert fill(space, 4, 32) == 32
    assert fill(space, 3, 2, first=9) == space.removal.evicted_blocks == 0
    tiny = make_space("lru", {"c": TenantShare(0, 1)})
    assert fill(tiny, 3, 2) == 0
    large = make_space("lru", {"c": TenantShare(0, 5 * SLAB)})
    assert fill(large, 3, 4, 3 * SLOT_ALIGN) == 4
    share_out(large, {"c": TenantShare(0, 9 * SLOT_ALIGN)})
    assert large.tenants.used[0] == 9 * SLOT_ALIGN


def test_asking_beyond_the_guarantee_gets_the_guarantee() -> None:
    """No slab can be emptied without evicting a guaranteed block."""
    space = make_space(
        "lru", {"a": TenantShare(NUM_SLABS * SLOT_ALIGN), "b": TenantShare(4 * SLAB)}
    )
    for at in range(NUM_SLABS):
        fill(space, 1, 1, SLOT_ALIGN, at)
        fill(space, 4, 3, SLOT_ALIGN, 3 * at)
    taken = insert(space, 2, 0, words_of(range(2000, 2012)), 2 * SLOT_ALIGN, np.arange(12))
    assert len(taken) >= 8, "a tenant that wants much gets less than one that wants little"
    space.check_invariants()


def test_sketches_within_a_guarantee_stay() -> None:
    space = make_space("lru", {"b": TenantShare(ARENA)})
    space.sketches.declare(2, MAX_GROUPS, 1002)
    assert fill(space, 2, 20) == 20
    blocks = space.index.ready_blocks(2)
    hashes = space.index.keys(blocks)[2]
    entries = insert(space, 2, MAX_GROUPS, hashes, SLOT_ALIGN, np.arange(20))
    space.sketches.publish(entries, blocks)
    assert fill(space, 4, 1) == 0 and len(space.sketches.ready()) == 20


def test_tenant_above_its_guarantee_gives_cold_slabs() -> None:
    space = make_space("lru", {"a": TenantShare(2 * SLAB)})
    fill(space, 1, 8)
    fill(space, 4, 32, first=10)
    insert(space, 1, 0, words_of(range(2000, 2004)), 2 * SLOT_ALIGN, np.arange(4))
    assert len(space.index.ready_blocks(4)) == 32 and not len(space.index.ready_blocks(1))
    space.check_invariants()


def test_bound_is_kept_while_others_store_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space_module, "EVICTED_PER_PART", 2)
    monkeypatch.setattr(shared, "SWEEP_ENTRIES", 12)
    space = make_space("lru", {"c": TenantShare(0, 5 * SLAB)})
    fill(space, 4, 10)
    colder = space.index.ready_blocks(4)
    fill(space, 3, 13)
    space.touch(space.index.ready_blocks(3), 50.0)
    space.tenants.share_out({"c": TenantShare(0, 5 * SLOT_ALIGN - 1)})
    assert space.tenants.used[0] == 13 * SLOT_ALIGN, "nothing goes at once"
    before = 13
    for number, _ in enumerate(keep_bounds(space.books, space.removal)):
        left = len(space.index.ready_blocks(3))
        assert before - left <= 2
        if before == left == 5:
            # Another caller evicts a block, after which the bound is kept.
            left -= space.removal.evict(space.index.ready_blocks(3)[:1])
        before = left
        fill(space, 4, 1, first=100 + number)
        space.check_invariants()
    assert space.tenants.used[0] == 4 * SLOT_ALIGN
    assert space.index.is_ready(colder).all(), "blocks of others went"


def test_room_within_a_bound_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "EVICTED_PER_PART", 2)
    space = make_space("lru", {"c": TenantShare(0, 10 * SLOT_ALIGN)})
    fill(space, 3, 10)
    lefts = [10]
    for _ in space.make_room(3, 0, SLOT_ALIGN, 7):
        lefts.append(len(space.index.ready_blocks(3)))
    lefts.append(len(space.index.ready_blocks(3)))
    assert max(-np.diff(lefts)) == 2 and lefts[-1] == 3


def test_tenants_share_the_arena_that_has_memory() -> None:
    """Half of the arena has memory, which is less than one tenant's guarantee."""
    shares = {"a": TenantShare(5 * SLAB), "b": TenantShare(3 * SLAB)}
    world = World(8, tenants=shares, unadmitted_share=1.0, is_backed=False)
    world.core.space.grow(4 * SLAB, 0)
    first, second = (world.open(tenant, tenant, tenant=tenant) for tenant in shares)
    world.store(first, range(16))
    assert set(world.store(second, range(4))) == {BlockResult.STORED}
    for session in (first, second):
        named = [HashList(0, words_of(world.found(range(16), session.key_space_id)))]
        (pinned,) = world.core.acquire(session.number, "lease", named, 0.0, 2.0).pinned
        assert np.count_nonzero(pinned) >= 4
    world.core.check_invariants()


class Name(str):
    """A name that counts its comparisons."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_many_tenants_shares_are_replaced_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reload does this on the event loop. To compare each of ten thousands with each would
    take seconds."""
    shares = {Name(f"t{number}"): TenantShare() for number in range(200)}
    book = TenantBook(shares, ARENA)
    monkeypatch.setattr(Name, "num_compared", 0)
    book.share_out({**shares, Name("new"): TenantShare(SLAB)})
    assert Name.num_compared < 10 * len(shares)
    assert len(book.used) == len(shares) + 1


IMPOSSIBLE = [
    {"a": TenantShare(SLAB, 1)},
    {"a": TenantShare(ARENA), "b": TenantShare(1)},
    {"a": TenantShare(-1)},
    {f"t{number}": TenantShare(1 << 60) for number in range(8)},
]


@pytest.mark.parametrize("shares", [{}, *IMPOSSIBLE])
def test_shares_that_can_not_be_change_nothing(shares: dict[str, TenantShare]) -> None:
    space = make_space("lru")
    fill(space, 1, 5)
    before = pickle.dumps(space.tenants)
    assert reason_of(lambda: share_out(space, shares)) is Reason.INVALID_FIELD
    assert pickle.dumps(space.tenants) == before
    if shares:
        assert reason_of(lambda: TenantBook(shares, ARENA)) is Reason.INVALID_FIELD
    unshared = make_space("lru", {})
    assert reason_of(lambda: share_out(unshared, {"a": TenantShare(SLAB)})) is Reason.INVALID_FIELD
    TenantBook({"a": TenantShare(5, 5)}, ARENA)
