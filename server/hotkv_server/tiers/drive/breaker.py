"""Keeps requests from a tier that is broken or hangs, and tries it again now and then.

Always true: while a tier is known to be broken, one call in RETRY_S seconds reaches it, which is
how it is found to be well again; a call that hangs is its own trial.
"""

import logging
import time
from collections.abc import Callable

from hotkv_server.tiers.protocol import Tier

log = logging.getLogger(__name__)

RETRY_S = 2.0
MAX_STALL_S = 1.0
"""A tier whose call has been under way for longer hangs."""
SAY_AGAIN_S = 60.0
StalledS = Callable[[float], float]
"""Given the time, how long a call that is under way has lasted; 0 if none is."""


class Breaker:
    """See the module. Of one tier. `stalls`: of other calls of the tier than those that move
    blocks."""

    def __init__(self, tier: Tier, *stalls: StalledS) -> None:
        self._tier = tier
        self._stalls = stalls
        self._next_try_s = 0.0
        self._is_said, self._next_say_s = False, 0.0

    def __repr__(self) -> str:
        return f"Breaker({'open' if self.is_open else 'closed'})"

    @property
    def problem(self) -> str:
        """Why lookups pass the tier by, in words; empty if they don't."""
        if words := self._tier.problem():
            return words
        stalled_s = self._stalled_s()
        return f"a call has hung for {stalled_s:.0f} s" if stalled_s > MAX_STALL_S else ""

    @property
    def hangs(self) -> bool:
        """Whether a call has been under way for too long."""
        return self._stalled_s() > MAX_STALL_S

    @property
    def is_open(self) -> bool:
        """Whether the tier is known to be broken, or hangs."""
        return bool(self.hangs or self._tier.problem())

    @property
    def lets_pass(self) -> bool:
        """Whether a call may be made: the tier is well, or a trial is due."""
        if self.hangs:
            return False
        return not self._tier.problem() or time.monotonic() >= self._next_try_s

    def take_turn(self) -> bool:
        """As `lets_pass`; a trial that was due is taken."""
        passes = self.lets_pass
        if passes and self._tier.problem():
            self._next_try_s = time.monotonic() + RETRY_S
        return passes

    def say(self) -> None:
        """Logs that the tier is passed by, and that it answers again; of a tier that goes to and
        fro the first of many times."""
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
