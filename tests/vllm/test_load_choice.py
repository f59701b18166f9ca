"""`LoadChoice`: load a hit or compute it. Simulated clock."""

import math
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.find.load_choice import (
    CHANGED,
    COSTED,
    DEBT_HALF_LIFE_S,
    DEBT_TRIALS,
    SLACK_S,
    TRIED_SHARE,
    USUAL_TRIALS,
    LoadChoice,
    ServerCosts,
)
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, RequestState, StoreState, Verdict
from hotkv_vllm.stats import HotKVStats

TOKENS_PER_S = 1000.0


class Groups:
    """A hit covers whole blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def longest_hit(self, masks: Any, computed_tokens: int, limit_tokens: int) -> int:
        return max(computed_tokens, limit_tokens // self.block_tokens * self.block_tokens)


class Finder:
    """ask_s: until the answer, seconds.
    hit: tokens.
    """

    def __init__(self, ask_s: float, hit: int, block_tokens: int = 16) -> None:
        self.ask_s, self.hit, self.groups = ask_s, hit, Groups(block_tokens)
        self.waited: Any = None

    def match(self, state: Any, computed_tokens: int, now_s: float) -> Any:
        if self.waited is None:
            self.waited = SimpleNamespace(seconds=0.0)
            state.hit.asked.append(self.waited)
            state.hit.answer = Future()
        if self.waited.seconds < self.ask_s:
            return ASK_AGAIN
        state.hit.answer = None
        if self.hit <= computed_tokens:
            return NO_HIT
        state.hit.hit_tokens = self.hit
        return self.hit - computed_tokens, True

    def look_again(self, state: Any, step_s: float) -> None:
        """The answer took `ask_s`, even if it is seen later."""
        self.waited.seconds = min(self.waited.seconds + step_s, self.ask_s)
        if self.waited.seconds == self.ask_s:
            state.hit.answer.set_result(None)

    def give_back(self, state: Any) -> None:
        state.hit.asked = []


def state_of(num_tokens: int) -> RequestState:
    request = SimpleNamespace(request_id="a", num_tokens=num_tokens + 1)
    return RequestState(request, StoreState([], 0))


class World:
    """fixed_s, token_s: time of a load, and of each token in it.
    ask_s, cancel_s: until a lookup's answer, and a cancelled load's end.
    step_s: interval at which answers are seen.
    learns: False: all hits are loaded.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self.stats, self.now_s = HotKVStats(), 0.0
        self.prefill = PrefillSpeed(self.stats)
        self.choice = LoadChoice(self.prefill if learns else None, self.stats)
        self.fixed_s, self.token_s, self.ask_s = 0.001, 1e-5, 0.001
        self.step_s, self.cancel_s, self.block_tokens = 0.001, 0.0, 16
        # Expected to be faster than computing, not a trial.
        self.was_taken = False
        for _ in range(3):
            self.compute(1000)

    def compute(self, num_tokens: int) -> None:
        number = self.prefill.begin_step([(num_tokens, 0)], self.now_s)
        self.now_s += num_tokens / TOKENS_PER_S
        if number:
            self.prefill.end_step(number, self.now_s)
        self.prefill.last_end_s = self.now_s

    def request(self, num_tokens: int, hit: int | None = None) -> float:
        """Seconds until the first token.

        hit: None: the whole prompt.
        """
        hit = num_tokens if hit is None else hit
        state, finder = state_of(num_tokens), Finder(self.ask_s, hit, self.block_tokens)
        began_s = self.now_s
        while True:
            answer = self.choice.match(finder, state, 0, self.now_s)  # type: ignore[arg-type]
            if answer != ASK_AGAIN:
                break
            self.now_s += self.step_s
            finder.look_again(state, self.step_s)
        loaded = 0
        choice = state.choice
        self.was_taken = choice is not None and choice.verdict is Verdict.TAKE
        if answer[0]:
            assert answer[0] == state.hit.hit_tokens <= hit
            timeout_s = self.choice.time_for(state, 10.0)
            load_s = self.fixed_s + answer[0] * self.token_s
            taken_s = load_s if load_s <= timeout_s else min(load_s, timeout_s + self.cancel_s)
            self.now_s += math.ceil(taken_s / self.step_s) * self.step_s
            loaded = answer[0] if load_s <= timeout_s else 0
            self.choice.update({"a": state}, {"a": taken_s if loaded else -taken_s})
            self.choice.end(state, not loaded)
            if not loaded:
                before = self.count("left_requests")
                again = self.choice.match(finder, state, 0, self.now_s)  # type: ignore[arg-type]
                assert again == NO_HIT and self.count("left_requests") == before
            else:
                assert state.choice is None
        if num_tokens > loaded:
            self.compute(num_tokens - loaded)
        return self.now_s - began_s

    def many(self, count: int, num_tokens: int) -> list[float]:
        return [self.request(num_tokens) for _ in range(count)]

    def begun(self, num_tokens: int, hit: int, block_tokens: int = 16) -> tuple[Any, Any]:
        state, finder = state_of(num_tokens), Finder(0.0, hit, block_tokens)
        return state, self.choice.match(finder, state, 0, self.now_s)  # type: ignore[arg-type]

    def count(self, name: str) -> float:
        return self.stats.data.get(name, 0)


