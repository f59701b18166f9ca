"""The core in cases worth telling apart: bursts, leases that end in a copy, ranks, key spaces."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import RESERVED_FLAG, SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run
from tests.core.cache_model import snapshot
from tests.core.support import begin_store, expire, make_key_space, make_table, reserve, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 6


class Burst:
    """One session that stores blocks of one group, in calls of any size, into an arena of 24
    slots."""

    def __init__(self, num_blocks: int) -> None:
        config = CoreConfig(NUM_SLABS * SLAB, SLAB, 100, max_blocks_per_call=1000)
        self.core = CacheCore(config, make_table(100), LRU(100))
        key_space = make_key_space("burst", SLOT_ALIGN, SLOT_ALIGN)
        self.session = self.core.open_session("engine", "rank", key_space, 0.0).number
        self.numbers = list(range(num_blocks))
        self.evicted: list[int] = []
        self.rows = {words_of([number])[0].tobytes(): number for number in self.numbers}

    def store(self, numbers: list[int], now_s: float) -> list[int]:
        """Results of one store; the notices that it caused are noted first, as a client would read
        them."""
        name = f"store {numbers[0]}"
        begin_store(self.core, self.session, name, name, [Run(0, words_of(numbers))], 0, 0.0, now_s)
        self.evicted += [
            self.rows[row.tobytes()] for notice in self.core.take_effects() for row in notice.hashes
        ]
        return self.core.end_store(self.session, name, True, now_s)[0].tolist()

    def found(self) -> list[int]:
        mask = self.core.lookup(1, [HashList(0, words_of(self.numbers))])[0]
        return np.flatnonzero(mask).tolist()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), pinned=st.integers(0, 6))
def test_a_burst_beyond_capacity_is_answered_truly_and_the_newest_survive(
    sizes: list[int], pinned: int
) -> None:
    burst = Burst(sum(sizes))
    capacity = NUM_SLABS * SLAB // SLOT_ALIGN
    stored: list[int] = []
    start = 0
    num_pinned = 0
    for call, size in enumerate(sizes):
        numbers = burst.numbers[start : start + size]
        start += size
        results = burst.store(numbers, float(call))
        assert set(results) <= {BlockResult.STORED, BlockResult.NO_SPACE}
        kept = [
            number
            for number, result in zip(numbers, results, strict=True)
            if result == BlockResult.STORED
        ]
        # What one call can't hold is refused from the first block that has no place; nothing is
        # refused that would have fitted.
        assert kept == numbers[: capacity - num_pinned]
        stored += kept
        assert set(burst.found()) == set(stored) - set(burst.evicted), (
            "answered as stored, gone, and nobody was told"
        )
        if call == 0 and pinned:
            grant = burst.core.acquire(
                burst.session, "pin", [HashList(0, words_of(kept[:pinned]))], 500.0, 0.0
            )
            num_pinned = int(grant.pinned[0].sum())
    held = stored[:num_pinned]
    newest = [number for number in stored if number not in held]
    # Of one call, leaves go first: the oldest call that has not gone wholly keeps its head.
    survivors = set(burst.found()) - set(held)
    assert set(held) <= set(burst.found())
    assert len(survivors) == min(len(newest), capacity - num_pinned)
    last_call = [number for number in newest if number >= sum(sizes[:-1])]
    assert set(last_call) <= survivors
    calls = {
        number: call
        for call, size in enumerate(sizes)
        for number in range(sum(sizes[:call]), sum(sizes[: call + 1]))
    }
    gone = [number for number in newest if number not in survivors]
    if gone and survivors:
        assert max(calls[number] for number in gone) <= min(calls[number] for number in survivors)
    burst.core.check_invariants()


def test_a_lease_that_expires_during_a_load_keeps_its_slots_until_the_load_ends() -> None:
    burst = Burst(200)
    burst.store(list(range(8)), 0.0)
    burst.core.acquire(burst.session, "lease", [HashList(0, words_of(range(6)))], 1.0, 0.0)
    slots = burst.core.begin_load(burst.session, "load", "lease", [LoadPositions(0, np.arange(6))])
    assert expire(burst.core, 5.0) == 1
    burst.store(list(range(50, 100)), 6.0)
    assert set(range(6)) <= set(burst.found()) and set(burst.evicted) == {6, 7}
    index = burst.core.space.index
    assert index.offsets(index.find(1, 0, words_of(range(6)))).tolist() == slots[0].offsets.tolist()
    burst.core.end_load(burst.session, "load", True)
    burst.store(list(range(100, 150)), 7.0)
    assert not set(range(6)) & set(burst.found()) and set(range(6)) <= set(burst.evicted)


@pytest.mark.parametrize(("num_shards", "num_sessions"), [(1, 1), (2, 2)])
def test_a_block_is_found_only_when_every_shard_is_written(
    num_shards: int, num_sessions: int
) -> None:
    config = CoreConfig(NUM_SLABS * SLAB, SLAB, 50)
    core = CacheCore(config, make_table(50), LRU(50))
    key_space = make_key_space("shards", SLOT_ALIGN, SLOT_ALIGN, num_shards)
    sessions = [
        core.open_session("engine", f"rank{rank}", key_space, 0.0).number
        for rank in range(num_sessions)
    ]
    run = [Run(0, words_of(range(4)))]
    reserve(core, sessions[0], "lease", run, 0.0, 0.0)
    for shard in range(num_shards):
        assert not core.lookup(1, [HashList(0, words_of(range(4)))])[0].any()
        begin_store(core, sessions[shard], "store", "lease", run, shard, 0.0, 0.0)
        result = core.end_store(sessions[shard], "store", True, 0.0)[0]
        assert set(result.tolist()) == {
            BlockResult.STORED if shard == num_shards - 1 else BlockResult.WRITTEN
        }
    assert core.lookup(1, [HashList(0, words_of(range(4)))])[0].all() and not core.leases.all()
    words = core.space.index.find(1, 0, words_of(range(4)))
    assert np.all(words < RESERVED_FLAG)


def test_a_block_that_is_reserved_and_then_stored_twice_in_a_call_is_copied_once() -> None:
    """Two copies to one slot would leave a mixture of both."""
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 50), make_table(50), LRU(50))
    session = core.open_session(
        "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    run = [Run(0, words_of([1, 2, 1]))]
    reserve(core, session, "lease", run, 0.0, 0.0)
    slots = begin_store(core, session, "store", "lease", run, 0, 0.0, 0.0)
    assert slots[0].positions.tolist() == [0, 1]
    results = core.end_store(session, "store", True, 0.0)[0].tolist()
    assert (
        results == [BlockResult.STORED, BlockResult.STORED, BlockResult.IN_FLIGHT]
        and core.counters.stored_blocks == 2
    )
    core.check_invariants()


def test_leases_do_not_cross_key_spaces_of_one_engine_id() -> None:
    """Slots are read through the session's layout, so a lease of other groups would name bytes that
    are not its own."""
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 50), make_table(50), LRU(50))
    one, two = (
        core.open_session("engine", "rank", make_key_space(name, size, SLOT_ALIGN), 0.0)
        for name, size in (("a", SLOT_ALIGN), ("b", SLAB))
    )
    hashes = words_of(range(3))
    reserve(core, one.number, "write", [Run(0, hashes)], 0.0, 0.0)
    core.acquire(one.number, "read", [HashList(0, hashes)], 0.0, 0.0)
    before = snapshot(core)
    calls: list[tuple[Callable[[], object], Reason]] = [
        (
            lambda: reserve(core, two.number, "write", [Run(0, hashes)], 0.0, 0.0),
            Reason.DUPLICATE_ID,
        ),
        (
            lambda: begin_store(core, two.number, "t", "write", [Run(0, hashes)], 0, 0.0, 0.0),
            Reason.DUPLICATE_ID,
        ),
        (
            lambda: core.acquire(two.number, "read", [HashList(0, hashes)], 0.0, 0.0),
            Reason.DUPLICATE_ID,
        ),
        (lambda: core.begin_load(two.number, "t", "read", []), Reason.FOREIGN_LEASE),
    ]
    for call, reason in calls:
        with pytest.raises(HotKVError) as raised:
            call()
        assert raised.value.reason == reason and snapshot(core) == before


@pytest.mark.parametrize(
    ("size", "num_shards", "reason"),
    [(NUM_SLABS * SLAB + 1, 1, Reason.INVALID_FIELD), (SLOT_ALIGN, 32, Reason.INVALID_FIELD)],
)
def test_key_spaces_that_cannot_be_served_are_refused(
    size: int, num_shards: int, reason: Reason
) -> None:
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 50), make_table(50), LRU(50))
    before = snapshot(core)
    with pytest.raises(HotKVError) as raised:
        core.open_session(
            "engine", "rank", make_key_space("bad", SLOT_ALIGN, size, num_shards), 0.0
        )
    assert raised.value.reason == reason and snapshot(core) == before
