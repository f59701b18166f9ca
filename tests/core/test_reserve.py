"""Tests the reserve of free slots that the server keeps for the next stores. A store that finds its
slots there evicts nothing. The reserve is bounded, and evicts nothing that a store may not evict.
When nothing is stored, it is empty. Also which stores a policy that holds blocks refuses."""

from collections.abc import Iterable, Mapping

import pytest

from bench.policies import POLICIES
from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room import reserve
from hotkv_server.cache.room import space as space_module
from hotkv_server.cache.room.policies.hotness import Contender, Duel, Hotness
from hotkv_server.cache.room.reserve import PARTS_PER_WINDOW, WINDOW_S
from hotkv_server.cache.values import Cause, HashList, Run, SessionRecord, TenantShare
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.moves import Moves
from tests.core.support import SLAB, World, begin_store, make_room_ahead, words_of

SLOTS = 24
MOST = 6
"""Slots of the reserve at most: a quarter of the arena, in these tests."""


@pytest.fixture(autouse=True)
def quarter_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "ARENA_PART", SLOTS // MOST)


class Stores(World):
    """An arena of 24 slots, in which every store has new blocks.

    shares: of tenants, in slots: guarantee and burst bound.
    """

    def __init__(self, policy: str = "lru", **shares: tuple[int, int]) -> None:
        slots = {
            name: TenantShare(least * SLOT_ALIGN, most * SLOT_ALIGN)
            for name, (least, most) in shares.items()
        }
        super().__init__(
            SLOTS * SLOT_ALIGN // SLAB, policy=policy, tenants=slots, unadmitted_share=1.0
        )
        self.session = self.open(tenant=next(iter(shares), ""))
        self.num_stored = 0

    def store_new(
        self, count: int, now_s: float, session: SessionRecord | None = None, group: int = 0
    ) -> int:
        """Stores blocks, one per call. Returns how many blocks the stores have evicted."""
        before = self.core.space.removal.evicted_blocks
        for at in range(self.num_stored, self.num_stored + count):
            self.store(session or self.session, [at], now_s, group=group)
        self.num_stored += count
        return self.core.space.removal.evicted_blocks - before

    def turn(self, now_s: float) -> int:
        """Makes room ahead. Returns how many blocks this has evicted."""
        evicted = make_room_ahead(self.core, now_s)
        self.core.check_invariants()
        return evicted

    def ready(self) -> list[int]:
        return self.found(range(self.num_stored))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_store_after_a_turn_evicts_nothing(policy: str) -> None:
    cache = Stores(policy)
    assert cache.store_new(SLOTS + 2, 1.0) == 2
    for now_s in (2.0, 2.1, 2.2):
        assert cache.turn(now_s) == MOST
        assert cache.core.space.reserve.free_bytes() == MOST * SLOT_ALIGN
        assert cache.store_new(MOST, now_s) == 0
    assert cache.store_new(1, 2.3) == 1


def test_the_same_blocks_go_as_for_stores() -> None:
    ahead, late = Stores(), Stores()
    for cache in (ahead, late):
        cache.store_new(SLOTS, 1.0)
    for round_ in range(10):
        ahead.turn(2.0 + round_)
        for cache in (ahead, late):
            cache.store_new(MOST, 2.5 + round_)
        assert ahead.ready() == late.ready()


def test_reserve_holds_what_was_stored_lately() -> None:
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    cache.turn(1.0)
    cache.turn(9.0)
    for now_s, evicted, wanted in ((10.0, 0, 2), (10.5, 2, 4), (10.6, 4, 6)):
        assert cache.store_new(2, now_s) == 0
        assert cache.turn(now_s) == evicted
        assert cache.core.space.reserve.wanted.total() == wanted
    for now_s, wanted in ((10.0 + WINDOW_S, 4), (10.5 + WINDOW_S, 0)):
        assert cache.turn(now_s) == 0
        assert cache.core.space.reserve.wanted.total() == wanted


def test_nothing_goes_when_nothing_is_stored() -> None:
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    everything = [HashList(0, words_of(range(SLOTS)))]
    cache.core.acquire(cache.session.number, "all", everything, 100.0, 1.0)
    assert cache.turn(1.0) == 0, "a pinned block went"
    cache.core.release(cache.session.number, "all")
    assert cache.turn(1.0 + WINDOW_S) == 0
    assert cache.core.space.reserve.free_bytes() == 0


def test_a_draining_server_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "EVICTED_PER_PART", 2)
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    for _ in cache.core.make_room_ahead(1.0):
        cache.core.draining = len(cache.ready()) < SLOTS
    assert len(cache.ready()) == SLOTS - 2
    assert cache.turn(1.1) == 0


def test_stores_between_two_parts_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "EVICTED_PER_PART", 2)
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    for _ in cache.core.make_room_ahead(1.0):
        has_room = len(cache.ready()) < SLOTS
        assert cache.store_new(1, 1.0) == (0 if has_room else 1)
        cache.core.check_invariants()
    assert len(cache.ready()) == SLOTS - MOST


