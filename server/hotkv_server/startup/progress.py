"""Logs the progress of a start: lines for each step that takes longer than a moment. While a
kernel is compiled, they name the kernel."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

LINES_S = (2.0, 5.0, 10.0, 30.0)
"""A step has a line when it has taken so long, and then every LINES_S[-1]."""
LOOK_S = 0.25


def next_line_s(took_s: float) -> float:
    """How long a step that has taken `took_s` must take until its next line."""
    last_s = LINES_S[-1]
    return next((one for one in LINES_S if one > took_s), (took_s // last_s + 1) * last_s)


def _nothing() -> str:
    return ""


class Progress:
    """Logs between `begin` and `end`, on its own thread, because a start blocks the thread that
    it runs on."""

    def __init__(self) -> None:
        self._what, self._shown, self._began_s = "", _nothing, 0.0
        self._said_s = 0.0
        self._compiling: list[str] = []
        """The kernel that is being compiled; behind it those that it calls, if they are compiled
        for it."""
        self._num_compiled = 0
        self._unwatch: Callable[[], object] = _nothing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotkv-progress", daemon=True)

    def begin(self, what: str) -> None:
        self.at(what)
        self._thread.start()

    def at(self, what: str, shown: Callable[[], str] = _nothing) -> None:
        """Sets the step that begins now.

        shown: a text about its progress. The logging thread calls it.
        """
        self._what, self._shown = what, shown
        self._began_s, self._said_s = time.monotonic(), 0.0

    def end(self) -> None:
        """A second call does nothing."""
        self._over.set()
        self._unwatch()
        self._unwatch = _nothing
        if self._thread.is_alive():
            self._thread.join()

    def watch_compiler(self) -> None:
        """Takes a second, to import numba."""
        from numba.core import event

        progress = self

        class Listener(event.Listener):  # type: ignore[misc]
            def on_start(self, event: Any) -> None:
                kernel = event.data["dispatcher"].py_func
                progress._compiling.append(f"{kernel.__module__}.{kernel.__name__}")

            def on_end(self, event: Any) -> None:
                progress._compiling.pop()
                progress._num_compiled += 1

        listener = Listener()
        event.register("numba:compile", listener)
        self._unwatch = functools.partial(event.unregister, "numba:compile", listener)

    def _work(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        took_s = time.monotonic() - self._began_s
        if took_s >= next_line_s(self._said_s):
            self._said_s = took_s
            log.info("starting: %s, %.0f s so far", self._now(), took_s)

    def _now(self) -> str:
        if not self._compiling:
            return self._what + self._shown()
        number = self._num_compiled + 1
        return (
            f"compiling kernel {number}, {self._compiling[0]} (`hotkv-server compile` does it "
            "ahead)"
        )
