"""Cases of `CacheCore` that the state machine of `test_cache` does not reach."""

import sys
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from hotkv_proto.blocks import BlockResult, Retention
from hotkv_proto.errors import Reason
from hotkv_proto.keys import MAX_GROUPS, Sketch
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.leases.leases import write_weight
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.values import Entries, HashList, LoadPositions, Run, TenantShare
from tests.core.cache_model import refused
from tests.core.support import (
    SLAB,
    World,
    begin_store,
    evict,
    expire,
    flush,
    reserve,
    residencies,
    words_of,
)


def test_block_reserved_and_stored_twice_copies_once() -> None:
    """Two copies into one slot could mix their bytes."""
    world = World()
    core, session = world.core, world.open().number
    run = [Run(0, words_of([1, 2, 1]))]
    reserve(core, session, "lease", run, 0.0, 0.0)
    slots = begin_store(core, session, "store", "lease", run, 0, 0.0, 0.0)
    assert slots[0].positions.tolist() == [0, 1]
    results = core.end_store(session, "store", True, 0.0)[0].tolist()
    assert results == [BlockResult.STORED, BlockResult.STORED, BlockResult.IN_FLIGHT]
    assert core.counters.stored_blocks == 2
    two = world.open("two", "two", (SLOT_ALIGN, SLOT_ALIGN)).number
    runs = [Run(group, words_of([5])) for group in (0, 1, 0)]
    begin_store(core, two, "store", "lease", runs, 0, 0.0, 0.0)
    results = np.concatenate(core.end_store(two, "store", True, 0.0)).tolist()
    assert results == [BlockResult.STORED, BlockResult.STORED, BlockResult.IN_FLIGHT]
    core.check_invariants()


@pytest.mark.parametrize("num_slabs", [1, 200])
def test_store_of_many_runs_takes_linear_time(num_slabs: int) -> None:
    """Stores run on the event loop. What is counted are calls of Python functions."""
    counts = []
    for num_runs in (50, 200):
        world, calls = World(num_slabs, capacity=600), list[int]()
        core, session = world.core, world.open(num_shards=2).number
        runs = [Run(0, words_of([number])) for number in range(num_runs)]
        sys.setprofile(lambda frame, event, of, n=calls: "call" in event and n.append(1))
        try:
            for shard, name in enumerate(("one", "two")):
                slots = begin_store(core, session, name, "lease", runs, shard, 0.0, 0.0)
                sums = [np.full(len(one.entries), 7, np.uint64) for one in slots]
                core.end_store(session, name, True, 0.0, sums)
        finally:
            sys.setprofile(None)
        assert core.counters.stored_blocks == min(num_runs, 4 * num_slabs)
        counts.append(len(calls))
    assert counts[1] < 6 * counts[0]


def test_leases_do_not_cross_key_spaces() -> None:
    """A load reads slots in the layout of its own session, which does not fit another key space."""
    world = World()
    core = world.core
    one, two = world.open(model="a").number, world.open(model="b", sizes=(SLAB, SLOT_ALIGN)).number
    hashes = words_of(range(3))
    runs, listed = [Run(0, hashes)], [HashList(0, hashes)]
    reserve(core, one, "write", runs, 0.0, 0.0)
    core.acquire(one, "read", listed, 0.0, 0.0)
    calls: list[tuple[Callable[[], object], Reason]] = [
        (lambda: reserve(core, two, "write", runs, 0.0, 0.0), Reason.DUPLICATE_ID),
        (lambda: begin_store(core, two, "t", "write", runs, 0, 0.0, 0.0), Reason.DUPLICATE_ID),
        (lambda: core.acquire(two, "read", listed, 0.0, 0.0), Reason.DUPLICATE_ID),
        (lambda: core.begin_load(two, "t", "read", []), Reason.FOREIGN_LEASE),
        (lambda: core.slot_offsets(one, "write"), Reason.INVALID_FIELD),
        *(
            (partial(core.begin_load, one, "t", "read", [positions]), Reason.INVALID_FIELD)
            for positions in (
                LoadPositions(1, np.array([0])),
                LoadPositions(0, np.array([2])),
                LoadPositions(0, np.array([3])),
                LoadPositions(0, np.array([-1])),
            )
        ),
    ]
    for call, reason in calls:
        refused(core, call, reason)


