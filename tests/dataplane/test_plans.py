"""Tests `BlockCopies`: its size grows with blocks, not with runs, and its shares are bounded."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hotkv_proto import table_reading
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_server.dataplane.plan import PIECE_RUNS, BlockCopies, Region, block_copies, num_shares

MIB = 1 << 20


def plan_of(
    num_blocks: int, runs: int, run_bytes: int, *, to_engine: bool = True, gap_bytes: int = 1
) -> BlockCopies:
    """Adjacent blocks and slots. `gap_bytes`: after each run in the engine's memory."""
    page_bytes, stride = runs * run_bytes, run_bytes + gap_bytes
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (page_bytes,))
    tensor = PageTensor(0, "kv", 0, runs * stride, run_bytes, 0, ((runs, stride),))
    layout = Layout(0, num_blocks, (MemoryHandle("kv", num_blocks * runs * stride),), (tensor,))
    layout.validate([group])
    blocks = np.arange(num_blocks, dtype=np.int64)
    arena, engine = (
        Region(0, num_blocks * page_bytes, "arena"),
        {"kv": Region(0, layout.num_bytes, "kv")},
    )
    (plan,) = block_copies(
        layout.recipes(0, group), blocks, blocks * page_bytes, arena, engine, to_engine=to_engine
    )
    return plan


def test_plan_grows_with_blocks_not_runs() -> None:
    """A list of all runs would take 212 MB; other threads allocate a little meanwhile."""
    plan_of(1, 1 << 16, 1)
    tracemalloc.start()
    try:
        plan = plan_of(100, 1 << 16, 1)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        assert num_shares(plan, 16 * MIB) == 100 == 100 * (1 << 16) // PIECE_RUNS
    finally:
        tracemalloc.stop()


def test_shares_are_bounded_in_bytes() -> None:
    """A cancel waits until the share being copied is done."""
    plan = plan_of(1024, 1, 2 * MIB, gap_bytes=0)
    count = num_shares(plan, 16 * MIB)
    parts = [plan.part(at, at + 1, count) for at in range(count)]
    assert count == 128 and {part.stop - part.start for part in parts} == {8}


@pytest.mark.parametrize("outside", ["engine", "arena", "below"])
def test_a_plan_that_leaves_its_memories_is_refused(outside: str) -> None:
    plan = plan_of(4, 3, 16)
    engine, arena = plan.engine, plan.arena
    blocks = plan.block_ids
    match outside:
        case "engine":
            engine = Region(0, engine.num_bytes - 2, "kv")
        case "arena":
            arena = Region(0, arena.num_bytes - 1, "arena")
        case "below":
            blocks = blocks - 1
    with pytest.raises(ValueError, match="copy plan leaves"):
        BlockCopies(plan.recipe, engine, arena, blocks, plan.slot_offsets, to_engine=True)


def test_extent_of_blocks_covers_all_runs() -> None:
    chance = np.random.default_rng(1)
    for _ in range(200):
        num_blocks, num_runs = chance.integers(1, 20, 2)
        ids, slots = chance.integers(-3, 100, num_blocks), chance.integers(-5, 1 << 20, num_blocks)
        bases, strides, places, lengths = chance.integers(1, 1 << 12, (4, num_runs))
        found = table_reading.extent_of_blocks(ids, slots, bases, strides, places, lengths)
        runs = ids[:, None] * strides + bases + lengths
        ends = max(0, runs.max()), slots.max() + (places + lengths).max()
        assert found == (ids.min(), ends[0], slots.min(), ends[1])


def test_a_plan_between_two_devices_is_refused() -> None:
    plan = plan_of(2, 1, 64)
    on_device = [replace(region, device=0) for region in (plan.engine, plan.arena)]
    for engine, arena in ((plan.engine, on_device[1]), (on_device[0], plan.arena)):
        assert replace(plan, engine=engine, arena=arena).device == 0
    with pytest.raises(ValueError, match="one side must be host memory"):
        replace(plan, engine=on_device[0], arena=on_device[1])
