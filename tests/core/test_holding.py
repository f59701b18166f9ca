"""Tests a policy that holds blocks for a time after a use: which stores are refused."""

from collections.abc import Iterable, Mapping

import pytest

from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room.policies.hotness import Contender, Duel, Hotness
from hotkv_server.cache.values import Cause, Run, TenantShare
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.moves import Moves
from tests.core.support import World, begin_store, words_of

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
