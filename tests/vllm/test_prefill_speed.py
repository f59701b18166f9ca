"""The prefill speed of an engine, learnt from its steps."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.scheduler.prefill_speed import LEAST_STEP_TOKENS, MAX_OPEN, RECENT, PrefillSpeed


def end(speed: PrefillSpeed, number: int, now_s: float) -> None:
    """As the scheduler's side does."""
    if number:
        speed.end_step(number, now_s)
    speed.last_end_s = now_s


@given(
    st.lists(st.tuples(st.integers(LEAST_STEP_TOKENS, 8192), st.integers(0, 3)), min_size=1),
    st.booleans(),
)
def test_it_is_that_of_the_steps_whatever_lies_between_them(
    steps: list[tuple[int, int]], is_pipelined: bool
) -> None:
    """An engine of 1000 tokens/s: steps one after the other, with pauses, and each planned before
    or after the last one has ended."""
    speed, free_s, ended_s, results = PrefillSpeed(), 0.0, 0.0, []
    for num_tokens, pause_s in steps:
        planned_s = (max(0.0, free_s - 0.1) if is_pipelined and not pause_s else free_s) + pause_s
        number = speed.begin_step({"a": num_tokens}, planned_s)
        assert number
        free_s = max(planned_s, free_s) + num_tokens / 1000
        results.append((number, free_s))
        while len(results) > is_pipelined:
            number, ended_s = results.pop(0)
            end(speed, number, ended_s)
    for number, ended_s in results:
        end(speed, number, ended_s)
    assert abs(speed.tokens_per_s - 1000) < 1e-3


def test_decode_small_steps_and_lost_results_do_not_count() -> None:
    speed = PrefillSpeed()
    assert speed.begin_step({}, 0.0) == 0
    assert speed.begin_step({str(at): 4 for at in range(1000)}, 0.0) == 0
    assert speed.begin_step({"a": LEAST_STEP_TOKENS - 1}, 0.0) == 0
    mixed = {"a": 300} | {str(at): 1 for at in range(301)}
    assert speed.begin_step(mixed, 0.0) == 0
    end(speed, 0, 5.0)
    assert speed.tokens_per_s == 0
    for at in range(2 * MAX_OPEN):
        assert speed.begin_step({"a": 1000}, float(at))
    assert len(speed._open) == MAX_OPEN
    # The first ones are forgotten: their results say nothing.
    end(speed, 1, 500.0)
    assert speed.tokens_per_s == 0
    number = speed.begin_step({"a": 1000, "b": 1}, 600.0)
    end(speed, number, 601.0)
    assert speed.tokens_per_s == 1001
    end(speed, number, 602.0)
    assert speed.tokens_per_s == 1001


def test_a_step_that_waited_long_does_not_count_for_much() -> None:
    speed, now_s = PrefillSpeed(), 0.0
    for at in range(RECENT):
        number = speed.begin_step({"a": 1000}, now_s)
        now_s += 60.0 if at == 3 else 1.0
        end(speed, number, now_s)
    assert speed.tokens_per_s == 1000
