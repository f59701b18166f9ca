"""Blocks through the server's copy engine, in every layout an engine may have, compared byte by
byte with numpy views.

The views are the reference: an engine's memory reshaped to its axes (layer, block, kernel block,
head, token, content). `Layout` knows the same memory by offsets and strides only.
"""

import threading
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Int64s, Layout, MemoryHandle, PageTensor, Recipe
from hotkv_server.dataplane.engines import CopyJob, Outcome
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region, block_copies
from tests.core.layouts import (
    Bytes,
    Case,
    Rank,
    Shape,
    cases,
    dealt,
    make_rank,
    ranks_of,
    shard_bytes,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[HostCopyEngine]:
    engine = HostCopyEngine(2)
    yield engine
    engine.close()


def run(
    engine: HostCopyEngine,
    recipes: Sequence[Recipe],
    blocks: Int64s,
    slots: Int64s,
    arena: Bytes,
    rank: Rank,
    *,
    to_engine: bool,
) -> None:
    """Copies, and waits for the end."""
    done = threading.Event()
    outcomes: list[tuple[Outcome, str]] = []
    regions = {
        name: Region(memory.ctypes.data, memory.nbytes, name)
        for name, memory in rank.memories.items()
    }

    def on_done(outcome: Outcome, error: str) -> None:
        outcomes.append((outcome, error))
        done.set()

    region = Region(arena.ctypes.data, arena.nbytes, "arena")
    engine.submit(
        CopyJob(block_copies(recipes, blocks, slots, region, regions, to_engine=to_engine), on_done)
    )
    assert done.wait(60) and outcomes == [(Outcome.DONE, "")]


@settings(max_examples=200)
@given(case=cases(), seed=st.integers(0, 1 << 20))
def test_blocks_come_back_in_any_layout_of_equal_pages(
    engine: HostCopyEngine, case: Case, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = case.groups
    slot_stride = max(group.slot_bytes for group in groups) + 7
    arena = rng.integers(0, 256, case.num_blocks * slot_stride, dtype=np.uint8)
    expected = arena.copy()
    old_ids, new_ids = dealt(case, rng), dealt(case, rng)
    slots = np.split(
        rng.permutation(case.num_blocks) * slot_stride,
        np.cumsum([len(ids) for ids in old_ids])[:-1],
    )
    for shard, (rank, other) in enumerate(
        zip(ranks_of(case, case.storing, rng), ranks_of(case, case.loading, rng), strict=True)
    ):
        stored_from = {name: memory.copy() for name, memory in rank.memories.items()}
        loaded_into = {name: memory.copy() for name, memory in other.memories.items()}
        for layout in (rank.layout(shard), other.layout(shard)):
            layout.validate(groups)
        for g, group in enumerate(groups):
            run(
                engine,
                rank.layout(shard).recipes(g, group),
                old_ids[g],
                slots[g],
                arena,
                rank,
                to_engine=False,
            )
            run(
                engine,
                other.layout(shard).recipes(g, group),
                new_ids[g],
                slots[g],
                arena,
                other,
                to_engine=True,
            )
            start = sum(group.shard_bytes[:shard])
            for slot, block in zip(slots[g].tolist(), old_ids[g].tolist(), strict=True):
                page = shard_bytes(rank, g, case.shapes[shard][g].num_layers, block)
                expected[slot + start : slot + start + len(page)] = page
        assert np.array_equal(arena, expected)
        assert all(np.array_equal(rank.memories[name], stored_from[name]) for name in stored_from)
        # Once more by views alone, into what was there before: no other byte has changed.
        by_engine = {name: memory.copy() for name, memory in other.memories.items()}
        for name, memory in loaded_into.items():
            other.memories[name][:] = memory
        for g in range(len(groups)):
            for n in range(case.shapes[shard][g].num_layers):
                other.layer(g, n)[0, new_ids[g]] = rank.layer(g, n)[0, old_ids[g]]
        assert all(np.array_equal(other.memories[name], by_engine[name]) for name in by_engine)


@pytest.mark.parametrize(
    ("order", "runs_per_block"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 12)],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_block_is_as_many_runs_as_its_layout_has_breaks(
    order: str, runs_per_block: int, split: bool
) -> None:
    """Three layers and four heads; told as one tensor or as one for each layer. Contiguous over the
    layers means one run a block."""
    shape = Shape(3, 1, 4, 5, 8)
    rank = make_rank(order, "packed", [shape], 6)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,))
    if split:
        rank.views = [[("m", rank.layer(0, layer)) for layer in range(3)]]
    blocks = np.array([4, 0, 2], np.int64)
    (recipe,) = rank.layout(0).recipes(0, group)
    runs = recipe.copy_runs(blocks, blocks * 4096)
    assert (
        len(runs.num_bytes) == 3 * runs_per_block and runs.num_bytes.sum() == 3 * group.slot_bytes
    )
    if runs_per_block == 1:
        assert runs.num_bytes.tolist() == [group.slot_bytes] * 3


def test_neighbours_in_the_first_block_only_are_no_run() -> None:
    """Two tensors that adjoin in block 0 and are blocks apart after it."""
    tensors = (PageTensor(0, "m", 0, 32, 16, 0), PageTensor(0, "m", 16, 64, 16, 16))
    layout = Layout(0, 2, (MemoryHandle("m", 96),), tensors)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (32,))
    layout.validate([group])
    (recipe,) = layout.recipes(0, group)
    runs = recipe.copy_runs(np.array([0, 1], np.int64), np.array([0, 32], np.int64))
    assert runs.engine_offsets.tolist() == [0, 16, 32, 80] and runs.slot_offsets.tolist() == [
        0,
        16,
        32,
        48,
    ]


def test_replicated_kv_is_stored_once_and_loaded_by_all(engine: HostCopyEngine) -> None:
    """Four ranks hold two distinct shards: the first of each pair writes, both read."""
    rng = np.random.default_rng(5)
    shape = Shape(2, 1, 2, 3, 16)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,) * 2)
    arena = np.zeros(3 * group.slot_bytes, np.uint8)
    writers = [make_rank(order, "apart", [shape], 4) for order in ("LBHNC", "BLHNC")]
    blocks, slots = np.array([3, 1], np.int64), np.array([0, 2], np.int64) * group.slot_bytes
    for shard, rank in enumerate(writers):
        rank.memories["group 0 part 0"][:] = rng.integers(
            0, 256, rank.memories["group 0 part 0"].nbytes, dtype=np.uint8
        )
        run(
            engine,
            rank.layout(shard).recipes(0, group),
            blocks,
            slots,
            arena,
            rank,
            to_engine=False,
        )
    for number in range(4):
        reader = make_rank("BHLNC", "layers", [shape], 4)
        run(
            engine,
            reader.layout(number // 2).recipes(0, group),
            blocks,
            slots,
            arena,
            reader,
            to_engine=True,
        )
        for layer in range(2):
            assert np.array_equal(
                reader.layer(0, layer)[0, blocks], writers[number // 2].layer(0, layer)[0, blocks]
            )
