"""The core where the machine of `test_cache` does not go: one engine on two key spaces, blocks
listed twice, key spaces that can't be served, and what a policy learns of a flush."""

from collections.abc import Callable

import pytest

from hotkv_proto.blocks import BlockResult, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.values import CoreConfig, Entries, HashList, Run
from tests.core.cache_model import snapshot
from tests.core.support import (
    begin_store,
    evict,
    flush,
    make_key_space,
    make_table,
    reserve,
    words_of,
)

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 6


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


def test_only_blocks_that_made_room_count_as_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy remembers what it should not have evicted; a flush tells nothing about that. It ends
    retention, too."""
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 50), make_table(50), LRU(50))
    session = core.open_session(
        "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    begin_store(core, session, "s", "s", [Run(0, words_of(range(8)))], 0, 0.0, 1.0)
    core.end_store(session, "s", True, 1.0)
    core.touch(session, [HashList(0, words_of([3, 4]))], 1.0, Retention(pin=True, ttl_s=50.0))
    assert core.retention_pins.held_bytes == 2 * SLOT_ALIGN
    told: list[tuple[int, bool]] = []
    forget = core.space.policy.forget

    def note(entries: Entries, keys: Keys, *, evicted: bool) -> None:
        told.append((len(entries), evicted))
        forget(entries, keys, evicted=evicted)

    monkeypatch.setattr(core.space.policy, "forget", note)
    assert evict(core, 1, 0, words_of([0, 1, 2])) == (3, 0)
    assert flush(core, 1) == 5
    reserve(core, session, "a", [Run(0, words_of([9]))], 10.0, 1.0)
    core.release(session, "a")
    assert told == [(3, True), (5, False), (1, False)]
    assert core.retention_pins.held_bytes == 0
    core.check_invariants()
