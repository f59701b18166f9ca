"""Copy engines: their protocol, their jobs, and the engine that combines all others.

Always true: `on_done` is called exactly once, from any thread, and only after the engine has
stopped accessing both memories. A gate is released exactly once by the code that polls it.
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hotkv_server.dataplane.plan import Plan
from hotkv_server.device.runtime import HOST, DeviceError

# --------------------------------------------------------------------------------- Jobs and engines


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Gate(Protocol):
    """Delays a job until the device of the vLLM engine has passed a mark (a point in its queue)."""

    def passed(self) -> bool:
        """Returns whether the job may begin. Cheap; does not wait. Raises DeviceError if the answer
        can't be determined; the job then fails."""

    def release(self) -> None:
        """Called after the last call of `passed`: the gate has passed or failed, or its job was
        cancelled. Runs on any thread; must not block."""


class CopyJob:
    """The copies of a transfer. A copy engine splits the job into pieces. `cancel` may be called
    from any thread and takes effect between pieces.

    `gate`: delays the job (see `Gate`). `CopyEngines` polls the gate; the copy engines of single
        devices assume that the gate has passed.
    `owner`: name of the tenant or vLLM engine that the job is for; copy engines serve owners in
        turn.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        on_done: Callable[[Outcome, str], None],
        gate: Gate | None = None,
        owner: str = "",
    ) -> None:
        self.plans = plans
        self.total_bytes = sum(plan.total_bytes for plan in plans)
        self.gate = gate
        self.owner = owner
        self._on_done = on_done
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._pieces_left = 0
        self._error = ""
        self._whole: CopyJob | None = None
        self._expected_s = self._begun_s = 0.0

    def __repr__(self) -> str:
        return (
            f"CopyJob({self.total_bytes} bytes, {self._pieces_left} pieces "
            f"left{', cancelled' if self.cancelled else ''})"
        )

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called, for the job or the job that it is a part of."""
        return self._is_cancelled or (self._whole is not None and self._whole.cancelled)

    def cancel(self) -> None:
        """Asks the copy engine to stop early."""
        self._is_cancelled = True

    def parts(self, groups: Sequence[Sequence[Plan]]) -> "list[CopyJob]":
        """Splits the job into a part per group of plans. Cancelling the job cancels the parts; the
        last part to end ends the job. Calls `expect`, so the caller must not."""
        self.expect(len(groups))
        parts = [CopyJob(plans, self._part_done, owner=self.owner) for plans in groups]
        for part in parts:
            part._whole = self
        return parts

    def _part_done(self, outcome: Outcome, error: str) -> None:
        self.piece_done(error if outcome is Outcome.FAILED else "")

    @property
    def begun_s(self) -> float | None:
        """Time when the copy of the first piece (part of the job) began; None before that."""
        return self._begun_s or None

    def expect(self, num_pieces: int) -> None:
        """Sets the number of `piece_done` calls that end the job; ends the job at once for 0. Only
        copy engines call it."""
        self._pieces_left = num_pieces
        self._expected_s = time.monotonic()
        if num_pieces == 0:
            self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")

    def piece_begun(self) -> None:
        """Records that a piece (part of the job) is about to be copied. Only copy engines call
        it."""
        if not self._begun_s:
            self._begun_s = time.monotonic()
            if self._whole is not None:
                self._whole.piece_begun()

    @property
    def waited_s(self) -> float | None:
        """Seconds from `expect` (called once the gate has passed) until the copy of the first piece
        (part of the job) began; None before that."""
        return self._begun_s - self._expected_s if self._begun_s else None

    def piece_done(self, error: str = "") -> None:
        """Records that a piece (part of the job) was copied, was skipped or has failed. Only copy
        engines call it."""
        with self._lock:
            self._error = self._error or error
            self._pieces_left -= 1
            last = self._pieces_left == 0
        if last:
            if self._error:
                self._on_done(Outcome.FAILED, self._error)
            else:
                self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")


class CopyEngine(Protocol):
    """Copies bytes. `submit` may be called from any thread, does not block, and never raises."""

    def submit(self, job: CopyJob) -> None:
        """Starts a job; its `on_done` follows."""

    @property
    def num_queued(self) -> int:
        """Number of pieces (parts of jobs) that have not begun; bounded by the transfers that the
        core admits."""

    @property
    def busy_s(self) -> float:
        """Busy seconds, summed over all lanes (see `num_lanes`). A piece (part of a job) counts
        when it ends."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes that copy in parallel: threads, or directions of a device."""

    def is_alive(self) -> bool:
        """Returns False if any of its threads has died."""

    def stalled_s(self, now_s: float) -> float:
        """Returns for how many seconds the slowest thread or device has worked on its piece (part
        of a job); 0 if all are idle."""

    def close(self) -> None:
        """Waits for jobs in flight and stops the threads."""


