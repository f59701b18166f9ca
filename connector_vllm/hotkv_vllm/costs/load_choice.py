"""Takes a hit if loading it is faster than computing it.

The engine measures the server's time for answers and loads, and its own time for prefill. Only the
server's time counts: an engine that is busy would wait between two steps in any case.

Always true: a load has a time limit, the time to compute its hit, as soon as that is known. While
loads are slower than prefill, trials of loading may take TRIED_SHARE of the prefill time of such
hits. A trial that exceeds its time limit adds the excess to a debt, and no trial begins until the
time that further hits allow for trials has paid it. The debt is bounded by the usual time of
trials, because one stall says little about the next trial, and it decreases with time.

A trial loads a few tokens of its hit, since a load that has begun can't always be ended at once. If
it ends in time, the next trial loads twice as many tokens. From both the engine learns the fixed
time of a load and the time per token. Scheduler thread only.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from hotkv_proto.costs import fitted
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.request import NO_HIT, Answer, HitChoice, RequestState, Verdict
from hotkv_vllm.stats import HotKVStats

COSTED = 16
"""Number of recent answers and loads from which costs are learnt, so that costs follow the server's
load."""
CHANGED = 4.0
"""If a time differs from its prediction by this factor, up or down, the server has changed: earlier
times are forgotten."""
TRIED_SHARE = 0.03
LEAST_TRIED_TOKENS = 32
LATE = 2.0
"""A call that was given up counts as if it had taken this multiple of its time so far."""
USUAL_TRIALS = 5
"""The usual time of a trial is the median over this many trials. Before there were so many, the
missing trials count as having ended in time."""
DEBT_TRIALS = 3
"""The debt of trials is at most the usual time of this many trials."""
DEBT_HALF_LIFE_S = 300.0
SLACK_S = 0.01
"""A hit is still loaded if that is slower than prefill by no more than this: it frees the device
for other work."""
LEAST_BUDGET_S, LEAST_LOAD_S = 0.05, 0.001
"""The shortest time limits: of a hit that is worth loading, and of the load of any hit. Timers are
coarse, and so short a wait does no harm."""


class ServerCosts:
    """Predicts the server's time for the answers of a hit, and for the load of its tokens."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=COSTED)
        self._loads: deque[tuple[int, float]] = deque(maxlen=COSTED)
        self._is_guess = False

    def __repr__(self) -> str:
        return f"ServerCosts({len(self._answers)} answers, {len(self._loads)} loads known)"

    @property
    def answers_s(self) -> float:
        """Returns the time for the answers of one hit; 0 before the first measurement."""
        return float(np.median(self._answers)) if self._answers else 0.0

    def load_s(self, num_tokens: int) -> float:
        """Returns the predicted time to load `num_tokens`; 0 before the first measurement."""
        if not self._loads:
            return 0.0
        fixed_s, token_s = fitted(*zip(*self._loads, strict=True))
        return fixed_s + num_tokens * token_s

    def forget_loads(self) -> None:
        """Discards the times of loads, which no longer hold."""
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
        """Replaces the times of loads by an estimate, after a load was given up. The next measured
        load replaces the estimate."""
        self._loads.clear()
        self._loads.append((num_tokens, seconds))
        self._is_guess = True


def _is_like(predicted_s: float, seconds: float) -> bool:
    return predicted_s / CHANGED <= seconds <= predicted_s * CHANGED + SLACK_S


