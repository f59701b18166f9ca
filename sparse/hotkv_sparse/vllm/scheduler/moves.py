"""Decides which requests to move off the device (`residency = "auto"`). Of a moved request the
device keeps sinks, recent window and hot slots.

Always true:
- Requests move only if the pool lacks blocks for the coming step or the first waiting request.
- The highest yield moves first; of equals, the one admitted first.
- A move for a waiting request never leaves fewer free blocks than the running requests need.

Pure. All counts are blocks of the device's pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """What the coming step needs and the pool has.

    free: held by no request.
    promised: that admitted requests will still allocate for their prompts.
    running: the most that running requests may allocate in the step.
    first: that must be free to admit the first waiting request; None if none may be admitted.
    """

    free: int
    promised: int
    running: int
    first: int | None

    @property
    def is_short(self) -> bool:
        wanted = -1 if self.first is None else self.first + self.promised
        return self.free < max(self.running, wanted)


@dataclass(frozen=True, slots=True)
class Relief:
    """What the pool gains by a move.

    freed: minus the move's hot slots; may be negative.
    unpromised: reduction of `BlockDemand.promised`: a moved request needs fewer blocks for its
        prompt.
    """

    freed: int
    unpromised: int = 0

    @property
    def total(self) -> int:
        """The yield for a waiting request."""
        return self.freed + self.unpromised


def to_move(demand: BlockDemand, reliefs: Mapping[str, Relief]) -> list[str]:
    """Ids in the order of their moves.

    reliefs: of the requests that can move, in the order of their admission.
    """
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
        # Even all moves would not let the waiting request begin.
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
