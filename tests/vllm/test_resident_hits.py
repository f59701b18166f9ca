"""Hits of requests that live in host memory: what of them is leased and loaded. No engine; the
server is a double."""

import pytest

from tests.vllm.parts import TOKENS, Parts, request
from tests.vllm.test_hit_finder import LONG, granted

LEFT_OUT = range(1, 3)
"""Of four blocks: a resident engine needs the first and the last one on the device."""


def test_what_the_server_keeps_for_a_resident_is_neither_leased_nor_loaded() -> None:
    parts = Parts(left_out=LEFT_OUT, represented=[0])
    parts.put("a", range(4))
    parts.put("a", range(4), group=1)
    state = granted(parts)
    lease = parts.server.leases[state.hit.lease_id]
    named = [request("a", LONG).block_hashes[block] for block in (0, 3)]
    assert [hashes for _, hashes in lease] == [named, named]
    job = parts.load(state, 4 * TOKENS, [[1, 0, 0, 4]])
    for run in (*job.runs, *job.representations):
        assert run.lease_positions.tolist() == [0, 1] and run.block_ids.tolist() == [1, 4]
    assert parts.finder.end_load(state, False) == (4,)


@pytest.mark.parametrize("table", [[1, 2, 0, 4], [1, 0, 3, 4], [1, 2, 3, 4]])
def test_what_is_left_out_of_a_lease_can_not_be_loaded(table: list[int]) -> None:
    parts = Parts(left_out=LEFT_OUT)
    assert parts.load(granted(parts), 4 * TOKENS, [table]) is None


def test_a_block_of_a_resident_that_came_without_its_representation_is_looked_at_again() -> None:
    parts = Parts(left_out=LEFT_OUT, represented=[0])
    parts.put("a", [0], group=1)
    state = granted(parts)
    assert parts.load(state, 4 * TOKENS, [[1, 0, 0, 4]])
    assert parts.finder.end_load(state, False) == (3,)


def test_behind_a_local_hit_less_is_left_out() -> None:
    parts = Parts(left_out=LEFT_OUT)
    state = granted(parts, computed=2 * TOKENS)
    (lease,) = parts.server.leases[state.hit.lease_id]
    assert lease[1] == [request("a", LONG).block_hashes[3]]
