"""Predicts when a tenant's sessions return, from their pauses between a request's end and the next.

Always true: at most OWN_GAPS pauses per session and SHARED_GAPS over all are kept. After an end
only the session's next request records a pause.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

OWN_GAPS, SHARED_GAPS = 8, 200
PRIOR_GAPS = 3
"""Artificial pauses, each the median over all sessions, in every prediction: they dominate while
few of the session's own are known."""
HELD_GAPS = 1.5
"""Blocks are held for this many expected pauses."""
MAX_HOLD_S = 5.0
"""Blocks that would be held longer are not held at all: the memory gives more hits with sessions
of shorter pauses (`bench.agents`)."""


@dataclass(slots=True)
class SessionGaps:
    """A session's latest pauses.

    idle_since_s: end of the last request; None if a request has begun since, or none has ended.
    """

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=OWN_GAPS))
    idle_since_s: float | None = None


class ReturnTimes:
    def __init__(self) -> None:
        self._all_s: deque[float] = deque(maxlen=SHARED_GAPS)

    def __repr__(self) -> str:
        return f"ReturnTimes({len(self._all_s)} gaps)"

    def began(self, session: SessionGaps, now_s: float) -> None:
        if session.idle_since_s is not None:
            gap_s = max(0.0, now_s - session.idle_since_s)
            session.gaps_s.append(gap_s)
            self._all_s.append(gap_s)
        session.idle_since_s = None

    def ended(self, session: SessionGaps, now_s: float) -> float:
        """Seconds to hold the session's blocks; 0 if no pause is known or it would exceed
        MAX_HOLD_S."""
        session.idle_since_s = now_s
        hold_s = HELD_GAPS * self.expected_s(session)
        return hold_s if hold_s <= MAX_HOLD_S else 0.0

    def expected_s(self, session: SessionGaps) -> float:
        """Median of the session's pauses and PRIOR_GAPS medians over all sessions; 0 if none is
        known."""
        if not self._all_s:
            return 0.0
        return median([*session.gaps_s, *[median(self._all_s)] * PRIOR_GAPS])
