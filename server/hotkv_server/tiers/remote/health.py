"""What is known against a server, and when to try it again.

Always true: while there is a problem, no call goes to the server. Threads claim the next try to
connect, so they do not all try at once. Tries come later after each failure in a row; the first
that succeeds ends the problem.
"""

import logging
import random
import threading
import time

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0


class RemoteHealth:
    """See the module. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._problem = ""
        self._failures = 0
        # Due at once: a server that is away is known before the first call.
        self._retry_at_s = 0.0

    def __repr__(self) -> str:
        return f"RemoteHealth({self._problem or 'well'!r}, {self._failures} failures in a row)"

    @property
    def problem(self) -> str:
        """What is known against the server; empty if it is well."""
        return self._problem

    @property
    def retry_at_s(self) -> float:
        """When to try again, of time.monotonic; infinity if nobody need."""
        return self._retry_at_s

    def claim(self) -> bool:
        """True if it is time to try again; the caller must, and then call `connected` or `fail`."""
        with self._lock:
            if time.monotonic() < self._retry_at_s:
                return False
            self._retry_at_s = float("inf")
            return True

    def connected(self) -> None:
        """The server has answered to a connection that can be used."""
        with self._lock:
            if self._problem:
                log.info("%s can be used again", self._name)
            self._problem, self._retry_at_s = "", float("inf")

    def worked(self) -> None:
        """A call has ended well."""
        self._failures = 0

    def fail(self, words: str) -> None:
        """The server can't be used; `words` go on after its name."""
        with self._lock:
            problem = f"{self._name} {words}"
            if problem != self._problem:
                log.warning("%s", problem)
            is_known = bool(self._problem) and self._retry_at_s < float("inf")
            self._problem = problem
            if is_known:
                # Another thread has met the same: no failure of a try.
                return
            # Nodes that lost the server together do not come back together.
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures, 20))
            self._retry_at_s = time.monotonic() + wait_s * random.uniform(0.75, 1.25)
            self._failures += 1
