"""A circuit breaker for a tier: makes lookups skip the tier if it is broken or hangs, and allows a
trial call from time to time.

Always true: a tier that is known to be broken gets one call every RETRY_S seconds; this trial call
shows whether the tier works again. A tier that hangs gets no trial call. It counts as working again
once the hanging call has ended.
"""

import logging
import time
from collections.abc import Callable

from hotkv_server.tiers.protocol import MAX_STALL_S as MAX_STALL_S
from hotkv_server.tiers.protocol import Tier

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Time between two trial calls of a broken tier."""
SAY_AGAIN_S = 60.0
"""Least time between two warnings that lookups skip the same tier."""
StalledS = Callable[[float], float]
"""Returns the seconds for which a call has been under way, given a time of time.monotonic. Returns
0 if no call is under way."""


class Breaker:
    """The circuit breaker of a tier: makes lookups skip the tier while the tier is broken or hangs;
    see the module.

    `stalls`: functions (`StalledS`), one for each kind of other work for the tier, such as writes
        of the disk's records. Each returns for how many seconds the work has been under way. The
        tier also counts as hanging if such work takes longer than `TierFacts.max_stall_s`.
    """

    def __init__(self, tier: Tier, *stalls: StalledS) -> None:
        self._tier = tier
        self._stalls = stalls
        self._max_stall_s = tier.facts().max_stall_s
        self._next_try_s = 0.0
        self._is_said, self._next_say_s = False, 0.0

    def __repr__(self) -> str:
        return f"Breaker({'open' if self.is_open else 'closed'})"

    @property
    def problem(self) -> str:
        """The reason why lookups skip the tier; empty if they use it."""
        if words := self._tier.problem():
            return words
        return f"a call has hung for {self._stalled_s():.0f} s" if self.hangs else ""

    @property
    def hangs(self) -> bool:
        """True if a call has been under way for longer than `TierFacts.max_stall_s`."""
        return self._stalled_s() > self._max_stall_s

    @property
    def is_open(self) -> bool:
        """True if the tier is known to be broken, or hangs. Lookups then skip it."""
        return bool(self.hangs or self._tier.problem())

    @property
    def lets_pass(self) -> bool:
        """True if a call may be made now: the tier works, or a trial call is due (a single call
        that shows whether a broken tier works again)."""
        if self.hangs:
            return False
        return not self._tier.problem() or time.monotonic() >= self._next_try_s

    def take_turn(self) -> bool:
        """Returns True if a call may be made now (`lets_pass`); the caller must then make it at
        once. If this call is a trial call (a single call to a broken tier), the next trial call is
        due after RETRY_S."""
        passes = self.lets_pass
        if passes and self._tier.problem():
            self._next_try_s = time.monotonic() + RETRY_S
        return passes

    def say(self) -> None:
        """Logs a warning when lookups begin to skip the tier. After a warning, logs a line when the
        tier works again. Two warnings are at least SAY_AGAIN_S apart, so that a tier that breaks
        often does not fill the log. Called from time to time."""
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
