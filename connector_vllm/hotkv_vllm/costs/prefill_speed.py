"""Learns how fast the engine computes prompts, from the engine's steps.

Always true: only steps that are mostly prefill count, and idle time does not count. Scheduler
thread only.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hotkv_vllm.stats import HotKVStats

LEAST_CHUNK_TOKENS = 64
"""This many tokens of a request in a step count as prefill. A decode step has one token, or a few
drafts."""
LEAST_STEP_TOKENS = 256
"""Smaller steps are not measured: the fixed cost of a step dominates there."""
RECENT = 15
"""The speed is the median over this many steps, since some steps wait for stores or for a compiler.
"""
LEAST_SPREAD_TOKENS = 2048
"""The cost of context is learnt only from steps whose contexts differ by at least this."""
MAX_OPEN = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that was planned.

    context_tokens: number of tokens before a token of the step, on average.
    """

    num_tokens: int
    context_tokens: float
    planned_s: float


class PrefillSpeed:
    """Learns how fast the engine computes prompts. A step begins when it is planned and ends when
    its results come; the worker repeats the step's number with the results. With asynchronous
    scheduling the next step is planned before these results come.

    `last_end_s`: the time at which the results of the last step of any kind came. The caller sets
        it.
    """

    def __init__(self, stats: HotKVStats) -> None:
        self._stats = stats
        self._number = 0
        self._open: dict[int, Planned] = {}
        self.last_end_s = 0.0
        # Context before a token, and the seconds that it took.
        self._costs: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._fit: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"PrefillSpeed({self.tokens_per_s:.0f} tokens/s)"

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens of prefill that the engine computes per second; 0 before the first
        measurement."""
        return 1 / float(np.median([cost for _, cost in self._costs])) if self._costs else 0.0

    def seconds(self, start_tokens: int, stop_tokens: int) -> float:
        """Returns the time to compute the tokens from `start_tokens` to `stop_tokens` of a prompt;
        0 before the first measurement."""
        if self._fit is None:
            self._fit = self._fitted()
        token_s, context_s = self._fit
        return (stop_tokens - start_tokens) * (
            token_s + context_s * (start_tokens + stop_tokens) / 2
        )

    def begin_step(self, rows: Iterable[tuple[int, int]], now_s: float) -> int:
        """Begins a step. Returns the step's id, which the worker sends back with the results; 0 if
        the step is not timed.

        rows: for each request, how many tokens the step computes, and how many tokens come before
            them.
        """
        num_tokens, num_prefill, contexts = 0, 0, 0.0
        for count, computed in rows:
            num_tokens += count
            num_prefill += count if count >= LEAST_CHUNK_TOKENS else 0
            contexts += count * (computed + count / 2)
        if num_tokens < LEAST_STEP_TOKENS or 2 * num_prefill < num_tokens:
            return 0
        self._number += 1
        self._open[self._number] = Planned(num_tokens, contexts / num_tokens, now_s)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return self._number

    def end_step(self, number: int, now_s: float) -> None:
        """Ends a timed step: its results have come."""
        planned = self._open.pop(number, None)
        if planned is None:
            return
        seconds = now_s - max(planned.planned_s, self.last_end_s)
        if seconds > 0:
            self._note(planned, seconds)

    def _note(self, planned: Planned, seconds: float) -> None:
        if self._costs:
            token_s, context_s = self._fit = self._fit or self._fitted()
            predicted_s = planned.num_tokens * (token_s + context_s * planned.context_tokens)
            self._stats.add("prefill_prediction_error_s", abs(predicted_s - seconds))
            self._stats.add("judged_prefill_s", seconds)
        self._costs.append((planned.context_tokens, seconds / planned.num_tokens))
        self._fit = None

    def _fitted(self) -> tuple[float, float]:
        """Returns the seconds per token, and the additional seconds per token for each token of
        context.

        Uses medians of slopes and of residuals (Theil 1950, Sen 1968), because up to a third of the
        steps may have waited for something else.
        """
        if not self._costs:
            return 0.0, 0.0
        contexts, costs = np.array(self._costs).T
        context_s = 0.0
        if np.ptp(contexts) >= LEAST_SPREAD_TOKENS:
            one, other = np.triu_indices(len(costs), 1)
            differs = np.abs(contexts[one] - contexts[other]) >= 1
            one, other = one[differs], other[differs]
            slopes = (costs[one] - costs[other]) / (contexts[one] - contexts[other])
            context_s = max(0.0, float(np.median(slopes)))
        token_s = float(np.median(costs - context_s * contexts))
        return (token_s, context_s) if token_s > 0 else (float(np.median(costs)), 0.0)
