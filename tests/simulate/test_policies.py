"""Tests the eviction policy hotness on made-up traffic of many kinds. Its hit rate must be near
that of the best other policy, also on loops, on which LRU has hardly any hits. Hotness can hold
blocks (protect them from eviction for some time after a use); this must raise its hit rate."""

from functools import cache

import pytest

from hotkv_server.cache.room.policies import POLICIES, Hotness
from hotkv_server.cache.room.policies.hotness import CONTENDERS, Duel
from hotkv_server.simulate.replay import clairvoyant, derive_hints, replay
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.traces import MAKERS

NUM_REQUESTS = 1500
MOST_BEHIND = 0.04
"""Largest difference between the hit rates of the best other policy and of hotness."""
LEAST_OF_BEST = 0.4
"""Least hits of hotness on loops larger than the cache, as a share of the most hits possible."""
MOST_LOST = 0.01
"""Largest loss of hit rate that holding blocks (protecting them from eviction) may cause."""
REGULAR = ("regular_turns", "agent_sessions")
"""Kinds of traffic with sessions whose next turn mostly comes after a regular pause."""
EVERYDAY = (*REGULAR, "sub_agents", "zipf_trees")
"""Kinds of traffic that the tests of every run replay. The long tests replay all kinds."""
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
    """Returns the hit rate of a replay with a cache of `percent` of all blocks. A replay runs only
    at the first call; later calls return the same result.

    maker: the kind of traffic.
    policy: a policy of the server, "clairvoyant" (the most hits possible), or "never holding"
        (hotness, but without protecting blocks for some time after a use).
    told: True if the policy gets the hints that a trace contains: when sessions end or pause.
    """
    trace = made(maker, num_requests)
    capacity = trace.capacity_blocks(percent)
    if policy == "clairvoyant":
        return trace.hit_blocks(clairvoyant(trace, capacity)) / trace.num_accesses
    make = never_holding if policy == "never holding" else POLICIES[policy]
    done = replay(trace, capacity, make, hints=derive_hints(trace) if told else None)
    return trace.hit_blocks(done.prefix) / trace.num_accesses


def some_long(names: tuple[str, ...]) -> list[object]:
    """Returns all kinds of traffic as test parameters. The kinds that are not in `names` run only
    in the long tests."""
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
    """Requests documents in a loop that is larger than the cache. LRU and ARC evict each block just
    before its next use. The policy hotness must have at least 40 % of the most hits that are
    possible."""
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
    """Replays sessions whose requests come at regular intervals. Hotness must close a quarter of
    the gap between LRU's hits and the most hits possible. It must also beat hotness that does not
    hold blocks (protect them from eviction for some time after a use)."""
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
