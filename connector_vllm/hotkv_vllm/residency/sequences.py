"""The requests of a resident engine in one worker, from the scheduler's word to their end.

What is always true: each request has one sequence, which ends before another request gets its
representation rows; a request whose bytes were lost is named once, with the step in which it was
found out.
"""

from collections.abc import Callable, Iterable

import numpy as np

from hotkv_client.arena import Arena
from hotkv_vllm import link
from hotkv_vllm.residency.kept_rows import KeptRows
from hotkv_vllm.residency.sequence import NOT_KEPT, ResidentSequence
from hotkv_vllm.residency.step import FileId, KeptBlocks, ResidentRow

logger = link.logger
STEPS_IN_FLIGHT = 2
"""Steps that vLLM may have planned before it hears what a step has come to."""


class ResidentSequences:
    """See the module. `arena_of`: the arena that this process maps now. `of_step`: the sequences
    of the present step, by the block that the step writes last."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._sequences: dict[str, ResidentSequence] = {}
        self._arenas: dict[FileId, Arena] = {}
        self._lost: set[int] = set()
        self._unnamed: dict[int, int] = {}
        self.of_step: dict[int, ResidentSequence] = {}
        self.arena_of: Callable[[], Arena | None] = lambda: None

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        return f"ResidentSequences({len(self._sequences)})"

    def known(self) -> Iterable[ResidentSequence]:
        """All of them."""
        return self._sequences.values()

    def begin_step(self, rows: Iterable[ResidentRow]) -> None:
        """Takes in what the scheduler says of the step's rows, and sets `of_step`."""
        self._unnamed = {block: left - 1 for block, left in self._unnamed.items() if left}
        self.of_step = {row.written_block: self._follow(row) for row in rows}

    def end(self, request_id: str) -> None:
        """Forgets a request that has ended or lost its blocks, and frees its rows."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._kept.give_back(sequence.rows)
            used = {one.file_id for other in self._sequences.values() for one in other.arenas}
            # The memory of servers that are gone is unmapped with its last reader.
            self._arenas = {
                file_id: one for file_id, one in self._arenas.items() if file_id in used
            }

    def _follow(self, row: ResidentRow) -> ResidentSequence:
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            sequence = self._sequences[row.request_id] = ResidentSequence(row.request_id)
            if row.first_block in self._unnamed:
                # Planned before the scheduler heard of the step whose rows were not known.
                sequence.is_lost = True
        sequence.first_block = row.first_block
        sequence.may_outgrow, sequence.num_freed = row.may_outgrow, row.num_freed
        if row.hot_blocks:
            sequence.hot_blocks = np.array(row.hot_blocks, np.int32)
            sequence.content.clear()
        if row.pin is not None:
            sequence.pin = row.pin
        for kept in row.kept:
            self._take_in(sequence, kept)
        return sequence

    def _take_in(self, sequence: ResidentSequence, kept: KeptBlocks) -> None:
        """Finds the addresses of blocks that the server keeps. Where this process doesn't map their
        arena they have none."""
        arena = self._arenas.get(kept.file_id)
        if arena is None:
            arena = self.arena_of()
            if arena is None or arena.file_id != kept.file_id:
                return
            self._arenas[kept.file_id] = arena
        if arena not in sequence.arenas:
            sequence.arenas.append(arena)
        base = arena.memory.ctypes.data
        slots, representations = (
            np.where(offsets >= 0, offsets + base, NOT_KEPT)
            for offsets in (kept.offsets, kept.representations)
        )
        sequence.kept(kept.first, slots, representations)

    # ----------------------------------------------------------------------------------------- loss

    def lose(self, sequence: ResidentSequence, why: str) -> None:
        """The request's bytes are gone: it is named with this step, whatever its rows attend to.
        Never again: vLLM may have given its blocks to others by then."""
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
            sequence.is_lost = True
            self._lost.add(sequence.first_block)

    def lose_named(self, request_ids: Iterable[str]) -> None:
        """The server has not pinned these requests' bytes again."""
        for request_id in request_ids:
            if request_id in self._sequences:
                self.lose(self._sequences[request_id], "the server has lost its blocks")

    def lose_all_away(self, why: str) -> None:
        """All requests that have blocks in host memory only."""
        for sequence in self._sequences.values():
            if sequence.num_freed:
                self.lose(sequence, why)

    def lose_unnamed(self, first_block: int, has_gaps: bool) -> None:
        """The scheduler has not named a row; whose it is shows in its first block. `has_gaps`:
        some of its blocks are not on the device."""
        for sequence in self._sequences.values():
            if sequence.num_freed and sequence.first_block == first_block:
                self.lose(sequence, "the step's plan does not name it")
        if has_gaps:
            self._lost.add(first_block)
            self._unnamed[first_block] = STEPS_IN_FLIGHT

    def find_lost(self) -> None:
        """Finds the requests whose bytes were read while the server did not pin them. Call it after
        a step's last layer."""
        for sequence in self._sequences.values():
            if sequence.has_read and not sequence.still_holds():
                self.lose(sequence, "the server pins its blocks no more")

    def is_lost(self, request_id: str) -> bool:
        """Whether what the request has computed in this step may be wrong: it was lost and is not
        computed anew yet, or nothing is known of it."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.is_lost

    def take_lost(self) -> set[int]:
        """First blocks of the requests that were lost since the last call. Call it after a step's
        last layer."""
        self.find_lost()
        for sequence in self._sequences.values():
            sequence.has_read = False
        lost, self._lost = self._lost, set()
        return lost

    def all_away(self) -> set[int]:
        """First blocks of all requests that have blocks in host memory only. Shares nothing with
        `take_lost`."""
        return {one.first_block for one in self._sequences.values() if one.num_freed}
