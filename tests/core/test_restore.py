"""Tests how a start restores an earlier server's block table, whatever that contains."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bench.policies import POLICIES
from hotkv_proto import table
from hotkv_proto.blocks import BlockResult
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore import BelowSpace, restore, restore_below
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from hotkv_server.integrity.checksums import strides_of
from tests.core.old_tables import KEY_SPACE, KIND, NUM_SLABS, damage, empty, filled
from tests.core.support import (
    SLAB,
    World,
    begin_store,
    evict_all,
    insert,
    make_key_space,
    make_table,
    taken_over,
    words_of,
)


def test_what_tenants_hold_is_counted_after_a_start() -> None:
    shares = {"a": TenantShare(2 * SLAB), "b": TenantShare(2 * SLAB)}
    world = World(NUM_SLABS, tenants=shares)
    for tenant, count in (("a", 3), ("b", 5)):
        session = world.open(tenant, tenant=tenant, sizes=(SLOT_ALIGN, 2 * SLOT_ALIGN))
        for group in (0, 1):
            world.store(session, range(count), group=group)
    again, _ = taken_over(world.core, "lru", 1.0, 5.0)
    used = [int(again.space.tenants.used[again.space.tenants.number(number)]) for number in (1, 2)]
    assert used == [3 * 3 * SLOT_ALIGN, 5 * 3 * SLOT_ALIGN]
    again.check_invariants()


class Counted(np.ndarray):
    """Counts the elements that numpy processes, which are the work of a restore."""

    num_elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        Counted.num_elements += max(np.size(one) for one in inputs)
        if "out" in more:
            more["out"] = tuple(map(plain, more["out"]))
        found = getattr(ufunc, method)(*map(plain, inputs), **more)
        return found.view(Counted) if isinstance(found, np.ndarray) else found


def plain(one: Any) -> Any:
    return one.view(np.ndarray) if isinstance(one, Counted) else one


def test_restart_costs_alike_in_many_key_spaces() -> None:
    """Elements are counted, as time depends on the machine's load."""
    num_blocks, found = 4000, {}
    config = CoreConfig(num_blocks * SLOT_ALIGN, SLAB, num_blocks + 8)
    for num_spaces in (1, 500):
        core = CacheCore(config, make_table(num_blocks + 8), POLICIES["lru"](num_blocks + 8))
        for number in range(num_spaces):
            core.catalog.register(make_key_space(f"m{number}", SLOT_ALIGN, SLOT_ALIGN), (), 0.0)
        old = np.zeros((num_blocks + 1, table.RECORD_WORDS), np.uint32)
        places = np.arange(num_blocks)
        old[1:, :8] = words_of(range(num_blocks))
        # Most old numbers belong to other key spaces now.
        old[1:, table.W_KEY_SPACE] = 7 + places % num_spaces
        old[1:, table.W_GROUP_STATE] = table.STATE_READY << 16
        old[1:, table.W_SIZE], old[1:, table.W_OFFSET] = 1, places
        Counted.num_elements = 0
        numbers = {7 + number: 1 + number for number in range(num_spaces)}
        assert restore(core, old.view(Counted), numbers, None, 5.0).blocks == num_blocks
        found[num_spaces] = Counted.num_elements
        core.check_invariants()
        for number in range(num_spaces):
            own = words_of(range(number, num_blocks, num_spaces))
            assert core.space.index.find(1 + number, 0, own).all()
    assert found[500] < 4 * found[1]


