"""The checks that every copy engine (`dataplane.engines.CopyEngine`) must pass. A copy engine
copies bytes between the server's arena and the memory of vLLM engines.

Each check calls `make_rig`, which returns a `CopyRig`: the copy engine under test, an arena, and
memory that stands for a vLLM engine's memory. The check compares the copied bytes with numpy
arrays.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_server.dataplane.engines import CopyEngine, CopyJob, Gate, Outcome
from hotkv_server.dataplane.plan import CopyPlan, Region

Bytes = NDArray[np.uint8]
WAIT_S = 60.0
"""Longest wait for the end of jobs, in seconds. After it the check fails."""


@dataclass(frozen=True)
class CopyRig:
    """A copy engine under test, with memory for its copies.

    arena: memory on the server's side of copies.
    memories: memory on the vLLM engine's side of copies.
    read, write: read or write all bytes of a region, in host or device memory.
    break_next: makes the next copy of a job fail.
    """

    engine: CopyEngine
    arena: Region
    memories: tuple[Region, ...]
    read: Callable[[Region], Bytes]
    write: Callable[[Region, Bytes], None]
    break_next: Callable[[], None]


MakeRig = Callable[[], "contextlib.AbstractContextManager[CopyRig]"]
"""A function that returns a context manager. The context manager makes a `CopyRig`, and at the end
closes the rig's copy engine, even if the check has already closed it."""