def test_held_blocks_stay() -> None:
    cache = Stores("hotness")
    policy = cache.core.space.policy
    assert isinstance(policy, Hotness)
    policy.duel = Duel(100, (Contender(0.1, hold_s=5.0),))
    cache.store_new(SLOTS, 8.0)
    assert cache.turn(9.0) == 0
    cache.store_new(MOST, 14.0)
    assert cache.turn(14.0) == MOST


def test_a_growing_arena_evicts_nothing() -> None:
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    cache.core.space.grow(SLOTS * SLOT_ALIGN, SLAB)
    assert cache.turn(1.0) == 0
    cache.core.space.grow(SLOTS * SLOT_ALIGN, 0)
    assert cache.turn(1.1) == MOST


def test_each_slot_size_has_its_reserve() -> None:
    cache = Stores()
    cache.session = cache.open("other", "other", (SLOT_ALIGN, 2 * SLOT_ALIGN))
    for _ in range(8):
        cache.store_new(2, 1.0)
        cache.store_new(2, 1.0, group=1)
    cache.turn(1.0)
    assert cache.store_new(1, 1.1) == cache.store_new(1, 1.1, group=1) == 0


def test_guaranteed_blocks_stay() -> None:
    """Another tenant could take the slots, so the reserve evicts no block within a guarantee, not
    even for stores of the tenant itself."""
    cache = Stores(a=(SLOTS - 2, 0), b=(0, 0))
    assert cache.store_new(SLOTS, 1.0) == 0
    assert cache.turn(1.0) == 2
    assert len(cache.ready()) == SLOTS - 2


def test_guaranteed_blocks_stay_at_the_bound() -> None:
    cache = Stores(a=(12, 12), b=(0, 0))
    assert cache.store_new(12, 1.0) == 0
    assert cache.turn(1.0) == 0
    assert cache.store_new(1, 1.1) == 1


def test_a_tenant_at_its_bound_pays_ahead() -> None:
    cache = Stores(a=(2, 12), b=(0, 0))
    other = cache.open("other", tenant="b")
    cache.store_new(SLOTS - 12, 1.0, other)
    cache.turn(1.0)
    cache.turn(9.0)
    assert cache.store_new(14, 10.0) == 2
    assert cache.turn(10.0) == 12 // 4, "a reserve is a part of what the tenant may use"
    assert cache.store_new(3, 10.1) == 0
    assert cache.core.space.tenants.used.tolist() == [12 * SLOT_ALIGN, 12 * SLOT_ALIGN]


def test_many_turns_leave_few_records() -> None:
    cache = Stores()
    for at in range(1000):
        cache.core.space.reserve.count(0, SLOT_ALIGN, 1)
        cache.turn(1.0 + at / 1000)
    assert len(cache.core.space.reserve._parts) <= PARTS_PER_WINDOW + 1
    assert cache.core.space.reserve.wanted.total() == MOST


def test_low_means_half_is_free() -> None:
    cache, low = Stores(), []
    cache.store_new(SLOTS, 1.0)
    for _ in range(2):
        low.append(cache.core.space.reserve.is_low)
        cache.turn(1.0)
        for _ in range(MOST):
            low.append(cache.core.space.reserve.is_low)
            cache.store_new(1, 1.0)
    assert low == 2 * ([True] + 3 * [False] + 3 * [True])


def test_a_tiny_arena_has_no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "ARENA_PART", 2 * SLOTS)
    cache = Stores()
    cache.store_new(SLOTS, 1.0)
    assert cache.turn(1.0) == 0 and not cache.core.space.reserve.wanted.total()


# A policy that holds blocks for a time after a use


HOLD_S = 5.0
HOLDING = Contender(0.1, hold_s=HOLD_S)


class Place(World):
    """24 slots, and a policy for which the last of `contenders` has won. `guaranteed`: slots of
    each tenant."""

    def __init__(
        self,
        guaranteed: Mapping[str, int] | None = None,
        contenders: tuple[Contender, ...] = (HOLDING,),
        capacity: int = 100,
    ) -> None:
        slots = (guaranteed or {}).items()
        shares = {name: TenantShare(count * SLOT_ALIGN) for name, count in slots}
        super().__init__(6, capacity, policy="hotness", tenants=shares)
        policy = self.core.space.policy
        assert isinstance(policy, Hotness)
        self.policy, self.duel = policy, Duel(100, contenders)
        policy.duel = self.duel
        self.duel.current = len(contenders) - 1
        self.sessions = {
            name: self.open(f"of {name}", "hold", (SLOT_ALIGN, 2 * SLOT_ALIGN), tenant=name)
            for name in shares or ("",)
        }

    def stored(
        self,
        numbers: Iterable[int],
        now_s: float,
        group: int = 0,
        retention: Retention = NO_RETENTION,
        tenant: str = "",
    ) -> list[int]:
        """Blocks that found room. Once one is refused, no later one may be stored."""
        named, session = list(numbers), self.sessions[tenant]
        results = self.store(session, named, now_s, group=group, retention=retention)
        self.core.check_invariants()
        count = results.count(BlockResult.STORED)
        refused = [BlockResult.NO_SPACE] * (len(named) - count)
        assert results == [BlockResult.STORED] * count + refused
        return named[:count]


