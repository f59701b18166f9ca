"""How much of the core's books one client may take: leases, their lists, transfers; and long work
in parts.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.leases import read_weight
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from tests.core.support import begin_store, evict, make_key_space, make_table, reserve, words_of

SLAB = 4 * SLOT_ALIGN
ARENA = 64 * SLAB


def make_core(*, tenants: bool = False, **config: int) -> CacheCore:
    shares = {"a": TenantShare(0, ARENA), "b": TenantShare(0, ARENA)} if tenants else {}
    return CacheCore(
        CoreConfig(ARENA, SLAB, 1000, unadmitted_share=1.0, tenants=shares, **config),
        make_table(1000),
        LRU(1000),
    )


def key_space(tenant: str = "") -> KeySpace:
    return replace(make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), tenant=tenant)


def session(core: CacheCore, engine: str, tenant: str = "") -> int:
    return core.open_session(engine, "rank", key_space(tenant), 0.0).number


def store(core: CacheCore, number: int, numbers: list[int], name: str) -> None:
    begin_store(core, number, name, name, [Run(0, words_of(numbers))], 0, 0.0, 0.0)
    core.end_store(number, name, True, 0.0)


def most(call: Callable[[int], object]) -> int:
    """Returns how many calls are granted until one is refused as too much."""
    for done in count():
        try:
            call(done)
        except HotKVError as error:
            assert (
                error.reason is Reason.OVERLOADED
                and "nobody may hold more than is left for others" in error.message
            )
            return done
    raise AssertionError


@pytest.mark.parametrize("tenants", [False, True])
def test_nobody_takes_all_leases(tenants: bool) -> None:
    core = make_core(tenants=tenants, max_leases=100)
    sessions = [
        session(core, engine, engine[0] if tenants else "") for engine in ("a1", "a2", "b1")
    ]
    hashes = [HashList(0, words_of([1]))]

    def acquire(at: int) -> Callable[[int], object]:
        return lambda i: core.acquire(sessions[at], f"{at}-{i}", hashes, 0.0, 0.0)

    # Half; with tenants all engines of one together.
    assert most(acquire(0)) == 50
    assert most(acquire(1)) == (0 if tenants else 25)
    assert most(acquire(2)) == (25 if tenants else 12)
    core.check_invariants()
    with pytest.raises(HotKVError, match="leases are held by this client"):
        reserve(core, sessions[0], "w", [Run(0, words_of([5]))], 0.0, 0.0)
    core.release(sessions[0], "0-0")
    core.check_invariants()


def test_nobody_lists_all_blocks_that_leases_may_list() -> None:
    core = make_core(client_memory_bytes=10 * read_weight(1, 100))
    one, other = session(core, "one"), session(core, "other")
    absent = [HashList(0, words_of(range(100)))]
    assert most(lambda i: core.acquire(one, f"l{i}", absent, 0.0, 0.0)) == 5
    assert most(lambda i: core.acquire(other, f"l{i}", absent, 0.0, 0.0)) == 2
    core.check_invariants()
    core.close_session(one, 0.0)
    assert most(lambda i: core.acquire(other, f"m{i}", absent, 0.0, 0.0)) == 3
    core.check_invariants()


@given(
    leases=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=200),
    meddle=st.lists(st.integers(0, 200), max_size=5),
)
def test_leases_that_end_in_parts_end_once(
    leases: list[tuple[int, int, bool]], meddle: list[int]
) -> None:
    """Whether late or of a session that closes; others end meanwhile, and one is in use by a
    copy."""
    for closing in (False, True):
        core = make_core()
        mine, other = session(core, "e"), session(core, "e")
        store(core, mine, list(range(10)), "s")
        for i, (block, ttl_s, is_mine) in enumerate(leases):
            core.acquire(
                mine if is_mine else other,
                f"l{i}",
                [HashList(0, words_of([block]))],
                float(ttl_s + 1),
                0.0,
            )
        if leases:
            core.begin_load(other, "copy", "l0", [])
        to_end = [
            f"l{i}"
            for i, (_, ttl_s, is_mine) in enumerate(leases)
            if (is_mine if closing else ttl_s + 1 <= 15.0)
        ]
        for step, _ in enumerate(core.end_leases(mine) if closing else core.expire(15.0)):
            core.check_invariants()
            for i in meddle[step : step + 1]:
                core.release(other, f"l{i}")
        if closing:
            core.close_session(mine, 15.0)
        core.check_invariants()
        released = {f"l{i}" for i in meddle}
        for i in range(len(leases)):
            lease = core.leases.get("e", f"l{i}")
            if f"l{i}" in to_end:
                assert lease is None or (i == 0 and lease.released)
            else:
                assert lease is not None or f"l{i}" in released
        if leases:
            core.end_load(other, "copy", True)
        core.check_invariants()


def test_all_is_evicted_in_parts_but_what_has_come_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BLOCKS", 16)
    core = make_core()
    mine = session(core, "e")
    other = core.open_session(
        "o", "rank", make_key_space("another", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    store(core, mine, list(range(100)), "s")
    store(core, other, list(range(20)), "s")
    core.acquire(mine, "pin", [HashList(0, words_of([40, 41]))], 0.0, 0.0)
    steps = core.evict_all(1)
    dropped, kept = next(steps)
    assert (dropped, kept) == (16, 0)
    # Numbers that are free again are given to others meanwhile, and blocks that were to go have
    # gone.
    store(core, mine, list(range(200, 210)), "more")
    evict(core, 1, 0, words_of([90, 91]))
    for part in steps:
        dropped, kept = dropped + part[0], kept + part[1]
    core.check_invariants()
    left = core.lookup(1, [HashList(0, words_of([*range(100), *range(200, 210)]))])[0]
    assert (dropped, kept) == (96, 2) and np.flatnonzero(left).tolist() == [
        40,
        41,
        *range(100, 110),
    ]
    assert core.lookup(2, [HashList(0, words_of(range(20)))])[0].all()
    assert sum(len(notice.hashes) for notice in core.take_effects()) == 98
