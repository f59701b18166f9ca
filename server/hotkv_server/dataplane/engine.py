"""The protocol of copy engines, and the job they work on.

Always true: `on_done` is called exactly once, from any thread, and only when the engine touches
neither memory any more. What asks a gate releases it exactly once.
"""

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.dataplane.plan import Plan


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Gate(Protocol):
    """What a job waits for before its first byte moves: a mark in the queue of an engine's
    device."""

    def passed(self) -> bool:
        """Whether the job may begin; cheap, does not wait. Raises DeviceError where that can't be
        known any more: the job has failed."""

    def release(self) -> None:
        """Nobody will ask again: the gate has passed or failed, or its job was cancelled. From any
        thread, must not block."""


class CopyJob:
    """One transfer's copying. `cancel` may be called from any thread; it takes effect between
    pieces.

    `gate` is for `engines.CopyEngines`; an engine that is given the job itself takes it as passed.
    `owner`: whose it is, for engines that serve owners in turn.
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

    def __repr__(self) -> str:
        return (
            f"CopyJob({self.total_bytes} bytes, {self._pieces_left} pieces "
            f"left{', cancelled' if self.cancelled else ''})"
        )

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Asks the engine to stop early."""
        self._cancelled.set()

    def parts(self, groups: Sequence[Sequence[Plan]]) -> "list[CopyJob]":
        """Jobs over parts of the plans, cancelled with this one; the last to end ends it. Instead
        of `expect`."""
        self.expect(len(groups))
        parts = [CopyJob(plans, self._part_done, owner=self.owner) for plans in groups]
        for part in parts:
            part._cancelled = self._cancelled
        return parts

    def _part_done(self, outcome: Outcome, error: str) -> None:
        self.piece_done(error if outcome is Outcome.FAILED else "")

    def expect(self, num_pieces: int) -> None:
        """For engines: how many calls of `piece_done` end the job; ends it at once where there is
        nothing to do."""
        self._pieces_left = num_pieces
        if num_pieces == 0:
            self._on_done(Outcome.CANCELLED if self.cancelled else Outcome.DONE, "")

    def piece_done(self, error: str = "") -> None:
        """For engines: one piece is copied, passed over or failed."""
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

    def is_alive(self) -> bool:
        """False where a thread of it has died."""

    def stalled_s(self, now_s: float) -> float:
        """How long the slowest thread, or what it gave to a device, has been at one piece; 0 where
        all wait for work."""

    def close(self) -> None:
        """Waits for jobs in flight and stops the threads."""