def test_hits_that_win_are_loaded() -> None:
    world = World()
    assert max(world.many(10, 1000)) < 0.05
    assert not world.count("left_requests") and not world.count("tried_requests")
    # Exactly as long as computing counts as right.
    state, _ = world.begun(1000, 1000)
    world.choice.update({"a": state}, {"a": state.choice.prefill_s})
    world.choice.end(state, False)
    assert world.count("judged_choices") == world.count("right_choices") == 11


def test_earlier_times_are_forgotten_with_the_server() -> None:
    costs, slow_s = ServerCosts(), 0.001 * CHANGED + SLACK_S
    changed_s = slow_s + 1e-6
    for seconds, known_s in (
        (0.001, 0.001),
        (0.001, 0.001),
        (slow_s, 0.001),
        (changed_s, changed_s),
        (changed_s, changed_s),
        (changed_s / CHANGED, changed_s),
        (changed_s / CHANGED - 1e-6, changed_s / CHANGED - 1e-6),
    ):
        costs.note_answers(seconds)
        assert costs.answers_s == known_s


GOOD = {"fixed_s": 0.001, "token_s": 1e-5, "ask_s": 0.001}
NO_END = {"cancel_s": math.inf}
"""A cancel never ends a load."""
TWENTY = 20 / TOKENS_PER_S


@pytest.mark.parametrize(
    "num_tokens, slow, well, num_first, most_share",
    [
        (200, {"fixed_s": 0.2, "token_s": 2e-3}, {}, 2, 0.1),
        (200, {"fixed_s": 0.2, "token_s": 2e-3, "ask_s": 0.05}, {}, 2, 0.1),
        (200, {"ask_s": 0.3}, {}, 2, 0.1),
        (200, {"fixed_s": 0.2, "token_s": 2e-3, "ask_s": 0.05, "cancel_s": 0.5}, {}, 2, 0.1),
        (600, {"token_s": TWENTY, "ask_s": 0.02, **NO_END}, {}, 4, 0.1),
        # Too large for a load in part.
        (600, {"token_s": TWENTY, "block_tokens": 2000}, {}, 4, 0.1),
        # A trial's limit is too short even after the recovery.
        (1000, {"fixed_s": 1.0, "token_s": 1e-3}, {"fixed_s": 0.05, "token_s": 1e-4}, 4, 0.2),
        # A trial of few tokens costs much of what loads could save.
        *(
            (size, {"fixed_s": fixed, "token_s": TWENTY, **NO_END}, {"fixed_s": fixed}, 4, most)
            for size, fixed, most in (
                (300, 0.03, 0.2),
                (600, 0.2, 0.43),
                (2000, 0.2, 0.2),
                (2000, 0.66, 0.43),
                (2000, 1.0, 0.6),
            )
        ),
    ],
)
def test_slow_server_costs_little_recovery_is_found(
    num_tokens: int,
    slow: dict[str, Any],
    well: dict[str, Any],
    num_first: int,
    most_share: float,
) -> None:
    """num_first: requests before the bound holds.
    most_share: of computing, for the last requests.
    """
    world = World()
    world.many(5, num_tokens)
    vars(world).update(slow)
    computing_s = num_tokens / TOKENS_PER_S
    first_s = world.request(num_tokens)
    if "block_tokens" not in slow and world.cancel_s < math.inf:
        # The first slow load costs at most as much as computing.
        assert first_s <= 2.1 * computing_s + 0.05 + world.cancel_s
    world.many(num_first - 1, num_tokens)
    assert sum(world.many(200, num_tokens)) <= 1.05 * 200 * computing_s + 0.6 * computing_s
    assert world.count("left_requests") > 100 and world.count("tried_requests") > 0
    vars(world).update(GOOD | well)
    took = world.many(600, num_tokens)
    assert max(took[-20:]) < most_share * computing_s + 1e-9
    assert all(seconds <= 2.5 * computing_s for seconds in took)


