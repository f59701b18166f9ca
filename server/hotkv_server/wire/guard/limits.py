"""Bounds on the work that clients cause."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from hotkv_proto.errors import HotKVError, Reason

# A malformed message costs the event loop as much as a call, and a client can send the next as
# soon as it has the answer. So only some of the answers are sent at once; the others wait, in
# one queue for all clients. Clients that follow the protocol are not delayed.


BURST_S = 2.0
"""After a pause, as many answers are sent without a wait as the rate allows in this time."""
MAX_WAIT_S = 1.0
"""Longest delay of one answer. As no client waits longer, `Pace` does not stop a flood over many
connections; `wire.server.MAX_CALLS` does."""


MAX_PEERS = 1024
"""Most peers that `FaultBound` knows; with one more it forgets the one whose first count is
oldest."""


class FaultBound:
    """Counts connections that end without a valid request. A peer with more than `per_s` a
    second (after a pause BURST_S times as many) is over the bound for some time."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        # The time up to which each peer has used up its rate.
        self._used_s: OrderedDict[Hashable, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"FaultBound({1 / self._interval_s:g} a second, {len(self._used_s)} peers)"

    def count(self, peer: Hashable, now_s: float) -> None:
        used_s = max(self._used_s.get(peer, 0.0), now_s - BURST_S)
        self._used_s[peer] = used_s + self._interval_s
        if len(self._used_s) > MAX_PEERS:
            self._used_s.popitem(last=False)

    def is_over(self, peer: Hashable, now_s: float) -> bool:
        return self._used_s.get(peer, 0.0) > now_s


class Pace:
    """Delays answers to malformed messages, and refusals of sessions, to about `per_s` a second.
    On the event loop only."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"Pace({1 / self._interval_s:g} a second)"

    async def turn(self) -> None:
        """Waits until the next answer may be sent, at most MAX_WAIT_S."""
        now_s = time.monotonic()
        wait_s = self.wait_s(now_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def wait_s(self, now_s: float) -> float:
        """Reserves the next free time. Returns how long to wait for it, at most MAX_WAIT_S."""
        self._due_s = max(self._due_s, now_s - BURST_S) + self._interval_s
        return min(max(self._due_s - now_s, 0.0), MAX_WAIT_S)


# A guest is a call that may last without a session: it watches health, reads reflection, opens a
# session, or has not sent its whole request.
#
# Always true: a new guest is admitted. If there are too many, the oldest is ended, so that a
# client can't block others by holding calls open.


ARRIVAL_S = 10.0
"""For a whole request."""
_NEVER_S = float("inf")


class SessionlessCalls:
    """At most `most` of them. On the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        # When each guest must end, the oldest guest first; and why guests were cancelled.
        self._until_s: dict[asyncio.Task[object], float] = {}
        self._told: dict[asyncio.Task[object], str] = {}

    def __len__(self) -> int:
        return len(self._until_s) + len(self._told)

    def __repr__(self) -> str:
        return f"SessionlessCalls({len(self)}/{self._most})"

    @contextmanager
    def stay(self, for_s: float = _NEVER_S) -> Iterator[None]:
        """Counts the current task as a guest until the end of the `with` block. If it is ended,
        after `for_s` or for a newer guest, the block raises OVERLOADED."""
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
        for task in [task for task, until_s in self._until_s.items() if until_s <= now_s]:
            self._tell(task, "the request did not come whole in time; send it again")

    def _tell(self, task: "asyncio.Task[object]", why: str) -> None:
        del self._until_s[task]
        self._told[task] = why
        task.cancel()
