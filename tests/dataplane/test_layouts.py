"""Copies blocks into the arena and back in every memory layout, with every copy method, against
numpy views with the axes (layer, block, kernel block, head, token, content)."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hotkv_proto.layout import Int64s, Recipe
from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import Method
from hotkv_server.dataplane.engines import CopyEngine, Outcome
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region, block_copies
from tests.contracts.copy_engine_contract import Bytes, Ends
from tests.core.layouts import Case, cases, dealt, ranks_of, shard_bytes
from tests.dataplane.rigs import SMALL, Arena, device_memory, read, write
from tests.doubles.device import FakeRuntime

ARENA_BYTES = 1 << 20


@dataclass
class Bench:
    """Half of the arena is pinned."""

    runtime: FakeRuntime
    arena: Arena
    engines: dict[Method | None, CopyEngine]

    def move(
        self,
        method: Method | None,
        recipes: Sequence[Recipe],
        blocks: Int64s,
        slots: Int64s,
        memories: dict[str, Bytes],
        *,
        to_engine: bool,
    ) -> None:
        """method: None copies in the host; otherwise the memories are written to the fake device
        before, and read back afterwards."""
        regions = {
            name: Region(memory.ctypes.data, memory.nbytes, name)
            if method is None
            else device_memory(self.runtime, 0, memory.nbytes, name)
            for name, memory in memories.items()
        }
        for name, memory in memories.items():
            write(self.runtime, regions[name], memory)
        ends = Ends()
        plans = block_copies(
            recipes, blocks, slots, self.arena.region, regions, to_engine=to_engine
        )
        self.engines[method].submit(ends.job("move", plans))
        ends.wait()
        assert ends["move"] is Outcome.DONE, ends.message("move")
        for name, memory in memories.items():
            memory.reshape(-1)[:] = read(self.runtime, regions[name])
            if method is not None:
                self.runtime.free(0, regions[name].address)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    runtime = FakeRuntime(3)
    arena = Arena(runtime, ARENA_BYTES, piece_bytes=5 * 4096)
    while arena.pinned_bytes < ARENA_BYTES // 2:
        arena.grow()
    engines: dict[Method | None, CopyEngine] = {
        method: CudaCopyEngine(runtime, 0, arena, dataclasses.replace(SMALL, method=method))
        for method in Method
    }
    engines[None] = HostCopyEngine(2)
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
    methods=st.tuples(*[st.sampled_from([None, *Method])] * 2),
)
def test_blocks_come_back_in_any_layout(
    bench: Bench, case: Case, seed: int, methods: tuple[Method | None, Method | None]
) -> None:
    rng = np.random.default_rng(seed)
    slot_stride = max(group.slot_bytes for group in case.groups) + 7
    num_bytes = case.num_blocks * slot_stride
    # A random offset, so that slots often cross the end of the pinned part.
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
        rank.layout(shard).validate(case.groups)
        stored_from = {name: memory.copy() for name, memory in rank.memories.items()}
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
        assert all(np.array_equal(rank.memories[name], stored_from[name]) for name in stored_from)
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