def of_two_ranks(**config: object) -> tuple[World, int]:
    world = World(capacity=50, unadmitted_share=1.0, **config)
    kinds = (Sketch(0, "f", 1, (SLOT_ALIGN // 2,) * 2),)
    return world, world.open(num_shards=2, kinds=kinds).number


def test_joining_ranks_name_at_most_the_first_call() -> None:
    world, session = of_two_ranks()
    core = world.core
    first = [Run(0, words_of([0, 1, 2])), Run(1, words_of([0]))]
    reserve(core, session, "id", first, 0.0, 0.0)
    for other in (
        [Run(0, words_of([3]))],
        [Run(0, words_of([0, 1, 3]))],
        [*first, Run(1, words_of([1]))],
    ):
        for call in (
            lambda runs=other: reserve(core, session, "id", runs, 0.0, 0.0),
            lambda runs=other: begin_store(core, session, "t", "id", runs, 1, 0.0, 0.0),
        ):
            refused(core, call, Reason.DUPLICATE_ID)
    same = reserve(core, session, "id", first, 0.0, 0.0)
    assert {value for row in same.results for value in row.tolist()} == {BlockResult.RESERVED}
    # Each rank sends the sketches that it could build.
    runs = [Run(0, words_of([2, 0])), Run(MAX_GROUPS, words_of([0, 1]))]
    results = reserve(core, session, "id", runs, 0.0, 0.0).results
    assert [row.tolist() for row in results] == [
        [BlockResult.RESERVED] * 2,
        [BlockResult.NO_SPACE] * 2,
    ]


def test_blocks_that_write_leases_list_are_bounded() -> None:
    """Blocks that are present count too, and so do sketches. The refusal evicts nothing."""
    num_bytes = 2 * write_weight(4, 2) + 2 * write_weight(20, 2)
    world, session = of_two_ranks(client_memory_bytes=num_bytes)
    core = world.core
    for first in range(0, 24, 4):
        run = [Run(0, words_of(range(first, first + 4)))]
        for shard in range(2):
            begin_store(core, session, "s", "s", run, shard, 0.0, 0.0)
            core.end_store(session, "s", True, 0.0)
    reserve(core, session, "id", [Run(0, words_of(range(4)))], 0.0, 0.0)
    for more in ([Run(0, words_of(range(100, 121)))], [Run(MAX_GROUPS, words_of(range(21)))]):
        call = partial(reserve, core, session, "other", more, 0.0, 0.0)
        refused(core, call, Reason.OVERLOADED)
    core.check_invariants()


@pytest.mark.parametrize(("size", "num_shards"), [(6 * SLAB + 1, 1), (SLOT_ALIGN, 32)])
def test_key_spaces_that_cannot_be_served_are_refused(size: int, num_shards: int) -> None:
    world = World()
    sizes = (SLOT_ALIGN, size)
    refused(
        world.core, lambda: world.open(sizes=sizes, num_shards=num_shards), Reason.INVALID_FIELD
    )
    world.open(sizes=(SLOT_ALIGN, 6 * SLAB), num_shards=1)


def test_only_blocks_that_made_room_count_as_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy remembers evicted blocks. Flushed and released ones must not be among them."""
    world = World()
    core, session = world.core, world.open()
    world.store(session, range(8))
    core.touch(
        session.number, [HashList(0, words_of([3, 4]))], 1.0, Retention(pin=True, ttl_s=50.0)
    )
    assert core.retention_pins.held_bytes == 2 * SLOT_ALIGN
    told: list[tuple[int, bool]] = []
    forget = core.space.policy.forget

    def note(entries: Entries, keys: Keys, *, evicted: bool) -> None:
        told.append((len(entries), evicted))
        forget(entries, keys, evicted=evicted)

    monkeypatch.setattr(core.space.policy, "forget", note)
    assert evict(core, 1, 0, words_of([0, 1, 2])) == (3, 0)
    assert flush(core, 1) == 5
    reserve(core, session.number, "a", [Run(0, words_of([9]))], 10.0, 1.0)
    core.release(session.number, "a")
    assert told == [(3, True), (5, False), (1, False)]
    assert core.retention_pins.held_bytes == 0
    core.check_invariants()


def test_each_tenant_may_pin_a_certain_share() -> None:
    """Leases whose load has not begun may pin a quarter of a tenant's guarantee."""
    share = TenantShare(16 * SLOT_ALIGN)
    world = World(8, unadmitted_share=0.25, tenants={"a": share, "b": share})
    for tenant in "ab":
        session = world.open(tenant, tenant=tenant)
        world.store(session, range(8))
        listed = [HashList(0, words_of(range(8)))]
        (mask,) = world.core.acquire(session.number, "l", listed, 100.0, 1.0).pinned
        assert mask.tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("num_promised", [0, 8])
def test_stores_never_whole_take_share_and_promise(num_promised: int) -> None:
    """What is refused evicts nobody."""
    world = World(6, unwritten_share=0.25)
    sizes = 2 * SLOT_ALIGN, 2 * SLOT_ALIGN
    core, kind = world.core, world.open("kind", "kind", sizes)
    session = world.open(num_shards=2, sizes=sizes).number
    world.store(kind, [0])
    if num_promised:
        residencies(core).open(session, "r", {0: num_promised}, 0.0)
    stored, share = 0, 3  # A quarter of 24 slots, two for each block.
    for name in ("a", "b", "c"):
        run = [Run(0, words_of(range(stored, stored + 9)))]
        residency = "r" if num_promised else ""
        begin_store(core, session, name, name, run, 0, 0.0, 0.0, residency_id=residency)
        results = core.end_store(session, name, True, 0.0)[0].tolist()
        stored += results.count(BlockResult.WRITTEN)
        core.check_invariants()
    assert stored == share + num_promised
    assert world.found([0], kind.key_space_id) == [0], "it was evicted"


def test_refused_reservations_teach_the_policy_nothing() -> None:
    world = World(6, unwritten_share=0.25)
    core, session = world.core, world.open().number
    reserve(core, session, "a", [Run(0, words_of(range(24)))], 0.0, 0.0)
    with patch.object(core.space.policy, "decline") as declined:
        again = reserve(core, session, "b", [Run(0, words_of(range(30, 50)))], 0.0, 0.0)
    assert set(again.results[0].tolist()) == {BlockResult.NO_SPACE} and not declined.called
    core.release(session, "a")
    freed = reserve(core, session, "c", [Run(0, words_of(range(30, 36)))], 0.0, 0.0)
    assert freed.results[0].tolist() == [BlockResult.RESERVED] * 6
    core.check_invariants()


def test_lease_ends_in_time_and_never_earlier() -> None:
    world = World()
    session, blocks = world.open(), [HashList(0, words_of([1]))]
    world.store(session, [1])
    for name, ttl_s in (("a", 10.0), ("b", 10.5)):
        world.core.acquire(session.number, name, blocks, ttl_s, 1.0)
    assert world.core.leases.renew(session.engine_id, "b", 2.0) is not None
    assert [expire(world.core, now_s) for now_s in (10.99, 11.0, 11.49, 11.5)] == [0, 1, 0, 1]


@pytest.mark.parametrize("by", ["release", "expiry"])
def test_a_lease_pins_until_its_copies_end(by: str) -> None:
    world = World()
    core, session = world.core, world.open()
    world.store(session, [1])
    core.acquire(session.number, "l", [HashList(0, words_of([1]))], 10.0, 1.0)
    core.begin_load(session.number, "load", "l", [LoadPositions(0, np.zeros(1, np.int64))])
    if by == "release":
        assert core.release(session.number, "l")
    else:
        assert expire(core, 11.0) == 1
    assert evict(core, 1, 0, words_of([1])) == (0, 1)
    core.end_load(session.number, "load", True)
    assert evict(core, 1, 0, words_of([1])) == (1, 0)
    core.check_invariants()
