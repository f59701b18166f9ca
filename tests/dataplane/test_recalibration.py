"""Tests when measured speeds are stable, and when they are measured again."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hotkv_server.dataplane.cuda import engine as engine_module
from hotkv_server.dataplane.cuda.calibration import Calibration
from hotkv_server.dataplane.cuda.recalibration import (
    MAX_PASSES,
    MAX_REST_S,
    MIN_PIECE_BYTES,
    REST_S,
    RIVAL,
    SLOW_PIECES,
    SLOW_RATIO,
    SLOW_S,
    STABLE_RATIO,
    Drift,
    Passes,
    Speeds,
    agree,
    merged,
)
from hotkv_server.dataplane.cuda.values import CudaCopySettings, Direction, Method
from tests.dataplane.test_cuda import Bench
from tests.support.waiting import wait_for

METHODS = (Method.MEMCPY, Method.BATCH)
SIZES = (4096, 65536)
KEYS = [(d, m, size) for d in Direction for m in METHODS for size in SIZES]
SPEEDS = st.sampled_from([0.0, 10.0, 10.5, 12.0, 30.0])
TABLES = st.fixed_dictionaries(dict.fromkeys(KEYS, SPEEDS))


def flat(speed: float) -> Speeds:
    return dict.fromkeys(KEYS, speed)


CHANGES = st.dictionaries(st.sampled_from(KEYS), SPEEDS, max_size=2)


@given(TABLES, CHANGES)
def test_tables_agree_if_no_rival_differs(one: Speeds, changes: Speeds) -> None:
    """The naive model compares each pair, for each direction and size."""
    other: Speeds = {**one, **changes}
    expected = True
    for direction in Direction:
        for size in SIZES:
            pairs = [(one[direction, m, size], other[direction, m, size]) for m in METHODS]
            best = max(map(max, pairs))
            rivals = [pair for pair in pairs if max(pair) >= RIVAL * best]
            expected &= all(max(pair) - min(pair) <= STABLE_RATIO * max(pair) for pair in rivals)
    assert agree(one, other) == agree(other, one) == expected


@given(st.lists(TABLES, min_size=1, max_size=3))
def test_equal_devices_have_the_fastest_of_each(tables: list[Speeds]) -> None:
    assert merged(tables) == {key: max(table[key] for table in tables) for key in KEYS}
    less = [{key: table[key] for key in KEYS[n:]} for n, table in enumerate(tables)]
    assert set(merged(less)) == set(KEYS[len(less) - 1 :])


@given(st.lists(TABLES, min_size=1, max_size=MAX_PASSES + 2))
def test_passes_end_with_two_that_agree(tables: list[Speeds]) -> None:
    passes, seen = Passes(), list[Speeds]()
    for table in tables:
        if passes.is_done:
            break
        seen.append(table)
        passes.add(table)
    is_stable = len(seen) > 1 and agree(*seen[-2:])
    assert passes.is_stable == is_stable and passes.num_passes == len(seen) <= MAX_PASSES
    assert passes.is_done == (is_stable or len(seen) == MAX_PASSES)
    assert not any(agree(*pair) for pair in itertools.pairwise(seen[:-1]))
    counted = seen[-2:] if is_stable else seen
    for key, speed in passes.speeds.items():
        found = [table[key] for table in counted]
        assert speed == (max(found) if all(found) else 0.0)


IGNORED = [(MIN_PIECE_BYTES - 1, Method.BATCH), (MIN_PIECE_BYTES, Method.STAGED)]


class DriftMachine(RuleBasedStateMachine):
    """The model keeps the list of pieces since the last fast one."""

    def __init__(self) -> None:
        super().__init__()
        self.drift = Drift()
        self.now_s = 0.0
        self.slow: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        self.measured: list[tuple[float, float]] = []
        self.measure(10.0)

    @precondition(lambda self: len(self.measured) < 4)
    @rule(speed=st.sampled_from([10.0, 10.2, 20.0]))
    def calibrate(self, speed: float) -> None:
        self.measure(speed)

    def measure(self, speed: float) -> None:
        self.drift.calibrated(flat(speed), self.now_s)
        self.measured.append((self.now_s, speed))
        self.forget()

    @precondition(lambda self: any(self.slow.values()))
    @rule()
    def put_off(self) -> None:
        self.drift.put_off()
        self.forget()

    def forget(self) -> None:
        for slow in self.slow.values():
            slow.clear()

    def rest_s(self) -> float:
        rest_s, before = REST_S, None
        for _, speed in self.measured:
            is_same = before is not None and agree(flat(before), flat(speed))
            rest_s, before = (min(2 * rest_s, MAX_REST_S) if is_same else REST_S), speed
        return rest_s

    @rule(
        direction=st.sampled_from(Direction),
        share=st.sampled_from([0.9 * SLOW_RATIO, 1.1 * SLOW_RATIO]),
        times=st.sampled_from([1, SLOW_PIECES - 1]),
        wait_s=st.sampled_from([0.0, SLOW_S, REST_S, 2 * REST_S]),
        what=st.sampled_from([*[(MIN_PIECE_BYTES, Method.BATCH)] * 6, *IGNORED]),
    )
    def copy(
        self,
        direction: Direction,
        share: float,
        times: int,
        wait_s: float,
        what: tuple[int, Method],
    ) -> None:
        num_bytes, method = what
        for _ in range(times):
            seconds = num_bytes / (share * self.measured[-1][1] * 1e9)
            asked = self.drift.copied(direction, method, 8192, num_bytes, seconds, self.now_s)
            slow = self.slow[direction]
            if what not in IGNORED:
                if share >= SLOW_RATIO:
                    slow.clear()
                    assert not asked
                else:
                    slow.append(self.now_s)
                    assert asked == (
                        len(slow) >= SLOW_PIECES
                        and self.now_s - slow[0] >= SLOW_S
                        and self.now_s - self.measured[-1][0] >= self.rest_s()
                    )
            else:
                assert not asked
        self.now_s += wait_s


TestDrift = DriftMachine.TestCase


@pytest.fixture
def slow_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench whose device was measured to be faster than it can be, and which asks soon."""
    monkeypatch.setattr("hotkv_server.dataplane.cuda.recalibration.SLOW_PIECES", 4)
    monkeypatch.setattr("hotkv_server.dataplane.cuda.recalibration.SLOW_S", 0.0)
    monkeypatch.setattr("hotkv_server.dataplane.cuda.recalibration.REST_S", 0.0)
    monkeypatch.setattr("hotkv_server.dataplane.cuda.recalibration.MIN_PIECE_BYTES", 1)
    settings = CudaCopySettings(
        staging_bytes=0, calibration_bytes=256 << 10, methods=METHODS, piece_bytes=1 << 20
    )
    bench = Bench(settings, threaded=True)
    wait_for(lambda: bench.engine.calibration is not None, "the first measurement")
    yield bench
    bench.close()


def pretend(bench: Bench, speed: float) -> Calibration:
    found = bench.engine.calibration
    assert found is not None
    made = Calibration(found.uuid, found.name, found.driver, dict.fromkeys(found.speeds, speed))
    bench.engine.calibration = made
    bench.engine._drift.calibrated(made.speeds, 0.0)
    return made


@pytest.mark.parametrize("copy", [Bench.load, Bench.store])
def test_slow_copies_are_measured_again(slow_bench: Bench, copy: Callable[..., Any]) -> None:
    bench = slow_bench
    made = pretend(bench, 1e6)
    for number in range(8):
        bench.engine.submit(bench.ends.job(f"{number}", [copy(bench)]))
        bench.ends.wait()
    wait_for(lambda: bench.engine.calibration is not made, "the measurement", 20)


def test_a_busy_device_is_not_measured(slow_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_WAIT_S", 0.2)
    bench, made = slow_bench, pretend(slow_bench, 1e6)
    monkeypatch.setattr(type(bench.engine), "num_queued", 1)
    bench.engine._begin_calibration(bench.engine._calibrate_when_idle)
    thread = bench.engine._calibrating
    assert isinstance(thread, threading.Thread)
    thread.join(20)
    assert not thread.is_alive() and bench.engine.calibration is made
