"""Tests what replaces copy methods that fail, and second tries of their jobs."""

import dataclasses
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_server.dataplane.cuda.demotion import (
    MAX_FAILURES,
    MAX_PAUSE_S,
    PAUSE_S,
    PLAINER,
    Demotions,
)
from hotkv_server.dataplane.cuda.values import Direction, Method
from hotkv_server.dataplane.engines import Outcome
from tests.dataplane.rigs import ARENA_BYTES, SMALL
from tests.dataplane.test_cuda import Bench
from tests.doubles.device import COPIES

METHODS = st.sampled_from(Method)


class DemotionMachine(RuleBasedStateMachine):
    """The model replays each method's history: (time, whether a piece failed)."""

    def __init__(self) -> None:
        super().__init__()
        self.demotions = Demotions()
        self.now_s = 1000.0
        self.history: dict[Method, list[tuple[float, bool]]] = {method: [] for method in Method}

    @rule(method=METHODS, error=st.booleans(), times=st.integers(1, MAX_FAILURES))
    def piece(self, method: Method, error: bool, times: int) -> None:
        for _ in range(times):
            before = self.until_s(method)
            self.history[method].append((self.now_s, error))
            if error:
                is_new = self.until_s(method) > max(before, self.now_s)
                assert self.demotions.failed(method, self.now_s) == is_new
            else:
                self.demotions.worked(method, self.now_s)

    @rule(seconds=st.sampled_from([1.0, PAUSE_S, MAX_PAUSE_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def until_s(self, method: Method) -> float:
        if method is Method.MEMCPY:
            return 0.0
        until_s, pause_s, in_a_row = 0.0, PAUSE_S, 0
        for at_s, error in self.history[method]:
            if at_s < until_s:
                continue
            if not error:
                until_s, pause_s, in_a_row = 0.0, PAUSE_S, 0
                continue
            in_a_row += 1
            if until_s:
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            if until_s or in_a_row == MAX_FAILURES:
                until_s, in_a_row = at_s + pause_s, 0
        return until_s

    @invariant()
    def the_first_that_is_not_demoted(self) -> None:
        demoted = {method for method in Method if self.now_s < self.until_s(method)}
        assert set(self.demotions.demoted(self.now_s)) == demoted
        for method in Method:
            chain = [method]
            while chain[-1] in PLAINER:
                chain.append(PLAINER[chain[-1]])
            expected = next(one for one in chain if one not in demoted)
            assert self.demotions.usable(method, self.now_s) is expected


TestDemotion = DemotionMachine.TestCase


@pytest.fixture
def batch() -> Iterator[Bench]:
    bench = Bench(dataclasses.replace(SMALL, method=Method.BATCH), threaded=True)
    yield bench
    bench.close()


def ended(bench: Bench, name: str, *, is_load: bool = True) -> Outcome:
    plan = bench.load() if is_load else bench.store()
    bench.engine.submit(bench.ends.job(name, [plan]))
    bench.ends.wait()
    return bench.ends[name]


def test_a_failed_piece_is_copied_by_the_plainer_method(batch: Bench) -> None:
    """A failing batch copies some bytes first."""
    wanted = np.arange(ARENA_BYTES, dtype=np.uint8)
    batch.arena.region.array()[:] = wanted
    batch.runtime.fail_call("copy_batch", 2)
    assert ended(batch, "load") is Outcome.DONE
    assert np.array_equal(batch.runtime.peek(batch.memory.address, ARENA_BYTES), wanted)
    found = batch.engine.figures()
    assert found.num_failed == 0 and found.failures.num_retried == 1
    assert found.failures.num_failed == {(Direction.LOAD, Method.BATCH): 1}
    assert not found.failures.demoted


def test_a_job_is_tried_twice_at_most(batch: Bench) -> None:
    for nth in (1, 2):
        batch.runtime.fail_call(COPIES, nth)
    assert ended(batch, "load") is Outcome.FAILED
    assert batch.engine.figures().num_failed == batch.engine.figures().failures.num_retried == 1


def test_failures_in_a_row_demote_in_their_direction(batch: Bench) -> None:
    for number in range(MAX_FAILURES):
        batch.runtime.fail_call("copy_batch")
        assert ended(batch, f"load {number}") is Outcome.DONE
    (demoted,) = batch.engine.figures().failures.demoted
    assert (demoted.direction, demoted.method, demoted.replacement) == (
        Direction.LOAD,
        Method.BATCH,
        Method.MEMCPY,
    )
    for is_load in (True, False):
        assert ended(batch, f"later {is_load}", is_load=is_load) is Outcome.DONE
    moved = {(m.direction, m.method): m.num_bytes for m in batch.engine.figures().moved}
    assert moved[Direction.STORE, "batch"] == ARENA_BYTES
    assert moved[Direction.LOAD, "memcpy"] == (MAX_FAILURES + 1) * ARENA_BYTES


def test_a_lost_device_is_not_tried_again(batch: Bench) -> None:
    batch.runtime.lose_after(0, 1)
    assert ended(batch, "load") is Outcome.FAILED
    assert batch.engine.figures().failures.num_retried == 0
