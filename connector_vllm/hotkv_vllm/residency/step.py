"""What the scheduler side tells the workers of resident requests with each step.

A worker's block tables keep the ids of blocks that the scheduler has given back. So each step says
how far each request's blocks were given back, and where the server keeps them.
"""

from dataclasses import dataclass, replace

from hotkv_client.types import Int64s, ResidencyOpened

FileId = tuple[int, int]
"""(device, inode) of an arena's file."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Where the server keeps a request's blocks from block `first` on: bytes from the start of the
    arena `file_id` to their slots, int64 [n]; `representations` likewise, -1 for a block whose
    representation the server lacks."""

    first: int
    offsets: Int64s
    representations: Int64s
    file_id: FileId

    def up_to(self, stop: int) -> "KeptBlocks":
        """Those before block `stop`."""
        count = max(0, stop - self.first)
        return replace(
            self, offsets=self.offsets[:count], representations=self.representations[:count]
        )


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """A request of the step. `written_block`: the block that the step writes last, which names the
    row; `first_block`: of the context.

    `may_outgrow`: the server has reserved room for it, so blocks may be given back. `num_freed`:
    those from the sinks up to this position are not on the device. `context_tokens`: with the
    step's own, which are `new_tokens`. The rest is said once, when it is new: `hot_blocks` of
    vLLM's pool, what the server has `kept`, and what its bytes are read under (`pin`).
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
    """`ended`: requests that have ended or were preempted. `lost`: those whose bytes the server no
    longer has, to be reported with the step."""

    rows: tuple[ResidentRow, ...] = ()
    ended: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