@given(
    st.lists(
        st.tuples(st.integers(64, 4000), st.floats(0, 0.2), st.floats(0, 3.0), st.floats(0, 3e-3)),
        min_size=1,
        max_size=60,
    )
)
def test_trials_spend_at_most_their_share(steps: list[Any]) -> None:
    """Other loads may take twice the time of computing."""
    world = World()
    computed_s, tried_s = 0.0, 0.0
    for num_tokens, ask_s, fixed_s, token_s in steps:
        world.ask_s, world.fixed_s, world.token_s = ask_s, fixed_s, token_s
        computing_s = num_tokens / TOKENS_PER_S
        before = world.count("tried_requests")
        took_s = world.request(num_tokens)
        computed_s += computing_s
        if world.count("tried_requests") > before and not world.was_taken:
            tried_s += max(0.0, took_s - computing_s)
        else:
            known = world.count("judged_load_s") > 0
            assert not known or took_s <= 2 * computing_s + 0.06 + 0.001 * 2
    assert tried_s <= TRIED_SHARE * computed_s + 0.003 * world.count("tried_requests") + 1e-6


def test_unknown_is_loaded_and_always_means_always() -> None:
    fresh = World()
    fresh.prefill._costs.clear()
    fresh.prefill._fit = None
    for world, count in ((fresh, 1), (World(learns=False), 3)):
        world.fixed_s = 9.0
        assert min(world.many(count, 1000)) > 9.0
        assert not world.count("left_requests")


def test_shorter_hit_is_left_if_losing() -> None:
    world = World()
    world.fixed_s, world.token_s = 0.3, 0.0
    for at in range(COSTED):
        world.request(1000 + 100 * at)
    before = world.count("left_requests")
    world.request(1000, hit=100)
    assert world.count("left_requests") == before + 1
    assert world.request(1000) < 0.4


def test_miss_and_instant_failure_say_nothing() -> None:
    world = World()
    assert world.request(1000, hit=0) >= 1.0
    assert world.choice.costs.load_s(1000) == 0
    # The server disconnects before it answers.
    state, finder = state_of(1000), Finder(9.0, 0)
    for finder.ask_s, answer in ((9.0, ASK_AGAIN), (0.0, NO_HIT)):
        assert world.choice.match(finder, state, 0, world.now_s) == answer  # type: ignore[arg-type]
    assert not world.count("late_requests")
    state, answer = world.begun(1000, 1000)
    assert answer == (1000, True) and state.choice.verdict is Verdict.TAKE
    assert world.choice.time_for(state, 10.0) == 1.0
    world.choice.end(state, True)
    assert world.choice.costs.load_s(1000) == 0 and not world.count("judged_choices")