@pytest.mark.parametrize("is_below", [False, True])
def test_new_blocks_are_hotter_than_restored_ones(*, is_below: bool) -> None:
    num_blocks, (name, policy) = 60_000, ("m", POLICIES["hotness"](60_010))
    old = np.zeros((num_blocks + 1, table.RECORD_WORDS), np.uint32)
    old[1:, :8] = words_of(range(num_blocks))
    old[1:, table.W_KEY_SPACE], old[1:, table.W_GROUP_STATE] = 1, table.STATE_READY << 16
    old[1:, table.W_SIZE], old[1:, table.W_OFFSET] = 1, np.arange(num_blocks)
    old[1:, table.W_DEPTH] = np.arange(num_blocks) % 100
    config = CoreConfig((num_blocks + 10) * SLOT_ALIGN, SLAB, num_blocks + 10)
    core = CacheCore(config, make_table(num_blocks + 10), policy)
    core.catalog.register(make_key_space(name, SLOT_ALIGN, SLOT_ALIGN), (), 0.0)
    if is_below:
        restored = restore_below(BelowSpace(core.space, core.catalog), old, {1: 1}, 5.0)
    else:
        restored = restore(core, old, {1: 1}, None, 5.0)
    assert restored.blocks == num_blocks
    back = core.space.index.find(1, 0, words_of(range(num_blocks)))
    (new,) = insert(core.space, 1, 0, words_of([-1]), SLOT_ALIGN, np.zeros(1, np.int64))
    core.space.publish(np.array([new], np.uint32), 9.0)
    heat = policy.heat(np.append(back, np.uint32(new)))
    assert heat[:-1].max() < heat[-1]
    assert (heat[:-1:100] > heat[99::100]).all(), "a tail is hotter than its head"


