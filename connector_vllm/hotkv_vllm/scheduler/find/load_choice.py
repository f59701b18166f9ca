"""Loads a hit only if that is faster than computing its tokens.

Learns the server's time for answers and loads, without the wait for the next step, and the engine's
for prefill.

- TAKE: loading is predicted to take at most SLACK_S longer than the prefill. The load is cancelled
  after the prefill's time (at least LEAST_BUDGET_S).
- LEAVE: the tokens are computed. Also decided before the server is asked, when nobody knows how
  long the hit is.
- TRY: loads a few tokens, because a load can't always be ended at once, to notice when loading has
  become faster. Each trial in time doubles the next: different sizes show the fixed time of a load
  and the time per token.

Trials are paid from an allowance in seconds: a computed hit adds TRIED_SHARE of its prefill, a
trial subtracts its time and begins only if its limit is covered. A late trial may leave a debt of
at most DEBT_TRIALS usual trials, which also fades.

Scheduler thread only.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from hotkv_proto.costs import fitted
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.find.hits import HitFinder
from hotkv_vllm.scheduler.request import NO_HIT, Answer, HitChoice, RequestState, Verdict
from hotkv_vllm.stats import HotKVStats

COSTED = 16
"""Recent answers, and recent loads, from which times are predicted."""
CHANGED = 4.0
"""Times beyond this factor of the prediction (plus SLACK_S) mean that the server has changed:
earlier times are discarded."""
TRIED_SHARE = 0.03
LEAST_TRIED_TOKENS = 32
LATE = 2.0
"""A call that was given up counts as this multiple of its time."""
USUAL_TRIALS = 5
"""A trial's usual time is the median of so many; the present limit stands for missing ones."""
DEBT_TRIALS = 3
DEBT_HALF_LIFE_S = 300.0
SLACK_S = 0.01
"""A load leaves the device free for other work."""
LEAST_BUDGET_S, LEAST_LOAD_S = 0.05, 0.001
"""For answers and load, and for the load alone; shorter limits can't be kept exactly."""


class ServerCosts:
    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=COSTED)
        self._loads: deque[tuple[int, float]] = deque(maxlen=COSTED)
        self._is_guess = False

    def __repr__(self) -> str:
        return f"ServerCosts({len(self._answers)} answers, {len(self._loads)} loads known)"

    @property
    def answers_s(self) -> float:
        """Lookup and lease of one hit; 0 before the first measurement."""
        return float(np.median(self._answers)) if self._answers else 0.0

    def load_s(self, num_tokens: int) -> float:
        """0 before the first measurement."""
        if not self._loads:
            return 0.0
        fixed_s, token_s = fitted(*zip(*self._loads, strict=True))
        return fixed_s + num_tokens * token_s

    def forget_loads(self) -> None:
        self._loads.clear()

    def note_answers(self, seconds: float) -> None:
        if not _is_like(self.answers_s, seconds):
            self._answers.clear()
        self._answers.append(seconds)

    def note_load(self, num_tokens: int, seconds: float) -> None:
        if self._is_guess or not _is_like(self.load_s(num_tokens), seconds):
            self._loads.clear()
        self._loads.append((num_tokens, seconds))
        self._is_guess = False

    def guess_load(self, num_tokens: int, seconds: float) -> None:
        """For a load that was given up, in place of measured ones; the next measured one
        replaces it."""
        self._loads.clear()
        self._loads.append((num_tokens, seconds))
        self._is_guess = True


def _is_like(predicted_s: float, seconds: float) -> bool:
    return predicted_s / CHANGED <= seconds <= predicted_s * CHANGED + SLACK_S


