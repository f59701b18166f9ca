"""Tests `CudaCopyEngine` on a fake device that the test advances step by step."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hotkv_server.dataplane.cuda.calibration import Calibration
from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import CudaCopySettings, Direction, Method
from hotkv_server.dataplane.engines import CopyJob, Outcome
from hotkv_server.dataplane.plan import BlockCopies, Region
from hotkv_server.device.runtime import DeviceError, Event
from tests.contracts.copy_engine_contract import Ends, random_bytes, whole_plan
from tests.dataplane.rigs import ARENA_BYTES, SMALL, Arena, cuda_rig, device_memory
from tests.doubles.device import FakeEvent, FakeRuntime
from tests.support.waiting import wait_for

STEPS = dataclasses.replace(SMALL, method=Method.BATCH, depth=2)


def has_passed(event: Event) -> bool:
    assert isinstance(event, FakeEvent)
    return bool(event.counters[1] >= event.counters[0])


class Bench:
    """A CUDA copy engine on a fake device, which advances only by `run`.

    threaded: the device runs by itself instead.
    prepare: called with the device before the engine is created.
    """

    def __init__(
        self,
        settings: CudaCopySettings = STEPS,
        *,
        threaded: bool = False,
        num_pinned: int = 4,
        prepare: Callable[[FakeRuntime], None] = lambda r: None,
    ) -> None:
        self.runtime = FakeRuntime(5, threaded=threaded)
        self.arena = Arena(self.runtime)
        for _ in range(num_pinned):
            self.arena.grow()
        prepare(self.runtime)
        self.engine = CudaCopyEngine(self.runtime, 0, self.arena, settings)
        self.memory = device_memory(self.runtime, 0, ARENA_BYTES, "memory")
        self.ends = Ends()

    def load(self, num_bytes: int = ARENA_BYTES) -> BlockCopies:
        return whole_plan(Region(self.memory.address, num_bytes, "memory", 0), self.arena.region)

    def store(self, num_bytes: int = ARENA_BYTES) -> BlockCopies:
        return whole_plan(Region(self.arena.address, num_bytes, "the arena"), self.memory)

    def until(self, reached: Callable[[], bool], *, running: bool = False) -> None:
        """Waits; if `running`, advances the device whenever the copy engine's threads are idle."""
        until_s = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < until_s
            if not (running and self.settled() and self.runtime.run(1)):
                time.sleep(1e-4)

    def settled(self) -> bool:
        """True if all threads of the engine wait for the device or for jobs."""
        return all(
            not (lane._giving_s or lane._finishing_s or (lane._works and lane._free))
            and lane._finished.empty()
            and not any(has_passed(given.slot.event) for given in list(lane._in_flight))
            for lane in self.engine._lanes.values()
        )

    def ended(self, *names: str) -> bool:
        return all(self.ends.outcomes[name] for name in names or self.ends.outcomes)

    def close(self) -> None:
        closing = threading.Thread(target=self.engine.close)
        closing.start()
        self.until(lambda: not closing.is_alive(), running=True)
        self.runtime.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_device_gets_at_most_depth_pieces(
    bench: Bench,
) -> None:
    bench.engine.submit(bench.ends.job("load", [bench.load()]))
    bench.engine.submit(bench.ends.job("store", [bench.store(ARENA_BYTES // 2)]))
    bench.until(lambda: bench.engine.figures().num_in_flight == 4)
    bench.until(bench.settled)
    figures = bench.engine.figures()
    assert figures.num_in_flight == 4 and figures.num_queued >= ARENA_BYTES // SMALL.piece_bytes - 2
    assert not any(bench.ends.outcomes.values()) and not figures.moved
    bench.until(bench.ended, running=True)
    moved = {(m.direction, m.method): m for m in bench.engine.figures().moved}
    assert moved.keys() == {(Direction.LOAD, "batch"), (Direction.STORE, "batch")}
    load = moved[Direction.LOAD, "batch"]
    assert load.num_bytes == ARENA_BYTES and load.num_pieces >= ARENA_BYTES // SMALL.piece_bytes
    assert (bench.engine.figures().num_queued, bench.engine.figures().num_in_flight) == (0, 0)


def test_small_job_takes_turns_with_large_ones(bench: Bench) -> None:
    bench.engine.submit(bench.ends.job("large", [bench.load()]))
    bench.until(lambda: bench.engine.figures().num_in_flight == 2)
    bench.engine.submit(bench.ends.job("small", [bench.load(4096)]))
    bench.engine.submit(bench.ends.job("as large", [bench.load()]))
    bench.until(lambda: bench.ended("small"), running=True)
    loaded = sum(m.num_bytes for m in bench.engine.figures().moved)
    assert not bench.ended("large") and not bench.ended("as large") and loaded < ARENA_BYTES // 2


def test_owners_take_turns_however_many_jobs_each_has(bench: Bench) -> None:
    jobs = [bench.ends.job(f"job {number}", [bench.load()]) for number in range(8)]
    late = bench.ends.job("late", [bench.load()])
    for job in jobs:
        job.owner = "greedy"
        bench.engine.submit(job)
    late.owner = "modest"
    bench.engine.submit(late)
    bench.until(lambda: bench.ended("late"), running=True)
    assert sum(m.num_bytes for m in bench.engine.figures().moved) < 3 * ARENA_BYTES


def test_what_stalls_on_the_device_shows(bench: Bench) -> None:
    assert bench.engine.stalled_s(time.monotonic()) == 0
    bench.engine.submit(bench.ends.job("load", [bench.load(4096)]))
    bench.until(lambda: bench.engine.stalled_s(time.monotonic()) > 0.02)
    assert bench.engine.stalled_s(time.monotonic() + 100) > 100 and bench.engine.is_alive()
    bench.until(bench.ended, running=True)
    bench.until(lambda: bench.engine.stalled_s(time.monotonic()) == 0)


@pytest.mark.parametrize(("call", "tries"), [("record", 3), ("record", 2), ("synchronize", 1)])
def test_device_that_cant_be_followed_is_abandoned(bench: Bench, call: str, tries: int) -> None:
    """The engine tries each call three times, then abandons the device."""
    for nth in range(tries):
        bench.runtime.fail_call(call, nth + 1)
    for name in ("fails", "later"):
        bench.engine.submit(bench.ends.job(name, [bench.load()]))
        bench.until(bench.ended, running=True)
    is_lost = "can't be followed" in bench.engine.problem
    assert is_lost == (tries == 3)
    for name in ("fails", "later"):
        assert bench.ends[name] is (Outcome.FAILED if is_lost else Outcome.DONE)
    assert bench.ends.message("later") == bench.engine.problem
    figures = bench.engine.figures()
    assert figures.num_failed == 2 * is_lost and figures.failures.num_retried == (not is_lost)
    assert bool(bench.engine.figures().moved) != is_lost


def test_without_room_for_staging_it_does_without() -> None:
    bench = Bench(
        dataclasses.replace(SMALL, method=Method.STAGED),
        threaded=True,
        prepare=lambda runtime: runtime.fail_call("allocate", 2),
    )
    bench.engine.submit(bench.ends.job("load", [bench.load()]))
    bench.engine.submit(bench.ends.job("store", [bench.store()]))
    bench.ends.wait()
    assert {(m.direction, m.method) for m in bench.engine.figures().moved} == {
        (Direction.LOAD, "batch"),
        (Direction.STORE, "staged"),
    }
    bench.close()


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *[(call, nth) for call in ("new_event", "allocate_pinned") for nth in (1, 2, 4)],
        ("new_stream", 1),
        ("new_stream", 2),
    ],
)
def test_failed_engine_construction_leaves_nothing(call: str, nth: int) -> None:
    runtime = FakeRuntime()
    arena = Arena(runtime)
    threads = {*threading.enumerate()}
    runtime.fail_call(call, nth)
    with pytest.raises(DeviceError):
        CudaCopyEngine(runtime, 0, arena, SMALL)
    assert not runtime.held() and threads >= {*threading.enumerate()}
    arena.close()
    runtime.close()


def test_unpinned_memory_is_copied_plainly_at_first() -> None:
    bench = Bench(threaded=True, num_pinned=1)
    bench.engine.submit(bench.ends.job("early", [bench.load()]))
    bench.ends.wait()
    early = {m.method: m.num_bytes for m in bench.engine.figures().moved}
    assert early == {
        "batch": bench.arena.piece_bytes,
        "pageable": ARENA_BYTES - bench.arena.piece_bytes,
    }
    for _ in range(3):
        bench.arena.grow()
    bench.engine.submit(bench.ends.job("later", [bench.load()]))
    bench.ends.wait()
    assert {m.method: m.num_bytes for m in bench.engine.figures().moved} == early | {
        "batch": early["batch"] + ARENA_BYTES
    }
    bench.close()


def test_calibration_runs_by_itself_and_is_used() -> None:
    runtime = FakeRuntime()
    arena = Arena(runtime)
    arena.grow()
    found: list[Calibration] = []
    before = arena.region.array().copy()
    settings = CudaCopySettings(staging_bytes=1 << 20, calibration_bytes=64 << 10)
    engine = CudaCopyEngine(runtime, 0, arena, settings, driver="1.0", on_calibrated=found.append)
    until_s = time.monotonic() + 60
    while not found:
        assert time.monotonic() < until_s
        time.sleep(1e-3)
    assert found == [engine.calibration] and found[0].holds_for(engine.info, "1.0")
    assert np.array_equal(arena.region.array(), before)
    engine.close()
    kernels = Calibration(
        engine.info.uuid, "", "", {(d, Method.KERNEL, 4096): 1.0 for d in Direction}
    )
    engine = CudaCopyEngine(
        runtime,
        0,
        arena,
        settings,
        calibration=kernels,
        on_calibrated=lambda calibration: pytest.fail("it was measured again"),
    )
    memory = device_memory(runtime, 0, arena.piece_bytes, "memory")
    ends = Ends()
    engine.submit(ends.job("load", [whole_plan(memory, arena.region)]))
    ends.wait()
    assert [m.method for m in engine.figures().moved] == ["kernel"]
    engine.close()
    runtime.close()


def test_closing_stops_a_calibration() -> None:
    runtime = FakeRuntime(threaded=False)
    arena = Arena(runtime)
    engine = CudaCopyEngine(
        runtime, 0, arena, CudaCopySettings(staging_bytes=1 << 20, calibration_bytes=64 << 10)
    )
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_for(engine._closing.is_set, "it is not closed")
    wait_for(lambda: not runtime.run(100) and not closing.is_alive(), "it does not close")
    assert engine.calibration is None and not runtime.held()
    arena.close()
    runtime.close()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"piece_bytes": 1}, "piece_bytes"),
        ({"depth": 0}, "depth"),
        ({"staging_bytes": 8192}, "staging_bytes"),
    ],
)
def test_settings_that_can_not_work_are_refused(fields: dict[str, int], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        CudaCopySettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_pinned", [4, 1])
@pytest.mark.parametrize("method", [Method.BATCH, Method.STAGED])
def test_progress_counts_only_blocks_that_are_there(method: Method, num_pinned: int) -> None:
    """Else checksums would be taken of old bytes. Blocks in memory that is not pinned come last."""
    told, wrong = list[int](), list[int]()
    settings = dataclasses.replace(SMALL, method=method)
    with cuda_rig(settings, seed=3, num_pinned=num_pinned)() as rig:
        memory, page_bytes = rig.memories[0], 4096
        model = random_bytes(np.random.default_rng(1), memory)
        rig.write(memory, model)
        wanted = model.reshape(-1, page_bytes)[::-1]

        def progress(num_blocks: int) -> None:
            told.append(num_blocks)
            found = rig.read(rig.arena).reshape(-1, page_bytes)[:num_blocks]
            wrong.extend(np.flatnonzero((found != wanted[:num_blocks]).any(1)).tolist())

        ends: list[Outcome] = []
        job = CopyJob(
            [whole_plan(rig.arena, memory, page_bytes)],
            lambda outcome, _: ends.append(outcome),
            progress=progress,
        )
        rig.engine.submit(job)
        wait_for(lambda: ends, "the end")
    assert ends == [Outcome.DONE] and not wrong
    assert len(told) > 3 and max(told) == len(wanted)
