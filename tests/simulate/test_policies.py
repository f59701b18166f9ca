"""Tests `hotness` on made-up traffic: it is near the best other policy, and holding blocks helps
it."""

from functools import cache

import pytest

from bench.policies import POLICIES
from hotkv_server.cache.room.policies.hotness import CONTENDERS, Duel, Hotness
from hotkv_server.simulate.replay import clairvoyant, derive_hints, replay
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.traces import MAKERS

NUM_REQUESTS = 1500
MOST_BEHIND = 0.04
"""Largest distance to the best other hit rate."""
LEAST_OF_BEST = 0.4
"""Least share of the most hits possible, on loops."""
MOST_LOST = 0.01
"""Largest loss of hit rate by holding blocks."""
REGULAR = ("regular_turns", "agent_sessions")
"""Next turns mostly come after a regular pause."""
EVERYDAY = (*REGULAR, "sub_agents", "zipf_trees")
"""Traffic for every run; the long tests replay all kinds."""
PERCENTS = pytest.mark.parametrize("percent", [5.0, pytest.param(2.0, marks=pytest.mark.campaign)])


@cache
def made(maker: str, num_requests: int = NUM_REQUESTS) -> Trace:
    return make_trace(maker, MAKERS[maker](2, num_requests))


def never_holding(capacity: int) -> Hotness:
    policy = Hotness(capacity)
    plain = tuple(contender for contender in CONTENDERS if not contender.hold_s)
    policy.duel = Duel(capacity, plain)
    return policy


@cache
def hit_rate(
    maker: str, policy: str, percent: float, num_requests: int = NUM_REQUESTS, *, told: bool = False
) -> float:
    """policy: also "clairvoyant", the most hits possible, and "never holding".
    told: the policy gets hints of ended and pausing sessions.
    """
    trace = made(maker, num_requests)
    capacity = trace.capacity_blocks(percent)
    if policy == "clairvoyant":
        return trace.hit_blocks(clairvoyant(trace, capacity)) / trace.num_accesses
    make = never_holding if policy == "never holding" else POLICIES[policy]
    done = replay(trace, capacity, make, hints=derive_hints(trace) if told else None)
    return trace.hit_blocks(done.prefix) / trace.num_accesses


def some_long(names: tuple[str, ...]) -> list[object]:
    """All kinds of traffic, others only in the long tests."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.long) for name in MAKERS
    ]


@PERCENTS
@pytest.mark.parametrize("maker", some_long(EVERYDAY))
def test_hotness_is_never_far_behind(maker: str, percent: float) -> None:
    rates = {policy: hit_rate(maker, policy, percent) for policy in POLICIES}
    assert max(rates.values()) <= hit_rate(maker, "clairvoyant", percent), rates
    assert rates["hotness"] >= max(rates.values()) - MOST_BEHIND, rates


def test_hotness_does_not_collapse_on_loops() -> None:
    """LRU and ARC evict each block just before its next use."""
    best, found = (
        hit_rate("loops", policy, 10.0, 2 * NUM_REQUESTS) for policy in ("clairvoyant", "hotness")
    )
    assert LEAST_OF_BEST * best <= found <= best


@PERCENTS
@pytest.mark.parametrize("maker", some_long(REGULAR))
def test_holding_blocks_costs_at_most_a_point(maker: str, percent: float) -> None:
    plain = hit_rate(maker, "never holding", percent)
    assert hit_rate(maker, "hotness", percent) >= plain - MOST_LOST


@pytest.mark.parametrize("percent", [2.0, pytest.param(5.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("maker", REGULAR)
def test_regular_turns_close_a_quarter_of_the_gap(maker: str, percent: float) -> None:
    least, most = (hit_rate(maker, policy, percent) for policy in ("lru", "clairvoyant"))
    reached = hit_rate(maker, "hotness", percent)
    assert reached >= least + (most - least) / 4
    assert reached >= hit_rate(maker, "never holding", percent) + MOST_LOST


@pytest.mark.parametrize("percent", [2.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_hints_close_half_of_the_gap(percent: float) -> None:
    maker = "regular_turns"
    least, most = (hit_rate(maker, policy, percent) for policy in ("lru", "clairvoyant"))
    reached = hit_rate(maker, "hotness", percent, told=True)
    assert reached >= (least + most) / 2
    assert reached >= hit_rate(maker, "hotness", percent)
