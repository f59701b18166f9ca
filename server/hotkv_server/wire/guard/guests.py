"""Guests: calls that may last without a session. They watch health, read reflection, open a
session, or have not sent their whole request.

Always true: a new guest is always admitted; if there are too many, the one that has lasted longest
ends for it, so no client keeps others out by holding calls open. A guest with a time limit ends
after it.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hotkv_proto.errors import HotKVError, Reason

ARRIVAL_S = 10.0
"""Time in which a request must have come whole."""
_NEVER_S = float("inf")


class Guests:
    """At most `most` guests at a time. Event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Oldest first, with the time by which each must have ended; and the reasons of those that
        # have been told to end.
        self._until_s: dict[asyncio.Task[object], float] = {}
        self._told: dict[asyncio.Task[object], str] = {}

    def __len__(self) -> int:
        return len(self._until_s) + len(self._told)

    def __repr__(self) -> str:
        return f"Guests({len(self)}/{self._most})"

    @contextmanager
    def stay(self, for_s: float = _NEVER_S) -> Iterator[None]:
        """Counts the running task as a guest. To end it, raises OVERLOADED in it, wherever it
        waits."""
        task = asyncio.current_task()
        assert task is not None, "only a task can be told to go"
        if len(self._until_s) >= self._most:
            self._tell(
                next(iter(self._until_s)),
                "this call was open longest of all that wait without a session; open it again",
            )
        self._until_s[task] = time.monotonic() + for_s
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._told:
                raise
            raise HotKVError(Reason.OVERLOADED, self._told[task]) from None
        finally:
            self._until_s.pop(task, None)
            self._told.pop(task, None)

    def end_late(self, now_s: float) -> None:
        """Ends guests whose time is over."""
        for task in [task for task, until_s in self._until_s.items() if until_s <= now_s]:
            self._tell(task, "the request did not come whole in time; send it again")

    def _tell(self, task: "asyncio.Task[object]", why: str) -> None:
        del self._until_s[task]
        self._told[task] = why
        task.cancel()
