"""The map of the arena says what a walk over each entry and each slab says, however it is cut into
cells and parts."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto.keys import Representation
from hotkv_proto.table import SLOT_ALIGN, STATE_READY
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.inspect import ArenaMap, arena_map
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.slabs import ABSENT, FREE
from hotkv_server.cache.values import CoreConfig, HashList, Run
from tests.core.support import begin_store, evict, make_key_space, make_table, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 11
CAPACITY = 60
END_S = 1000.0


def drawn(core: CacheCore) -> ArenaMap:
    *parts, whole = arena_map(core, END_S)
    assert whole is not None and parts == [None] * len(parts)
    return whole


class Naive:
    """Entry by entry, slab by slab."""

    def __init__(self, core: CacheCore, slabs_per_cell: int) -> None:
        num_cells = math.ceil(core.space.pool.num_slabs / slabs_per_cell)
        self.used, self.ready = [0.0] * num_cells, [0.0] * num_cells
        self.idle = [math.nan] * num_cells
        index, policy = core.space.index, core.space.policy
        sums = [0.0] * num_cells
        for entry in np.flatnonzero(index.states()).astype(np.uint32)[:, None]:
            begin, size = int(index.offsets(entry)[0]), int(index.slot_bytes(entry)[0])
            state = int(index.states()[entry[0]])
            is_block = not core.space.representations.among(entry)[0]
            age_s = END_S - float(policy.last_used_s(entry)[0])
            for at in range(begin, begin + size, SLOT_ALIGN):
                cell = at // SLAB // slabs_per_cell
                self.used[cell] += SLOT_ALIGN
                if state == STATE_READY and is_block:
                    self.ready[cell] += SLOT_ALIGN
                    sums[cell] += SLOT_ALIGN * math.log1p(age_s)
        for cell, ready in enumerate(self.ready):
            if ready:
                self.idle[cell] = math.expm1(sums[cell] / ready)
        owners = core.space.pool.slab_owner().tolist()
        self.owners = []
        for cell in range(num_cells):
            mine = owners[cell * slabs_per_cell : (cell + 1) * slabs_per_cell]
            lent = [owner for owner in mine if owner >= 0]
            self.owners.append(lent[0] if lent else FREE if FREE in mine else ABSENT)
            self.used[cell] /= len(mine) * SLAB


@pytest.mark.parametrize("policy", ["hotness", "lru"])
@given(
    sizes=st.sampled_from([(1, 2), (3, 1), (5, 1), (9, 2)]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "reserve", "touch", "evict", "represent"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
        ),
        max_size=12,
    ),
    most_cells=st.sampled_from([1, 2, 4, 11, 64]),
    backed=st.integers(0, NUM_SLABS),
)
@settings(max_examples=25)
def test_a_map_is_what_each_entry_says(
    policy: str,
    sizes: tuple[int, int],
    steps: list[tuple[str, int, list[int]]],
    most_cells: int,
    backed: int,
) -> None:
    config = CoreConfig(NUM_SLABS * SLAB, SLAB, CAPACITY, is_backed=False)
    core = CacheCore(config, make_table(CAPACITY), POLICIES[policy](CAPACITY))
    core.space.grow(backed * SLAB, 0)
    kind = Representation(0, "min-max", 1, (SLOT_ALIGN,))
    space = make_key_space("one", *(size * SLOT_ALIGN for size in sizes))
    session = core.open_session("engine", "rank", space, 0.0, (kind,))
    for now, (what, group, numbers) in enumerate(steps):
        now_s, name = float(now * now), f"{now}"
        words = words_of(numbers)
        if what == "touch":
            core.touch(session.number, [HashList(group, words)], now_s)
        elif what == "evict":
            evict(core, session.key_space_id, group, words)
        else:
            group = session.representations[0] if what == "represent" else group
            begin_store(core, session.number, name, name, [Run(group, words)], 0, 0.0, now_s)
            if what != "reserve":
                core.end_store(session.number, name, True, now_s)
        core.take_effects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "MAX_CELLS", most_cells)
        patch.setattr(inspect, "MAP_PART_ENTRIES", 7)
        found = drawn(core)
    assert len(found.used_ratios) == len(found.idle_s) == len(found.slot_bytes) <= most_cells
    expected = Naive(core, found.slabs_per_cell)
    assert np.allclose(found.used_ratios, expected.used)
    assert found.slot_bytes.tolist() == expected.owners
    assert np.allclose(found.idle_s, expected.idle, rtol=1e-6, equal_nan=True)


def test_slabs_of_a_large_arena_are_joined() -> None:
    slabs = 3 * inspect.MAX_CELLS + 1
    core = CacheCore(
        CoreConfig(slabs * SLAB, SLAB, CAPACITY), make_table(CAPACITY), POLICIES["lru"](CAPACITY)
    )
    found = drawn(core)
    assert found.slabs_per_cell == 4 and len(found.used_ratios) == -(-slabs // 4)
    assert not found.used_ratios.any() and set(found.slot_bytes.tolist()) == {FREE}
