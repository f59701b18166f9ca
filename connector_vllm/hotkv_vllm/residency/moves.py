"""Decides which requests to move off the device (`residency = "auto"`). Of a moved request, the
server holds the whole context, and the device only its sinks (first blocks), its recent window, and
its hot slots (device blocks into which selected blocks are copied). So a move frees blocks in the
device's pool.

Always true:
- A request is moved only if the device's pool lacks blocks for the coming step, or for the first
  waiting request.
- The request whose move yields the most blocks is moved first. Of requests with equal yield, the
  request that vLLM admitted first is moved first.
- A move that makes room for a waiting request never leaves the pool with fewer free blocks than the
  running requests need.

Pure: the decision depends on the arguments alone. All counts are blocks of the device's pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The numbers of blocks that the coming step needs and that the device's pool has. All fields
    are numbers of blocks of this pool.

    free: blocks that no request holds.
    promised: blocks that admitted requests will still allocate until their prompts are computed.
    running: the largest number of blocks that the running requests may allocate in the step.
    first: free blocks that vLLM needs to admit the first waiting request; None if no request waits
        or vLLM may not run more requests.
    """

    free: int
    promised: int
    running: int
    first: int | None

    @property
    def is_short(self) -> bool:
        """Returns True if the device's pool has too few free blocks for the running requests or for
        the first waiting request."""
        wanted = -1 if self.first is None else self.first + self.promised
        return self.free < max(self.running, wanted)


@dataclass(frozen=True, slots=True)
class Relief:
    """The number of blocks that the device's pool gains if a request is moved off the device, so
    that most of the request's blocks are only in the server's memory.

    freed: number of blocks that the move frees, minus the number of hot slots (device blocks for
        selected blocks) that it allocates; may be negative.
    unpromised: by how much the move reduces `BlockDemand.promised`, because a moved request needs
        fewer blocks for its prompt.
    """

    freed: int
    unpromised: int = 0

    @property
    def total(self) -> int:
        """Returns how many blocks the move yields for a waiting request: by how much it increases
        the number of free blocks that admitted requests will not need (`BlockDemand.promised`)."""
        return self.freed + self.unpromised


def to_move(demand: BlockDemand, reliefs: Mapping[str, Relief]) -> list[str]:
    """Decides which requests to move off the device, so that its pool has enough blocks for the
    coming step and for the first waiting request. Returns their ids in the order of the moves. Each
    move takes the remaining request that yields the most blocks.

    reliefs: by request id, the blocks that moving the request would yield. Contains the requests
        that can be moved, in the order in which vLLM admitted them.
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
        # Moves no further request, because the waiting request could not begin even if all requests
        # in `left` were moved off the device.
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