@dataclass
class Ends:
    """Records the outcomes of copy jobs, by the name of the job."""

    outcomes: dict[str, list[tuple[Outcome, str]]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def job(
        self,
        name: str,
        plans: list[CopyPlan],
        gate: Gate | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> CopyJob:
        """Makes a copy job. When it ends, `then` is called and the outcome is recorded under
        `name`.

        gate: delays the job until the device of the vLLM engine has passed a mark (a point in its
            queue); None: no delay.
        """
        assert name not in self.outcomes
        self.outcomes[name] = []

        def on_done(outcome: Outcome, message: str) -> None:
            then()
            with self._changed:
                self.outcomes[name].append((outcome, message))
                self._changed.notify_all()

        return CopyJob(plans, on_done, gate)

    def wait(self, *names: str) -> None:
        """Waits until the copy jobs with these names have ended; without names, until all jobs have
        ended. Raises AssertionError if a job has not ended after WAIT_S, or has ended twice."""
        with self._changed:
            wanted = names or tuple(self.outcomes)
            ended = self._changed.wait_for(
                lambda: all(self.outcomes[name] for name in wanted), WAIT_S
            )
        assert ended, (
            f"jobs that did not end: {[name for name in wanted if not self.outcomes[name]]}"
        )
        self.check_once()

    def check_once(self) -> None:
        """Raises AssertionError if a copy job has ended twice."""
        assert all(len(outcomes) <= 1 for outcomes in self.outcomes.values()), "a job ended twice"

    def __getitem__(self, name: str) -> Outcome:
        return self.outcomes[name][0][0]

    def message(self, name: str) -> str:
        return self.outcomes[name][0][1]


def random_bytes(rng: np.random.Generator, region: Region) -> Bytes:
    """Returns random bytes, as many as the region has bytes."""
    return rng.integers(0, 256, region.num_bytes, dtype=np.uint8)


def random_runs(
    rng: np.random.Generator, spaces: tuple[int, ...], num_runs: int, page_bytes: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Makes random byte ranges (runs) in several memories (spaces); the ranges of a memory don't
    overlap. Returns the offsets of the ranges for each memory, int64 [runs], and the sizes of the
    ranges, int64 [runs].

    spaces: sizes of the memories in bytes.
    page_bytes: size of all ranges, whose offsets are then aligned; 0: sizes and offsets are random.
    """
    room = min(spaces)
    if page_bytes:
        num_runs = min(num_runs, room // page_bytes)
        numbers = [
            rng.permutation(space // page_bytes)[:num_runs]
            if rng.random() < 0.7
            else np.arange(num_runs)
            for space in spaces
        ]
        return [number.astype(np.int64) * page_bytes for number in numbers], np.full(
            num_runs, page_bytes, np.int64
        )
    cuts = np.sort(rng.integers(0, room + 1, 2 * num_runs))
    sizes = (cuts[1::2] - cuts[::2]).astype(np.int64)
    offsets = []
    for space in spaces:
        order = rng.permutation(num_runs)
        begins = np.empty(num_runs, np.int64)
        begins[order] = np.cumsum(sizes[order]) - sizes[order]
        offsets.append(begins + rng.integers(0, space - int(sizes.sum()) + 1))
    return offsets, sizes


def check_bytes(make_rig: MakeRig, *, seed: int, num_jobs: int = 12) -> None:
    """Executes random copy jobs in both directions, and makes the same copies between numpy arrays.
    Checks after each job that all memories have the same bytes as the arrays."""
    rng = np.random.default_rng(seed)
    with make_rig() as rig:
        regions = (rig.arena, *rig.memories)
        model = {region.name: random_bytes(rng, region) for region in regions}
        for region in regions:
            rig.write(region, model[region.name])
        ends = Ends()
        for number in range(num_jobs):
            to_engine, plans = bool(rng.integers(0, 2)), []
            share = rig.arena.num_bytes // len(rig.memories)
            for at, memory in enumerate(rig.memories):
                page_bytes = int(rng.choice([0, 64, 512, 4096, 16384]))
                (in_arena, in_memory), sizes = random_runs(
                    rng,
                    (share // 16384 * 16384, memory.num_bytes),
                    int(rng.integers(0, 200)),
                    page_bytes,
                )
                in_arena = in_arena + at * share
                dst, src = (memory, rig.arena) if to_engine else (rig.arena, memory)
                to, from_ = (in_memory, in_arena) if to_engine else (in_arena, in_memory)
                plans.append(CopyPlan.build(dst, src, to, from_, sizes))
                for dst_offset, src_offset, size in zip(
                    to.tolist(), from_.tolist(), sizes.tolist(), strict=True
                ):
                    model[dst.name][dst_offset : dst_offset + size] = model[src.name][
                        src_offset : src_offset + size
                    ]
            rig.engine.submit(ends.job(f"{number}", plans))
            ends.wait(f"{number}")
            assert ends[f"{number}"] is Outcome.DONE, ends.message(f"{number}")
            for region in regions:
                assert np.array_equal(rig.read(region), model[region.name]), (
                    f"{region.name} differs after job {number}"
                )


def check_nothing_to_do(make_rig: MakeRig) -> None:
    """Checks that copy jobs without plans, without byte ranges or without bytes end as DONE."""
    with make_rig() as rig:
        nothing, zero = np.empty(0, np.int64), np.zeros(3, np.int64)
        ends = Ends()
        rig.engine.submit(ends.job("no plans", []))
        rig.engine.submit(
            ends.job(
                "no runs",
                [CopyPlan(memory, rig.arena, nothing, nothing, nothing) for memory in rig.memories],
            )
        )
        rig.engine.submit(
            ends.job(
                "no bytes",
                [CopyPlan(rig.arena, memory, zero, zero, zero) for memory in rig.memories],
            )
        )
        ends.wait()
        assert all(ends[name] is Outcome.DONE for name in ends.outcomes)


def whole_plan(dst: Region, src: Region, page_bytes: int = 4096) -> CopyPlan:
    """Makes a plan that copies all bytes for which both regions have room. The pages of the source
    are copied in reversed order, so that no two byte ranges are merged."""
    pages = np.arange(min(dst.num_bytes, src.num_bytes) // page_bytes, dtype=np.int64) * page_bytes
    return CopyPlan(dst, src, pages, pages[::-1].copy(), np.full(len(pages), page_bytes, np.int64))


def check_cancel(make_rig: MakeRig, *, seed: int) -> None:
    """Cancels a copy job before it begins, and other jobs later. Checks that the first job copies
    no bytes, and that each of the others ends once and does not write to memory after its end."""
    rng = np.random.default_rng(seed)
    with make_rig() as rig:
        ends = Ends()
        memory = rig.memories[0]
        before = random_bytes(rng, memory)
        rig.write(memory, before)
        job = ends.job("never begun", [whole_plan(memory, rig.arena)])
        job.cancel()
        rig.engine.submit(job)
        ends.wait()
        assert ends["never begun"] is Outcome.CANCELLED and np.array_equal(rig.read(memory), before)
        # At the end of a job the test overwrites the job's target. These bytes must still be there
        # when all jobs have ended, because no other job writes there.
        share = memory.num_bytes // 8
        marks: list[tuple[Region, Bytes]] = []
        jobs = []
        for number in range(8):
            target = Region(
                memory.address + number * share, share, f"share {number}", memory.device
            )
            mark = random_bytes(rng, target)
            marks.append((target, mark))
            plans = [whole_plan(target, rig.arena, 512)]
            jobs.append(
                ends.job(
                    f"{number}",
                    plans,
                    then=lambda target=target, mark=mark: rig.write(target, mark),  # type: ignore[misc]
                )
            )
        for job in jobs:
            rig.engine.submit(job)
        for number in rng.permutation(8)[:5].tolist():
            time.sleep(float(rng.random()) * 1e-3)
            jobs[number].cancel()
        ends.wait()
        assert all(ends[name] in (Outcome.DONE, Outcome.CANCELLED) for name in ends.outcomes)
        assert all(np.array_equal(rig.read(target), mark) for target, mark in marks), (
            "memory changed after the end of its job"
        )


def check_failure(make_rig: MakeRig) -> None:
    """Makes a copy fail. Checks that its job ends as FAILED with a message, and that later jobs
    succeed."""
    with make_rig() as rig:
        ends = Ends()
        memory = rig.memories[0]
        rig.break_next()
        rig.engine.submit(ends.job("broken", [whole_plan(rig.arena, memory)]))
        ends.wait()
        assert ends["broken"] is Outcome.FAILED and ends.message("broken")
        for name in ("after", "and again"):
            rig.engine.submit(ends.job(name, [whole_plan(rig.arena, memory)]))
        ends.wait()
        assert ends["after"] is ends["and again"] is Outcome.DONE
        assert rig.engine.is_alive()


def check_close(make_rig: MakeRig) -> None:
    """Closes a copy engine that has 20 jobs. Checks that all jobs have ended as DONE when `close`
    returns."""
    with make_rig() as rig:
        ends = Ends()
        for number in range(20):
            memory = rig.memories[number % len(rig.memories)]
            plan = whole_plan(memory, rig.arena) if number % 2 else whole_plan(rig.arena, memory)
            rig.engine.submit(ends.job(f"{number}", [plan]))
        rig.engine.close()
        assert all(outcomes == [(Outcome.DONE, "")] for outcomes in ends.outcomes.values())


def check_idle(make_rig: MakeRig) -> None:
    """Checks that a copy engine without work is alive and does not count as stalled."""
    with make_rig() as rig:
        ends = Ends()
        rig.engine.submit(ends.job("some", [whole_plan(rig.arena, rig.memories[0])]))
        ends.wait()
        until_s = time.monotonic() + WAIT_S
        while rig.engine.stalled_s(time.monotonic()) > 0 or rig.engine.num_queued:
            assert time.monotonic() < until_s, "an engine without work counts as stalled"
            time.sleep(1e-3)
        assert rig.engine.is_alive()


def check_times(make_rig: MakeRig) -> None:
    """Executes some copy jobs. Checks that they report how long they waited for a thread or device,
    except jobs that never began. Also checks that the copy engine counts as busy only while it
    copies."""
    with make_rig() as rig:
        ends, plans = Ends(), [whole_plan(rig.arena, memory) for memory in rig.memories]
        assert rig.engine.busy_s == 0.0 and rig.engine.num_lanes >= 1
        began_s = time.monotonic()
        jobs = [ends.job(f"{number}", plans) for number in range(4)]
        for job in jobs:
            rig.engine.submit(job)
        ends.wait()
        took_s = time.monotonic() - began_s
        for job in jobs:
            assert job.begun_s and job.waited_s is not None and 0.0 <= job.waited_s <= took_s
        cancelled = ends.job("cancelled", [whole_plan(rig.arena, rig.memories[0])])
        cancelled.cancel()
        rig.engine.submit(cancelled)
        nothing = ends.job("nothing", [])
        rig.engine.submit(nothing)
        ends.wait()
        assert nothing.waited_s is cancelled.waited_s is nothing.begun_s is None
        busy_s = rig.engine.busy_s
        assert 0.0 < busy_s <= rig.engine.num_lanes * (time.monotonic() - began_s)
        time.sleep(0.01)
        assert rig.engine.busy_s == busy_s