def test_requests_without_a_hit_cost_no_trials() -> None:
    """Else the recovery would go unnoticed."""
    world = World()
    world.fixed_s, world.token_s = 9.0, 0.0
    world.many(60, 500)
    before = world.choice._allowance_s
    state, answer = world.begun(100, 100)
    assert answer[0] and world.choice._allowance_s < before
    world.choice.drop(state, 0.0)
    assert world.choice._allowance_s == pytest.approx(before) and state.choice is None
    state, finder = state_of(500), Finder(0.0, 0)
    for _ in range(40):
        world.choice.match(finder, state, 0, world.now_s)  # type: ignore[arg-type]
    assert world.choice._allowance_s >= before

    def tenths_hit(count: int) -> list[float]:
        for _ in range(count):
            took.append(world.request(2000))
            for _ in range(9):
                world.request(500, hit=0)
        return took

    took: list[float] = []
    tenths_hit(40)
    assert world.count("tried_requests") > 0
    world.fixed_s = 0.001
    assert max(tenths_hit(150)[-10:]) < 0.2


@pytest.mark.parametrize("late", [False, True])
def test_failing_rank_says_nothing_of_speed(late: bool) -> None:
    world = World()
    world.fixed_s = 0.1
    world.many(3, 1000)
    known_s = world.choice.costs.load_s(1000)
    state, _ = world.begun(1000, 1000)
    world.choice.update({"a": state}, {"a": 0.01})
    if late:
        world.choice.update({"a": state}, {"a": -5.0, "b": -1.0})
    assert world.choice.end(state, True) == late
    assert (world.choice.costs.load_s(1000) == known_s) != late


def test_untimed_trial_has_share_and_wins() -> None:
    world = World()
    world.fixed_s = 9.0
    world.many(5, 1000)
    world.choice._allowance_s, world.choice._share = 100.0, 1.0
    state, answer = world.begun(20_000, 100, 200)
    assert answer == (100, True)
    assert world.choice.time_for(state, 10.0) == pytest.approx(0.1)
    assert world.choice._allowance_s == pytest.approx(99.9)
    assert world.choice.costs.load_s(1000) > 1.0
    # It ended before its mark was seen: its time counts as fast.
    assert not world.choice.end(state, False)
    assert world.choice.costs.load_s(1000) == 0


# ----------------------------------------------------------------------------------------- stalls


def fallen(num_tokens: int, stall_s: float = 0.0) -> World:
    """The server has become too slow.

    stall_s: by which loads also stall.
    """
    world = World()
    world.many(5, num_tokens)
    world.token_s = TWENTY
    world.many(2, num_tokens)
    if stall_s:
        world.fixed_s = world.cancel_s = stall_s
    return world


def requests_until(world: World, num_tokens: int, happens: Any, most: int = 3000) -> int:
    """Number of requests before `happens`."""
    for number in range(most):
        if happens(world.request(num_tokens)):
            return number
    return most


@given(st.floats(0.0, 1000.0), st.sampled_from([200, 600, 2000]), st.integers(0, 12))
def test_stall_silences_hits_for_bounded_requests(
    stall_s: float, num_tokens: int, num_trials: int
) -> None:
    """num_trials: before the stall."""
    world = fallen(num_tokens)
    tried = world.count("tried_requests")
    requests_until(world, num_tokens, lambda _: world.count("tried_requests") >= tried + num_trials)
    late = world.count("late_requests")
    world.fixed_s = world.cancel_s = stall_s
    requests_until(world, num_tokens, lambda _: world.count("late_requests") > late)
    vars(world).update(GOOD, cancel_s=0.0)
    computing_s = num_tokens / TOKENS_PER_S
    # Each computed hit earns TRIED_SHARE of its time, after a debt of at most DEBT_TRIALS
    # trials.
    most = (DEBT_TRIALS + 2) / TRIED_SHARE
    assert requests_until(world, num_tokens, lambda took: took <= 0.1 * computing_s) <= most


def test_stalling_trials_are_paid_debt_fades() -> None:
    world = fallen(200, stall_s=10.0)
    spent_s = sum(world.many(10_000, 200))
    assert spent_s <= 1.06 * 10_000 * 0.2 + USUAL_TRIALS * world.cancel_s
    vars(world).update(GOOD, cancel_s=0.0)
    world.now_s += 20 * DEBT_HALF_LIFE_S
    assert requests_until(world, 200, lambda took: took <= 0.02) <= 100
