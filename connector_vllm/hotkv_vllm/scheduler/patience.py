"""Waits a moment for the server's answers, so that a hit costs the engine no further step.

The server answers sooner than a step ends, and vLLM asks the connector again only in its next step.
Always true: all waits of one step together last PATIENCE_S at most; after waits in vain fewer are
tried. Scheduler thread only.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

PATIENCE_S = 0.002
"""In each step. With asynchronous scheduling the workers compute meanwhile."""
MOST_PASSED_BY = 63
"""So many answers at most are not waited for after one that was, and did not come."""


def _is_there_in(answer: "Future[Any]", seconds: float) -> bool:
    return bool(wait((answer,), seconds).done)


class Patience:
    """See the module. `clock`: seconds. `wait_for`: waits for an answer so many seconds at most;
    whether it is there."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wait_for: "Callable[[Future[Any], float], bool]" = _is_there_in,
    ) -> None:
        self._clock, self._wait_for = clock, wait_for
        self._left_s = PATIENCE_S
        self._pause = self._passes_by = 0

    def __repr__(self) -> str:
        return f"Patience({self._left_s:.4f} s left, {self._passes_by} to pass by)"

    def begin_step(self) -> None:
        """The engine plans its next step."""
        self._left_s = PATIENCE_S

    def awaits(self, answer: "Future[Any]") -> bool:
        """Whether the answer is there, maybe after a wait."""
        if answer.done():
            return True
        if self._left_s <= 0:
            return False
        if self._passes_by:
            self._passes_by -= 1
            return False
        began_s = self._clock()
        is_there = self._wait_for(answer, self._left_s)
        self._left_s -= self._clock() - began_s
        self._pause = 0 if is_there else min(2 * self._pause + 1, MOST_PASSED_BY)
        self._passes_by = self._pause
        return is_there
