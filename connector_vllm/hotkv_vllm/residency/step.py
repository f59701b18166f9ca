"""The scheduler side's message to the workers about resident requests, one per step.

vLLM does not tell workers which blocks were freed on the device: their block tables still have
the ids. So each message says up to which block a request's blocks were freed, and at which
offsets of the arena the server holds them.
"""

from dataclasses import dataclass, replace

from hotkv_client.types import Int64s, ResidencyOpened

FileId = tuple[int, int]
"""(device, inode) of an arena's file."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Where the server holds consecutive blocks of a request.

    first: position of the first.
    offsets: of the slots, bytes in the arena `file_id`, int64.
    sketches: the same of the sketches' slots; -1 if the server lacks a sketch.
    """

    first: int
    offsets: Int64s
    sketches: Int64s
    file_id: FileId

    def up_to(self, stop: int) -> "KeptBlocks":
        count = max(0, stop - self.first)
        return replace(self, offsets=self.offsets[:count], sketches=self.sketches[:count])


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """A request of the step. vLLM's batches have no request ids for workers' attention, so a block
    id identifies the request's row there.

    written_block: the last device block that the step writes; a worker finds the row by it.
    first_block: the first device block, by which workers report the request as lost.
    may_outgrow: the request is resident.
    num_freed: the blocks between the sinks and this position are not on the device; 0 for none.
    hot_blocks: device blocks of the hot slots; empty if unchanged.
    kept: newly pinned blocks; each is sent once.
    pin: of these blocks, for `Arena.holds` after reading; None if unchanged.
    context_tokens: including `new_tokens`.
    new_tokens: that the step computes.
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
    """preempted: ids, since the last message.
    lost: ids of requests whose blocks the server has lost; workers report them to vLLM.
    """

    rows: tuple[ResidentRow, ...] = ()
    preempted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
