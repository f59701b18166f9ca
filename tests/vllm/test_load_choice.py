"""Whether a hit is loaded or computed, as loads and prefill turn out: with a clock of its own."""

import math
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.costs.load_choice import (
    COSTED,
    DEBT_HALF_LIFE_S,
    DEBT_TRIALS,
    TRIED_SHARE,
    USUAL_TRIALS,
    LoadChoice,
)
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, RequestState, StoreState, Verdict
from hotkv_vllm.stats import HotKVStats

TOKENS_PER_S = 1000.0


class Waited:
    """An answer that has taken so long until now."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Groups:
    """Hits of whole blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def longest_hit(self, masks: Any, computed_tokens: int, limit_tokens: int) -> int:
        return max(computed_tokens, limit_tokens // self.block_tokens * self.block_tokens)


class Finder:
    """Answers after the server's `ask_s`: `hit` tokens, or none. The engine looks again after each
    step of `step_s`."""

    def __init__(self, ask_s: float, hit: int, block_tokens: int = 16) -> None:
        self.ask_s, self.hit, self.groups = ask_s, hit, Groups(block_tokens)
        self.waited: Waited | None = None

    def match(self, state: Any, computed_tokens: int, now_s: float) -> Any:
        if self.waited is None:
            self.waited = Waited()
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
        """A step later. The answer came when it came, not when the engine looks."""
        assert self.waited is not None
        self.waited.seconds = min(self.waited.seconds + step_s, self.ask_s)
        if self.waited.seconds == self.ask_s:
            state.hit.answer.set_result(None)

    def give_back(self, state: Any) -> None:
        state.hit.asked = []


class World:
    """An engine that computes TOKENS_PER_S, and a server whose loads take `fixed_s` and
    `token_s`; it ends a load `cancel_s` after it was asked to. The engine looks at what has come
    each `step_s`."""

    def __init__(self, *, learns: bool = True) -> None:
        self.stats, self.now_s = HotKVStats(), 0.0
        self.prefill = PrefillSpeed(self.stats)
        self.choice = LoadChoice(self.prefill if learns else None, self.stats)
        self.fixed_s, self.token_s, self.ask_s = 0.001, 1e-5, 0.001
        self.step_s, self.cancel_s, self.block_tokens = 0.001, 0.0, 16
        # Whether the last request's hit was believed to win as its load began.
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
        """Seconds to the first token of a request, whose hit is all but one token if left out."""
        hit = num_tokens if hit is None else hit
        request = SimpleNamespace(request_id="a", num_tokens=num_tokens + 1)
        state = RequestState(request, StoreState([], 0))
        finder = Finder(self.ask_s, hit, self.block_tokens)
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
            self.choice.told({"a": state}, {"a": taken_s if loaded else -taken_s})
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

    def count(self, name: str) -> float:
        return self.stats.data.get(name, 0)


def test_hits_that_win_are_loaded() -> None:
    world = World()
    for _ in range(10):
        assert world.request(1000) < 0.05
    assert not world.count("left_requests") and not world.count("tried_requests")
    assert world.count("judged_choices") == world.count("right_choices") == 10


@pytest.mark.parametrize(
    "ask_s, times, cancel_s",
    [(0.001, 200.0, 0.0), (0.05, 200.0, 0.0), (0.3, 1.0, 0.0), (0.05, 200.0, 0.5)],
)
def test_a_slow_server_costs_little_after_the_first_request_and_is_found_well_again(
    ask_s: float, times: float, cancel_s: float
) -> None:
    world, num_tokens = World(), 200
    for _ in range(5):
        world.request(num_tokens)
    world.fixed_s, world.token_s = 0.001 * times, 1e-5 * times
    world.ask_s, world.cancel_s = ask_s, cancel_s
    computing_s = num_tokens / TOKENS_PER_S
    # It loses at most what computing takes, once more.
    assert world.request(num_tokens) <= 2.1 * computing_s + 0.05 + cancel_s
    world.request(num_tokens)
    spent_s = sum(world.request(num_tokens) for _ in range(200))
    assert spent_s <= 1.05 * 200 * computing_s
    assert world.count("left_requests") > 150 and world.count("tried_requests") > 0
    # It recovers, and that is noticed by trials alone.
    world.fixed_s, world.token_s, world.ask_s = 0.001, 1e-5, 0.001
    took = [world.request(num_tokens) for _ in range(400)]
    assert max(took[-100:]) < 0.1 * computing_s
    assert all(seconds <= 2.1 * computing_s for seconds in took)


def test_trials_load_little_where_a_load_can_not_be_ended() -> None:
    """A load that has begun takes its time, twenty times that of computing. So trials are of a few
    blocks, and a server that is well again is found soon."""
    world, num_tokens = World(), 600
    for _ in range(5):
        world.request(num_tokens)
    world.token_s, world.ask_s, world.cancel_s = 20 / TOKENS_PER_S, 0.02, math.inf
    computing_s = num_tokens / TOKENS_PER_S
    for _ in range(3):
        world.request(num_tokens)
    took = [world.request(num_tokens) for _ in range(200)]
    assert sum(took) <= 1.05 * 200 * computing_s and max(took) <= 2.5 * computing_s
    assert world.count("tried_requests") > 3
    world.token_s, world.ask_s = 1e-5, 0.001
    took = [world.request(num_tokens) for _ in range(60)]
    assert max(took[-20:]) < 0.1 * computing_s


@pytest.mark.parametrize("num_tokens", [300, 600, 2000])
@pytest.mark.parametrize("fixed_share", [0.1, 0.33, 0.5])
def test_what_any_load_takes_is_told_from_what_each_token_takes(
    num_tokens: int, fixed_share: float
) -> None:
    """A load of few tokens takes nearly as long as one of many."""
    world = World()
    for _ in range(5):
        world.request(num_tokens)
    computing_s = num_tokens / TOKENS_PER_S
    world.fixed_s = fixed_share * computing_s
    world.token_s, world.cancel_s = 20 / TOKENS_PER_S, math.inf
    slow = [world.request(num_tokens) for _ in range(60)]
    assert sum(slow[3:]) <= 1.05 * 57 * computing_s + 0.6 * computing_s
    world.token_s = 1e-5
    took = [world.request(num_tokens) for _ in range(600)]
    assert max(took[-20:]) < (fixed_share + 0.1) * computing_s


def test_a_hit_of_which_no_part_is_one_is_tried_whole() -> None:
    world, num_tokens = World(), 600
    world.block_tokens = 2000
    world.token_s = 20 / TOKENS_PER_S
    for _ in range(100):
        world.request(num_tokens)
    world.token_s = 1e-5
    took = [world.request(num_tokens) for _ in range(400)]
    assert max(took[-50:]) < 0.1 * num_tokens / TOKENS_PER_S


def test_a_load_of_a_tenth_of_computing_is_found_again_too() -> None:
    """The first trials have less time than such a load takes."""
    world, num_tokens = World(), 1000
    world.fixed_s, world.token_s, world.ask_s = 1.0, 1e-3, 0.0
    for _ in range(20):
        world.request(num_tokens)
    world.fixed_s, world.token_s = 0.05, 0.1e-3
    took = [world.request(num_tokens) for _ in range(300)]
    assert max(took[-50:]) <= 0.2


@given(
    st.lists(
        st.tuples(
            st.integers(64, 4000),
            st.floats(0, 0.2),
            st.floats(0, 3.0),
            st.floats(0, 3e-3),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_the_server_does_trials_spend_their_share_at_most(steps: list[Any]) -> None:
    """Of all that is spent beyond computing, what was believed to win is one prefill a time at
    most; trials are TRIED_SHARE of what was computed, and one whole prefill."""
    world = World()
    computed_s, tried_s, largest_s = 0.0, 0.0, 0.0
    for num_tokens, ask_s, fixed_s, token_s in steps:
        world.ask_s, world.fixed_s, world.token_s = ask_s, fixed_s, token_s
        computing_s = num_tokens / TOKENS_PER_S
        before = world.count("tried_requests")
        took_s = world.request(num_tokens)
        largest_s = max(largest_s, computing_s)
        computed_s += computing_s
        if world.count("tried_requests") > before and not world.was_taken:
            tried_s += max(0.0, took_s - computing_s)
        else:
            known = world.count("judged_load_s") > 0
            assert not known or took_s <= 2 * computing_s + 0.06 + 0.001 * 2
    assert tried_s <= TRIED_SHARE * computed_s + 0.003 * world.count("tried_requests") + 1e-6


def test_what_is_not_known_is_loaded_and_always_means_always() -> None:
    world = World(learns=False)
    world.fixed_s = 9.0
    for _ in range(3):
        assert world.request(1000) > 9.0
    assert not world.count("left_requests")
    fresh = World()
    fresh.prefill._costs.clear()
    fresh.prefill._fit = None
    fresh.fixed_s = 9.0
    assert fresh.request(1000) > 9.0


def test_a_hit_that_is_shorter_than_hoped_is_left_if_it_loses() -> None:
    world = World()
    world.fixed_s, world.token_s = 0.3, 0.0
    for at in range(COSTED):
        world.request(1000 + 100 * at)
    before = world.count("left_requests")
    world.request(1000, hit=100)
    assert world.count("left_requests") == before + 1
    assert world.request(1000) < 0.4


def test_a_miss_and_a_load_that_failed_at_once_say_nothing() -> None:
    world = World()
    assert world.request(1000, hit=0) >= 1.0
    assert world.choice.costs.load_s(1000) == 0
    request = SimpleNamespace(request_id="a", num_tokens=1001)
    state, finder = RequestState(request, StoreState([], 0)), Finder(0.0, 1000)
    assert world.choice.match(finder, state, 0, world.now_s) == (1000, True)  # type: ignore[arg-type]
    assert state.choice is not None and state.choice.verdict is Verdict.TAKE
    assert world.choice.time_for(state, 10.0) == 1.0
    world.choice.end(state, True)
    assert world.choice.costs.load_s(1000) == 0 and not world.count("judged_choices")


@pytest.mark.parametrize("step_s", [0.2, 2.0])
def test_a_busy_engine_goes_on_to_hit(step_s: float) -> None:
    """It looks for answers between its long steps only, which is not the server's time."""
    world = World()
    world.step_s = step_s
    for _ in range(50):
        world.request(200)
    assert not world.count("left_requests") and not world.count("late_requests")
    assert world.choice.costs.answers_s < 0.002 and world.choice.costs.load_s(200) < 0.004


def test_a_server_that_never_answers_in_time_is_left_before_any_load() -> None:
    world = World()
    world.ask_s = 30.0
    took = [world.request(200) for _ in range(50)]
    assert took[0] <= 0.2 + 0.2 + 0.01, "no longer than computing it, and computing it"
    assert sum(took[1:]) <= 1.05 * 49 * 0.2
    assert world.count("left_requests") > 40


def test_a_server_whose_answers_come_in_time_again_was_tried() -> None:
    """Its loads had never lost, so the first trial is a load like any other."""
    world = World()
    world.request(200)
    world.ask_s = 0.5
    for _ in range(5):
        world.request(200)
    assert world.count("left_requests") > 0
    world.ask_s, before = 0.001, world.count("tried_requests")
    while not world.was_taken:
        world.request(200)
    assert world.count("tried_requests") == before + 1


def test_requests_without_a_hit_cost_no_trials() -> None:
    """Most have none. The server is well again, and that is noticed."""
    world = World()
    world.fixed_s, world.token_s = 9.0, 0.0
    for _ in range(5):
        world.request(2000)
    for at in range(400):
        world.request(2000 if at % 10 == 0 else 500, hit=None if at % 10 == 0 else 0)
    tried = world.count("tried_requests")
    assert tried > 0
    world.fixed_s = 0.001
    took = [
        world.request(2000 if at % 10 == 0 else 500, hit=None if at % 10 == 0 else 0)
        for at in range(1500)
    ]
    assert max(took[-100::10]) < 0.2


def test_a_request_that_is_asked_about_again_and_again_is_charged_nothing() -> None:
    world = World()
    world.fixed_s = 9.0
    for _ in range(60):
        world.request(500)
    before = world.choice._allowance_s
    request = SimpleNamespace(request_id="a", num_tokens=501)
    state, finder = RequestState(request, StoreState([], 0)), Finder(0.0, 0)
    for _ in range(40):
        world.choice.match(finder, state, 0, world.now_s)  # type: ignore[arg-type]
    assert world.choice._allowance_s >= before


def test_short_hits_of_long_prompts_are_tried_again() -> None:
    """Loads had a large fixed part; what is left for them alone is too little to notice."""
    world = World()
    world.fixed_s, world.token_s = 0.3, 0.0
    for at in range(COSTED):
        world.request(4000 + 500 * at)
    world.fixed_s = 0.001
    took = [world.request(20_000, hit=100) for _ in range(200)]
    assert world.count("tried_requests") > 0
    assert min(took[-10:]) < 20.0 - 0.05, "the hit is loaded again"


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_fails_says_nothing_of_the_servers_speed(late: bool) -> None:
    world = World()
    world.fixed_s = 0.1
    for _ in range(3):
        world.request(1000)
    known_s = world.choice.costs.load_s(1000)
    request = SimpleNamespace(request_id="a", num_tokens=1001)
    state, finder = RequestState(request, StoreState([], 0)), Finder(0.0, 1000)
    world.choice.match(finder, state, 0, world.now_s)  # type: ignore[arg-type]
    world.choice.told({"a": state}, {"a": 0.01})
    if late:
        world.choice.told({"a": state}, {"a": -5.0, "b": -1.0})
    assert world.choice.end(state, True) == late
    assert (world.choice.costs.load_s(1000) == known_s) != late


def test_a_trial_that_was_not_timed_is_a_win() -> None:
    """A load that ended before the device was seen at its mark."""
    world = World()
    world.fixed_s = 9.0
    for _ in range(40):
        world.request(1000)
    assert world.choice.costs.load_s(1000) > 1.0
    world.choice._allowance_s = 9.0
    request = SimpleNamespace(request_id="a", num_tokens=1001)
    state, finder = RequestState(request, StoreState([], 0)), Finder(0.0, 1000, 2000)
    assert world.choice.match(finder, state, 0, world.now_s) == (1000, True)  # type: ignore[arg-type]
    assert not world.choice.end(state, False)
    assert world.choice.costs.load_s(1000) == 0


def test_a_trial_of_a_short_hit_has_its_share_of_that() -> None:
    world = World()
    world.fixed_s = 9.0
    for _ in range(5):
        world.request(1000)
    world.choice._allowance_s, world.choice._share = 100.0, 1.0
    request = SimpleNamespace(request_id="a", num_tokens=20_001)
    state, finder = RequestState(request, StoreState([], 0)), Finder(0.0, 100, 200)
    assert world.choice.match(finder, state, 0, world.now_s) == (100, True)  # type: ignore[arg-type]
    assert world.choice.time_for(state, 10.0) == pytest.approx(0.1)
    assert world.choice._allowance_s == pytest.approx(99.9)


# ----------------------------------------------------------------------------------------- stalls


def fallen(num_tokens: int) -> World:
    """Returns a world whose server was good, and has just become too slow."""
    world = World()
    for _ in range(5):
        world.request(num_tokens)
    world.token_s = 20 / TOKENS_PER_S
    for _ in range(2):
        world.request(num_tokens)
    return world


def requests_until(world: World, num_tokens: int, happens: Any, most: int = 3000) -> int:
    """Returns how many requests it takes."""
    for number in range(most):
        if happens(world.request(num_tokens)):
            return number
    return most


@given(st.floats(0.0, 1000.0), st.sampled_from([200, 600, 2000]), st.integers(0, 12))
def test_a_stall_of_any_length_silences_hits_for_a_bounded_number_of_requests(
    stall_s: float, num_tokens: int, num_trials: int
) -> None:
    """`num_trials`: of those that lost in their time before."""
    world = fallen(num_tokens)
    tried = world.count("tried_requests")
    requests_until(world, num_tokens, lambda _: world.count("tried_requests") >= tried + num_trials)
    late = world.count("late_requests")
    world.fixed_s = world.cancel_s = stall_s
    requests_until(world, num_tokens, lambda _: world.count("late_requests") > late)
    world.fixed_s, world.token_s, world.cancel_s = 0.001, 1e-5, 0.0
    computing_s = num_tokens / TOKENS_PER_S
    # Each left request puts TRIED_SHARE of its time by; failed trials double the next one's time.
    most = (DEBT_TRIALS + 2) / TRIED_SHARE
    assert requests_until(world, num_tokens, lambda took: took <= 0.1 * computing_s) <= most


def test_trials_that_always_stall_are_paid_for_in_full() -> None:
    world, num_tokens = fallen(200), 200
    world.fixed_s = world.cancel_s = 10.0
    computing_s = num_tokens / TOKENS_PER_S
    spent_s = sum(world.request(num_tokens) for _ in range(10_000))
    assert spent_s <= 1.06 * 10_000 * computing_s + USUAL_TRIALS * world.cancel_s


def test_a_debt_fades_while_nothing_happens() -> None:
    world, num_tokens = fallen(200), 200
    world.fixed_s = world.cancel_s = 10.0
    for _ in range(5000):
        world.request(num_tokens)
    world.fixed_s, world.token_s, world.cancel_s = 0.001, 1e-5, 0.0
    world.now_s += 20 * DEBT_HALF_LIFE_S
    computing_s = num_tokens / TOKENS_PER_S
    assert requests_until(world, num_tokens, lambda took: took <= 0.1 * computing_s) <= 100