# ------------------------------------------------------------------------ All engines of the server
# Passes each plan to the engine of its device, after the job's gate has passed.
#
# Always true: one thread at a time polls a gate. The gate is released when it has passed or failed,
# or its job was cancelled. No thread polls while no job waits.

POLL_S = 50e-6
MAX_POLL_S = 1e-3
POLL_SHARE = 0.05
"""The pause between two polls of the gates (conditions for which jobs wait): this share of the time
since the last gate passed or the last job came, within the bounds above. So polling adds at most a
twentieth to a wait (a tenth if a poll only starts to read a word). During long waits the GIL is
free for other threads."""


class CopyEngines:
    """Combines the copy engines of the server. Owns and closes all of them.

    host: copy engine for plans that involve no device.
    devices: copy engines for all other plans, by device number.
    """

    def __init__(self, host: CopyEngine, devices: Mapping[int, CopyEngine]) -> None:
        self._engines: dict[int, CopyEngine] = {HOST: host, **devices}
        self._changed = threading.Condition()
        self._waiting: list[CopyJob] = []
        self._closing = False
        self._begun_s = self._moved_s = 0.0
        self._thread = threading.Thread(target=self._poll, name="hotkv-copy-gates", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"CopyEngines({len(self._waiting)} jobs wait, "
            f"{', '.join(map(repr, self._engines.values()))})"
        )

    def submit(self, job: CopyJob) -> None:
        if not self._settle(job):
            with self._changed:
                self._waiting.append(job)
                self._moved_s = time.monotonic()
                self._changed.notify()

    def close(self) -> None:
        """Ends jobs that wait for their gates as cancelled, and closes all copy engines."""
        with self._changed:
            self._closing = True
            for job in self._waiting:
                job.cancel()
            self._changed.notify()
        self._thread.join()
        for engine in self._engines.values():
            engine.close()

    @property
    def num_queued(self) -> int:
        """Number of pieces (parts of jobs) that have not begun, plus jobs that wait for their gates
        (marks of vLLM engines)."""
        return self.num_waiting + sum(engine.num_queued for engine in self._engines.values())

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for their gates (marks that the devices of vLLM engines have not
        passed)."""
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Busy seconds of the copy engine for host memory; copy engines of devices have separate
        figures."""
        return self._engines[HOST].busy_s

    @property
    def num_lanes(self) -> int:
        """Number of lanes (threads) of the copy engine for host memory."""
        return self._engines[HOST].num_lanes

    def is_alive(self) -> bool:
        """Returns False if a thread of any copy engine has died, or the thread that polls the gates
        (a gate holds a job back until the device has passed the job's mark)."""
        return self._thread.is_alive() and all(
            engine.is_alive() for engine in self._engines.values()
        )

    def stalled_s(self, now_s: float) -> float:
        """Returns the longest stall of a copy engine, or for how many seconds a gate (mark of a
        vLLM engine) has not answered. Waiting for a gate to pass is no stall."""
        gates_s = now_s - (self._begun_s or now_s)
        return max(gates_s, *(engine.stalled_s(now_s) for engine in self._engines.values()))

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                waiting = list(self._waiting)
            self._begun_s = time.monotonic()
            settled = {id(job) for job in waiting if self._settle(job)}
            self._begun_s = 0.0
            if settled:
                with self._changed:
                    self._waiting = [job for job in self._waiting if id(job) not in settled]
                    self._moved_s = time.monotonic()
            del waiting
            time.sleep(
                min(max(POLL_SHARE * (time.monotonic() - self._moved_s), POLL_S), MAX_POLL_S)
            )

    def _settle(self, job: CopyJob) -> bool:
        """Starts or ends the job if its gate has passed or failed; returns False if the job must
        wait."""
        gate = job.gate
        if gate is None:
            self._start(job)
            return True
        error = ""
        try:
            if not job.cancelled and not gate.passed():
                return False
        except Exception as failure:  # noqa: BLE001 The edge of the effect executor: what can't be waited for is a failed transfer.
            error = (
                str(failure)
                if isinstance(failure, DeviceError)
                else f"{type(failure).__name__}: {failure}"
            )
        with contextlib.suppress(DeviceError):
            gate.release()
        if error:
            fail(job, error)
        elif job.cancelled:
            job.expect(0)
        else:
            self._start(job)
        return True

    def _start(self, job: CopyJob) -> None:
        groups = by_device(job.plans)
        if missing := groups.keys() - self._engines.keys():
            fail(job, f"device {min(missing)} has no copy engine")
        elif len(groups) == 1:
            self._engines[next(iter(groups))].submit(job)
        else:
            for device, part in zip(groups, job.parts(list(groups.values())), strict=True):
                self._engines[device].submit(part)


def by_device(plans: Iterable[Plan]) -> dict[int, list[Plan]]:
    """Groups plans by the device that they involve; HOST for plans without a device."""
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.device, []).append(plan)
    return groups


def fail(job: CopyJob, error: str) -> None:
    """Ends, as failed, a job that has not begun."""
    job.expect(1)
    job.piece_done(error)
