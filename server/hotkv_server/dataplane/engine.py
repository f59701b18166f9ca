"""The protocol of copy engines, and the job they work on.

Always true: `on_done` is called exactly once, from any thread, and only when the engine touches neither memory any more.
"""

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hotkv_server.dataplane.plan import CopyPlan


class Outcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class CopyJob:
    """One transfer's copying. `cancel` may be called from any thread; it takes effect between pieces."""

    def __init__(self, plans: Sequence[CopyPlan], on_done: Callable[[Outcome, str], None]) -> None:
        self.plans = plans
        self.total_bytes = sum(plan.total_bytes for plan in plans)
        self.cancelled = False
        self._on_done = on_done
        self._lock = threading.Lock()
        self._pieces_left = 0
        self._error = ""

    def __repr__(self) -> str:
        return f"CopyJob({self.total_bytes} bytes, {self._pieces_left} pieces left{', cancelled' if self.cancelled else ''})"

    def cancel(self) -> None:
        """Asks the engine to stop early."""
        self.cancelled = True

    def expect(self, num_pieces: int) -> None:
        """For engines: how many calls of `piece_done` end the job; ends it at once where there is nothing to do."""
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
    """Moves bytes. `submit` may be called from one thread, does not block, and never raises."""

    def submit(self, job: CopyJob) -> None:
        """Starts a job; its `on_done` follows."""

    @property
    def num_queued(self) -> int:
        """Pieces not yet begun; bounded by the transfers that the core admits."""

    def close(self) -> None:
        """Waits for jobs in flight and stops the threads."""
