"""How long the server takes for an answer, whenever the engine looks at it.

An engine looks between its steps, which may take longer than the answer. Any thread.
"""

import time
from concurrent.futures import Future
from typing import Any


class AnswerTime:
    """The time from now until `answer` is there, in seconds."""

    __slots__ = ("_asked_s", "_came_s")

    def __init__(self, answer: "Future[Any]") -> None:
        self._asked_s = time.monotonic()
        self._came_s: float | None = None
        answer.add_done_callback(self._came)

    def __repr__(self) -> str:
        return f"AnswerTime({self.seconds:.6f} s{'' if self._came_s else ' so far'})"

    def _came(self, _: "Future[Any]") -> None:
        self._came_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far, if it is not there yet."""
        return (self._came_s or time.monotonic()) - self._asked_s
