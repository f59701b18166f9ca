"""Decides whether to load a hit: only if loading is faster than computing its tokens.

The engine learns the time to load a hit and the time to compute its tokens. It measures how long
the server takes for answers and loads, and how long its own prefill takes. The time in which an
answer waits for the engine's next step does not count.

There are three decisions:
- `TAKE`: the hit is loaded, because loading is predicted to take at most SLACK_S longer than
  computing its tokens (prefill). The load is cancelled when it has taken as long as the prefill
  would (or LEAST_BUDGET_S, if that is longer).
- `LEAVE`: the hit's tokens are computed, because loading seems slower.
- `TRY` (a trial): a part of the hit is loaded although loading seems slower, to notice when loading
  has become faster. A trial loads only a few tokens, because a load that has begun can't always be
  ended at once. After a trial that ended in time, the next trial loads twice as many tokens. From
  trials of different sizes the engine learns the fixed time of a load and the time per token.

Trials must not cost much. So an allowance (in seconds) limits their time: each computed hit adds
the share TRIED_SHARE of its prefill time to the allowance, and each trial subtracts its own time.
Always true: a trial begins only if the allowance covers the trial's time limit.

A trial that exceeds its time limit can make the allowance negative (a debt). Then no trial begins
until computed hits have added enough to the allowance. The debt is at most the usual time of
DEBT_TRIALS trials, because a single slow trial says little about the next trial. The debt also
decreases with time.

Scheduler thread only.
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
"""The server's times are predicted from this many recent answers and this many recent loads, so
that the predictions follow changes."""
CHANGED = 4.0
"""The server counts as changed if a measured time is greater than this multiple of its prediction
(plus SLACK_S), or smaller than the prediction divided by this number. Earlier times are then
discarded."""
TRIED_SHARE = 0.03
LEAST_TRIED_TOKENS = 32
LATE = 2.0
"""If a call to the server was given up, the learned times count it as if it had taken this multiple
of the time until it was given up."""
USUAL_TRIALS = 5
"""A trial is a load that is begun although loading seems slower than computing. Its usual time is
the median over this many recent trials. If there were fewer trials so far, the time limit of the
present trial stands for each missing trial."""
DEBT_TRIALS = 3
"""A trial (a load that measures the server) that exceeds its time limit can make the allowance for
trials negative (a debt). The debt is at most the usual time of this many trials."""
DEBT_HALF_LIFE_S = 300.0
SLACK_S = 0.01
"""A hit is still loaded if loading takes longer than the prefill by at most this time, because a
load leaves the device free for other work."""
LEAST_BUDGET_S, LEAST_LOAD_S = 0.05, 0.001
"""The shortest time limits, seconds: LEAST_BUDGET_S for the server's answers and the load of a hit
together, LEAST_LOAD_S for the load alone. Shorter limits could not be kept exactly, and would gain
nothing."""


class ServerCosts:
    """Predicts, from measured times, how long the server takes for its answers about a hit, and for
    a load."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=COSTED)
        self._loads: deque[tuple[int, float]] = deque(maxlen=COSTED)
        self._is_guess = False

    def __repr__(self) -> str:
        return f"ServerCosts({len(self._answers)} answers, {len(self._loads)} loads known)"

    @property
    def answers_s(self) -> float:
        """Returns the predicted time, in seconds, of the server's answers about one hit (lookup and
        lease); 0 before the first measurement."""
        return float(np.median(self._answers)) if self._answers else 0.0

    def load_s(self, num_tokens: int) -> float:
        """Returns the predicted seconds to load `num_tokens`; 0 before the first measurement."""
        if not self._loads:
            return 0.0
        fixed_s, token_s = fitted(*zip(*self._loads, strict=True))
        return fixed_s + num_tokens * token_s

    def forget_loads(self) -> None:
        """Discards the measured times of loads, because they may be wrong by now."""
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
        """Replaces the measured times of loads by an estimate, because a load was given up at its
        time limit. The next measured load replaces the estimate.

        num_tokens: number of tokens that the load was to load.
        seconds: estimated time of the whole load.
        """
        self._loads.clear()
        self._loads.append((num_tokens, seconds))
        self._is_guess = True


def _is_like(predicted_s: float, seconds: float) -> bool:
    return predicted_s / CHANGED <= seconds <= predicted_s * CHANGED + SLACK_S


