"""Runs random jobs, gates, cancels, failures, pinning and lost devices on copy engines, against
plain arrays.

Jobs that run at the same time use different bytes, so each job's result is known.
"""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import CudaCopySettings, Method
from hotkv_server.dataplane.engines import CopyEngines, CopyJob, Outcome
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.runtime import DeviceError
from tests.contracts.copy_engine_contract import Bytes, Ends, random_bytes, random_runs
from tests.dataplane.rigs import Arena, SwitchedGate, device_memory, read, write
from tests.doubles.device import FakeRuntime
from tests.support.plans import runs_plan

ARENA_BYTES, NUM_SHARES = 1 << 19, 16
SHARE_BYTES = ARENA_BYTES // NUM_SHARES
REGISTRATION_BYTES = 3 * 4096 * 5


@dataclass
class Running:
    """share: index of the equal part of arena and memories that only this job uses.
    runs: per plan (destination, source, offsets in the destination, offsets in the source, sizes
        in bytes).
    """

    job: CopyJob
    share: int
    runs: list[tuple[Region, Region, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]
    gate: SwitchedGate | None
    was_cancelled: bool = False


class CopyMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 30),
        method=st.sampled_from([None, *Method]),
        depth=st.integers(1, 3),
    )
    def begin(self, seed: int, method: Method | None, depth: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.runtime = FakeRuntime(
            seed, num_devices=2, max_delay_s=float(self.rng.choice([0.0, 50e-6]))
        )
        self.arena = Arena(self.runtime, ARENA_BYTES, REGISTRATION_BYTES)
        told = CudaCopySettings(
            method=method,
            piece_bytes=9000,
            depth=depth,
            staging_bytes=2 * depth * 5000,
            calibration_bytes=0,
        )
        self.cuda = {
            device: CudaCopyEngine(self.runtime, device, self.arena, told) for device in range(2)
        }
        self.engine = CopyEngines(HostCopyEngine(1), self.cuda)
        self.plain = np.zeros(ARENA_BYTES, np.uint8)
        on_devices = [
            device_memory(self.runtime, device, ARENA_BYTES, f"memory of device {device}")
            for device in range(2)
        ]
        self.memories = [
            *on_devices,
            Region(self.plain.ctypes.data, ARENA_BYTES, "memory of the host"),
        ]
        self.regions = [self.arena.region, *self.memories]
        self.model: dict[str, Bytes] = {
            region.name: random_bytes(self.rng, region) for region in self.regions
        }
        for region in self.regions:
            write(self.runtime, region, self.model[region.name])
        self.ends = Ends()
        self.running: dict[str, Running] = {}
        self.lost: set[int] = set()
        self.num_faults = 0

    # Events

    @precondition(lambda self: len(self.running) < NUM_SHARES)
    @rule(
        gated=st.booleans(), which=st.sets(st.integers(0, 2), min_size=1), to_engine=st.booleans()
    )
    def submit(self, gated: bool, which: set[int], to_engine: bool) -> None:
        share = min(set(range(NUM_SHARES)) - {running.share for running in self.running.values()})
        begin, runs = share * SHARE_BYTES, []
        for at, number in enumerate(sorted(which)):
            memory, room = self.memories[number], SHARE_BYTES // len(which) // 4096 * 4096
            page_bytes = int(self.rng.choice([0, 256, 4096]))
            (in_arena, in_memory), sizes = random_runs(
                self.rng, (room, SHARE_BYTES), int(self.rng.integers(0, 60)), page_bytes
            )
            in_arena, in_memory = in_arena + begin + at * room, in_memory + begin
            sides = (
                (memory, self.arena.region, in_memory, in_arena)
                if to_engine
                else (self.arena.region, memory, in_arena, in_memory)
            )
            runs.append((*sides, sizes))
        name, gate = f"{len(self.ends.outcomes)}", SwitchedGate() if gated else None
        job = self.ends.job(name, [runs_plan(*parts) for parts in runs], gate)
        self.running[name] = Running(job, share, runs, gate)
        self.engine.submit(job)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 100), error=st.booleans())
    def open_gate(self, number: int, error: bool) -> None:
        gated = [running.gate for running in self.running.values() if running.gate is not None]
        if gated:
            gate = gated[number % len(gated)]
            gate.error = (
                DeviceError("the mark can't be seen") if error and number % 4 == 0 else None
            )
            self.num_faults += gate.error is not None
            gate.is_open = True

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 100))
    def cancel(self, number: int) -> None:
        running = list(self.running.values())[number % len(self.running)]
        running.was_cancelled = True
        running.job.cancel()

    @rule(
        method=st.sampled_from(["copy", "copy_batch", "copy_kernel", "record", "synchronize"]),
        nth=st.integers(1, 20),
    )
    def fail(self, method: str, nth: int) -> None:
        self.runtime.fail_call(method, nth)
        self.num_faults += 1

    @rule()
    def grow(self) -> None:
        self.arena.grow()

    @precondition(lambda self: not self.lost)
    @rule(device=st.integers(0, 1), after=st.integers(0, 60))
    def lose(self, device: int, after: int) -> None:
        if after:
            self.runtime.lose_after(device, after)
        else:
            self.runtime.lose(device)
        self.lost.add(device)

    @rule()
    def settle(self) -> None:
        for running in self.running.values():
            if running.gate is not None:
                running.gate.is_open = True
        self.ends.wait()
        for name, running in self.running.items():
            self.check_end(name, running)
        self.running.clear()
        for region in self.regions:
            assert np.array_equal(read(self.runtime, region), self.model[region.name]), (
                f"bytes of {region.name} that no job moves changed"
            )

    # Invariants

    def check_end(self, name: str, running: Running) -> None:
        outcome = self.ends[name]
        may_fail = self.num_faults or any(
            region.device in self.lost for to, from_, *_ in running.runs for region in (to, from_)
        )
        assert outcome is not Outcome.FAILED or (may_fail and self.ends.message(name)), (
            self.ends.message(name)
        )
        assert outcome is not Outcome.CANCELLED or running.was_cancelled
        assert running.gate is None or running.gate.num_released == 1
        for to, from_, to_offsets, from_offsets, sizes in running.runs:
            found = read(self.runtime, to) if outcome is not Outcome.DONE else None
            for at, origin, size in zip(
                to_offsets.tolist(), from_offsets.tolist(), sizes.tolist(), strict=True
            ):
                # Not done: any part of the bytes may be copied, so the model adopts what is
                # there.
                moved = (
                    self.model[from_.name][origin : origin + size]
                    if found is None
                    else found[at : at + size]
                )
                self.model[to.name][at : at + size] = moved

    @invariant()
    def each_ends_once(self) -> None:
        self.ends.check_once()
        assert self.engine.is_alive()

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        try:
            self.settle()
            for device, engine in self.cuda.items():
                figures = engine.figures()
                assert (figures.num_queued, figures.num_in_flight) == (0, 0)
                if figures.problem:
                    is_lost = device in self.lost and "is lost" in figures.problem
                    assert is_lost or self.num_faults, figures.problem
                    self.check_refuses(device)
        finally:
            self.engine.close()
            self.runtime.close()

    def check_refuses(self, device: int) -> None:
        memory, where = self.memories[device], np.zeros(1, np.int64)
        self.engine.submit(
            self.ends.job(
                f"too late {device}",
                [runs_plan(memory, self.arena.region, where, where, where + 8)],
            )
        )
        self.ends.wait()
        assert self.ends[
            f"too late {device}"
        ] is Outcome.FAILED and f"device {device}" in self.ends.message(f"too late {device}")


TestCopies = CopyMachine.TestCase
TestCopies.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
