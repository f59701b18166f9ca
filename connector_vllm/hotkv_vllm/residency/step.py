"""Defines the scheduler side's message to the workers about resident requests, one per step.

Old blocks of a resident request may be only in the server's memory (arena). vLLM does not tell
workers which blocks the scheduler has freed on the device: the workers' block tables still have the
ids of the freed blocks. So each message says up to which block of a request blocks were freed, and
at which offsets of the arena the server holds them.
"""

from dataclasses import dataclass, replace

from hotkv_client.types import Int64s, ResidencyOpened

FileId = tuple[int, int]
"""(device, inode) of an arena's file."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """The scheduler's message where the server holds consecutive blocks of a request. The workers
    read the blocks there.

    first: index of the first of these blocks in the request.
    offsets: for each block, bytes from the start of the arena `file_id` to the block's slot, int64.
    sketches: for each block, bytes from the start of the arena to the slot of the block's
        sketch (a compact form of its keys, by which sparse attention selects blocks),
        int64; -1 if the server lacks the sketch.
    """

    first: int
    offsets: Int64s
    sketches: Int64s
    file_id: FileId

    def up_to(self, stop: int) -> "KeptBlocks":
        """Returns the blocks before position `stop`."""
        count = max(0, stop - self.first)
        return replace(self, offsets=self.offsets[:count], sketches=self.sketches[:count])


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """Tells the workers about a request of the step. vLLM's batches have no request ids
    for workers' attention, so the request's row there is found by a block id.

    written_block: id of the last device block that the step writes for the request. A worker finds
        the request's row in vLLM's batch by this id.
    first_block: id of the device block with the context's first tokens, by which workers report the
        request as lost.
    may_outgrow: True if the request is resident: its old blocks may be freed on the device.
    num_freed: the blocks between the sinks (first blocks, which stay on the device) and this block
        index are not on the device; 0 if no block was freed.
    hot_blocks: the request's hot slots: ids of the device blocks into which selected blocks are
        copied. Empty if they have not changed since the last message.
    kept: where the server has pinned blocks of the request. Each block is sent once.
    pin: identifies the server's pin of these blocks. After reading blocks, workers test by it
        whether the blocks were still pinned (`Arena.holds`). None if it has not changed.
    context_tokens: length of the context, including the step's `new_tokens`.
    new_tokens: number of tokens that the step computes.
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
    """A step's message to the workers about resident requests (requests whose old blocks may be
    only in the server's memory).

    rows: the step's requests.
    preempted: ids of requests that were preempted since the last message.
    lost: ids of requests whose blocks the server has lost. Workers report them to vLLM as lost.
    """

    rows: tuple[ResidentRow, ...] = ()
    preempted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
