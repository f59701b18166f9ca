"""Return times of sessions: which pauses count, and how long blocks are held for them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_server.hints.book.returns import (
    HELD_GAPS,
    MAX_HOLD_S,
    OWN_GAPS,
    PRIOR_GAPS,
    SHARED_GAPS,
    ReturnTimes,
    SessionGaps,
)


def paused(
    times: ReturnTimes, session: SessionGaps, gap_s: float, count: int, now_s: float
) -> float:
    """Pauses the session `count` times for `gap_s`. Returns the hold after its last request."""
    session.idle_since_s = None
    hold_s = 0.0
    for turn in range(count + 1):
        times.began(session, now_s + turn * (gap_s + 1.0))
        hold_s = times.ended(session, now_s + turn * (gap_s + 1.0) + 1.0)
    return hold_s


def test_nothing_is_held_before_a_session_has_returned() -> None:
    times, session = ReturnTimes(), SessionGaps()
    times.began(session, 1.0)
    assert times.ended(session, 2.0) == 0.0 == times.expected_s(session)


def test_a_new_session_is_expected_as_the_others_and_then_as_itself() -> None:
    times, slow = ReturnTimes(), SessionGaps()
    assert paused(times, SessionGaps(), 1.0, 20, 0.0) == pytest.approx(HELD_GAPS)
    assert paused(times, slow, 2.0, 1, 100.0) == pytest.approx(HELD_GAPS * 1.0)
    assert paused(times, slow, 2.0, PRIOR_GAPS, 200.0) == pytest.approx(HELD_GAPS * 2.0)


def test_long_pauses_are_not_held() -> None:
    times = ReturnTimes()
    assert paused(times, SessionGaps(), 3.0, 9, 0.0) == pytest.approx(HELD_GAPS * 3.0)
    assert HELD_GAPS * 3.0 < MAX_HOLD_S
    assert paused(times, SessionGaps(), 60.0, OWN_GAPS, 100.0) == 0.0


def test_requests_at_the_same_time_tell_nothing() -> None:
    times, session = ReturnTimes(), SessionGaps()
    times.began(session, 1.0)
    times.began(session, 2.0)
    times.ended(session, 3.0)
    times.ended(session, 9.0)
    assert not session.gaps_s and session.idle_since_s == 9.0
    times.began(session, 10.5)
    assert list(session.gaps_s) == [1.5]


@given(gaps_s=st.lists(st.floats(0.0, 1e6), max_size=300), sessions=st.integers(1, 3))
def test_memory_is_bounded_and_holds_are_in_range(gaps_s: list[float], sessions: int) -> None:
    times, known, now_s = ReturnTimes(), [SessionGaps() for _ in range(sessions)], 0.0
    for turn, gap_s in enumerate(gaps_s):
        session = known[turn % sessions]
        now_s += gap_s
        times.began(session, now_s)
        assert 0.0 <= times.ended(session, now_s) <= MAX_HOLD_S
    assert all(len(one.gaps_s) <= OWN_GAPS for one in known)
    assert len(times._all_s) <= SHARED_GAPS
