"""Replaces copy methods that fail, and tries their jobs again.

Always true: MEMCPY is never replaced. A job is tried twice at most, the second time after nothing
of the first is in flight. A lost device's jobs are not tried again.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hotkv_server.dataplane.cuda.values import (
    DemotedMethod,
    Direction,
    FailureFigures,
    Method,
)
from hotkv_server.dataplane.engines import CopyJob, Outcome
from hotkv_server.dataplane.plan import BlockCopies

log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------- Failing methods

PLAINER: Mapping[Method, Method] = {
    Method.STAGED: Method.BATCH,
    Method.KERNEL: Method.BATCH,
    Method.BATCH: Method.MEMCPY,
}
"""What replaces a method: calls that ask less of driver and device."""
MAX_FAILURES = 3
"""Pieces in a row that fail before their method is demoted."""
PAUSE_S, MAX_PAUSE_S = 600.0, 4 * 3600.0
"""A demoted method is tried again after the first. If it fails then, after twice the pause before,
but no more than the second."""


@dataclass(slots=True)
class _Record:
    """`num_failed`: in a row.
    `until_s`: when a demotion ends; 0 before the first, and once a piece has succeeded.
    """

    num_failed: int = 0
    until_s: float = 0.0
    pause_s: float = PAUSE_S


class Demotions:
    """The methods of a device in one direction. No clock, no threads."""

    def __init__(self) -> None:
        self._records = {method: _Record() for method in PLAINER}

    def __repr__(self) -> str:
        return f"Demotions({self._records})"

    def usable(self, method: Method, now_s: float) -> Method:
        """The method, or what replaces it."""
        while (record := self._records.get(method)) is not None and now_s < record.until_s:
            method = PLAINER[method]
        return method

    def demoted(self, now_s: float) -> list[Method]:
        return [method for method, record in self._records.items() if now_s < record.until_s]

    def failed(self, method: Method, now_s: float) -> bool:
        """True if the method is demoted by this failure."""
        record = self._records.get(method)
        if record is None or now_s < record.until_s:
            return False
        record.num_failed += 1
        is_on_trial = record.until_s > 0
        if record.num_failed < MAX_FAILURES and not is_on_trial:
            return False
        if is_on_trial:
            record.pause_s = min(2 * record.pause_s, MAX_PAUSE_S)
        record.until_s, record.num_failed = now_s + record.pause_s, 0
        return True

    def worked(self, method: Method, now_s: float) -> None:
        """A piece that was in flight when its method was demoted does not count."""
        record = self._records.get(method)
        if record is not None and now_s >= record.until_s:
            record.num_failed, record.until_s, record.pause_s = 0, 0.0, PAUSE_S


# ------------------------------------------------------------------------------------- Second tries


class Attempt(CopyJob):
    """One try of a job. `failed`: method of a piece that failed; None without."""

    def __init__(
        self, whole: CopyJob, plans: Sequence[BlockCopies], on_done: Callable[[Outcome, str], None]
    ) -> None:
        # The job's order is that of its plans, which are then all of them.
        progress = whole.progress if len(plans) == len(whole.plans) else None
        super().__init__(plans, on_done, owner=whole.owner, progress=progress)
        self._whole = whole
        self.failed: Method | None = None


Submit = Callable[[Direction, CopyJob, Method | None], None]
"""Gives a job to a lane, for pinned memory with this method if one is given."""


class Retries:
    """Of one device. Any thread. `num_failed_jobs`: in all their tries.

    `submit`: to the lane.
    `may_retry`: False once the device is lost.
    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        device: int,
        submit: Submit,
        may_retry: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._submit = submit
        self._may_retry = may_retry
        self._clock = clock
        self._lock = threading.Condition()
        self._num_running = self.num_failed_jobs = 0
        self._closing = False
        self._demotions = {direction: Demotions() for direction in Direction}
        self._num_failed: dict[tuple[Direction, Method], int] = {}
        self._num_retried = 0

    def __repr__(self) -> str:
        return f"Retries({self._demotions}, {self._num_retried} retried)"

    def submit(self, direction: Direction, job: CopyJob, plans: Sequence[BlockCopies]) -> None:
        """Tries the plans, which all have this direction, up to twice, as one piece of `job`."""

        def ended(outcome: Outcome, error: str) -> None:
            plainer = None if first.failed is None else PLAINER.get(first.failed)
            may_retry = self._may_retry() and not (self._closing or job.cancelled)
            if outcome is Outcome.FAILED and first.failed and plainer and may_retry:
                log.warning(
                    "copy tried again device=%d direction=%s method=%s instead_of=%s error=%s",
                    self._device, direction.value, plainer.value, first.failed.value, error,
                )  # fmt: skip
                with self._lock:
                    self._num_retried += 1
                self._submit(direction, Attempt(job, plans, done), plainer)
            else:
                done(outcome, error)

        def done(outcome: Outcome, error: str) -> None:
            with self._lock:
                self.num_failed_jobs += outcome is Outcome.FAILED
                self._num_running -= 1
                self._lock.notify_all()
            job.piece_done(error if outcome is Outcome.FAILED else "")

        first = Attempt(job, plans, ended)
        with self._lock:
            self._num_running += 1
        self._submit(direction, first, None)

    def close(self) -> None:
        """Tries no job again, and waits until all have ended. The lanes must still be open."""
        self._closing = True
        with self._lock:
            self._lock.wait_for(lambda: not self._num_running)

    def piece_ended(
        self, direction: Direction, job: CopyJob, method: Method | None, error: str
    ) -> None:
        """`method`: None if the host memory was not pinned. `error`: empty if it succeeded."""
        if method is None or not self._may_retry():
            return
        now_s, demotions = self._clock(), self._demotions[direction]
        with self._lock:
            if not error:
                demotions.worked(method, now_s)
                return
            key = (direction, method)
            self._num_failed[key] = self._num_failed.get(key, 0) + 1
            is_demoted = demotions.failed(method, now_s)
        if isinstance(job, Attempt):
            job.failed = job.failed or method
        if is_demoted:
            log.error(
                "copy method demoted device=%d direction=%s method=%s replacement=%s error=%s",
                self._device,
                direction.value,
                method.value,
                PLAINER[method].value,
                error,
            )

    def usable(self, direction: Direction, method: Method) -> Method:
        """See `Demotions.usable`."""
        return self._demotions[direction].usable(method, self._clock())

    def figures(self) -> FailureFigures:
        now_s = self._clock()
        demoted = tuple(
            DemotedMethod(direction, method, demotions.usable(method, now_s))
            for direction, demotions in self._demotions.items()
            for method in demotions.demoted(now_s)
        )
        with self._lock:
            return FailureFigures(demoted, dict(self._num_failed), self._num_retried)