def test_just_used_stays_the_rest_is_refused() -> None:
    place = Place()
    old, live, fresh = list(range(10)), list(range(10, 24)), list(range(100, 120))
    assert place.stored(old, 0.0) == old
    assert place.stored(live, 4.0) == live
    assert place.stored(fresh, 6.0) == fresh[:10]
    assert place.found(old + live) == live
    assert place.core.counters.no_space_blocks == 10
    causes = place.core.space.removal.causes(1, 0, words_of(fresh))
    assert causes.tolist() == [Cause.NONE] * 10 + [Cause.NO_ROOM] * 10
    assert place.stored(fresh[10:], 6.5) == [] and place.found(live) == live
    even = place.open("even", "even", (SLOT_ALIGN, SLOT_ALIGN)).number
    runs = [Run(group, words_of([50])) for group in (0, 1)]
    begin_store(place.core, even, "s", "s", runs, 0, 0.0, 6.5)
    results = [one.tolist() for one in place.core.end_store(even, "s", True, 6.5)]
    assert results == [[BlockResult.NO_SPACE]] * 2 and place.found(live) == live
    assert place.stored(fresh[10:], 9.5) == fresh[10:]
    assert place.found(fresh) == fresh


def test_held_blocks_survive_a_lack_of_entries() -> None:
    place = Place(capacity=20)
    live = list(range(20))
    assert place.stored(live, 0.0) == live
    assert place.stored([50], 1.0) == [] and place.found(live) == live
    assert place.stored([50], 6.5) == [50]


def test_refused_blocks_are_remembered_kept_ones_admitted() -> None:
    place = Place()
    place.stored(range(24), 0.0)
    assert place.stored([50], 1.0) == [] and len(place.policy._ghosts) == 1
    assert place.stored([60, 61], 1.0, retention=Retention(2)) == [60, 61]
    # Refused block 51 and those before it count as used, those behind it do not.
    place.store(place.sessions[""], [51, *range(22), 60, 61], 1.0)
    assert len(place.policy._ghosts) == 4
    assert place.stored([50], 10.0) == [50]
    assert place.policy._uses[place.entries([50])[0]] > 0.9, "its first use was forgotten"


def test_guarantee_is_a_claim_on_others_blocks() -> None:
    """Held blocks go for the guarantee, and only for it."""
    place = Place({"late": 12, "early": 8})
    assert len(place.stored(range(24), 0.0, tenant="early")) == 24
    late = list(range(100, 116))
    assert place.stored(late, 1.0, tenant="late") == late[:12]
    assert place.stored(late[12:], 2.0, tenant="late") == []
    assert place.stored(late[12:], 6.5, tenant="late") == late[12:]


def test_tenant_at_its_bound_keeps_its_blocks() -> None:
    place, live = Place({"bound": 0}), list(range(8))
    place.core.space.tenants.share_out({"bound": TenantShare(0, 8 * SLOT_ALIGN)})
    assert place.stored(live, 0.0, tenant="bound") == live
    assert place.stored([50], 1.0, tenant="bound") == [] and place.found(live) == live
    assert place.stored([50, 51], 1.0, retention=Retention(2), tenant="bound") == [50, 51]
    assert place.stored([52], 6.5, tenant="bound") == [52]


@pytest.mark.parametrize("cause", ["another size", "tiers", "sketches"])
def test_what_may_not_hold_is_left_at_once(cause: str) -> None:
    """With any of these, no rule may hold blocks, so the best of the others wins."""
    place = Place(contenders=(Contender(120.0), Contender(30.0), HOLDING))
    space, duel = place.core.space, place.duel
    assert len(place.stored(range(16), 0.0)) == 16
    assert duel.winner == HOLDING and space.policy.figures()["hold_s"] == HOLD_S
    duel._scores[:] = 1.0, 2.0, 100.0
    match cause:
        case "another size":
            assert place.stored([200, 201], 0.0, group=1) == [200, 201]
        case "tiers":
            Copies(Moves(space))
        case _:
            space.sketches.declared = True
    assert len(place.stored(range(50, 66), 1.0)) == 16
    assert duel.winner == Contender(30.0) and space.policy.figures()["hold_s"] == 0.0
    if cause == "another size":
        # The policy must still see two sizes.
        place.stored([202], 150.0, group=1)
    place.stored([80], 200.0)
    place.stored([81], 300.0)
    assert duel.winner == Contender(30.0), "a round's end brought it back"
