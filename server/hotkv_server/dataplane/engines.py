"""Copy engines: their protocol, the jobs that they work on, and the one that combines them all.

Always true: `on_done` is called exactly once, from any thread, and only when the engine touches
neither memory any more; whoever asks a gate releases it exactly once.
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
    """Holds a job until its first byte may move: until a mark in the queue of an engine's device
    has passed."""

    def passed(self) -> bool:
        """True if the job may begin. Cheap, does not wait. Raises DeviceError if that can't be
        known any more: the job has failed."""

    def release(self) -> None:
        """Called when the gate is asked no more: it has passed or failed, or its job was cancelled.
        From any thread, must not block."""


class CopyJob:
    """One transfer's copying. `cancel` may be called from any thread; it takes effect between
    pieces.

    `gate` is for `CopyEngines`; a single engine takes it as passed. `owner`: engines serve
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
        self._cancelled = threading.Event()
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
        """True if `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Asks the engine to stop early."""
        self._cancelled.set()

    def parts(self, groups: Sequence[Sequence[Plan]]) -> "list[CopyJob]":
        """Splits the job by groups of plans. The parts are cancelled with it, and the last one to
        end ends it. In place of `expect`."""
        self.expect(len(groups))
        parts = [CopyJob(plans, self._part_done, owner=self.owner) for plans in groups]
        for part in parts:
            part._cancelled, part._whole = self._cancelled, self
        return parts

    def _part_done(self, outcome: Outcome, error: str) -> None:
        self.piece_done(error if outcome is Outcome.FAILED else "")

    @property
    def begun_s(self) -> float | None:
        """When its first piece began; None if none has."""
        return self._begun_s or None

    def expect(self, num_pieces: int) -> None:
        """For engines: sets how many calls of `piece_done` end the job; ends it at once if there is
        nothing to do."""
        self._pieces_left = num_pieces
        self._expected_s = time.monotonic()
        if num_pieces == 0:
            self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")

    def piece_begun(self) -> None:
        """For engines: one piece is about to be copied."""
        if not self._begun_s:
            self._begun_s = time.monotonic()
            if self._whole is not None:
                self._whole.piece_begun()

    @property
    def waited_s(self) -> float | None:
        """How long the job, its gate passed, has waited for its first piece to begin; None if none
        has."""
        return self._begun_s - self._expected_s if self._begun_s else None

    def piece_done(self, error: str = "") -> None:
        """For engines: one piece has been copied, skipped or has failed."""
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
    """Moves bytes. `submit` may be called from any thread, does not block, and never raises."""

    def submit(self, job: CopyJob) -> None:
        """Starts a job; its `on_done` follows."""

    @property
    def num_queued(self) -> int:
        """Pieces not yet begun; bounded by the transfers that the core admits."""

    @property
    def busy_s(self) -> float:
        """Seconds that lanes have been busy with pieces that have ended, all lanes together."""

    @property
    def num_lanes(self) -> int:
        """How many lanes copy side by side: threads, or directions of a device."""

    def is_alive(self) -> bool:
        """False if a thread of it has died."""

    def stalled_s(self, now_s: float) -> float:
        """How long the slowest thread or device has been at one piece; 0 if all wait for work."""

    def close(self) -> None:
        """Waits for jobs in flight and stops the threads."""


# ------------------------------------------------------------------------ All engines of the server
# Gives each plan to the engine of its device, and begins no job before its gate has passed.
#
# Always true: a gate is asked by one thread at a time and released when it has passed, has failed,
# or its job was cancelled. While no job waits, nobody polls.

POLL_S = 50e-6
MAX_POLL_S = 1e-3
POLL_SHARE = 0.05
"""The pause between two looks at the gates that jobs wait for: this share of the time since one
last passed or came, within these bounds. So a wait grows by a twentieth at most (by two if a look
only begins to read a word), and during long waits the GIL is free for others.
"""


class CopyEngines:
    """See above. `host` takes plans that touch no device, `devices` the others, by number.
    Owns all of them and closes them."""

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
        """Ends jobs that wait for their gates as cancelled, and closes all engines."""
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
        """Pieces not yet begun, and jobs that wait for their gates."""
        return self.num_waiting + sum(engine.num_queued for engine in self._engines.values())

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for their gates."""
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Of the engine in host memory; devices have figures of their own."""
        return self._engines[HOST].busy_s

    @property
    def num_lanes(self) -> int:
        """Of the engine in host memory."""
        return self._engines[HOST].num_lanes

    def is_alive(self) -> bool:
        """False if a thread of any engine has died, or the one that asks the gates."""
        return self._thread.is_alive() and all(
            engine.is_alive() for engine in self._engines.values()
        )

    def stalled_s(self, now_s: float) -> float:
        """The longest stall of an engine, or how long a gate has not answered. Waiting for a gate
        is no stall."""
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
        """Starts or ends the job if its gate has passed or failed; False if it must wait."""
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
    """Plans by the device that they need; HOST if they need none."""
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.device, []).append(plan)
    return groups


def fail(job: CopyJob, error: str) -> None:
    """Ends a job that has not begun."""
    job.expect(1)
    job.piece_done(error)
