"""Measures how long a router's sessions (such as users' conversations) pause between the end of a
request and their next request, to predict when a session returns.

The values belong to one tenant. Always true: at most OWN_GAPS pauses are stored for a session, and
at most SHARED_GAPS for all sessions together. After the end of a request only the session's next
request records a pause. Further requests that begin before another request ends record none.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

OWN_GAPS, SHARED_GAPS = 8, 200
PRIOR_GAPS = 3
"""Number of artificial pauses that the prediction for a session (such as a user's conversation)
includes, each as long as the median over all sessions. So if few pauses of the session are known,
the other sessions determine its prediction."""
HELD_GAPS = 1.5
"""The eviction policy holds a session's blocks (does not evict them) for HELD_GAPS times the pause
that is expected before the session's next request."""
MAX_HOLD_S = 5.0
"""Longest time for which a session's blocks are held (not evicted). Blocks that would have to be
held longer are not held at all: the same memory gives more hits if it holds the blocks of sessions
with shorter pauses (`bench.agents`)."""


@dataclass(slots=True)
class SessionGaps:
    """The latest pauses of a session (such as a user's conversation): times between the end of a
    request and the next request.

    gaps_s: lengths of the session's pauses in seconds.
    idle_since_s: when a request of the session last ended; None if a request has begun since, or if
        no request has ended yet.
    """

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=OWN_GAPS))
    idle_since_s: float | None = None


class ReturnTimes:
    """Predicts how long a tenant's sessions (such as users' conversations) pause between the end of
    a request and their next request (see the module)."""

    def __init__(self) -> None:
        self._all_s: deque[float] = deque(maxlen=SHARED_GAPS)

    def __repr__(self) -> str:
        return f"ReturnTimes({len(self._all_s)} gaps)"

    def began(self, session: SessionGaps, now_s: float) -> None:
        """Records that a request of the router's session (such as a user's conversation) was
        scheduled."""
        if session.idle_since_s is not None:
            gap_s = max(0.0, now_s - session.idle_since_s)
            session.gaps_s.append(gap_s)
            self._all_s.append(gap_s)
        session.idle_since_s = None

    def ended(self, session: SessionGaps, now_s: float) -> float:
        """Records that a request of the session has ended. Returns for how many seconds the
        eviction policy should hold the session's blocks (not evict them), because the next request
        will probably use them: HELD_GAPS times the expected pause, or 0 if no pause is known or
        that time would exceed MAX_HOLD_S."""
        session.idle_since_s = now_s
        hold_s = HELD_GAPS * self.expected_s(session)
        return hold_s if hold_s <= MAX_HOLD_S else 0.0

    def expected_s(self, session: SessionGaps) -> float:
        """Returns the expected pause of the session before its next request, in seconds; 0 if no
        pause of any session is known yet.

        It is the median of the session's pauses and of PRIOR_GAPS artificial pauses, each as long
        as the median over all sessions.
        """
        if not self._all_s:
            return 0.0
        return median([*session.gaps_s, *[median(self._all_s)] * PRIOR_GAPS])
