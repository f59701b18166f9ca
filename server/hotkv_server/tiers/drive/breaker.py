"""A circuit breaker: makes lookups skip a tier that is broken or hangs, and tries the tier again
from time to time.

Always true: a tier that is known to be broken gets a single call every RETRY_S seconds, which shows
whether it works again. A tier that hangs gets no trial call; it works again when the call that
hangs has ended.
"""

import logging
import time
from collections.abc import Callable

from hotkv_server.tiers.protocol import Tier

log = logging.getLogger(__name__)

RETRY_S = 2.0
MAX_STALL_S = 1.0
"""A tier counts as hanging if a call takes longer than this."""
SAY_AGAIN_S = 60.0
"""Least time between two log lines about a tier that begins to be skipped."""
StalledS = Callable[[float], float]
"""Takes a time of time.monotonic. Returns for how many seconds the call under way has lasted; 0
without a call."""


class Breaker:
    """The breaker of a tier; see the module.

    `stalls`: functions that take the time and return for how many seconds a call of the tier that
        moves no blocks (such as writing the disk's records) has lasted; 0 without such a call.
    """

    def __init__(self, tier: Tier, *stalls: StalledS) -> None:
        self._tier = tier
        self._stalls = stalls
        self._next_try_s = 0.0
        self._is_said, self._next_say_s = False, 0.0

    def __repr__(self) -> str:
        return f"Breaker({'open' if self.is_open else 'closed'})"

    @property
    def problem(self) -> str:
        """Why lookups skip the tier; empty if they don't."""
        if words := self._tier.problem():
            return words
        stalled_s = self._stalled_s()
        return f"a call has hung for {stalled_s:.0f} s" if stalled_s > MAX_STALL_S else ""

    @property
    def hangs(self) -> bool:
        """True if a call has lasted longer than MAX_STALL_S."""
        return self._stalled_s() > MAX_STALL_S

    @property
    def is_open(self) -> bool:
        """True if the tier is known to be broken, or hangs."""
        return bool(self.hangs or self._tier.problem())

    @property
    def lets_pass(self) -> bool:
        """True if a call may be made: the tier works, or a trial call is due."""
        if self.hangs:
            return False
        return not self._tier.problem() or time.monotonic() >= self._next_try_s

    def take_turn(self) -> bool:
        """Returns `lets_pass`. If the result is True because a trial is due, the next trial is due
        only after RETRY_S."""
        passes = self.lets_pass
        if passes and self._tier.problem():
            self._next_try_s = time.monotonic() + RETRY_S
        return passes

    def say(self) -> None:
        """Logs when lookups begin to skip the tier, and when it works again. If the tier breaks and
        recovers often, logs a line at most once in SAY_AGAIN_S."""
        problem, now_s = self.problem, time.monotonic()
        if problem and not self._is_said and now_s >= self._next_say_s:
            self._is_said, self._next_say_s = True, now_s + SAY_AGAIN_S
            log.warning(
                "tier=%s is passed by, so its blocks are misses: %s",
                self._tier.facts().name,
                problem,
            )
        elif self._is_said and not problem:
            self._is_said = False
            log.info("tier=%s answers again", self._tier.facts().name)

    def _stalled_s(self) -> float:
        now_s = time.monotonic()
        others = [stalled_s(now_s) for stalled_s in self._stalls]
        return max(self._tier.stalled_s(now_s), *others, 0.0)
