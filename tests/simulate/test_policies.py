"""Hotness on traffic of many kinds: near the best of the fixed policies everywhere, no collapse on
traffic where they all collapse, and never far below hotness without contenders that hold blocks."""

from functools import cache

import pytest

from hotkv_server.cache.room.policies import POLICIES, Hotness
from hotkv_server.cache.room.policies.hotness import CONTENDERS, Duel
from hotkv_server.simulate.replay import clairvoyant, derive_hints, replay
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.traces import MAKERS

NUM_REQUESTS = 1500
MOST_BEHIND = 0.04
"""Of all accesses: how far hotness may be behind the best of the others."""
LEAST_OF_BEST = 0.4
"""Of what the clairvoyant hits: the least on loops larger than the cache."""
MOST_LOST = 0.01
"""Of all accesses: how far hotness may be behind what it would be if it never held blocks."""
LARGE = ("bursts", "drift", "loops", "scans")
"""Traffic that takes five seconds and more."""
CAMPAIGN = pytest.mark.campaign
REGULAR = ("regular_turns", "agent_sessions")
"""Sessions whose next turn mostly comes in a time that can be learnt."""


def hit_rate(trace: Trace, policy: str, percent: float) -> float:
    done = replay(trace, trace.capacity_blocks(percent), POLICIES[policy])
    return trace.hit_blocks(done.prefix) / trace.num_accesses


def best_hit_rate(trace: Trace, percent: float) -> float:
    return trace.hit_blocks(clairvoyant(trace, trace.capacity_blocks(percent))) / trace.num_accesses


@pytest.mark.parametrize(
    "percent",
    [pytest.param(2.0, marks=CAMPAIGN), 5.0, pytest.param(10.0, marks=CAMPAIGN)],
)
@pytest.mark.parametrize(
    "maker",
    [pytest.param(name, marks=pytest.mark.long) if name in LARGE else name for name in MAKERS],
)
def test_hotness_is_never_far_behind(maker: str, percent: float) -> None:
    trace = make_trace(maker, MAKERS[maker](2, NUM_REQUESTS))
    rates = {policy: hit_rate(trace, policy, percent) for policy in POLICIES}
    assert max(rates.values()) <= best_hit_rate(trace, percent), rates
    assert rates["hotness"] >= max(rates.values()) - MOST_BEHIND, rates


@pytest.mark.parametrize("percent", [10.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_hotness_does_not_collapse_on_loops(percent: float) -> None:
    """LRU and ARC hit next to nothing here: each block goes just before it is asked for again."""
    trace = make_trace("loops", MAKERS["loops"](2, 2 * NUM_REQUESTS))
    best = best_hit_rate(trace, percent)
    assert LEAST_OF_BEST * best <= hit_rate(trace, "hotness", percent) <= best


@cache
def made(maker: str, seed: int) -> Trace:
    return make_trace(maker, MAKERS[maker](seed, NUM_REQUESTS))


def never_holding(capacity: int) -> Hotness:
    policy = Hotness(capacity)
    plain = tuple(contender for contender in CONTENDERS if not contender.hold_s)
    policy.duel = Duel(capacity, plain)
    return policy


def plain_hit_rate(trace: Trace, percent: float) -> float:
    done = replay(trace, trace.capacity_blocks(percent), never_holding)
    return trace.hit_blocks(done.prefix) / trace.num_accesses


def hinted_hit_rate(trace: Trace, percent: float) -> float:
    capacity = trace.capacity_blocks(percent)
    done = replay(trace, capacity, Hotness, hints=derive_hints(trace))
    return trace.hit_blocks(done.prefix) / trace.num_accesses


@pytest.mark.parametrize(
    "percent",
    [
        pytest.param(1.0, marks=pytest.mark.long),
        pytest.param(2.0, marks=CAMPAIGN),
        5.0,
        pytest.param(10.0, marks=CAMPAIGN),
    ],
)
@pytest.mark.parametrize("maker", MAKERS)
def test_holding_blocks_costs_at_most_a_point(maker: str, percent: float) -> None:
    trace = made(maker, 2)
    assert hit_rate(trace, "hotness", percent) >= plain_hit_rate(trace, percent) - MOST_LOST


@pytest.mark.parametrize("percent", [2.0, pytest.param(5.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("maker", REGULAR)
def test_regular_turns_close_a_quarter_of_the_gap(maker: str, percent: float) -> None:
    """From LRU to the clairvoyant, and more than hotness closes that never holds blocks."""
    trace = made(maker, 2)
    least, most = hit_rate(trace, "lru", percent), best_hit_rate(trace, percent)
    reached = hit_rate(trace, "hotness", percent)
    assert reached >= least + (most - least) / 4
    assert reached >= plain_hit_rate(trace, percent) + MOST_LOST


@pytest.mark.parametrize("percent", [2.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_hints_close_half_of_the_gap(percent: float) -> None:
    trace = made("regular_turns", 2)
    least, most = hit_rate(trace, "lru", percent), best_hit_rate(trace, percent)
    reached = hinted_hit_rate(trace, percent)
    assert reached >= (least + most) / 2
    assert reached >= hit_rate(trace, "hotness", percent)
