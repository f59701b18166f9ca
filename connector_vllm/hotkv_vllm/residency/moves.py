"""Decides which requests leave the device as a whole (`residency = "auto"`).

Always true:
- A request is moved only if the coming step, or the request that waits first, lacks blocks.
- The one that gives most is moved first; of equals, the one that came first.
- Moving never leaves the running requests with fewer blocks than they need.

Pure: what is moved depends on the arguments alone. All counts are blocks of the device's pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step asks of the pool.

    free: blocks that no request holds.
    promised: blocks that admitted requests still need for their prompts.
    running: the most that the running requests take in the step.
    first: blocks without which the request that waits first is not admitted; None if none waits.
    """

    free: int
    promised: int
    running: int
    first: int | None

    @property
    def is_short(self) -> bool:
        """Returns True if the pool lacks blocks."""
        wanted = -1 if self.first is None else self.first + self.promised
        return self.free < max(self.running, wanted)


@dataclass(frozen=True, slots=True)
class Relief:
    """What it gives to move a request.

    freed: blocks that it frees, less the hot slots that it takes; may be negative.
    unpromised: blocks that it no longer needs for its prompt.
    """

    freed: int
    unpromised: int = 0

    @property
    def total(self) -> int:
        """Returns by how much the blocks grow that are neither held nor promised."""
        return self.freed + self.unpromised


def to_move(demand: Demand, reliefs: Mapping[str, Relief]) -> list[str]:
    """Returns the requests to move, in order. `reliefs`: the requests that can be moved, in the
    order in which they came."""
    free, unpromised, left, chosen = demand.free, -demand.promised, dict(reliefs), []

    def move(request_id: str) -> None:
        nonlocal free, unpromised
        relief = left.pop(request_id)
        free, unpromised = free + relief.freed, unpromised + relief.unpromised
        chosen.append(request_id)

    while free < demand.running and left:
        best = max(left, key=lambda name: left[name].freed)
        if left[best].freed <= 0:
            break
        move(best)
    if demand.first is None:
        return chosen
    most = sum(max(0, relief.total) for relief in left.values())
    if free + unpromised + most < demand.first:
        # It could not begin even then.
        return chosen
    while free + unpromised < demand.first:
        able = [
            name
            for name, relief in left.items()
            if relief.total > 0 and free + relief.freed >= demand.running
        ]
        if not able:
            break
        move(max(able, key=lambda name: left[name].total))
    return chosen
