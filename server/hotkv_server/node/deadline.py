"""The deadline of a transfer: its timeout, and before it the longest wait for its mark.

Always true: a transfer that waits for the engine's own device is not late; its timeout begins when
the mark has passed, or at once if there is none.
"""

import asyncio

from hotkv_server.dataplane.engine import CopyJob

DEFAULT_TIMEOUT_S = 30.0
MARK_TIMEOUT_S = 600.0
"""Longest wait for a mark: far above what an engine queues for its device."""


class Deadline:
    """Cancels a job that is late, and says so in `message`. On the event loop, but for
    `mark_passed`."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: 0 for the default."""
        self.message = ""
        self._timeout_s = timeout_s or DEFAULT_TIMEOUT_S
        self._loop = asyncio.get_running_loop()
        self._job: CopyJob | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, job: CopyJob, *, has_mark: bool) -> None:
        """Watches the job from now on."""
        self._job = job
        if has_mark:
            self._timer = self._loop.call_later(
                MARK_TIMEOUT_S, self._late, f"the mark did not pass within {MARK_TIMEOUT_S:.0f} s"
            )
        else:
            self._start()

    def mark_passed(self) -> None:
        """Begins the transfer's own time. From any thread."""
        self._loop.call_soon_threadsafe(self._start)

    def end(self) -> None:
        """Stops watching: the job has ended."""
        self._job = None
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._job is not None:
            self._timer = self._loop.call_later(
                self._timeout_s, self._late, f"the transfer took longer than {self._timeout_s} s"
            )

    def _late(self, message: str) -> None:
        self.message = message
        if self._job is not None:
            self._job.cancel()
