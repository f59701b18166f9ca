"""Return times: how long sessions pause between a request's end and their next request.

Belongs to one tenant. Always true: a session has at most OWN_GAPS gaps here, and all together have
at most SHARED_GAPS. A request that comes while another of its session is running tells nothing.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

OWN_GAPS, SHARED_GAPS = 8, 200
PRIOR_GAPS = 3
"""A session counts as having had so many gaps of the median of all, until its own outweigh them."""
HELD_GAPS = 1.5
MAX_HOLD_S = 5.0
"""Pauses for which a longer hold would be due are not held: blocks of quick sessions hit more in
that room (`bench.agents`)."""


@dataclass(slots=True)
class SessionGaps:
    """The latest pauses of a session. `idle_since_s`: end of its last request; None while one is
    running, or before the first has ended."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=OWN_GAPS))
    idle_since_s: float | None = None


class ReturnTimes:
    """See the module."""

    def __init__(self) -> None:
        self._all_s: deque[float] = deque(maxlen=SHARED_GAPS)

    def __repr__(self) -> str:
        return f"ReturnTimes({len(self._all_s)} gaps)"

    def began(self, session: SessionGaps, now_s: float) -> None:
        """Records that a request of the session was scheduled."""
        if session.idle_since_s is not None:
            gap_s = max(0.0, now_s - session.idle_since_s)
            session.gaps_s.append(gap_s)
            self._all_s.append(gap_s)
        session.idle_since_s = None

    def ended(self, session: SessionGaps, now_s: float) -> float:
        """Records that a request of the session has ended. Returns how long to hold its blocks: 0
        if nothing is known, or it is expected back too late."""
        session.idle_since_s = now_s
        hold_s = HELD_GAPS * self.expected_s(session)
        return hold_s if hold_s <= MAX_HOLD_S else 0.0

    def expected_s(self, session: SessionGaps) -> float:
        """Returns the median of the session's pauses, beginning at that of all sessions; 0 before
        any session has returned."""
        if not self._all_s:
            return 0.0
        return median([*session.gaps_s, *[median(self._all_s)] * PRIOR_GAPS])
