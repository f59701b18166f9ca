"""Bounds on the work that clients cause: `Pace` for answers to malformed messages, `FaultBound` for
connections without a valid request, and `Guests` for long calls without a session."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from hotkv_proto.errors import HotKVError, Reason

# `Pace` throttles answers to malformed messages.
#
# A malformed message costs the event loop as much time as a call. A client can send the next
# malformed message as soon as it has the answer to the last. So only some of the answers are sent
# at once each second; the others wait, in one queue for all clients. Clients that follow the
# protocol are not delayed, because they send no malformed messages.


BURST_S = 2.0
"""After a pause without answers to malformed messages, the next of these answers are sent without a
wait: as many as the rate allows in this number of seconds."""
MAX_WAIT_S = 1.0
"""Longest wait of an answer to a malformed message, in seconds. So `Pace` does not stop a flood of
messages over many connections; the bound on concurrent calls (`wire.server.MAX_CALLS`) does."""


MAX_PEERS = 1024
"""Most peers whose faults a `FaultBound` counts; beyond, it forgets the peer that it has counted
longest."""


class FaultBound:
    """Counts the faults of peers: connections that end without a valid request. A peer with more
    than `per_s` faults a second (after a pause BURST_S times as many) is over the bound until some
    time has passed. A peer without faults never is."""

    def __init__(self, per_s: float) -> None:
        self.set_rate(per_s)
        # The time up to which each peer has used up what it may do wrong.
        self._used_s: OrderedDict[Hashable, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"FaultBound({1 / self._interval_s:g} a second, {len(self._used_s)} peers)"

    def set_rate(self, per_s: float) -> None:
        """Sets how many faults a second a peer may have from now on."""
        self._interval_s = 1 / per_s

    def count(self, peer: Hashable, now_s: float) -> None:
        """Counts a fault of the peer."""
        used_s = max(self._used_s.get(peer, 0.0), now_s - BURST_S)
        self._used_s[peer] = used_s + self._interval_s
        if len(self._used_s) > MAX_PEERS:
            self._used_s.popitem(last=False)

    def is_over(self, peer: Hashable, now_s: float) -> bool:
        """Returns True if the peer has more faults than it may have."""
        return self._used_s.get(peer, 0.0) > now_s


class Pace:
    """Delays answers to malformed messages, and refusals of sessions, so that about `per_s` of them
    are sent per second. An answer waits at most MAX_WAIT_S. On the event loop only.

    per_s: answers per second.
    """

    def __init__(self, per_s: float) -> None:
        self.set_rate(per_s)
        self._due_s = 0.0

    def set_rate(self, per_s: float) -> None:
        """Sets how many of the delayed answers may be sent per second from now on."""
        self._interval_s = 1 / per_s

    def __repr__(self) -> str:
        return f"Pace({1 / self._interval_s:g} a second)"

    async def turn(self) -> None:
        """Waits until the next answer to a malformed message, or the next refusal of a session, may
        be sent."""
        now_s = time.monotonic()
        wait_s = self.wait_s(now_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def wait_s(self, now_s: float) -> float:
        """Reserves the next free time at which a delayed answer may be sent. Returns how long the
        caller must wait before it sends its answer, in seconds, at most MAX_WAIT_S."""
        self._due_s = max(self._due_s, now_s - BURST_S) + self._interval_s
        return min(max(self._due_s - now_s, 0.0), MAX_WAIT_S)


# A guest is a call that may last without a session: it watches health, reads reflection, opens a
# session, or has not sent its whole request.
#
# Always true: a new guest is always admitted. If there are too many guests, the oldest is ended, so
# a client can't block other clients by holding calls open. A guest with a time limit is ended when
# the limit is over.


ARRIVAL_S = 10.0
"""A whole request must arrive within this time, in seconds."""
_NEVER_S = float("inf")


class Guests:
    """Bounds the number of guests (calls that may last without a session). A new guest is always
    admitted. If there are then more than `most` guests, the call of the oldest guest is ended. On
    the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        # `_until_s` has the time at which each guest must end, the oldest guest first. `_told` has
        # the guests that were cancelled, each with the reason.
        self._until_s: dict[asyncio.Task[object], float] = {}
        self._told: dict[asyncio.Task[object], str] = {}

    def __len__(self) -> int:
        return len(self._until_s) + len(self._told)

    def __repr__(self) -> str:
        return f"Guests({len(self)}/{self._most})"

    @contextmanager
    def stay(self, for_s: float = _NEVER_S) -> Iterator[None]:
        """Counts the current task as a guest (a call that may last without a session) until the end
        of the `with` block. A guest is ended after `for_s` seconds, or when it is the oldest guest
        and a newer guest needs its place. Then its task is cancelled, and the `with` block raises
        OVERLOADED."""
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
        """Ends the guests (calls that may last without a session) whose time limit is over."""
        for task in [task for task, until_s in self._until_s.items() if until_s <= now_s]:
            self._tell(task, "the request did not come whole in time; send it again")

    def _tell(self, task: "asyncio.Task[object]", why: str) -> None:
        del self._until_s[task]
        self._told[task] = why
        task.cancel()
