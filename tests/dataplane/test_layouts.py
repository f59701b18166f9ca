"""Blocks of engines on a device, in every layout, go through the arena and back by every method.

`Layout` tells both sides by offsets; the reference is numpy views of the engine's memory
(`tests.core.test_layout_copies`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Int64s, Layout, MemoryHandle, PageTensor, Recipe
from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import Method
from hotkv_server.dataplane.engines import Outcome
from hotkv_server.dataplane.plan import block_copies
from hotkv_server.testing.copy_engine_contract import Bytes, Ends
from hotkv_server.testing.device import FakeRuntime
from tests.core.layouts import ORDERS, Case, Shape, cases, dealt, make_rank, ranks_of, shard_bytes
from tests.dataplane.rigs import SMALL, Arena, device_memory

ARENA_BYTES = 1 << 20


@dataclass
class Bench:
    """One arena, half of it pinned, and an engine for each method."""

    runtime: FakeRuntime
    arena: Arena
    engines: dict[Method, CudaCopyEngine]

    def move(
        self,
        method: Method,
        recipes: Sequence[Recipe],
        blocks: Int64s,
        slots: Int64s,
        memories: dict[str, Bytes],
        *,
        to_engine: bool,
    ) -> None:
        """As if the memories lay on the device: copies them there and back."""
        regions = {
            name: device_memory(self.runtime, 0, memory.nbytes, name)
            for name, memory in memories.items()
        }
        for name, memory in memories.items():
            self.runtime.poke(regions[name].address, memory)
        ends = Ends()
        plans = block_copies(
            recipes, blocks, slots, self.arena.region, regions, to_engine=to_engine
        )
        self.engines[method].submit(ends.job("move", plans))
        ends.wait()
        assert ends["move"] is Outcome.DONE, ends.message("move")
        for name, memory in memories.items():
            memory.reshape(-1)[:] = self.runtime.peek(regions[name].address, memory.nbytes)
            self.runtime.free(0, regions[name].address)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    runtime = FakeRuntime(3)
    arena = Arena(runtime, ARENA_BYTES, piece_bytes=5 * 4096)
    while arena.pinned_bytes < ARENA_BYTES // 2:
        arena.grow()
    engines = {
        method: CudaCopyEngine(runtime, 0, arena, dataclasses.replace(SMALL, method=method))
        for method in Method
    }
    yield Bench(runtime, arena, engines)
    for engine in engines.values():
        engine.close()
    arena.close()
    assert not runtime.held()
    runtime.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=cases(),
    seed=st.integers(0, 1 << 20),
    methods=st.tuples(st.sampled_from(Method), st.sampled_from(Method)),
)
def test_blocks_come_back_in_any_layout(
    bench: Bench, case: Case, seed: int, methods: tuple[Method, Method]
) -> None:
    rng = np.random.default_rng(seed)
    slot_stride = max(group.slot_bytes for group in case.groups) + 7
    num_bytes = case.num_blocks * slot_stride
    # Somewhere in the arena, often across the end of what is pinned.
    begin = int(rng.integers(0, ARENA_BYTES - num_bytes))
    arena = bench.arena.region.array()
    arena[:] = rng.integers(0, 256, ARENA_BYTES, dtype=np.uint8)
    expected = arena.copy()
    old_ids, new_ids = dealt(case, rng), dealt(case, rng)
    slots = np.split(
        begin + rng.permutation(case.num_blocks) * slot_stride,
        np.cumsum([len(ids) for ids in old_ids])[:-1],
    )
    for shard, (rank, other) in enumerate(
        zip(ranks_of(case, case.storing, rng), ranks_of(case, case.loading, rng), strict=True)
    ):
        for g, group in enumerate(case.groups):
            bench.move(
                methods[0],
                rank.layout(shard).recipes(g, group),
                old_ids[g],
                slots[g],
                rank.memories,
                to_engine=False,
            )
            start = sum(group.shard_bytes[:shard])
            for slot, block in zip(slots[g].tolist(), old_ids[g].tolist(), strict=True):
                page = shard_bytes(rank, g, case.shapes[shard][g].num_layers, block)
                expected[slot + start : slot + start + len(page)] = page
        assert np.array_equal(arena, expected)
        before = {name: memory.copy() for name, memory in other.memories.items()}
        for g, group in enumerate(case.groups):
            bench.move(
                methods[1],
                other.layout(shard).recipes(g, group),
                new_ids[g],
                slots[g],
                other.memories,
                to_engine=True,
            )
        by_engine = {name: memory.copy() for name, memory in other.memories.items()}
        for name, memory in before.items():
            other.memories[name][:] = memory
        for g in range(len(case.groups)):
            for n in range(case.shapes[shard][g].num_layers):
                other.layer(g, n)[0, new_ids[g]] = rank.layer(g, n)[0, old_ids[g]]
        assert all(np.array_equal(other.memories[name], by_engine[name]) for name in by_engine)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placing", ["layers", "apart", "packed"])
def test_methods_are_equal_to_each_other(bench: Bench, order: str, placing: str) -> None:
    rng = np.random.default_rng(11)
    shapes, num_blocks = [Shape(3, 1, 2, 16, 32), Shape(2, 1, 2, 16, 24)], 24
    groups = [GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,)) for shape in shapes]
    rank = make_rank(order, placing, shapes, num_blocks)
    for memory in rank.memories.values():
        memory[:] = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    check_methods(bench, rank.layout(0), groups, rank.memories, num_blocks, rng)


def test_mamba_states_are_moved_whole_by_every_method(bench: Bench) -> None:
    """Convolution and state of two layers, of odd sizes, padded to one page size as vLLM pads them,
    beside an attention group."""
    rng, num_blocks = np.random.default_rng(5), 10
    conv, state, padded, attention = 1030, 6144, 8192, 4096
    tensors = [
        *(
            PageTensor(
                0, "states", layer * num_blocks * padded, padded, conv, layer * (conv + state)
            )
            for layer in range(2)
        ),
        *(
            PageTensor(
                0,
                "states",
                layer * num_blocks * padded + conv + 10,
                padded,
                state,
                layer * (conv + state) + conv,
            )
            for layer in range(2)
        ),
        PageTensor(1, "attention", 0, attention, 64, 0, ((attention // 64, 64),)),
    ]
    handles = (
        MemoryHandle("states", 2 * num_blocks * padded),
        MemoryHandle("attention", num_blocks * attention),
    )
    layout = Layout(0, num_blocks, handles, tuple(tensors))
    groups = [
        GroupSpec(GroupKind.FULL_ATTENTION, 16, (2 * (conv + state),)),
        GroupSpec(GroupKind.FULL_ATTENTION, 16, (attention,)),
    ]
    layout.validate(groups)
    memories = {
        handle.handle_id: rng.integers(0, 256, handle.num_bytes, dtype=np.uint8)
        for handle in handles
    }
    check_methods(bench, layout, groups, memories, num_blocks, rng)


def check_methods(
    bench: Bench,
    layout: Layout,
    groups: Sequence[GroupSpec],
    memories: dict[str, Bytes],
    num_blocks: int,
    rng: np.random.Generator,
) -> None:
    """Every method stores the same bytes into the arena, and what any stores every other loads into
    other blocks the same."""
    stride = max(group.slot_bytes for group in groups) + 5
    begin = max(0, ARENA_BYTES // 2 - num_blocks * stride // 2)
    slots = begin + rng.permutation(num_blocks)[: num_blocks // 2] * stride
    blocks, elsewhere = (
        rng.permutation(num_blocks)[: num_blocks // 2],
        rng.permutation(num_blocks)[: num_blocks // 2],
    )
    stored, loaded = [], []
    for method in Method:
        arena = bench.arena.region.array()
        arena[:] = 7
        target = {name: np.full_like(memory, 9) for name, memory in memories.items()}
        images = []
        for g, group in enumerate(groups):
            bench.move(method, layout.recipes(g, group), blocks, slots, memories, to_engine=False)
            images.append(arena.copy())
            bench.move(method, layout.recipes(g, group), elsewhere, slots, target, to_engine=True)
        stored.append(np.concatenate(images))
        loaded.append(np.concatenate(list(target.values())))
    assert all(np.array_equal(stored[0], other) for other in stored[1:]) and (stored[0] != 7).any()
    assert all(np.array_equal(loaded[0], other) for other in loaded[1:]) and (loaded[0] != 9).any()
