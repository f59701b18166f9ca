"""The checks that every `dataplane.engines.CopyEngine` must pass. A check gets a `CopyRig` and
compares copied bytes with numpy arrays."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.layout import Recipe
from hotkv_server.dataplane.engines import CopyEngine, CopyJob, Gate, Outcome
from hotkv_server.dataplane.plan import BlockCopies, Region
from hotkv_server.device.runtime import HOST
from tests.support.plans import runs_plan

Bytes = NDArray[np.uint8]
WAIT_S = 60.0
"""For the end of jobs; then the check fails."""


@dataclass(frozen=True)
class CopyRig:
    """A copy engine under test.

    memories: the vLLM engine's side of copies.
    read, write: all bytes of a region, in host or device memory.
    break_next: makes the next copy of a job fail.
    """

    engine: CopyEngine
    arena: Region
    memories: tuple[Region, ...]
    read: Callable[[Region], Bytes]
    write: Callable[[Region, Bytes], None]
    break_next: Callable[[], None]


MakeRig = Callable[[], "contextlib.AbstractContextManager[CopyRig]"]
"""Makes a context that closes the rig's copy engine at its end, even if the check already has."""


@dataclass
class Ends:
    """Outcomes of copy jobs by name."""

    outcomes: dict[str, list[tuple[Outcome, str]]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def job(
        self,
        name: str,
        plans: list[BlockCopies],
        gate: Gate | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> CopyJob:
        """`then` is called at the job's end. `gate`: None: no delay."""
        assert name not in self.outcomes
        self.outcomes[name] = []

        def on_done(outcome: Outcome, message: str) -> None:
            then()
            with self._changed:
                self.outcomes[name].append((outcome, message))
                self._changed.notify_all()

        return CopyJob(plans, on_done, gate)

    def wait(self, *names: str) -> None:
        """Without names, for all jobs. Raises AssertionError after WAIT_S, or if a job has ended
        twice."""
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
        assert all(len(outcomes) <= 1 for outcomes in self.outcomes.values()), "a job ended twice"

    def __getitem__(self, name: str) -> Outcome:
        return self.outcomes[name][0][0]

    def message(self, name: str) -> str:
        return self.outcomes[name][0][1]


def random_bytes(rng: np.random.Generator, region: Region) -> Bytes:
    return rng.integers(0, 256, region.num_bytes, dtype=np.uint8)


def random_runs(
    rng: np.random.Generator, spaces: tuple[int, ...], num_runs: int, page_bytes: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Random byte ranges that don't overlap, in several memories: offsets per memory and sizes,
    int64 [runs].

    spaces: bytes of each memory.
    page_bytes: size and alignment of all ranges; 0: random.
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
    """Random jobs in both directions leave the bytes that numpy copies leave."""
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
                plans.append(runs_plan(dst, src, to, from_, sizes))
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
    """Jobs without plans, ranges or bytes end as DONE."""
    with make_rig() as rig:
        nothing, zero = np.empty(0, np.int64), np.zeros(3, np.int64)
        ends = Ends()
        rig.engine.submit(ends.job("no plans", []))
        rig.engine.submit(
            ends.job(
                "no runs",
                [
                    runs_plan(memory, rig.arena, nothing, nothing, nothing)
                    for memory in rig.memories
                ],
            )
        )
        rig.engine.submit(
            ends.job(
                "no bytes",
                [runs_plan(rig.arena, memory, zero, zero, zero) for memory in rig.memories],
            )
        )
        ends.wait()
        assert all(ends[name] is Outcome.DONE for name in ends.outcomes)


def whole_plan(dst: Region, src: Region, page_bytes: int = 4096) -> BlockCopies:
    """Copies all bytes for which both have room, a page a block, those of the engine in reversed
    order, so that none are merged."""
    to_engine = dst.device != HOST or src.device == HOST
    engine, arena = (dst, src) if to_engine else (src, dst)
    blocks = np.arange(min(dst.num_bytes, src.num_bytes) // page_bytes, dtype=np.int64)
    zero, size = np.zeros(1, np.int64), np.array([page_bytes], np.int64)
    recipe = Recipe("kv", zero, size, zero, size)
    return BlockCopies(recipe, engine, arena, blocks[::-1].copy(), blocks * page_bytes, to_engine)


def check_cancel(make_rig: MakeRig, *, seed: int) -> None:
    """A job cancelled before it begins copies nothing; others end once and write nothing after
    their end."""
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
        # Written over a job's target at its end: must still be there when all have ended.
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
    """A failing copy ends its job as FAILED with a message; later jobs succeed."""
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
    """All jobs have ended as DONE when `close` returns."""
    with make_rig() as rig:
        ends = Ends()
        for number in range(20):
            memory = rig.memories[number % len(rig.memories)]
            plan = whole_plan(memory, rig.arena) if number % 2 else whole_plan(rig.arena, memory)
            rig.engine.submit(ends.job(f"{number}", [plan]))
        rig.engine.close()
        assert all(outcomes == [(Outcome.DONE, "")] for outcomes in ends.outcomes.values())


def check_idle(make_rig: MakeRig) -> None:
    """Without work it is alive and not stalled."""
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
    """Jobs report how long they waited, unless they never began; the engine is busy only while
    it copies."""
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
