"""The bounds: exact on small cases, and never below a policy (of traffic see `test_policies`)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.simulate.replay import clairvoyant, replay, unbounded
from hotkv_server.simulate.trace import make_trace
from tests.simulate.naive import any_requests, chained_requests, most_hits, unbounded_hits
from tests.simulate.traces import Requests


@given(
    requests=chained_requests(max_requests=7, max_blocks=3, branches=1), capacity=st.integers(1, 4)
)
def test_clairvoyant_is_the_best_there_is(requests: Requests, capacity: int) -> None:
    trace = make_trace("t", requests)
    assert trace.hit_blocks(clairvoyant(trace, capacity)) == most_hits(requests, capacity)


@given(requests=any_requests())
def test_unbounded(requests: Requests) -> None:
    trace = make_trace("t", requests)
    assert trace.hit_blocks(unbounded(trace)) == unbounded_hits(requests)


@given(requests=chained_requests())
def test_clairvoyant_with_room_for_all_is_unbounded(requests: Requests) -> None:
    trace = make_trace("t", requests)
    assert clairvoyant(trace, trace.num_unique_blocks).tolist() == unbounded(trace).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=chained_requests(max_requests=60, max_blocks=8), capacity=st.integers(1, 30))
def test_no_policy_beats_the_bounds(policy: str, requests: Requests, capacity: int) -> None:
    trace = make_trace("t", requests)
    best = trace.hit_blocks(clairvoyant(trace, capacity))
    assert (
        trace.hit_blocks(replay(trace, capacity, POLICIES[policy]).prefix)
        <= best
        <= trace.hit_blocks(unbounded(trace))
    )
