"""Hints that a trace's sessions would have given: which turn was a session's last, and after which
it pauses for long.

A turn is a request; the session's next one is the first later request that has all its blocks, but
for the last, which may not be full. Only ends and pauses look into the future, as an agent knows
its own; which blocks a session shares is taken from the past.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.simulate.trace import Int64s, Trace

SHARED = -1
LONG_PAUSE_S = 30.0
"""Pauses from here on are told: the session's blocks may go meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class Hints:
    """Of each request. `pauses_s` [R]: time until the session's next turn; infinite after its last.
    `own_from` [R]: place in the request of the first block that no other session has used so
    far."""

    def cold_from(self, request: int) -> int | None:
        """Place of the first block of a request that nobody is expected to use soon; None if all
        are."""
        is_long = self.pauses_s[request] >= LONG_PAUSE_S
        return int(self.own_from[request]) if is_long else None

    pauses_s: NDArray[np.float64]
    own_from: Int64s


def derive_hints(trace: Trace) -> Hints:
    """Finds the sessions of a trace. Linear in its accesses."""
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    num_requests = trace.num_requests
    pauses_s = np.full(num_requests, np.inf)
    own_from = np.zeros(num_requests, np.int64)
    # Per block, the request that waits for a next turn with this block, and the only session that
    # has used it; SHARED if there are several.
    waiting: dict[int, int] = {}
    owner: dict[int, int] = {}
    session_of = list(range(num_requests))
    for request in range(num_requests):
        chain = blocks[starts[request] : starts[request + 1]]
        before = [waiting.pop(block) for block in chain if block in waiting]
        for earlier in before:
            pauses_s[earlier] = trace.times_s[request] - trace.times_s[earlier]
        if before:
            session_of[request] = session_of[before[-1]]
        session = session_of[request]
        num_shared = 0
        for place, block in enumerate(chain):
            if owner.setdefault(block, session) != session:
                owner[block] = SHARED
                num_shared = place + 1
        own_from[request] = num_shared
        waiting[chain[max(0, len(chain) - 2)]] = request
    return Hints(pauses_s, own_from)
