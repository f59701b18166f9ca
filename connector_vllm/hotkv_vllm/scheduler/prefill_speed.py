"""How fast the engine computes prompts, from its own steps.

Always true: only steps that are mostly prefill count, and no time in which the engine was idle.
Scheduler thread only.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

LEAST_CHUNK_TOKENS = 64
"""So many tokens of a request in one step are prefill: decode has one, or a few drafts."""
LEAST_STEP_TOKENS = 256
"""Smaller steps say what a step costs, not what tokens cost."""
RECENT = 15
"""The speed is the median of so many steps: some wait for stores, or for a compiler."""
MAX_OPEN = 64


class PrefillSpeed:
    """See the module. A step is begun when it is planned, and ended when its results come; the
    worker repeats its number. With asynchronous scheduling the next one is planned before.
    `last_end_s`: when the results of the last step of all have come, whose owner is the caller."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, tuple[int, float]] = {}
        self.last_end_s = 0.0
        self._rates: deque[float] = deque(maxlen=RECENT)

    def __repr__(self) -> str:
        return f"PrefillSpeed({self.tokens_per_s:.0f} tokens/s)"

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prefill that the engine computes in a second; 0 before any was measured."""
        return float(np.median(self._rates)) if self._rates else 0.0

    def seconds(self, start_tokens: int, stop_tokens: int) -> float:
        """What it takes to compute a prompt's tokens from `start_tokens` to `stop_tokens`; 0 before
        any speed was measured."""
        return (stop_tokens - start_tokens) / self.tokens_per_s if self._rates else 0.0

    def begin_step(self, scheduled: Mapping[str, int], now_s: float) -> int:
        """A step is planned, with so many tokens of each request. Returns the number that the
        worker is to repeat with its results; 0 if the step is not timed."""
        num_tokens = sum(scheduled.values())
        num_prefill = sum(count for count in scheduled.values() if count >= LEAST_CHUNK_TOKENS)
        if num_tokens < LEAST_STEP_TOKENS or 2 * num_prefill < num_tokens:
            return 0
        self._number += 1
        self._open[self._number] = num_tokens, now_s
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return self._number

    def end_step(self, number: int, now_s: float) -> None:
        """The results of a step that is timed have come."""
        num_tokens, began_s = self._open.pop(number, (0, 0.0))
        seconds = now_s - max(began_s, self.last_end_s)
        if num_tokens and seconds > 0:
            self._rates.append(num_tokens / seconds)
