"""Tests that no client can use up the memory for leases and their lists, and leases that end in
parts."""

from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from hotkv_proto.blocks import Retention
from hotkv_proto.errors import Reason
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.leases import leases as leases_module
from hotkv_server.cache.leases.leases import ReadLease, WriteLease, read_weight
from hotkv_server.cache.room.shares import FLOOR_SHARE, FairBound
from hotkv_server.cache.values import HashList, Run, TenantShare
from tests.core.support import SLAB, World, begin_store, evict, grants, reason_of, reserve, words_of


def make_world(**config: object) -> World:
    return World(64, 1000, unadmitted_share=1.0, **config)


@pytest.mark.parametrize("tenants", [False, True])
def test_nobody_takes_all_leases_or_transfers(
    tenants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "MAX_TRANSFERS", 100)
    shares = {name: TenantShare(0, 64 * SLAB) for name in ("ab" if tenants else "")}
    world = make_world(tenants=shares, max_leases=100)
    core = world.core
    sessions = [
        world.open(engine, tenant=engine[0] if tenants else "").number
        for engine in ("a1", "a2", "b1")
    ]
    hashes = [HashList(0, words_of([1]))]
    # Each engine may open half of the leases that are free; with tenants, their engines share
    # it.
    for session, granted in zip(sessions, (50, 0, 25) if tenants else (50, 25, 12), strict=True):
        store = partial(begin_store, core, session, lease_id="s", runs=[], shard_index=0, ttl_s=0.0)
        assert grants(lambda i, s=store: s(transfer_id=f"{i}", now_s=0.0)) == granted  # type: ignore[misc]
        assert grants(lambda i, s=session: core.acquire(s, f"{s}-{i}", hashes, 0.0, 0.0)) == granted  # type: ignore[misc]
        core.check_invariants()
    runs = [Run(0, words_of([5]))]
    assert reason_of(lambda: reserve(core, sessions[0], "w", runs, 0.0, 0.0)) is Reason.OVERLOADED
    core.release(sessions[0], f"{sessions[0]}-0")
    core.check_invariants()


def test_nobody_lists_all_blocks_that_leases_may_list() -> None:
    """Absent blocks count too, and a lease with at least the memory of its lists."""
    world = make_world(client_memory_bytes=10 * read_weight(1, 1000))
    core, one, other = world.core, world.open("one").number, world.open("other").number
    absent = [HashList(0, words_of(range(1000)))]
    reserve(core, one, "w", [Run(0, absent[0].hashes)], 0.0, 0.0)
    (write,) = core.leases.all()
    assert isinstance(write, WriteLease) and write.weight > write.listed.nbytes
    core.release(one, "w")
    assert grants(lambda i: core.acquire(one, f"l{i}", absent, 0.0, 0.0)) == 5
    assert grants(lambda i: core.acquire(other, f"l{i}", absent, 0.0, 0.0)) == 2
    for lease in core.leases.all():
        assert isinstance(lease, ReadLease) and lease.weight > lease.groups[0][1].nbytes
    core.close_session(one, 0.0)
    assert grants(lambda i: core.acquire(other, f"m{i}", absent, 0.0, 0.0)) == 3
    core.check_invariants()


