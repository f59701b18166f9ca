"""Learns how fast the engine computes prompts, from steps in which most tokens are prefill; idle
time does not count. Scheduler thread only."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hotkv_vllm.stats import HotKVStats

LEAST_CHUNK_TOKENS = 64
"""So many tokens of a request in a step are prefill; decode has one, or a few drafts."""
LEAST_STEP_TOKENS = 256
"""In smaller steps the fixed cost dominates."""
RECENT = 15
"""The median ignores steps that wait for stores or a compiler."""
LEAST_SPREAD_TOKENS = 2048
"""The cost of context is learned only if the steps' contexts differ by so much."""
MAX_OPEN = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """A step whose results have not arrived.

    context_tokens: before a computed token, on average.
    planned_s: monotonic clock.
    """

    num_tokens: int
    context_tokens: float
    planned_s: float


class PrefillSpeed:
    """With asynchronous scheduling vLLM plans a step before the last one's results arrive: so each
    measured step has a number, which workers report, and begins no earlier than the one before
    ends.

    last_end_s: when the results of the last step of any kind arrived. The caller sets it.
    """

    def __init__(self, stats: HotKVStats) -> None:
        self._stats = stats
        self._number = 0
        self._open: dict[int, Planned] = {}
        self.last_end_s = 0.0
        # `Planned.context_tokens`, and seconds per computed token.
        self._costs: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._fit: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"PrefillSpeed({self.tokens_per_s:.0f} tokens/s)"

    @property
    def tokens_per_s(self) -> float:
        """0 before the first measurement."""
        return 1 / float(np.median([cost for _, cost in self._costs])) if self._costs else 0.0

    def seconds(self, start_tokens: int, stop_tokens: int) -> float:
        """0 before the first measurement."""
        if self._fit is None:
            self._fit = self._fitted()
        token_s, context_s = self._fit
        return (stop_tokens - start_tokens) * (
            token_s + context_s * (start_tokens + stop_tokens) / 2
        )

    def begin_step(self, rows: Iterable[tuple[int, int]], now_s: float) -> int:
        """Number for the workers to report; 0: not timed, because it is small or mostly decode.

        rows: per request, tokens that the step computes and tokens computed before.
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
        """Seconds per token without context, and the seconds that each token of context adds.

        Medians of slopes and residuals (Theil 1950, Sen 1968): robust to 29 % of slow steps.
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
