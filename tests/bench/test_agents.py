"""Tests `bench.agents`: its best time to live, and its bound, a cache that knows all later
requests."""

from bench.agents import NEW_GAPS, best_ttl_s, compare
from hotkv_server.simulate.trace import make_trace
from tests.simulate.traces import regular_turns

BENEFIT_S = 60.0


def test_best_time_to_live_covers_paying_gaps() -> None:
    gaps_s = [1.0] * (NEW_GAPS - 1) + [100.0]
    assert best_ttl_s(gaps_s, 10.0) == 1.0
    assert best_ttl_s(gaps_s, 5000.0) == 100.0
    assert best_ttl_s(gaps_s, 0.5) == 0.0
    assert best_ttl_s(gaps_s[1:], 10.0) == 10.0


def test_no_rule_beats_the_bound() -> None:
    trace = make_trace("regular", regular_turns(1, 250))
    (found,) = compare([trace], [5.0], BENEFIT_S).values()
    assert max(found.values()) == found["clairvoyant"] > found["lru"]
    assert found["cachewise"] != found["cachewise_told"]
