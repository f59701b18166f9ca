"""Keeps requests from a tier that is broken or hangs, and tries it again now and then.

Always true: while a tier is known to be broken, one call in RETRY_S seconds reaches it, which is
how it is found to be well again; a call that hangs is its own trial.
"""

import time

from hotkv_server.tiers.protocol import Tier

RETRY_S = 2.0
MAX_STALL_S = 1.0
"""A tier whose call has been under way for longer hangs."""


class Breaker:
    """See the module. Of one tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._next_try_s = 0.0

    def __repr__(self) -> str:
        return f"Breaker({'open' if self.is_open else 'closed'})"

    @property
    def is_open(self) -> bool:
        """Whether the tier is known to be broken, or hangs."""
        return bool(self._hangs() or self._tier.problem())

    @property
    def lets_pass(self) -> bool:
        """Whether a call may be made: the tier is well, or a trial is due."""
        if self._hangs():
            return False
        return not self._tier.problem() or time.monotonic() >= self._next_try_s

    def take_turn(self) -> bool:
        """As `lets_pass`; a trial that was due is taken."""
        passes = self.lets_pass
        if passes and self._tier.problem():
            self._next_try_s = time.monotonic() + RETRY_S
        return passes

    def _hangs(self) -> bool:
        return self._tier.stalled_s(time.monotonic()) > MAX_STALL_S