def apart(records: Words) -> dict[tuple[int, bytes], bool]:
    """The ready blocks (group, hash) with slots of their group's size. True if no other record
    has the slot, or another size in its slab."""
    slots = []
    for record in records.tolist():
        state, group = divmod(record[table.W_GROUP_STATE], 1 << 16)
        at, size = record[table.W_OFFSET], record[table.W_SIZE]
        fits = size == {0: 1, 1: 2, MAX_GROUPS: 1}.get(group) and at % size == 0
        fits &= record[table.W_CHECK] > 0
        if fits and at < 4 * NUM_SLABS and (state, record[table.W_KEY_SPACE]) == (2, 1):
            slots.append((group, np.array(record[:8], np.uint32).tobytes(), at, size))
    found: dict[tuple[int, bytes], bool] = {}
    for group, block, at, size in slots:
        in_slab = [one for one in slots if one[2] // 4 == at // 4]
        good = sum(one[2] == at or one[3] != size for one in in_slab) == 1
        found[group, block] = good or found.get((group, block), False)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_table_gives_a_consistent_cache(data: st.DataObject) -> None:
    """Only blocks whose slots conflict with no other record are there."""
    records = damage(filled().space.index.table.records.copy(), data)
    core = empty()
    restore(core, records, {1: 1}, None, 5.0)
    core.check_invariants()
    for (group, block), is_restored in apart(records).items():
        words = np.frombuffer(block, np.uint32).reshape(1, 8)
        assert group >= MAX_GROUPS or core.space.index.find(1, group, words).any() == is_restored
    session = core.open_session("f", "rank", KEY_SPACE, 5.0, (KIND,)).number
    core.acquire(session, "r", [HashList(0, words_of(range(30)))], 0.0, 5.0)
    begin_store(core, session, "t", "l", [Run(0, words_of(range(50)))], 0, 0.0, 6.0)
    core.end_store(session, "t", True, 6.0)
    core.check_invariants()


def test_ready_blocks_come_back_unverified_with_checksum() -> None:
    old = filled()
    core, restored = taken_over(old, "lru", 3.0, 5.0)
    assert (restored.blocks, restored.sketches) == (14, 4)
    assert restored.dropped == {"unfinished": 2}
    index = core.space.index
    for group, count in ((0, 8), (1, 6)):
        now, was = (one.find(1, group, words_of(range(count))) for one in (index, old.space.index))
        assert index.checks(now).all()
        assert np.array_equal(index.checks(now), old.space.index.checks(was))
        assert index.unverified[now].all()
        assert core.space.chains.ancestors(int(now[-1]), 100).tolist() == now[:-1].tolist()
        assert core.space.policy.last_used_s(now) == pytest.approx(3.0, abs=0.001)
    evict_all(core, 1)
    assert int(index.unverified.sum()) == 0


def test_a_link_beyond_the_table_is_no_link() -> None:
    records = filled().space.index.table.records.copy()
    kind = int(np.flatnonzero(records[:, table.W_SKETCH])[-1])
    block = int(records[kind, table.W_SKETCH])
    records[-1], records[block] = records[block], 0
    records[kind, table.W_SKETCH] = 2**31
    core = empty()
    restored = restore(core, records, {1: 1}, None, 5.0)
    assert (restored.blocks, restored.sketches) == (14, 3)
    core.check_invariants()


def test_sketch_not_named_by_its_block_drops() -> None:
    records = filled().space.index.table.records.copy()
    kind = int(np.flatnonzero(records[:, table.W_SKETCH])[-1])
    records[int(records[kind, table.W_SKETCH]), table.W_SKETCH] = 0
    core = empty()
    restored = restore(core, records, {1: 1}, None, 5.0)
    assert (restored.blocks, restored.sketches) == (14, 3)
    core.check_invariants()


@pytest.mark.parametrize("field", [table.W_KEY_SPACE, table.W_GROUP_STATE, 0])
def test_a_sketch_of_another_block_is_dropped(field: int) -> None:
    core = empty()
    foreign = replace(KEY_SPACE, model="two")
    core.catalog.register(foreign, (KIND,), 0.0)
    records = filled().space.index.table.records.copy()
    kind = int(np.flatnonzero(records[:, table.W_SKETCH])[-1])
    block = int(records[kind, table.W_SKETCH])
    if field == table.W_GROUP_STATE:
        same = (records[:, :8] == records[kind, :8]).all(axis=1)
        (other,) = np.flatnonzero(same & (records[:, table.W_GROUP_STATE] & 0xFFFF == 1))
        records[block, table.W_SKETCH] = 0
        records[kind, table.W_SKETCH] = other
        records[other, table.W_SKETCH] = kind
    else:
        records[kind, field] = 2
    restored = restore(core, records, {1: 1, 2: 2}, None, 5.0)
    assert (restored.blocks, restored.sketches) == (14, 3)
    core.check_invariants()


def test_a_record_without_checksum_is_dropped() -> None:
    records = filled().space.index.table.records.copy()
    (row, *_) = np.flatnonzero(records[:, table.W_GROUP_STATE] == table.STATE_READY << 16)
    records[row, table.W_CHECK : table.W_CHECK + 2] = 0
    restored = restore(empty(), records, {1: 1}, None, 5.0)
    assert restored.dropped["without checksum"] == 1


def test_a_tier_takes_over_only_ready_blocks() -> None:
    old = filled()
    below = BelowSpace(empty().space, old.catalog)
    restored = restore_below(below, old.space.index.table.records.copy(), {1: 1}, 5.0)
    assert restored.blocks == 14 and restored.dropped["unfinished"] == 2


def test_unknown_key_spaces_are_dropped() -> None:
    records = filled().space.index.table.records.copy()
    restored = restore(empty(), records, {}, None, 5.0)
    assert restored.blocks == 0 and restored.dropped == {"unfinished": 2, "misshapen": 18}


def test_a_flushed_block_is_kept_only_for_readers() -> None:
    old = filled()
    records = old.space.index.table.records.copy()
    flushed = old.space.index.find(1, 0, words_of([7]))
    records[flushed, table.W_GROUP_STATE] = table.STATE_DETACHED << 16
    core = empty()
    restored = restore(core, records, {1: 1}, None, 5.0, np.ones(len(records), np.uint8))
    assert (restored.blocks, restored.kept) == (13, 0) and restored.dropped == {"unfinished": 3}
    core.check_invariants()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_shards_that_are_written_apart_make_one_checksum(order: tuple[int, int]) -> None:
    core = empty()
    key_space = make_key_space("two", SLOT_ALIGN, SLOT_ALIGN, 2)
    session = core.open_session("e", "rank", key_space, 0.0)
    first, second = order
    stores = ((first, ([3, 7], [2])), (second, ([3],)), (second, ([2, 7],)))
    for name, (shard, parts) in zip("abc", stores, strict=True):
        runs = [Run(0, words_of(part)) for part in parts]
        sums = [np.array(part, np.uint64) * np.uint64(1000**shard) for part in parts]
        begin_store(core, session.number, name, "l", runs, shard, 0.0, 1.0)
        results = core.end_store(session.number, name, True, 1.0, sums)
    assert [one.tolist() for one in results] == [[BlockResult.STORED] * 2]
    index = core.space.index
    entries = index.find(session.key_space_id, 0, words_of([2, 3, 7]))
    checks = index.checks(entries)
    keys = index.mixed(entries) * np.uint64(0x9E37_79B9_7F4A_7C15)
    assert strides_of(checks).tolist() == [64] * 3
    assert ((checks ^ keys) >> np.uint64(4)).tolist() == [(1001 * n) >> 4 for n in (2, 3, 7)]
