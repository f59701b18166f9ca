"""Logs the progress of a start: a line for each step that takes longer than a moment."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

BEAT_S = 2.0
KERNELS = (
    "compiling kernels, which only the first start does (`hotkv-server compile` does it ahead)"
)


def _nothing() -> str:
    return ""


class Progress:
    """Logs the progress of a start from a separate thread, because the start blocks its own thread.
    Use it in a `with` block, and call `at` when a step begins."""

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._beat_s = beat_s
        self._part: tuple[str, Callable[[], str], float] = ("", _nothing, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotkv-progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, what: str, shown: Callable[[], str] = _nothing) -> None:
        """Sets the step that begins now.

        what: name of the step in the log.
        shown: returns a text about the step's progress. The logging thread calls it.
        """
        self._part = (what, shown, time.monotonic())

    def _work(self) -> None:
        while not self._over.wait(self._beat_s):
            what, shown, began_s = self._part
            if what and (took_s := time.monotonic() - began_s) >= self._beat_s:
                log.info("starting: %s%s, %.0f s so far", what, shown(), took_s)
