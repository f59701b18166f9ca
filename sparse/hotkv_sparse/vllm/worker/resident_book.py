"""A worker's book of resident requests, on any device: which there are, where the server keeps
their blocks, and which are *lost*. vLLM computes a lost request anew.

Always true:
- A request has one record, from the first step whose message lists it to its end.
- A block that is not on the device is read only at its known address. If that is unknown, the
  request is lost when the block is needed.
- A lost request is reported once, with the step in which the loss was found: vLLM may then give
  its first block to another.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened
from hotkv_sparse.vllm.step import KeptBlocks, ResidentRow
from hotkv_vllm import link

STEPS_IN_FLIGHT = 2
"""That vLLM may have planned before it gets a step's results: their messages may have a request
reported as lost."""


@dataclass(slots=True, eq=False)
class ResidentRecord:
    """A position is the index of a block in the context.

    first_block: the device block by which the request is reported as lost.
    num_freed: the blocks between the sinks and this position are not on the device; 0 for none.
    pin: of the blocks that the server keeps, in `arenas`; None before the scheduler has sent it.
    unmapped: news of blocks in an arena that was not mapped; each step tries again.
    is_lost: must be computed anew.
    """

    request_id: str
    first_block: int = 0
    num_freed: int = 0
    pin: ResidencyOpened | None = None
    arenas: list[Arena] = field(default_factory=list)
    unmapped: list[KeptBlocks] = field(default_factory=list)
    is_lost: bool = False

    def is_pinned(self) -> bool:
        pin = self.pin
        return pin is not None and all(arena.holds(pin) for arena in self.arenas)


Record = TypeVar("Record", bound=ResidentRecord)


class ResidentBook(Generic[Record]):
    """Used by one thread. A device's book says how a record begins, where its blocks are, and what
    its end frees."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._lost: set[int] = set()
        # By first block of each request that was reported without a record, or whose record has
        # ended: how many more steps may arrive that were planned before the report.
        self._reported: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} requests)"

    def of(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    # --------------------------------------------------------------------------- of each device

    def _begin(self, request_id: str) -> Record:
        raise NotImplementedError

    def _take_in(self, record: Record, kept: KeptBlocks) -> bool:
        """Records addresses. False if this process does not map the blocks' arena."""
        raise NotImplementedError

    def _forget_kept(self, record: Record) -> None:
        """Forgets the addresses, `arenas` and `unmapped`."""
        raise NotImplementedError

    def end(self, request_id: str) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ a step

    def age_reports(self) -> None:
        """A step begins."""
        self._reported = {block: left - 1 for block, left in self._reported.items() if left}

    def _named(self, row: ResidentRow) -> Record:
        """The record of a row. A new one is lost if its step was planned before the scheduler got
        the report of its loss: a request id may be used again."""
        record = self._records.get(row.request_id)
        if record is None:
            record = self._records[row.request_id] = self._begin(row.request_id)
            begins = not row.num_freed or row.pin is not None
            record.is_lost = row.first_block in self._reported and not begins
        return record

    def _take_news(self, record: Record, row: ResidentRow) -> None:
        if row.pin is not None:
            record.pin = row.pin
        if row.kept and not row.kept[0].first and (record.arenas or record.unmapped):
            # The message lists the blocks from the first on, although some were known: the server
            # had lost them, and has pinned them again at other places.
            self._forget_kept(record)
        told = (*record.unmapped, *row.kept)
        record.unmapped = [kept for kept in told if not self._take_in(record, kept)]

    # ------------------------------------------------------------------------------------- losses

    def lose(self, record: Record, why: str) -> None:
        if not record.is_lost:
            link.logger.warning("hotkv: request %s is computed anew: %s", record.request_id, why)
            record.is_lost = True
            self._lost.add(record.first_block)

    def lose_named(self, request_ids: Iterable[str]) -> None:
        """Loses requests whose blocks were not at the old offsets after a reconnect."""
        for request_id in request_ids:
            if request_id in self._records:
                self.lose(self._records[request_id], "the server has lost its blocks")

    def forget_all(self, why: str) -> None:
        """Forgets all requests, because a lost message may have said that some begin anew. Those
        with blocks only in host memory are lost."""
        for record in self:
            if record.num_freed:
                self.lose(record, why)
                self._reported[record.first_block] = STEPS_IN_FLIGHT
            self.end(record.request_id)

    def is_lost(self, request_id: str) -> bool:
        """Whether this step may compute wrong KV for the request; True if it is unknown."""
        record = self._records.get(request_id)
        return record is None or record.is_lost

    def take_reports(self) -> set[int]:
        """First blocks of newly lost requests."""
        lost, self._lost = self._lost, set()
        return lost

    def all_away(self) -> set[int]:
        """First blocks of all requests with blocks only in host memory. Used if the search for lost
        ones raises, so it shares no code with it."""
        return {one.first_block for one in self._records.values() if one.num_freed}
