"""The protocol of copy engines, and the job they work on.

Always true: `on_done` is called exactly once, from any thread, and only when the engine touches
neither memory any more; whoever asks a gate releases it exactly once.
"""

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.dataplane.plan import Plan


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

    `gate` is for `engines.CopyEngines`; a single engine takes it as passed. `owner`: engines serve
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
