"""The rules that `bench.agents` compares: each does what its words say; none beats the bound."""

import pytest

from bench.agents import NEW_GAPS, ROWS, Gaps, best_ttl_s, compare, hit_rate
from hotkv_server.simulate.trace import Trace, make_trace
from tests.simulate.traces import regular_turns

BENEFIT_S = 60.0


def rounds(gaps_s: dict[int, float], turns: int = 40) -> Trace:
    """Sessions of eight blocks that come back after their own gap, in a trace of as many turns."""
    sessions = [(gap_s * (1 + turn), name) for name, gap_s in gaps_s.items() for turn in range(99)]
    return make_trace(
        "rounds",
        [
            (time_s, list(range(100 * name, 100 * name + 8)))
            for time_s, name in sorted(sessions)[: turns * len(gaps_s)]
        ],
    )


def rates(trace: Trace, percent: float) -> dict[str, float]:
    return {row: hit_rate(trace, percent, row, BENEFIT_S) for row in ROWS}


def test_the_best_time_to_live_covers_the_gaps_that_pay() -> None:
    gaps_s = [1.0] * (NEW_GAPS - 1) + [100.0]
    assert best_ttl_s(gaps_s, 10.0) == 1.0
    assert best_ttl_s(gaps_s, 5000.0) == 100.0
    assert best_ttl_s(gaps_s, 0.5) == 0.0
    assert best_ttl_s(gaps_s[1:], 10.0) == 10.0


def test_a_session_is_expected_as_all_are_and_then_as_it_came_itself() -> None:
    gaps = Gaps()
    for turn in range(50):
        gaps.turn(1, 2.0 * turn)
    gaps.turn(2, 100.0)
    assert gaps.expected_s(1) == pytest.approx(2.0)
    assert gaps.expected_s(2) == pytest.approx(2.0)
    for turn in range(1, 50):
        gaps.turn(2, 100.0 + 30.0 * turn)
    assert 25.0 < gaps.expected_s(2) < 30.0


def test_held_sessions_hit_where_lru_has_lost_them() -> None:
    """Three sessions in turn, with room for two."""
    found = rates(rounds({1: 3.0, 2: 3.1, 3: 3.2}), 67.0)
    assert found["learnt"] > found["lru"] + 0.3
    assert found["lru"] < 0.2
    assert found["continuum"] > 0.5


def test_the_longest_predicted_idle_time_is_evicted_first() -> None:
    """A quick and a slow session, with room for one and a half."""
    found = rates(rounds({1: 1.0, 2: 50.0}, turns=100), 75.0)
    assert found["cachewise"] > 0.9


def test_no_rule_beats_the_bound() -> None:
    trace = make_trace("regular", regular_turns(1, 250))
    (found,) = compare([trace], [5.0], BENEFIT_S).values()
    assert max(found.values()) == found["clairvoyant"] > found["lru"]
    assert found["cachewise"] != found["cachewise_told"]
