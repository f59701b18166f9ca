"""Tests the replay of traces against naive caches, its bounds, and its hints."""

import math
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bench.policies import POLICIES
from bench.policies.lru import LRU
from hotkv_server.cache.room.policies.hotness import CONTENDERS, Hotness
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.simulate.replay import (
    BLOCK_TOKENS,
    LONG_PAUSE_S,
    OneTier,
    SimulatedTier,
    clairvoyant,
    derive_hints,
    replay,
    unbounded,
)
from hotkv_server.simulate.trace import make_trace
from hotkv_server.simulate.two_tiers import TwoTiers, replay_two_tiers
from tests.simulate.naive import (
    any_requests,
    chained_requests,
    distinct,
    lru_hits,
    most_hits,
    two_tier_hits,
    unbounded_hits,
)
from tests.simulate.traces import Requests


def at_one_depth(requests: Requests) -> Requests:
    """Gives each block one depth in all requests, as real hashes have. Predecessors and the
    order of demoted blocks depend on it."""
    renamed: Requests = []
    for time_s, ids in requests:
        names = {block: 16 * block + depth for depth, block in enumerate(distinct(ids))}
        renamed.append((time_s, [names[block] for block in ids]))
    return renamed


@given(
    requests=st.one_of(chained_requests(), any_requests().map(at_one_depth)),
    capacity=st.integers(1, 25),
)
def test_lru_is_lru(requests: Requests, capacity: int) -> None:
    trace, told = make_trace("t", requests), list[int]()
    with mock.patch("hotkv_server.simulate.replay.STEP_REQUESTS", 3):
        prefix = replay(trace, capacity, LRU, told.append).prefix
    assert trace.hit_blocks(prefix) == lru_hits(requests, capacity)
    assert sum(told) == trace.num_requests and set(told[:-1]) <= {3} and told[-1] < 3


@given(
    requests=st.one_of(chained_requests(), any_requests().map(at_one_depth)),
    capacity=st.integers(1, 12),
    second_capacity=st.integers(1, 20),
)
def test_two_tiers_of_lru(requests: Requests, capacity: int, second_capacity: int) -> None:
    trace = make_trace("t", requests)
    done = replay_two_tiers(trace, capacity, second_capacity, LRU)
    found = trace.hit_blocks(done.prefix), done.num_second_tier_hits, done.num_second_tier_writes
    assert found == two_tier_hits(requests, capacity, second_capacity)


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=chained_requests(), capacity=st.integers(1, 12))
def test_an_endless_second_tier_loses_nothing(
    policy: str, requests: Requests, capacity: int
) -> None:
    capacity = max(capacity, *(len(ids) for _, ids in requests))
    trace = make_trace("t", requests)
    done = replay_two_tiers(trace, capacity, trace.num_unique_blocks, POLICIES[policy])
    assert done.prefix.tolist() == unbounded(trace).tolist()
    assert done.num_second_tier_writes <= trace.num_unique_blocks, (
        "a block was written twice though it never went"
    )


def holds_nothing(policy: Policy) -> bool:
    return not (isinstance(policy, Hotness) and policy.duel.winner.hold_s)