class LoadChoice:
    """Decides whether a hit is loaded or computed. Owns the `HitChoice` of each request (the
    decision about its hit).

    costs: predicts the server's times.
    prefill: predicts the engine's prefill time; if it is None, every hit is loaded.
    """

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
        """Answers vLLM's question how long the request's hit is. If the hit is to be loaded,
        returns the result of `HitFinder.match`. If the hit's tokens are to be computed, returns "no
        hit". For a trial (a short load that measures the server), returns a hit of a few tokens.

        computed_tokens: length of the hit in vLLM's own prefix cache.
        """
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
        """Returns True if the request should ask the server for a hit. Returns False if an earlier
        decision says to compute the prompt, or if the server's answers took longer than the time
        limit (`HitChoice.budget_s`)."""
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
        """Discards the decision about the request's hit, because there is no hit, or because an
        answer of the server exceeded `lookup_timeout_s`.

        spent_s: time that the server has taken for its answers, seconds.
        was_late: True if an answer exceeded `lookup_timeout_s`.
        """
        if state.choice is not None and was_late:
            self._answers_lost(state.choice, spent_s)
            state.choice = None
        self.drop(state, spent_s)

    def drop(self, state: RequestState, spent_s: float) -> None:
        """Discards the decision about the request's hit, because no load of the hit begins. If the
        load was to be a trial, adds the trial's unspent time to the allowance (the time that trials
        may still take).

        spent_s: time that the server has taken for its answers, seconds.
        """
        choice, state.choice = state.choice, None
        if choice is not None and choice.verdict is Verdict.TRY:
            self._allowance_s += max(0.0, choice.budget_s - spent_s)

    def leave(self, state: RequestState) -> None:
        """Makes the request compute its hit, because a load of the same blocks has reached its time
        limit."""
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
        """Decides whether a leased hit is loaded, and how many of its tokens are loaded. Writes the
        decision to the request's `HitChoice`.

        num_tokens: length of the hit beyond `computed_tokens`.
        computed_tokens: length of the hit in vLLM's own prefix cache.
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
        """Decides whether to load a hit (TAKE), to try a load of a part of it (TRY), or to compute
        its tokens (LEAVE). The hit's length is known now. So the result replaces the preliminary
        choice of `_chosen`, which assumed that the hit covers the whole prompt."""
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
        """Returns the time limit for the load of a trial.

        prefill_s: predicted time to compute the hit.
        """
        few_s = self.costs.load_s(self._tried_tokens)
        return min(prefill_s, max(self._share * prefill_s, few_s))

    def time_for(self, state: RequestState, timeout_s: float) -> float:
        """Returns the time limit for a request's load, seconds. This is `timeout_s`, or the rest of
        the hit's time limit (`HitChoice.budget_s`) that the server's answers have not used,
        whichever is shorter. The rest counts as at least LEAST_LOAD_S."""
        choice = state.choice
        if choice is None or not choice.budget_s:
            return timeout_s
        return min(timeout_s, max(choice.budget_s - choice.ask_s, LEAST_LOAD_S))

    def update(self, states: Mapping[str, RequestState], load_seconds: Mapping[str, float]) -> None:
        """Records the load times that the ranks have reported.

        states: the requests that hotkv follows, by id.
        load_seconds: by request, the time that the server took for its load; negative if the load
            reached its time limit.
        """
        for request_id, load_s in load_seconds.items():
            choice = states[request_id].choice if request_id in states else None
            if choice is not None:
                choice.load_s = max(choice.load_s, abs(load_s))
                choice.is_late |= load_s < 0

    def end(self, state: RequestState, has_failed: bool) -> bool:
        """Handles the end of a load in all ranks: learns from the load's time, and discards the
        decision about the request's hit. If the load failed because it reached its time limit, the
        decision stays, as "compute the hit's tokens", and the result is True."""
        choice, state.choice = state.choice, None
        if choice is None:
            return False
        if has_failed and choice.is_late:
            # Keeps the choice, because vLLM will ask for this hit again. The hit's tokens are then
            # computed.
            state.choice = choice
            if self._lost(choice, choice.ask_s + choice.load_s):
                self.costs.note_answers(choice.ask_s)
                self.costs.guess_load(choice.num_tokens, LATE * choice.load_s)
        elif not has_failed:
            self._won(choice)
        return has_failed and choice.is_late

    def _won(self, choice: HitChoice) -> None:
        """Learns from a load that has ended within its time limit: updates the measured times, and
        sets the size of the next trial. If the load's time is not known (`choice.load_s` is 0),
        learns only that the load was in time."""
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
        """Returns a preliminary decision about a hit whose length is not known yet. Assumes that
        the hit covers the whole prompt. `_weigh_load` may replace the decision once the server has
        answered.

        computed_tokens: length of the hit in vLLM's own prefix cache.
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
        """Handles a hit whose lookup, lease or load was given up at the time limit: from now on the
        decision about the hit is LEAVE (compute its tokens). Returns True if the decision was TAKE
        (load it); the caller may then use `seconds` as a measure of the server's speed. Returns
        False after a trial (TRY), whose time limit is too short for such a measure.

        seconds: time that the server had taken when the call was given up.
        """
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
        """Subtracts from the allowance (the time that trials may still take) the time by which a
        failed trial exceeded its limit. The allowance may become negative (a debt).

        seconds: time that the trial took.
        budget_s: time limit of the trial.
        """
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
        """Counts a decision about a hit, and whether it was right, in the counters `judged_choices`
        and `right_choices`.

        is_sooner: True if loading was, or would have been, faster than computing the hit's tokens.
        """
        if choice.prefill_s:
            self._stats.add("judged_choices")
            if (choice.verdict is Verdict.TAKE) == is_sooner:
                self._stats.add("right_choices")


def _left(finder: HitFinder, state: RequestState) -> Answer:
    finder.give_back(state)
    state.hit.miss = Miss.COMPUTED_SOONER
    return NO_HIT


def _shorten(finder: HitFinder, state: RequestState, computed_tokens: int, limit: int) -> int:
    """Shortens a granted hit for a trial (a load of a few tokens that measures the server's speed),
    and returns the hit's new length beyond `computed_tokens`.

    limit: wanted number of tokens. A hit can't have every length: if no hit of at most `limit`
        tokens is possible, the limit is doubled until a hit is possible.
    """
    hit = state.hit
    while not hit.left_out and computed_tokens + limit < hit.hit_tokens:
        shorter = finder.groups.longest_hit(hit.ready, computed_tokens, computed_tokens + limit)
        if shorter > computed_tokens:
            hit.hit_tokens = shorter
            hit.miss = Miss.COMPUTED_SOONER
            break
        limit *= 2
    return hit.hit_tokens - computed_tokens
