"""Decides which requests to move off the device (`residency = "auto"`). A moved request has its
whole context in the server. Only its sinks (first blocks), its recent window and its hot slots
(blocks for selected parts of the context) stay on the device.

Always true:
- A request is moved only if the coming step, or the first waiting request, lacks blocks.
- The request whose move yields the most blocks is moved first; of equals, the request that came
  first.
- Moving never leaves the running requests with fewer blocks than they need.

Pure: the decision depends on the arguments alone. All counts are blocks of the device's pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """The blocks that a step needs from the device's pool.

    free: blocks that no request holds.
    promised: blocks that admitted requests still need for their prompts.
    running: the most blocks that the running requests allocate in the step.
    first: blocks that vLLM needs to admit the first waiting request; None if no request waits.
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
    """The blocks that the device's pool gains if a request is moved off the device.

    freed: blocks that the move frees, less the hot slots (device blocks for selected blocks) that
        the move allocates; may be negative.
    unpromised: blocks that the request no longer needs for its prompt.
    """

    freed: int
    unpromised: int = 0

    @property
    def total(self) -> int:
        """Returns how many more blocks are neither held nor promised after the move."""
        return self.freed + self.unpromised


def to_move(demand: Demand, reliefs: Mapping[str, Relief]) -> list[str]:
    """Returns the ids of the requests to move off the device, in the order of the moves (see the
    module).

    reliefs: the requests that can be moved, in the order in which they came, each with the blocks
        that its move would yield.
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
