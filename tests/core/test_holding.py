"""The core while its policy holds blocks that were just used: which stores are refused, and which
never are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import Hotness
from hotkv_server.cache.room.policies.hotness import Contender, Duel
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.moves import Moves
from tests.core.support import begin_store, make_key_space, make_table, words_of

NUM_SLOTS = 24
SLAB = 4 * SLOT_ALIGN
HOLD_S = 5.0
HOLDING = Contender(0.1, hold_s=HOLD_S)


@dataclass
class Store:
    """What became of one store: result by block."""

    stored: list[int]
    refused: list[int]


class Place:
    """A core of 24 slots whose policy is settled: it holds blocks for five seconds after a use.
    `guaranteed`: slots by tenant. The last of `contenders` has won."""

    def __init__(
        self,
        guaranteed: Mapping[str, int] | None = None,
        contenders: tuple[Contender, ...] = (HOLDING,),
    ) -> None:
        shares = {
            name: TenantShare(count * SLOT_ALIGN) for name, count in (guaranteed or {}).items()
        }
        config = CoreConfig(
            NUM_SLOTS * SLOT_ALIGN,
            SLAB,
            100,
            max_blocks_per_call=1000,
            tenants=shares,
        )
        policy = Hotness(100)
        policy.duel = Duel(100, contenders)
        policy.duel.current = len(contenders) - 1
        self.duel = policy.duel
        self.core = CacheCore(config, make_table(100), policy)
        key_space = make_key_space("hold", SLOT_ALIGN, 2 * SLOT_ALIGN)
        self.records = {
            name: self.core.open_session(
                f"engine {name}", "rank", replace(key_space, tenant=name), 0.0
            )
            for name in shares or ("",)
        }
        self.num_stores = 0

    def store(
        self,
        numbers: list[int],
        now_s: float,
        group: int = 0,
        retention: Retention = NO_RETENTION,
        tenant: str = "",
    ) -> Store:
        self.num_stores += 1
        record = self.records[tenant]
        name, runs = f"store {self.num_stores}", [Run(group, words_of(numbers))]
        begin_store(self.core, record.number, name, name, runs, 0, 0.0, now_s, retention)
        results = self.core.end_store(record.number, name, True, now_s)[0].tolist()
        self.core.check_invariants()
        assert set(results) <= {BlockResult.STORED, BlockResult.NO_SPACE}
        return Store(
            [n for n, result in zip(numbers, results, strict=True) if result == BlockResult.STORED],
            [
                n
                for n, result in zip(numbers, results, strict=True)
                if result == BlockResult.NO_SPACE
            ],
        )

    def found(self, numbers: list[int]) -> list[int]:
        mask = self.core.lookup(1, [HashList(0, words_of(numbers))])[0].tolist()
        return [number for number, is_there in zip(numbers, mask, strict=True) if is_there]


@pytest.fixture
def place() -> Place:
    return Place()


def test_what_was_just_used_stays_and_the_rest_is_refused(place: Place) -> None:
    old, live, fresh = list(range(10)), list(range(10, 24)), list(range(100, 120))
    assert place.store(old, 0.0).stored == old
    assert place.store(live, 4.0).stored == live
    done = place.store(fresh, 6.0)
    assert done.stored == fresh[:10] and done.refused == fresh[10:]
    assert place.found(old + live) == live
    assert place.core.counters.no_space_blocks == 10
    again = place.store(fresh[10:], 6.5)
    assert again.stored == [] and place.found(live) == live
    later = place.store(fresh[10:], 9.5)
    assert later.stored == fresh[10:]
    assert place.found(fresh) == fresh


def test_refused_blocks_are_remembered(place: Place) -> None:
    place.store(list(range(24)), 0.0)
    refused = place.store([50], 1.0).refused
    assert refused == [50]
    policy = place.core.space.policy
    assert isinstance(policy, Hotness) and len(policy._ghosts) == 1
    assert place.store([50], 10.0).stored == [50]
    entry = place.core.space.index.find(1, 0, words_of([50]))
    assert policy._uses[entry[0]] > 0.9, "its first use was forgotten"


def test_who_asks_to_keep_blocks_is_not_refused(place: Place) -> None:
    place.store(list(range(24)), 0.0)
    asked = place.store([50, 51], 1.0, retention=Retention(2))
    assert asked.stored == [50, 51]


def test_nothing_is_refused_while_slot_sizes_share_the_arena(place: Place) -> None:
    """Those of another size would pay for it."""
    assert place.store(list(range(16)), 0.0).refused == []
    assert place.store([200, 201], 0.0, group=1).refused == []
    assert place.store(list(range(50, 66)), 1.0).refused == []


def test_a_guarantee_is_a_claim_on_what_others_hold() -> None:
    """Beyond it a tenant waits as all do."""
    place = Place({"late": 12, "early": 8})
    assert place.store(list(range(24)), 0.0, tenant="early").refused == []
    late = list(range(100, 116))
    done = place.store(late, 1.0, tenant="late")
    assert done.stored == late[:12] and done.refused == late[12:]
    assert place.store(late[12:], 2.0, tenant="late").stored == []
    assert place.store(late[12:], 6.5, tenant="late").stored == late[12:]


@pytest.mark.parametrize("cause", ["another size", "tiers", "representations"])
def test_what_may_not_hold_is_left_at_once(cause: str) -> None:
    """Without its holding the winner would be worse than others are."""
    place = Place(contenders=(Contender(120.0), Contender(30.0), HOLDING))
    space, duel = place.core.space, place.duel
    assert place.store(list(range(16)), 0.0).refused == []
    assert duel.winner == HOLDING and space.policy.figures()["hold_s"] == HOLD_S
    duel._scores[:] = 1.0, 2.0, 100.0
    match cause:
        case "another size":
            assert place.store([200], 0.0, group=1).refused == []
        case "tiers":
            Copies(Moves(space))
        case _:
            space.representations.declared = True
    assert place.store(list(range(50, 70)), 1.0).refused == []
    assert duel.winner == Contender(30.0) and space.policy.figures()["hold_s"] == 0.0
    if cause == "another size":
        # Its slab may have gone.
        place.store([201], 150.0, group=1)
    place.store([80], 200.0)
    place.store([81], 300.0)
    assert duel.winner == Contender(30.0), "an epoch's end brought it back"