class LoadChoice:
    """prefill: None: every hit is loaded."""

    def __init__(self, prefill: PrefillSpeed | None, stats: HotKVStats) -> None:
        self.costs = ServerCosts()
        self._prefill = prefill
        self._stats = stats
        self._allowance_s = 0.0
        self._share = TRIED_SHARE
        self._tried_tokens = LEAST_TRIED_TOKENS
        self._trials_s: deque[float] = deque(maxlen=USUAL_TRIALS)
        self._seen_s = 0.0

    def __repr__(self) -> str:
        return f"LoadChoice({self.costs}, {self._allowance_s:.3f} s for trials)"

    def match(
        self, finder: HitFinder, state: RequestState, computed_tokens: int, now_s: float
    ) -> Answer:
        """`HitFinder.match`, but no hit if its tokens are to be computed, and a short one for a
        trial."""
        self._let_debt_fade(now_s)
        if not self._may_ask(state, computed_tokens):
            return _left(finder, state)
        spent_s = state.hit.server_s
        waited = state.hit.answer is not None and not state.hit.answer.done()
        answer = finder.match(state, computed_tokens, now_s)
        if answer == NO_HIT:
            self._missed(state, spent_s, waited and state.hit.miss is Miss.LATE)
        elif answer[0]:
            self._weigh(finder, state, answer[0], computed_tokens)
            assert state.choice is not None, "a hit that was not asked for"
            if state.choice.verdict is Verdict.LEAVE:
                return _left(finder, state)
            return state.choice.num_tokens, True
        return answer

    def _may_ask(self, state: RequestState, computed_tokens: int) -> bool:
        """False if the prompt is to be computed, or the answers took too long."""
        choice = state.choice
        if choice is None:
            stop_tokens = state.request.num_tokens - 1
            choice = state.choice = self._chosen(computed_tokens, stop_tokens)
        if choice.verdict is Verdict.LEAVE:
            return False
        answer = state.hit.answer
        if not choice.budget_s or answer is None or answer.done():
            return True
        if state.hit.server_s < choice.budget_s:
            return True
        self._answers_lost(choice, state.hit.server_s)
        return False

    def _missed(self, state: RequestState, spent_s: float, was_late: bool) -> None:
        """was_late: an answer exceeded `lookup_timeout_s`."""
        if state.choice is not None and was_late:
            self._answers_lost(state.choice, spent_s)
            state.choice = None
        self.drop(state, spent_s)

    def drop(self, state: RequestState, spent_s: float) -> None:
        """No load begins: a trial's unspent time returns to the allowance.

        spent_s: for the server's answers.
        """
        choice, state.choice = state.choice, None
        if choice is not None and choice.verdict is Verdict.TRY:
            self._allowance_s += max(0.0, choice.budget_s - spent_s)

    def leave(self, state: RequestState) -> None:
        """A load of the same blocks has reached its limit."""
        self.drop(state, state.hit.server_s)
        state.choice = HitChoice(Verdict.LEAVE, 0.0)

    def _answers_lost(self, choice: HitChoice, answers_s: float) -> None:
        if choice.verdict is Verdict.TRY:
            self._stats.add("tried_requests")
        if self._lost(choice, answers_s):
            self.costs.note_answers(LATE * answers_s)

    def _weigh(
        self, finder: HitFinder, state: RequestState, num_tokens: int, computed_tokens: int
    ) -> None:
        """Decides about a leased hit, and how many of its tokens are loaded.

        num_tokens: beyond `computed_tokens`.
        """
        choice = state.choice
        assert choice is not None, "a hit that was not asked for"
        if choice.num_tokens == num_tokens:
            return
        choice.num_tokens = num_tokens
        choice.ask_s = state.hit.server_s
        choice.prefill_s = self._prefill_s(computed_tokens, computed_tokens + num_tokens)
        if not choice.prefill_s:
            return
        self._weigh_load(choice)
        if choice.verdict is Verdict.TRY:
            choice.num_tokens = _shorten(finder, state, computed_tokens, self._tried_tokens)
            choice.prefill_s = self._prefill_s(computed_tokens, computed_tokens + choice.num_tokens)

    def _weigh_load(self, choice: HitChoice) -> None:
        """Replaces the choice of `_chosen`: the hit's length is known now."""
        held_s = choice.budget_s if choice.verdict is Verdict.TRY else 0.0
        if self.costs.load_s(choice.num_tokens) <= choice.prefill_s + SLACK_S:
            if held_s:
                self._stats.add("tried_requests")
                self._allowance_s += max(0.0, held_s - choice.ask_s)
            choice.verdict = Verdict.TAKE
            choice.budget_s = max(choice.prefill_s, LEAST_BUDGET_S)
            return
        needed_s = choice.ask_s + self._trial_load_s(choice.prefill_s)
        if not held_s and self._allowance_s < needed_s:
            self._leave(choice, choice.prefill_s)
            return
        choice.verdict = Verdict.TRY
        choice.budget_s = min(held_s, needed_s) if held_s else needed_s
        self._allowance_s += held_s - choice.budget_s
        self._stats.add("tried_requests")

    def _trial_load_s(self, prefill_s: float) -> float:
        few_s = self.costs.load_s(self._tried_tokens)
        return min(prefill_s, max(self._share * prefill_s, few_s))

    def time_for(self, state: RequestState, timeout_s: float) -> float:
        """Limit for the load: what the answers have left of `HitChoice.budget_s`, at least
        LEAST_LOAD_S and at most `timeout_s`."""
        choice = state.choice
        if choice is None or not choice.budget_s:
            return timeout_s
        return min(timeout_s, max(choice.budget_s - choice.ask_s, LEAST_LOAD_S))

    def update(self, states: Mapping[str, RequestState], load_seconds: Mapping[str, float]) -> None:
        """load_seconds: by request; negative if the load reached its limit."""
        for request_id, load_s in load_seconds.items():
            choice = states[request_id].choice if request_id in states else None
            if choice is not None:
                choice.load_s = max(choice.load_s, abs(load_s))
                choice.is_late |= load_s < 0

    def end(self, state: RequestState, has_failed: bool) -> bool:
        """Learns from a load that has ended in all ranks. True if it reached its limit: the
        choice stays, as LEAVE."""
        choice, state.choice = state.choice, None
        if choice is None:
            return False
        if has_failed and choice.is_late:
            # vLLM will ask for this hit again.
            state.choice = choice
            if self._lost(choice, choice.ask_s + choice.load_s):
                self.costs.note_answers(choice.ask_s)
                self.costs.guess_load(choice.num_tokens, LATE * choice.load_s)
        elif not has_failed:
            self._won(choice)
        return has_failed and choice.is_late

    def _won(self, choice: HitChoice) -> None:
        """If the load's time is unknown (0), learns only that it was in time."""
        self._share = TRIED_SHARE
        was_tried = choice.verdict is Verdict.TRY
        self._tried_tokens = 2 * choice.num_tokens if was_tried else LEAST_TRIED_TOKENS
        if not choice.load_s:
            if was_tried:
                self.costs.forget_loads()
            return
        predicted_s = self.costs.answers_s + self.costs.load_s(choice.num_tokens)
        seconds = choice.ask_s + choice.load_s
        if was_tried:
            self._allowance_s += choice.budget_s - seconds
            self._trials_s.append(seconds)
        self._judge(choice, seconds <= choice.prefill_s)
        if predicted_s:
            self._stats.add("load_prediction_error_s", abs(predicted_s - seconds))
            self._stats.add("judged_load_s", seconds)
        self.costs.note_answers(choice.ask_s)
        self.costs.note_load(choice.num_tokens, choice.load_s)

    def _prefill_s(self, start_tokens: int, stop_tokens: int) -> float:
        return 0.0 if self._prefill is None else self._prefill.seconds(start_tokens, stop_tokens)

    def _chosen(self, computed_tokens: int, stop_tokens: int) -> HitChoice:
        """Preliminary: assumes that the hit covers the whole prompt.

        stop_tokens: length of the longest possible hit.
        """
        prefill_s = self._prefill_s(computed_tokens, stop_tokens)
        if not prefill_s:
            return HitChoice(Verdict.TAKE, 0.0)
        load_s = self.costs.load_s(stop_tokens - computed_tokens)
        if self.costs.answers_s + load_s <= prefill_s + SLACK_S:
            return HitChoice(Verdict.TAKE, max(prefill_s, LEAST_BUDGET_S), prefill_s=prefill_s)
        trial_s = min(prefill_s, self.costs.answers_s + self._trial_load_s(prefill_s))
        choice = HitChoice(Verdict.TRY, trial_s, prefill_s=prefill_s)
        if self._allowance_s < choice.budget_s:
            self._leave(choice, prefill_s)
        else:
            self._allowance_s -= choice.budget_s
        return choice

    def _leave(self, choice: HitChoice, prefill_s: float) -> None:
        choice.verdict = Verdict.LEAVE
        self._allowance_s += TRIED_SHARE * prefill_s
        self._stats.add("left_requests")

    def _lost(self, choice: HitChoice, seconds: float) -> bool:
        """An answer or load was given up after `seconds`: LEAVE from now on. True after TAKE:
        `seconds` may serve as a measure, as a trial's could not."""
        was_taken = choice.verdict is Verdict.TAKE
        self._judge(choice, is_sooner=False)
        self._stats.add("late_requests")
        choice.verdict = Verdict.LEAVE
        if not was_taken:
            self._make_up_for(seconds, choice.budget_s)
            self._share = min(1.0, 2 * self._share)
            self._tried_tokens = LEAST_TRIED_TOKENS
        return was_taken

    def _make_up_for(self, seconds: float, budget_s: float) -> None:
        """Subtracts from the allowance what a failed trial took beyond its limit."""
        self._trials_s.append(seconds)
        in_time = [budget_s] * (USUAL_TRIALS - len(self._trials_s))
        usual_s = max(budget_s, float(np.median([*self._trials_s, *in_time])))
        owed_s = self._allowance_s - max(0.0, seconds - budget_s)
        self._allowance_s = max(owed_s, -DEBT_TRIALS * usual_s)

    def _let_debt_fade(self, now_s: float) -> None:
        if self._allowance_s < 0:
            self._allowance_s *= 0.5 ** ((now_s - self._seen_s) / DEBT_HALF_LIFE_S)
        self._seen_s = now_s

    def _judge(self, choice: HitChoice, is_sooner: bool) -> None:
        """is_sooner: loading was, or would have been, faster."""
        if choice.prefill_s:
            self._stats.add("judged_choices")
            if (choice.verdict is Verdict.TAKE) == is_sooner:
                self._stats.add("right_choices")


def _left(finder: HitFinder, state: RequestState) -> Answer:
    finder.give_back(state)
    state.hit.miss = Miss.COMPUTED_SOONER
    return NO_HIT


def _shorten(finder: HitFinder, state: RequestState, computed_tokens: int, limit: int) -> int:
    """New length beyond `computed_tokens`. Doubles `limit` until some length is possible."""
    hit = state.hit
    while not hit.left_out and computed_tokens + limit < hit.hit_tokens:
        shorter = finder.groups.longest_hit(hit.ready, computed_tokens, computed_tokens + limit)
        if shorter > computed_tokens:
            hit.hit_tokens = shorter
            hit.miss = Miss.COMPUTED_SOONER
            break
        limit *= 2
    return hit.hit_tokens - computed_tokens
