"""Bounds on what clients make a server do: the pace of answers to malformed messages, lines of the
log, and calls that may last without a session.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hotkv_proto.errors import HotKVError, Reason

# Paces: they throttle answers to malformed messages, and lines of the log.
#
# A malformed message costs the event loop as much as a call, and its sender sends the next one as
# soon as it is answered. So a few are answered at once each second; all others wait their turn, in
# one line for all clients. Clients that speak the protocol send none.


BURST_S = 2.0
"""Burst that is answered at once, in seconds of the rate."""
MAX_WAIT_S = 1.0
"""Longest wait of an answer. A flood over many connections is bounded by the calls that the server
takes at a time."""


class LineBound:
    """Lets `lines_per_s` lines a second through, and counts the others."""

    def __init__(self, lines_per_s: int) -> None:
        self._lines_per_s = lines_per_s
        self._second = self._lines = self._left_out = 0

    def __repr__(self) -> str:
        return f"LineBound({self._lines_per_s} a second, {self._left_out} left out)"

    def take(self, now_s: float) -> bool:
        """Whether a line may be written now."""
        if int(now_s) != self._second:
            self._second, self._lines = int(now_s), 0
        self._lines += 1
        may_go = self._lines <= self._lines_per_s
        self._left_out += not may_go
        return may_go

    def take_left_out(self) -> int:
        """How many lines were left out since the last call."""
        left_out, self._left_out = self._left_out, 0
        return left_out


class Pace:
    """`per_s`: malformed messages and refused sessions that are answered a second. Event loop
    only."""

    def __init__(self, per_s: float) -> None:
        self.set_rate(per_s)
        self._due_s = 0.0

    def set_rate(self, per_s: float) -> None:
        """Answers so many a second from now on."""
        self._interval_s = 1 / per_s

    def __repr__(self) -> str:
        return f"Pace({1 / self._interval_s:g} a second)"

    async def turn(self) -> None:
        """Waits until the next answer may go out."""
        now_s = time.monotonic()
        wait_s = self.wait_s(now_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def wait_s(self, now_s: float) -> float:
        """Takes a turn and returns how long to wait for it."""
        self._due_s = max(self._due_s, now_s - BURST_S) + self._interval_s
        return min(max(self._due_s - now_s, 0.0), MAX_WAIT_S)


# Guests: calls that may last without a session. They watch health, read reflection, open a
# session, or have not sent their whole request.
#
# Always true: a new guest is always admitted; if there are too many, the one that has lasted
# longest ends for it, so no client keeps others out by holding calls open. A guest with a time
# limit ends after it.


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
