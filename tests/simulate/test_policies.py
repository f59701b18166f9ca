"""Hotness on traffic of many kinds: near the best of the fixed policies everywhere, and no collapse
on traffic where they all collapse."""

import pytest

from hotkv_server.core.policies import POLICIES
from hotkv_server.simulate.bounds import clairvoyant
from hotkv_server.simulate.replay import replay
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.traces import MAKERS

NUM_REQUESTS = 1500
MOST_BEHIND = 0.04
"""Of all accesses: how far hotness may be behind the best of the others."""
LEAST_OF_BEST = 0.4
"""Of what the clairvoyant hits: the least on loops larger than the cache."""


def hit_rate(trace: Trace, policy: str, percent: float) -> float:
    done = replay(trace, trace.capacity_blocks(percent), POLICIES[policy])
    return trace.hit_blocks(done.prefix) / trace.num_accesses


def best_hit_rate(trace: Trace, percent: float) -> float:
    return trace.hit_blocks(clairvoyant(trace, trace.capacity_blocks(percent))) / trace.num_accesses


@pytest.mark.parametrize(
    "percent",
    [pytest.param(2.0, marks=pytest.mark.long), 5.0, pytest.param(10.0, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("maker", MAKERS)
def test_hotness_is_never_far_behind(maker: str, percent: float) -> None:
    trace = make_trace(maker, MAKERS[maker](2, NUM_REQUESTS))
    rates = {policy: hit_rate(trace, policy, percent) for policy in POLICIES}
    assert max(rates.values()) <= best_hit_rate(trace, percent), rates
    assert rates["hotness"] >= max(rates.values()) - MOST_BEHIND, rates


@pytest.mark.parametrize("percent", [10.0, 20.0])
def test_hotness_does_not_collapse_on_loops(percent: float) -> None:
    """LRU and ARC hit next to nothing here: each block goes just before it is asked for again."""
    trace = make_trace("loops", MAKERS["loops"](2, 2 * NUM_REQUESTS))
    best = best_hit_rate(trace, percent)
    assert LEAST_OF_BEST * best <= hit_rate(trace, "hotness", percent) <= best
