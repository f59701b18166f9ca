"""Sums of a write lease: over all copies, whatever part of the blocks each wrote and in whatever
order they ended."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from hotkv_server.cache.leases.leases import WriteLease

NUM_BLOCKS = 5


@given(data=st.data(), num_shards=st.integers(1, 3))
def test_a_block_is_given_the_sum_of_all_its_shards(data: st.DataObject, num_shards: int) -> None:
    """Each shard is written in parts of its own; a block is complete with its last shard, and asked
    for once."""
    lease = WriteLease("engine", "owner", "lease", 1, 1, 1, 0.0, np.empty(0, np.uint64), 0)
    todo = [(block, shard) for block in range(1, NUM_BLOCKS + 1) for shard in range(num_shards)]
    todo = data.draw(st.permutations(todo))
    seen: dict[int, list[int]] = {block: [] for block in range(1, NUM_BLOCKS + 1)}
    while todo:
        shard = todo[0][1]
        mine = [block for block, other in todo if other == shard]
        part = mine[: data.draw(st.integers(1, len(mine)))]
        todo = [(block, other) for block, other in todo if other != shard or block not in part]
        sums = data.draw(
            st.lists(st.integers(1, (1 << 64) - 1), min_size=len(part), max_size=len(part))
        )
        for block, value in zip(part, sums, strict=True):
            seen[block].append(value)
        complete = np.array([len(seen[block]) == num_shards for block in part])
        found = lease.sums_with(np.array(part, np.uint32), np.array(sums, np.uint64), complete)
        assert found.tolist() == [
            sum(seen[block]) % (1 << 64) for block in part if len(seen[block]) == num_shards
        ]