@given(
    leases=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=20),
    meddle=st.lists(st.integers(0, 19), max_size=9),
    closing=st.booleans(),
    renews=st.booleans(),
)
@example(leases=[(1, 0, True)] * 8, meddle=[6], closing=False, renews=True)
def test_leases_that_end_in_parts_end_once(
    leases: list[tuple[int, int, bool]], meddle: list[int], closing: bool, renews: bool
) -> None:
    """Other leases are released or renewed in between, and a copy uses one."""
    world = make_world()
    core, mine, other = world.core, world.open(), world.open().number
    world.store(mine, range(10))
    for i, (block, ttl_s, is_mine) in enumerate(leases):
        listed = [HashList(0, words_of([block]))]
        core.acquire(mine.number if is_mine else other, f"l{i}", listed, float(ttl_s + 1), 0.0)
    if leases:
        core.begin_load(other, "copy", "l0", [])
    ending = [is_mine if closing else ttl_s + 1 <= 15.0 for _, ttl_s, is_mine in leases]
    parts = core.end_leases(mine.number) if closing else core.expire(15.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "LEASED_BLOCKS", 2 * core_module.LEASE_BLOCKS)
        for step, _ in enumerate(parts):
            core.check_invariants()
            for i in meddle[step : step + 1]:
                if not renews:
                    core.release(other, f"l{i}")
                elif core.leases.renew("engine", f"l{i}", 90.0):
                    ending[i] &= closing
    if closing:
        core.close_session(mine.number, 15.0)
    core.check_invariants()
    for i, is_over in enumerate(ending):
        lease = core.leases.get("engine", f"l{i}")
        if is_over:
            assert lease is None or (i == 0 and lease.released)
        else:
            assert lease is not None or (i in meddle and not renews)
    if leases:
        core.end_load(other, "copy", True)
    core.check_invariants()


def test_all_but_newcomers_is_evicted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BLOCKS", 16)
    world = make_world()
    core, mine, other = world.core, world.open(), world.open("o", "another")
    world.store(mine, range(100))
    world.store(other, range(20))
    core.acquire(mine.number, "pin", [HashList(0, words_of([40, 41]))], 0.0, 0.0)
    steps = core.evict_all(1)
    counts = [next(steps)]
    assert counts == [(16, 0)]
    # Reuses freed entries, and evicts blocks of a later part.
    world.store(mine, range(200, 210))
    evict(core, 1, 0, words_of([90, 91]))
    counts += steps
    core.check_invariants()
    assert [sum(column) for column in zip(*counts, strict=True)] == [96, 2]
    assert world.found([*range(100), *range(200, 210)]) == [40, 41, *range(200, 210)]
    assert world.found(range(20), 2) == list(range(20))
    assert sum(len(notice.hashes) for notice in core.take_effects()) == 98
    assert core.space.used_bytes() == 32 * SLOT_ALIGN
    assert [sum(column) for column in zip(*core.evict_all(0), strict=True)] == [30, 2]


def test_closing_sessions_report_pins_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_module, "BLOCKS", 4)
    world = make_world()
    core, session = world.core, world.open()
    world.store(session, range(12))
    listed, keep = HashList(0, words_of(range(12))), Retention(pin=True, ttl_s=9.0)
    parts = core.use(session.number, listed, 1.0, keep)
    assert [next(parts) for _ in range(3)] == [None] * 3
    core.close_session(session.number, 1.0)
    assert not list(parts)[1:] and core.counters.held_blocks == 8
    core.check_invariants()


@given(
    capacity=st.sampled_from([1, 7, 64, 1000]),
    steps=st.lists(
        st.tuples(st.sampled_from(["", "x", "y"]), st.sampled_from("abcd"), st.integers(-60, 60)),
        max_size=60,
    ),
)
def test_kinds_share_a_bound_by_the_rule(capacity: int, steps: list[tuple[str, str, int]]) -> None:
    bound = FairBound(capacity)
    books = {kind: dict.fromkeys("abcd", 0) for kind in ("", "x", "y")}
    floor = max(1, capacity // FLOOR_SHARE)

    def held(owner: str) -> int:
        return sum(book[owner] for book in books.values())

    for kind, owner, change in steps:
        left = capacity - sum(map(held, "abcd"))
        allowed = [
            n for n in range(1, left + 1) if held(owner) + n <= floor or held(owner) + n <= left - n
        ]
        # All smaller amounts must be allowed too.
        assert allowed == list(range(1, len(allowed) + 1))
        assert bound.room(owner) == max(allowed, default=0)
        if 0 < change <= bound.room(owner):
            bound.take(owner, change, kind)
            books[kind][owner] += change
        elif change < 0:
            given_back = min(-change, books[kind][owner])
            bound.give(owner, given_back, kind)
            books[kind][owner] -= given_back
        for one, book in books.items():
            bound.check({name: count for name, count in book.items() if count}, one)
        assert [bound.held(name) for name in "abcd"] == [held(name) for name in "abcd"]
