"""The scheduler side's message to the workers, one per step (`HotKVMetadata.companion`).

vLLM does not tell workers which blocks were freed on the device: their block tables keep the
ids. So each message says up to which block they were freed, and where in the arena they are.
"""

from dataclasses import dataclass, replace

from hotkv_client.types import Int64s, ResidencyOpened
from hotkv_sparse.vllm.scheduler.rows import SparseRows

FileId = tuple[int, int]
"""(device, inode) of an arena's file."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Consecutive blocks of a request in the arena `file_id`.

    first: position of the first.
    offsets, sketches: of slots and sketches' slots, bytes, int64; -1 if the server lacks a
        sketch.
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
    """A request of the step. vLLM's batches have no request ids for workers' attention.

    written_block: the last device block that the step writes, by which a worker finds the row.
    first_block: by which workers report a loss.
    may_outgrow: the request is resident.
    num_freed: the blocks between the sinks and this position are not on the device; 0 for none.
    hot_blocks: of the hot slots; empty if unchanged.
    kept: newly pinned blocks.
    pin: for `Arena.holds` after reading; None if unchanged.
    context_tokens: with `new_tokens`, which the step computes.
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
    """preempted: since the last message.
    lost: whose blocks the server has lost; workers report them to vLLM.
    """

    rows: tuple[ResidentRow, ...] = ()
    preempted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


NO_ROWS, NOTHING_RESIDENT = SparseRows(), ResidentStep()


@dataclass(frozen=True, slots=True)
class SparseStep:
    """last_reports_of: ended requests, whose last selections must be reported.
    resident: without residency empty.
    """

    rows: SparseRows = NO_ROWS
    last_reports_of: tuple[str, ...] = ()
    resident: ResidentStep = NOTHING_RESIDENT
