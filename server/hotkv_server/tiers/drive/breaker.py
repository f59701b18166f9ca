"""Circuit breaker of a tier: lookups skip it while it is broken or hangs.

Always true: a broken tier gets one trial call every RETRY_S. A tier that hangs gets none; it
works again once the hanging call has ended.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from hotkv_server.tiers.protocol import MAX_STALL_S as MAX_STALL_S
from hotkv_server.tiers.protocol import Tier

log = logging.getLogger(__name__)

RETRY_S = 2.0
SAY_AGAIN_S = 60.0
"""Least time between two warnings about the same tier."""
StalledS = Callable[[float], float]
"""How long a call has been under way at a time of time.monotonic; 0 if none is."""


class Breaker:
    """See the module. `stalls`: one for each kind of other work, such as writes of the disk's
    records; the tier also hangs if such work takes longer than `TierFacts.max_stall_s`."""

    def __init__(self, tier: Tier[Any], *stalls: StalledS) -> None:
        self._tier = tier
        self._stalls = stalls
        self._max_stall_s = tier.facts().max_stall_s
        self._next_try_s = 0.0
        self._is_said, self._next_say_s = False, 0.0

    def __repr__(self) -> str:
        return f"Breaker({'open' if self.is_open else 'closed'})"

    @property
    def problem(self) -> str:
        """Why lookups skip the tier, or ""."""
        if words := self._tier.problem():
            return words
        return f"a call has hung for {self._stalled_s():.0f} s" if self.hangs else ""

    @property
    def hangs(self) -> bool:
        return self._stalled_s() > self._max_stall_s

    @property
    def is_open(self) -> bool:
        return bool(self.hangs or self._tier.problem())

    @property
    def lets_pass(self) -> bool:
        """The tier works, or a trial call is due."""
        if self.hangs:
            return False
        return not self._tier.problem() or time.monotonic() >= self._next_try_s

    def take_turn(self) -> bool:
        """`lets_pass`. If True, the caller must call at once; the next trial call is due after
        RETRY_S."""
        passes = self.lets_pass
        if passes and self._tier.problem():
            self._next_try_s = time.monotonic() + RETRY_S
        return passes

    def say(self) -> None:
        """Logs when lookups begin to skip the tier, at most every SAY_AGAIN_S, and when it works
        again."""
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
