"""Copy engines: their protocol (`CopyEngine`), their jobs (`CopyJob`), and the object that combines
all copy engines of a server (`CopyEngines`).

A job has all copies of one transfer (a store or a load). A copy engine splits a job into *pieces*,
and copies the pieces on its *lanes*: threads, or the two directions of a device. A job may have a
*gate*: the job then must not begin before the device of the vLLM engine has passed a mark, which is
a point in the device's queue.

Always true: a job's `on_done` is called exactly once, from any thread, and only after the copy
engine has stopped accessing both memories. A gate is released exactly once, by the code that polls
the gate.
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
    """The result of a copy job (all copies of a load or a store)."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Gate(Protocol):
    """Delays a job until the device of the vLLM engine has passed a mark (a point in its queue)."""

    def passed(self) -> bool:
        """Returns True if the device has passed the mark (a point in its queue), so that the job
        may begin. Does not wait. Raises DeviceError if this can't be determined; the job then
        fails."""

    def release(self) -> None:
        """Frees the resources of the gate (which delays a copy job). Called once, after the last
        call of `passed`, from any thread; must not block."""


class CopyJob:
    """All copies of one transfer: a store or a load of KV blocks. A copy engine splits the job into
    pieces.

    `plans`: the copies.
    `on_done`: called once when the job has ended, with its outcome, and a message if it has failed.
    `gate`: delays the job until the device of the vLLM engine has passed a point in its queue.
        `CopyEngines` polls the gate, and passes the job to a copy engine once `Gate.passed` returns
        True.
    `owner`: name of the tenant or vLLM engine for which the bytes are copied. Copy engines serve
        owners in turn.
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
        """True if this job, or the job of which it is a part (see `parts`), was cancelled."""
        return self._is_cancelled or (self._whole is not None and self._whole.cancelled)

    def cancel(self) -> None:
        """Asks the copy engine to copy no further pieces of this job (a piece is the part of a job
        that is copied at once). Pieces that are being copied end normally. Thread-safe."""
        self._is_cancelled = True

    def parts(self, groups: Sequence[Sequence[Plan]]) -> "list[CopyJob]":
        """Splits the job into smaller jobs, its parts, so that several copy engines can execute it.
        Cancelling the job cancels its parts. The job ends when all parts have ended. This method
        calls `expect` for the job, so the caller must not call `expect`.

        `groups`: for each part, its plans. Each plan of the job is in one group.
        """
        self.expect(len(groups))
        parts = [CopyJob(plans, self._part_done, owner=self.owner) for plans in groups]
        for part in parts:
            part._whole = self
        return parts

    def _part_done(self, outcome: Outcome, error: str) -> None:
        self.piece_done(error if outcome is Outcome.FAILED else "")

    @property
    def begun_s(self) -> float | None:
        """The time when the copying of the first piece (part of the job) began, a time of
        time.monotonic; None before that."""
        return self._begun_s or None

    def expect(self, num_pieces: int) -> None:
        """Sets the number of pieces (parts of the job that are copied at once): the job ends after
        `num_pieces` calls of `piece_done`. Ends the job at once if the number is 0. Only copy
        engines call this method."""
        self._pieces_left = num_pieces
        self._expected_s = time.monotonic()
        if num_pieces == 0:
            self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")

    def piece_begun(self) -> None:
        """Records that the copying of a piece (part of the job) begins. Only copy engines call this
        method."""
        if not self._begun_s:
            self._begun_s = time.monotonic()
            if self._whole is not None:
                self._whole.piece_begun()

    @property
    def waited_s(self) -> float | None:
        """Seconds that the job has waited in a copy engine. The wait begins when `expect` is
        called, once the job's gate has let it through. It ends when the copying of the first piece
        begins; until then the value is None."""
        return self._begun_s - self._expected_s if self._begun_s else None

    def piece_done(self, error: str = "") -> None:
        """Records that a piece (part of the job) has ended: it was copied, was skipped or has
        failed. Ends the job after the last piece. Only copy engines call this method. `error`: why
        the piece has failed; empty otherwise."""
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
    """Interface of a copy engine, which executes copy jobs. It splits a job into pieces, and copies
    the pieces on its lanes: threads, or the two directions of a device."""

    def submit(self, job: CopyJob) -> None:
        """Starts a job. Its `on_done` is called when it has ended. Callable from any thread; does
        not block and never raises."""

    @property
    def num_queued(self) -> int:
        """Number of pieces (parts of jobs) whose copying has not begun. It is bounded, because the
        cache core bounds the number of transfers."""

    @property
    def busy_s(self) -> float:
        """Seconds in which lanes (threads, or directions of a device) have copied, summed over all
        lanes. The time of a piece is added when the piece ends."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes that copy in parallel: threads, or directions of a device."""

    def is_alive(self) -> bool:
        """Returns False if a thread of the copy engine has died."""

    def stalled_s(self, now_s: float) -> float:
        """Returns the longest time, in seconds, for which a thread or device has already worked on
        its present piece (part of a copy job); 0 if all are idle. `now_s`: a time of
        time.monotonic."""

    def close(self) -> None:
        """Waits until all jobs have ended, then stops the threads."""


