"""How much leases may pin before a load has started under them."""

import numpy as np
import pytest

from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run, TenantShare
from tests.core.support import begin_store, expire, make_key_space, make_table, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLOTS = 32
TTL_S = 100.0


class Place:
    """An arena of 32 slots whose leases may pin eight before a load. Blocks 0 to 15 of both groups
    are stored."""

    def __init__(self, share: float = 0.25, tenants: dict[str, TenantShare] | None = None) -> None:
        config = CoreConfig(
            NUM_SLOTS * SLOT_ALIGN, SLAB, 100, unadmitted_share=share, tenants=tenants or {}
        )
        self.core = CacheCore(config, make_table(100), LRU(100))
        self.sessions: dict[str, int] = {}

    def open(
        self, name: str, key_space: KeySpace | None = None, first: int = 0, count: int = 14
    ) -> int:
        """Returns a session under whose key space blocks from `first` on are stored in both
        groups."""
        session = self.core.open_session(
            name, "rank", key_space or make_key_space(name, SLOT_ALIGN, SLOT_ALIGN), 0.0
        ).number
        runs = [Run(group, words_of(range(first, first + count)), None, 0) for group in (0, 1)]
        begin_store(self.core, session, "store", "store", runs, 0, TTL_S, 0.0)
        assert all(
            (results == 1).all() for results in self.core.end_store(session, "store", True, 0.0)
        )
        return session

    def acquire(
        self, session: int, lease_id: str, lists: dict[int, list[int]], now_s: float = 1.0
    ) -> list[list[bool]]:
        groups = [HashList(group, words_of(numbers)) for group, numbers in lists.items()]
        return [
            mask.tolist()
            for mask in self.core.acquire(session, lease_id, groups, TTL_S, now_s).pinned
        ]

    @property
    def pinned_slots(self) -> int:
        return int(np.count_nonzero(self.core.space.index.pins))


def test_a_lease_pins_its_first_blocks_up_to_the_budget() -> None:
    place = Place()
    session = place.open("one")
    assert place.acquire(session, "l", {0: list(range(12))}) == [[True] * 8 + [False] * 4]
    assert place.pinned_slots == 8
    assert place.acquire(session, "m", {0: [0], 1: [0]}) == [[False], [False]], (
        "the budget is used up"
    )


def test_the_budget_goes_over_all_groups_of_a_lease_and_over_all_leases() -> None:
    place = Place()
    session = place.open("one")
    assert place.acquire(session, "a", {0: [0, 1, 2]}) == [[True] * 3]
    # What is not there costs nothing.
    assert place.acquire(session, "b", {0: [3, 99, 4, 5], 1: [0, 98, 1, 2, 3]}) == [
        [True, False, True, True],
        [True, False, True, False, False],
    ]
    assert place.pinned_slots == 8


@pytest.mark.parametrize("how", ["load", "release", "expire", "close"])
def test_the_budget_comes_back(how: str) -> None:
    place = Place()
    session, other = (
        place.open("one"),
        place.core.open_session(
            "two", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0
        ).number,
    )
    place.acquire(session, "l", {0: list(range(8))})
    assert place.acquire(other, "m", {0: [0]}) == [[False]]
    now_s = 2.0
    if how == "load":
        for turn in range(2):
            # It comes back once, however many loads there are.
            place.core.begin_load(session, f"t{turn}", "l", [LoadPositions(0, np.arange(8))])
    elif how == "release":
        place.core.release(session, "l")
    elif how == "expire":
        now_s = 1.0 + TTL_S
        assert expire(place.core, now_s) == 2
    else:
        place.core.close_session(session, now_s)
    assert place.acquire(other, "n", {0: list(range(10))}, now_s) == [[True] * 8 + [False] * 2]
    if how == "load":
        for turn in range(2):
            place.core.end_load(session, f"t{turn}", True)
        place.core.release(session, "l")
        # What was admitted is not given back twice.
        assert place.acquire(other, "o", {0: [0]}, now_s) == [[False]]


def test_each_tenant_has_a_budget_of_what_is_surely_its_own() -> None:
    guaranteed = NUM_SLOTS * SLOT_ALIGN // 2
    place = Place(tenants={"a": TenantShare(guaranteed), "b": TenantShare(guaranteed)})
    groups = make_key_space("", SLOT_ALIGN, SLOT_ALIGN).groups
    spaces = {tenant: KeySpace("m", "r", "bfloat16", groups, 16, tenant=tenant) for tenant in "ab"}
    sessions = {tenant: place.open(tenant, spaces[tenant], count=8) for tenant in "ab"}
    for tenant in "ab":
        budget = (
            int(
                0.25
                * place.core.space.tenants.surely_bytes(
                    place.core.space.tenants.number(1 if tenant == "a" else 2)
                )
            )
            // SLOT_ALIGN
        )
        assert place.acquire(sessions[tenant], "l", {0: list(range(8))}) == [
            [True] * budget + [False] * (8 - budget)
        ]
        assert budget == 4