class LoadChoice:
    """Decides whether a hit is loaded or computed. Without `prefill` (measured prefill speed) every
    hit is loaded."""

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
        """Returns the hit finder's answer if loading the hit is faster than computing it; otherwise
        the answer "no hit"."""
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
        """Returns True if the request may ask for its hit, whose length is not known yet. Returns
        False once the hit is to be computed instead, or its time limit has passed."""
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
        """Ends the choice, because there is no hit or the answer exceeded the time limit that every
        request has."""
        choice, state.choice = state.choice, None
        if choice is not None and was_late:
            self._answers_lost(choice, spent_s)
        elif choice is not None and choice.verdict is Verdict.TRY:
            self._allowance_s += max(0.0, choice.budget_s - spent_s)

    def _answers_lost(self, choice: HitChoice, answers_s: float) -> None:
        if choice.verdict is Verdict.TRY:
            self._stats.add("tried_requests")
        if self._lost(choice, answers_s):
            self.costs.note_answers(LATE * answers_s)

    def _weigh(
        self, finder: HitFinder, state: RequestState, num_tokens: int, computed_tokens: int
    ) -> None:
        """Decides whether a leased hit of `num_tokens` is loaded, and how much of it."""
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
        """Decides again, now that the server has answered and the length of the hit is known."""
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
        """Returns the time limit of a trial's load, for a hit that takes `prefill_s` to compute."""
        few_s = self.costs.load_s(self._tried_tokens)
        return min(prefill_s, max(self._share * prefill_s, few_s))

    def time_for(self, state: RequestState, timeout_s: float) -> float:
        """Returns the time limit of a request's load: `timeout_s`, or the rest of the hit's own
        limit if that is shorter."""
        choice = state.choice
        if choice is None or not choice.budget_s:
            return timeout_s
        return min(timeout_s, max(choice.budget_s - choice.ask_s, LEAST_LOAD_S))

    def told(self, states: Mapping[str, RequestState], load_seconds: Mapping[str, float]) -> None:
        """Processes the ranks' reports of load times.

        load_seconds: the server's time for the load, by request; negative if the time limit was
            reached.
        """
        for request_id, load_s in load_seconds.items():
            choice = states[request_id].choice if request_id in states else None
            if choice is not None:
                choice.load_s = max(choice.load_s, abs(load_s))
                choice.is_late |= load_s < 0

    def end(self, state: RequestState, has_failed: bool) -> bool:
        """Ends the choice of a request whose load has ended in all ranks. Returns True if the load
        failed because it reached its time limit."""
        choice, state.choice = state.choice, None
        if choice is None:
            return False
        if has_failed and choice.is_late:
            # vLLM will ask for this hit again: retain the choice.
            state.choice = choice
            if self._lost(choice, choice.ask_s + choice.load_s):
                self.costs.note_answers(choice.ask_s)
                self.costs.guess_load(choice.num_tokens, LATE * choice.load_s)
        elif not has_failed:
            self._won(choice)
        return has_failed and choice.is_late

    def _won(self, choice: HitChoice) -> None:
        """Updates the choice after a load that ended within its time limit. The load's time counts
        only if `load_s` (the server's time for the load) is known."""
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
        """Returns a first choice for a hit of unknown length, as if it covered the whole prompt."""
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
        """Counts a hit whose load was ended at its time limit, after `seconds`. Returns True if
        `seconds` shows the cost of the load; the limit of a trial is too short for that."""
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
        """Adds to the debt the time that a failed trial took beyond its limit."""
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
        """Counts whether the choice about a hit (to load or to compute) proved right."""
        if choice.prefill_s:
            self._stats.add("judged_choices")
            if (choice.verdict is Verdict.TAKE) == is_sooner:
                self._stats.add("right_choices")


def _left(finder: HitFinder, state: RequestState) -> Answer:
    finder.give_back(state)
    state.hit.miss = Miss.COMPUTED_SOONER
    return NO_HIT


def _shorten(finder: HitFinder, state: RequestState, computed_tokens: int, limit: int) -> int:
    """Shortens a granted hit to about `limit` tokens, if a whole hit of that length exists. Returns
    the new length."""
    hit = state.hit
    while not hit.left_out and computed_tokens + limit < hit.hit_tokens:
        shorter = finder.groups.longest_hit(hit.ready, computed_tokens, computed_tokens + limit)
        if shorter > computed_tokens:
            hit.hit_tokens = shorter
            hit.miss = Miss.COMPUTED_SOONER
            break
        limit *= 2
    return hit.hit_tokens - computed_tokens
