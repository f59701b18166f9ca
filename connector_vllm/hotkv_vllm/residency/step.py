"""The scheduler side's messages to the workers about resident requests, one message per step.

A resident request's earlier blocks are only in the server's memory (arena). A worker's block tables
still have the ids of blocks that the scheduler has freed. So each message says up to which position
a request's blocks were freed, and at which offsets of the arena the server holds them.
"""

from dataclasses import dataclass, replace

from hotkv_client.types import Int64s, ResidencyOpened

FileId = tuple[int, int]
"""(device, inode) of an arena's file."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Where the server holds a request's blocks, from block `first` on.

    offsets: int64 [n], bytes from the start of the arena `file_id` to the blocks' slots.
    representations: int64 [n], bytes from the start of the arena to the slots of the blocks'
        representations (compact forms of a block's keys, by which sparse attention selects blocks);
        -1 if the server lacks a representation.
    """

    first: int
    offsets: Int64s
    representations: Int64s
    file_id: FileId

    def up_to(self, stop: int) -> "KeptBlocks":
        """Returns the blocks before position `stop`."""
        count = max(0, stop - self.first)
        return replace(
            self, offsets=self.offsets[:count], representations=self.representations[:count]
        )


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """A request of the step.

    written_block: id of the block that the step writes last, by which workers find the row.
    first_block: id of the context's first block, by which workers report the request as lost.
    may_outgrow: True if the server has reserved room for the request, so its blocks may be freed.
    num_freed: position up to which the blocks after the sinks (first blocks) are not on the device.
    hot_blocks: the request's hot slots: blocks of vLLM's pool into which selected blocks are
        copied. Sent when they change.
    kept: blocks that the server has pinned. Sent once.
    pin: the server's pin under which workers read the kept blocks' bytes. Sent when it changes.
    context_tokens: length of the context, including the step's `new_tokens`.
    """

    request_id: str
    written_block: int
    first_block: int
    may_outgrow: bool
    num_freed: int
    hot_blocks: tuple[int, ...] = ()
    kept: tuple[KeptBlocks, ...] = ()
    pin: ResidencyOpened | None = None
    context_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ResidentStep:
    """A step's message about resident requests.

    ended: requests that have ended or were preempted.
    lost: requests whose bytes the server has lost, to be reported with the step.
    """

    rows: tuple[ResidentRow, ...] = ()
    ended: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
