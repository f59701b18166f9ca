"""`PrefillSpeed`, measured from an engine's steps."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.costs.prefill_speed import LEAST_STEP_TOKENS, MAX_OPEN, PrefillSpeed
from hotkv_vllm.stats import HotKVStats


def end(speed: PrefillSpeed, number: int, now_s: float) -> None:
    """number: 0 if not measured."""
    if number:
        speed.end_step(number, now_s)
    speed.last_end_s = now_s


@given(
    st.lists(st.tuples(st.integers(LEAST_STEP_TOKENS, 8192), st.integers(0, 3)), min_size=1),
    st.booleans(),
)
def test_speed_is_the_steps_whatever_between_them(
    steps: list[tuple[int, int]], is_pipelined: bool
) -> None:
    """A pipelined engine plans a step before the previous has ended."""
    speed, free_s, ended_s, results = PrefillSpeed(HotKVStats()), 0.0, 0.0, []
    for num_tokens, pause_s in steps:
        planned_s = (max(0.0, free_s - 0.1) if is_pipelined and not pause_s else free_s) + pause_s
        number = speed.begin_step([(num_tokens, 0)], planned_s)
        assert number
        free_s = max(planned_s, free_s) + num_tokens / 1000
        results.append((number, free_s))
        while len(results) > is_pipelined:
            number, ended_s = results.pop(0)
            end(speed, number, ended_s)
    for number, ended_s in results:
        end(speed, number, ended_s)
    assert abs(speed.tokens_per_s - 1000) < 1e-3


def test_decode_small_and_lost_steps_dont_count() -> None:
    speed = PrefillSpeed(HotKVStats())
    assert speed.begin_step([], 0.0) == 0
    assert speed.begin_step([(4, 500)] * 1000, 0.0) == 0
    assert speed.begin_step([(LEAST_STEP_TOKENS - 1, 0)], 0.0) == 0
    mixed = [(300, 0), *([(1, 500)] * 301)]
    assert speed.begin_step(mixed, 0.0) == 0
    end(speed, 0, 5.0)
    assert speed.tokens_per_s == 0
    for at in range(2 * MAX_OPEN):
        assert speed.begin_step([(1000, 0)], float(at))
    assert len(speed._open) == MAX_OPEN
    # Older steps are forgotten.
    end(speed, 1, 500.0)
    assert speed.tokens_per_s == 0
    number = speed.begin_step([(1000, 0)], 600.0)
    end(speed, number, 600.0)
    assert speed.tokens_per_s == 0, "it took no time"
    number = speed.begin_step([(1000, 0), (1, 500)], 600.0)
    end(speed, number, 601.0)
    assert round(speed.tokens_per_s) == 1001
    end(speed, number, 602.0)
    assert round(speed.tokens_per_s) == 1001


def test_longer_context_costs_more_if_measured() -> None:
    """1 ms a token and 1 us for each before it; one step takes 9 s too long."""
    speed, now_s = PrefillSpeed(HotKVStats()), 0.0
    for computed in range(0, 8192, 1024):
        number = speed.begin_step([(1024, computed)], now_s)
        now_s += 1024 * (1e-3 + 1e-6 * (computed + 512)) + (9.0 if computed == 4096 else 0.0)
        end(speed, number, now_s)
    assert abs(speed.seconds(4096, 8192) / (4096 * (1e-3 + 1e-6 * 6144)) - 1) < 0.02
    assert abs(speed.seconds(0, 1000) / (1000 * (1e-3 + 1e-6 * 500)) - 1) < 0.02


def test_a_prediction_error_is_counted() -> None:
    stats, now_s = HotKVStats(), 0.0
    speed = PrefillSpeed(stats)
    for seconds in (1.0, 1.0, 3.0):
        number = speed.begin_step([(1000, 0)], now_s)
        now_s += seconds
        end(speed, number, now_s)
    assert stats.data["judged_prefill_s"] == 4.0
    assert abs(stats.data["prefill_prediction_error_s"] - 2.0) < 1e-9
