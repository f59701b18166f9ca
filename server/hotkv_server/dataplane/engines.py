"""`CopyEngine` is the protocol of copy engines, `CopyJob` their work, `CopyEngines` all of a
server.

A job has all copies of one transfer. An engine splits it into *pieces*, and copies these on its
*lanes*, which are threads or the two directions of a device. A *gate* holds a job back until the
engine's device has passed a mark.

Always true: `on_done` is called exactly once, from any thread, and only after both memories are
no longer accessed. A gate is released exactly once, by who polls it. `submit` calls no driver.
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hotkv_server.dataplane.plan import BlockCopies
from hotkv_server.device.runtime import HOST, DeviceError

# --------------------------------------------------------------------------------- Jobs and engines


class Outcome(enum.Enum):
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Gate(Protocol):
    @property
    def device(self) -> int:
        """HOST if `passed` calls no driver, so that any thread may call it."""

    def passed(self) -> bool:
        """Calls the driver, and waits for nothing else. Raises DeviceError if it can't be known;
        the job then fails."""

    def release(self) -> None:
        """Called once, after the last `passed`, from any thread; must not block."""


_COUNTING = threading.Lock()
"""Of the pieces of all jobs: a lock of its own would cost each job more."""


class CopyJob:
    """`on_done`: called with the outcome, and a message if the job failed.
    `progress`: called before `on_done`, by one thread at a time, with how many of the plans'
        blocks, in order, are copied; perhaps never. If it raises, the job fails.
    `gate`: polled by `CopyEngines`, which passes the job on once it has passed.
    `owner`: tenant or engine; copy engines serve owners in turn.
    `is_prompt`: an access to its host memory waits for nothing, so that `submit` may copy a small
        job itself.
    `begun_s`: when the first piece began, monotonic; None before.
    `waited_s`: from `expect`, after the gate, to then.
    """

    def __init__(
        self,
        plans: Sequence[BlockCopies],
        on_done: Callable[[Outcome, str], None],
        gate: Gate | None = None,
        owner: str = "",
        progress: Callable[[int], None] | None = None,
        *,
        is_prompt: bool = False,
    ) -> None:
        self.plans = plans
        self.progress = progress
        self.is_prompt = is_prompt
        self.total_bytes = sum(plan.total_bytes for plan in plans)
        self.gate = gate
        self.owner = owner
        self._on_done = on_done
        self._is_cancelled = False
        self._pieces_left = 0
        self._error = ""
        self._whole: CopyJob | None = None
        self._expected_s = 0.0
        self.begun_s: float | None = None
        self.waited_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"CopyJob({self.total_bytes} bytes, {self._pieces_left} pieces "
            f"left{', cancelled' if self.cancelled else ''})"
        )

    @property
    def cancelled(self) -> bool:
        """True if this job, or the one it is a part of, was cancelled."""
        return self._is_cancelled or (self._whole is not None and self._whole.cancelled)

    def cancel(self) -> None:
        """No further pieces are copied; those under way end normally. Thread-safe."""
        self._is_cancelled = True

    def parts(self, groups: Sequence[Sequence[BlockCopies]]) -> "list[CopyJob]":
        """Splits the job, a part for each of `groups`, so that several copy engines can execute
        it. Cancelling it cancels them; it ends when all have ended. Calls `expect`."""
        self.expect(len(groups))
        parts = [CopyJob(plans, self._part_done, owner=self.owner) for plans in groups]
        for part in parts:
            part._whole = self
        return parts

    def _part_done(self, outcome: Outcome, error: str) -> None:
        self.piece_done(error if outcome is Outcome.FAILED else "")

    def expect(self, num_pieces: int) -> None:
        """The job ends after so many calls of `piece_done`; at once with 0. For copy engines."""
        self._pieces_left = num_pieces
        self._expected_s = time.monotonic()
        if num_pieces == 0:
            self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")

    def piece_begun(self) -> None:
        """For copy engines."""
        if self.begun_s is None:
            self.begun_s = time.monotonic()
            self.waited_s = self.begun_s - self._expected_s
            if self._whole is not None:
                self._whole.piece_begun()

    def advance(self, num_blocks: int) -> None:
        """For copy engines that copy in order; only if there is a `progress`."""
        assert self.progress is not None, "who wants no progress is told none"
        try:
            self.progress(num_blocks)
        except Exception as error:  # noqa: BLE001 Only the job fails; the copy thread goes on.
            self._error = self._error or f"{type(error).__name__}: {error}"

    def piece_done(self, error: str = "") -> None:
        """A piece was copied or skipped, or has failed (`error`). Ends the job after the last.
        For copy engines."""
        with _COUNTING:
            self._error = self._error or error
            self._pieces_left -= 1
            last = self._pieces_left == 0
        if last:
            if self._error:
                self._on_done(Outcome.FAILED, self._error)
            else:
                self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")


class CopyEngine(Protocol):
    def submit(self, job: CopyJob) -> None:
        """Any thread; does not block and never raises. May end the job, if it `is_prompt`."""

    @property
    def num_queued(self) -> int:
        """Pieces that have not begun; bounded, because the core bounds transfers."""

    @property
    def busy_s(self) -> float:
        """Summed over lanes; a piece counts when it ends."""

    @property
    def num_lanes(self) -> int:
        """Lanes that copy in parallel."""

    def is_alive(self) -> bool:
        """False if a thread has died."""

    def stalled_s(self, now_s: float) -> float:
        """Longest time that a thread or device has worked on its present piece; 0 if all are
        idle. `now_s`: monotonic."""

    def close(self) -> None:
        """Waits until all jobs have ended."""


# ------------------------------------------------------------------------------------------- Gates
# Always true: one thread at a time polls a gate. It is released when it has passed or failed, or
# its job was cancelled. While no job waits, no thread polls. A device whose driver hangs delays
# no gate of another.

POLL_S = 50e-6
MAX_POLL_S = 1e-3
POLL_SHARE = 0.05
"""Pause between two polls of gates, as a share of the time since one has last passed or a job
came in. So a wait gets at most a twentieth longer, and during long waits the GIL is free. Gates
that need two polls, one to start reading device memory and one to get the number, wait at most a
tenth longer."""


class _Gates:
    """Polls the gates of one device's marks on a thread of its own.

    `start`: starts a job whose gate has passed.
    """

    def __init__(self, device: int, start: Callable[[CopyJob], None]) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._new: list[CopyJob] = []
        self._waiting: list[CopyJob] = []
        self._closing = False
        self._begun_s = self._moved_s = 0.0
        name = "hotkv-copy-gates" if device == HOST else f"hotkv-cuda{device}-gates"
        self._thread = threading.Thread(target=self._poll, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._new) + len(self._waiting)

    def add(self, job: CopyJob) -> None:
        with self._changed:
            self._new.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Cancels the jobs."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """Of the present poll."""
        return now_s - (self._begun_s or now_s)

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closing, self._pause_s())
                if self._new:
                    self._moved_s = time.monotonic()
                waiting, self._new = [*self._waiting, *self._new], []
                self._waiting = waiting
                if self._closing:
                    if not waiting:
                        return
                    for job in waiting:
                        job.cancel()
            self._begun_s = time.monotonic()
            left = [job for job in waiting if not self.settle(job)]
            self._begun_s = 0.0
            if len(left) < len(waiting):
                self._moved_s = time.monotonic()
            self._waiting = left
            del waiting, left

    def _pause_s(self) -> float | None:
        """None: until a job comes in."""
        if not self._waiting:
            return None
        return min(max(POLL_SHARE * (time.monotonic() - self._moved_s), POLL_S), MAX_POLL_S)

    def settle(self, job: CopyJob) -> bool:
        """Polls a job's gate. False if the job must still wait; else it was started, or has
        ended."""
        gate = job.gate
        assert gate is not None, "a job without a gate starts at once"
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


# ------------------------------------------------------------------------ All engines of the server


class CopyEngines:
    """Combines all copy engines, which it owns and closes.

    `host`: for plans between host memories.
    `devices`: by number.
    """

    def __init__(self, host: CopyEngine, devices: Mapping[int, CopyEngine]) -> None:
        self._engines: dict[int, CopyEngine] = {HOST: host, **devices}
        self._gates = {device: _Gates(device, self._start) for device in self._engines}

    def __repr__(self) -> str:
        return (
            f"CopyEngines({self.num_waiting} jobs wait, "
            f"{', '.join(map(repr, self._engines.values()))})"
        )

    def submit(self, job: CopyJob) -> None:
        if job.gate is None:
            self._start(job)
            return
        device = job.gate.device
        gates = self._gates.get(device, self._gates[HOST])
        if device != HOST or not gates.settle(job):
            gates.add(job)

    def close(self) -> None:
        """Cancels the jobs that wait for their gates, and closes all engines."""
        for gates in self._gates.values():
            gates.close()
        for engine in self._engines.values():
            engine.close()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for their gates."""
        return sum(map(len, self._gates.values()))

    @property
    def num_queued(self) -> int:
        """Pieces that have not begun, and jobs that wait for their gates."""
        return self.num_waiting + sum(engine.num_queued for engine in self._engines.values())

    @property
    def busy_s(self) -> float:
        """Of host memory only; devices report their own figures."""
        return self._engines[HOST].busy_s

    @property
    def num_lanes(self) -> int:
        """Of host memory only."""
        return self._engines[HOST].num_lanes

    def is_alive(self) -> bool:
        """False if a thread has died, also one that polls."""
        return all(map(self.is_alive_on, self._engines))

    def stalled_s(self, now_s: float) -> float:
        """As of `CopyEngine`, or of the present poll. Jobs that wait for their gates do not
        count."""
        return max(self.stalled_s_on(device, now_s) for device in self._engines)

    def is_alive_on(self, device: int) -> bool:
        """As `is_alive`, for one device or HOST."""
        return self._gates[device].is_alive() and self._engines[device].is_alive()

    def stalled_s_on(self, device: int, now_s: float) -> float:
        """As `stalled_s`, for one device or HOST."""
        engine = self._engines[device]
        return max(self._gates[device].stalled_s(now_s), engine.stalled_s(now_s))

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


def by_device(plans: Iterable[BlockCopies]) -> dict[int, list[BlockCopies]]:
    """HOST for plans between host memories."""
    groups: dict[int, list[BlockCopies]] = {}
    for plan in plans:
        groups.setdefault(plan.device, []).append(plan)
    return groups


def fail(job: CopyJob, error: str) -> None:
    """Ends a job that has not begun."""
    job.expect(1)
    job.piece_done(error)
