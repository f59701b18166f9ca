"""How fast a client that makes no sense is answered.

What is no message costs the event loop as much as a call, and its sender sends the next one as soon
as it is answered. So few a second are answered at once, and the rest wait their turn, all clients'
together: nobody who speaks the protocol is among them.
"""

import asyncio
import time

BURST_S = 2.0
"""What may come at once, as so many seconds' worth."""
MAX_WAIT_S = 1.0
"""No answer waits longer: a flood over many connections is bounded by the calls that the server
takes at a time."""


class Pace:
    """`per_s`: malformed messages and refused sessions that are answered a second. Event loop
    only."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"Pace({1 / self._interval_s:g} a second)"

    async def turn(self) -> None:
        """Returns when the next answer may go out."""
        now_s = time.monotonic()
        wait_s = self.wait_s(now_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def wait_s(self, now_s: float) -> float:
        """Takes a turn; how long until it comes."""
        self._due_s = max(self._due_s, now_s - BURST_S) + self._interval_s
        return min(max(self._due_s - now_s, 0.0), MAX_WAIT_S)
