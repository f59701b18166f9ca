"""Return times of sessions agree with lists of all pauses."""

from statistics import median

import hypothesis.strategies as st
from hypothesis import example, given

from hotkv_server.hints.book.returns import (
    HELD_GAPS,
    MAX_HOLD_S,
    OWN_GAPS,
    PRIOR_GAPS,
    SHARED_GAPS,
    ReturnTimes,
    SessionGaps,
)

TURNS = st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 0.5, 1.0, 3.0, 60.0]))


@given(turns=st.lists(TURNS, max_size=60))
@example([(0, at % 2 == 0, 0.5 + at % 7) for at in range(3 * SHARED_GAPS)])
@example([(0, False, 0.0), (0, True, MAX_HOLD_S / HELD_GAPS), (0, False, 0.0)])
@example([(0, at % 2 == 0, 4.0 if at < 40 else 1.0) for at in range(80)])
def test_a_session_is_expected_as_the_others_and_then_as_itself(
    turns: list[tuple[int, bool, float]],
) -> None:
    """Compares with lists of pauses. A pause lasts from the end of a session's last request to the
    start of its next. Requests at the same time have none. Only the latest pauses count; nothing is
    held for a long pause."""
    times, now_s = ReturnTimes(), 0.0
    known = [SessionGaps() for _ in range(3)]
    own: list[list[float]] = [[] for _ in known]
    everybody: list[float] = []
    idle_since_s: dict[int, float] = {}
    for which, begins, passed_s in turns:
        now_s += passed_s
        if begins:
            times.began(known[which], now_s)
            if which in idle_since_s:
                gap_s = now_s - idle_since_s.pop(which)
                own[which].append(gap_s)
                everybody.append(gap_s)
        else:
            expected_s, latest = 0.0, everybody[-SHARED_GAPS:]
            if latest:
                expected_s = median([*own[which][-OWN_GAPS:], *[median(latest)] * PRIOR_GAPS])
            hold_s = HELD_GAPS * expected_s
            found_s = times.ended(known[which], now_s)
            assert found_s == (hold_s if hold_s <= MAX_HOLD_S else 0.0)
            idle_since_s[which] = now_s
            assert times.expected_s(known[which]) == expected_s