def test_with_two_tiers_neither_holds() -> None:
    spaces = [SimulatedTier(8, Hotness), SimulatedTier(16, Hotness)]
    two = TwoTiers(spaces[0], spaces[1], BLOCK_TOKENS, None)
    duels = []
    for tier in spaces:
        assert isinstance(tier.space.policy, Hotness)
        duels.append(tier.space.policy.duel)
        duels[-1].current = len(CONTENDERS) - 1
    assert all(duel.hold_s for duel in duels)
    trace = make_trace("t", [(0.0, list(range(8))), (1.0, list(range(8, 20)))])
    for start, end, now_s in zip(trace.starts, trace.starts[1:], trace.times_s, strict=False):
        two.serve(trace.hashes[start:end], float(now_s))
    assert not any(duel.winner.hold_s for duel in duels)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=chained_requests(),
    capacity=st.integers(1, 12),
    budget=st.one_of(st.none(), st.integers(0, 1 << 18)),
)
def test_tiers_stay_consistent(
    policy: str, requests: Requests, capacity: int, budget: int | None
) -> None:
    trace = make_trace("t", requests)
    one = OneTier(SimulatedTier(capacity, POLICIES[policy]))
    two = TwoTiers(
        SimulatedTier(capacity, POLICIES[policy]),
        SimulatedTier(capacity, POLICIES[policy]),
        BLOCK_TOKENS,
        budget,
    )
    for start, end, now_s in zip(trace.starts, trace.starts[1:], trace.times_s, strict=False):
        hashes = trace.hashes[start:end]
        refuses_none = holds_nothing(one.tier.space.policy)
        one.serve(hashes, float(now_s))
        refuses_none &= holds_nothing(one.tier.space.policy)
        two.serve(hashes, float(now_s))
        for tier in (one.tier, two.first, two.second):
            tier.space.check_invariants()
            assert not tier.space.removal.effects and not tier.space.index.pins.any()
        two.lower.check_invariants()
        # Nothing may be refused above another tier, or without holding.
        for tier in (two.first, *((one.tier,) if refuses_none else ())):
            assert np.count_nonzero(tier.find(hashes)) == min(len(hashes), capacity)


@given(
    requests=chained_requests(max_requests=7, max_blocks=3, branches=1), capacity=st.integers(1, 4)
)
def test_clairvoyant_is_the_best_there_is(requests: Requests, capacity: int) -> None:
    trace = make_trace("t", requests)
    assert trace.hit_blocks(clairvoyant(trace, capacity)) == most_hits(requests, capacity)


@given(requests=any_requests())
def test_an_endless_cache_hits_every_repetition(requests: Requests) -> None:
    trace = make_trace("t", requests)
    assert trace.hit_blocks(unbounded(trace)) == unbounded_hits(requests)


# Hints


@settings(max_examples=60)
@given(requests=chained_requests(max_blocks=5))
def test_pauses_end_with_the_next_whole_request(requests: Requests) -> None:
    trace = make_trace("t", requests)
    hints, listed = derive_hints(trace), np.split(trace.blocks, trace.starts[1:-1])
    for request, blocks in enumerate(listed):
        wanted = blocks[: max(1, len(blocks) - 1)].tolist()
        later = (
            at
            for at in range(request + 1, len(listed))
            if listed[at][: len(wanted)].tolist() == wanted
        )
        # inf: others came in between, so the session can't be recognized.
        pauses_s = {trace.times_s[at] - trace.times_s[request] for at in [*later][:1]}
        assert hints.pauses_s[request] in pauses_s | {math.inf}
        assert 0 <= hints.own_from[request] <= len(blocks)


def test_what_others_used_is_not_told() -> None:
    first, second = [1, 2, 3, 4], [1, 2, 5, 8]
    begin = [(0.0, first), (1.0, second)]
    turns = [(10.0, [*first, 6]), (1.0 + LONG_PAUSE_S, [*second, 7])]
    hints = derive_hints(make_trace("t", begin + turns))
    assert hints.pauses_s.tolist() == [10.0, LONG_PAUSE_S, math.inf, math.inf]
    assert hints.own_from.tolist() == [0, 2, 2, 2]
    assert [hints.cold_from(request) for request in range(4)] == [None, 2, 2, 2]


def test_a_replay_gives_up_what_has_ended() -> None:
    going_on, ended, other = ([*range(first, first + 10)] for first in (0, 100, 200))
    trace = make_trace("t", [*enumerate([going_on, ended, other, [*going_on, 10]])])
    assert replay(trace, 20, LRU).prefix.tolist() == [0, 0, 0, 0]
    told = replay(trace, 20, LRU, hints=derive_hints(trace))
    assert told.prefix.tolist() == [0, 0, 0, 10]