# ------------------------------------------------------------------------ All engines of the server
# `CopyEngines` passes each plan of a copy job to the copy engine of its device, but only once the
# job's gate has passed: when the device of the vLLM engine has reached a point in its queue.
#
# Always true: only one thread at a time polls a gate. The gate is released when it has passed or
# failed, or when its job was cancelled. While no job waits for its gate, no thread polls.

POLL_S = 50e-6
MAX_POLL_S = 1e-3
POLL_SHARE = 0.05
"""Length of the pause between two polls of the jobs' gates (`Gate`), as a share of the time since a
gate has last passed or a job was last added. The pause is at least POLL_S and at most MAX_POLL_S.
So the pauses make the wait for a gate at most a twentieth longer, and during long waits the GIL is
free for other threads. (Some gates need two polls: the first starts to read a number from the
device's memory, the second gets the number. The pauses then make a wait at most a tenth longer.)"""


class CopyEngines:
    """Combines all copy engines of the server into one. Owns and closes them.

    `host`: copy engine for plans between host memories.
    `devices`: copy engines for plans that involve a device, by the number of the device.
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
        """Cancels the jobs that still wait for the device of a vLLM engine (`CopyJob.gate`), and
        closes all copy engines."""
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
        """Number of pieces (parts of jobs) whose copying has not begun, plus the number of jobs
        that wait for their gates (`Gate`)."""
        return len(self._waiting) + sum(engine.num_queued for engine in self._engines.values())

    @property
    def busy_s(self) -> float:
        """Seconds in which the threads of the copy engine for host memory have copied. Copy engines
        of devices report their own figures."""
        return self._engines[HOST].busy_s

    @property
    def num_lanes(self) -> int:
        """Number of lanes (threads) of the copy engine for host memory only."""
        return self._engines[HOST].num_lanes

    def is_alive(self) -> bool:
        """Returns False if a thread of any copy engine, or the thread that polls the jobs' gates
        (`Gate`), has died."""
        return self._thread.is_alive() and all(
            engine.is_alive() for engine in self._engines.values()
        )

    def stalled_s(self, now_s: float) -> float:
        """Returns the longest of these times, in seconds: how long each thread or device of a copy
        engine has worked on its present piece (part of a job), and how long the present poll of the
        jobs' gates (`Gate`) has lasted. The time that a job waits for its gate does not count."""
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
        """Polls the gate of a job (`Gate`). If the gate has passed, starts the job. If the gate has
        failed or the job was cancelled, ends the job. Returns False if the job must still wait."""
        gate = job.gate
        if gate is None:
            self._start(job)
            return True
        error = ""
        try:
            if not job.cancelled and not gate.passed():
                return False
        except Exception as failure:  # noqa: BLE001 If a gate raises, only its job fails; the thread goes on.
            error = (
                str(failure)
                if isinstance(failure, DeviceError)
                else f"{type(failure).__name__}: {failure}"
            )
        with contextlib.suppress(Exception):
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
            return
        parts = [job] if len(groups) == 1 else job.parts(list(groups.values()))
        for device, part in zip(groups, parts, strict=True):
            try:
                self._engines[device].submit(part)
            except Exception as error:  # noqa: BLE001 Only this part fails; the thread goes on.
                fail(part, f"{type(error).__name__}: {error}")


def by_device(plans: Iterable[Plan]) -> dict[int, list[Plan]]:
    """Groups copy plans by the number of the device that they involve; HOST for plans between host
    memories."""
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.device, []).append(plan)
    return groups


def fail(job: CopyJob, error: str) -> None:
    """Ends a job that has not begun, with the outcome FAILED. `error`: the message for the job's
    `on_done`."""
    job.expect(1)
    job.piece_done(error)
