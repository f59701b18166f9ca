"""Requests of a CUDA engine whose old blocks are in host memory, as the worker hears of them from
step to step: their states, rows of representations, hot slots and addresses, in device memory.

What is always true: a state and a row belong to one request at a time; a block counts as away only
when its address was written before; a request of which that can't be said is lost, and takes no
part in a step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened
from hotkv_sparse.cuda.arena import MappedArena
from hotkv_sparse.cuda.workspace import Workspace
from hotkv_vllm import link
from hotkv_vllm.residency.step import FileId, KeptBlocks, ResidentRow

logger = link.logger
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
NO_ROWS = np.empty(0, np.int32)
ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """An arena that this process maps, and the same as the device reads it."""

    arena: Arena
    mapped: MappedArena


@dataclass(slots=True, eq=False)
class CudaSequence:
    """One request. `rows` int32: of representations, by position. `addresses` int64 by position,
    0: not known. `num_built`: leading blocks whose representations are built with the step that is
    planned. `is_sparse`: in the present step, as the scheduler has decided."""

    request_id: str
    state: int
    first_block: int = 0
    num_freed: int = 0
    num_built: int = 0
    context_tokens: int = 0
    new_tokens: int = 0
    is_sparse: bool = False
    has_hot_slots: bool = False
    rows: I32 = field(default_factory=lambda: NO_ROWS)
    addresses: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    pin: ResidencyOpened | None = None
    arenas: list[Arena] = field(default_factory=list)
    is_lost: bool = False

    def still_holds(self) -> bool:
        """Whether what was read from the arenas was pinned when it was read."""
        pin = self.pin
        return pin is not None and all(arena.holds(pin) for arena in self.arenas)


class CudaSequences:
    """Owns states and rows. `slot_bytes`: of a block in the arena. One thread."""

    def __init__(
        self,
        workspace: Workspace,
        num_rows: int,
        slot_bytes: int,
        arena_of: Callable[[FileId], DeviceArena | None],
    ) -> None:
        assert workspace.residents is not None, "a workspace without an engine"
        self._work, self._residents = workspace, workspace.residents
        self._slot_bytes, self._arena_of = slot_bytes, arena_of
        self._free_states = list(range(workspace.shape.states - 1, -1, -1))
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._sequences: dict[str, CudaSequence] = {}
        self._by_state: dict[int, CudaSequence] = {}
        self._lost: set[int] = set()

    def __repr__(self) -> str:
        return f"CudaSequences({len(self._sequences)} requests, {len(self._free_rows)} free rows)"

    def __iter__(self) -> Iterator[CudaSequence]:
        return iter(list(self._sequences.values()))

    def of_state(self, state: int) -> CudaSequence | None:
        """The request that has the state."""
        return self._by_state.get(state)

    def of(self, request_id: str) -> CudaSequence | None:
        """The request of that name, if it has a state."""
        return self._sequences.get(request_id)

    def is_lost(self, request_id: str) -> bool:
        """Whether what the request has computed in this step may be wrong: it was lost and is not
        computed anew yet, or nothing is known of it."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.is_lost

    def is_away(self, sequence: CudaSequence) -> bool:
        """Whether some of its blocks are in host memory only."""
        return sequence.num_freed > self._residents.num_sinks

    # ------------------------------------------------------------------------------------ lifetime

    def end(self, request_id: str) -> None:
        """The request has ended, or was preempted."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            del self._by_state[sequence.state]
            self._free_states.append(sequence.state)
            self._free_rows.extend(sequence.rows.tolist())

    def follow(self, row: ResidentRow, is_sparse: bool) -> CudaSequence | None:
        """Takes in what the scheduler says of a request, and whether it attends sparsely; None if
        it stays on the device as a whole."""
        if not row.may_outgrow:
            return None
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            if not self._free_states:
                raise RuntimeError("more requests than vLLM's max_num_seqs")
            sequence = CudaSequence(row.request_id, self._free_states.pop())
            self._sequences[row.request_id] = self._by_state[sequence.state] = sequence
            self._residents.begin_anew(sequence.state)
        sequence.first_block, sequence.is_sparse = row.first_block, is_sparse
        sequence.context_tokens, sequence.new_tokens = row.context_tokens, row.new_tokens
        if not 1 <= row.new_tokens <= row.context_tokens:
            self.lose(sequence, "the step does not say how long its context is")
        if row.hot_blocks:
            self._take_hot_slots(sequence, row.hot_blocks)
        if row.pin is not None:
            sequence.pin = row.pin
        for kept in row.kept:
            self._take_in(sequence, kept)
        self._give_rows(sequence)
        self._give_back(sequence, row.num_freed)
        return sequence

    def lose(self, sequence: CudaSequence, why: str) -> None:
        """The request's bytes are gone: it is computed anew."""
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
        sequence.is_lost = True
        self._lost.add(sequence.first_block)

    def lose_away(self, among: Iterable[CudaSequence], why: str) -> None:
        """Those of these requests are lost that have blocks in host memory only."""
        for sequence in among:
            if self.is_away(sequence):
                self.lose(sequence, why)

    def take_lost(self) -> set[int]:
        """First blocks of the requests that were lost since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    # ------------------------------------------------------------------------------- device memory

    def _take_hot_slots(self, sequence: CudaSequence, hot_blocks: tuple[int, ...]) -> None:
        num_slots = self._work.shape.num_slots
        if len(hot_blocks) != num_slots:
            self.lose(sequence, f"it has {len(hot_blocks)} hot slots, not {num_slots}")
            return
        if sequence.has_hot_slots:
            num_freed = sequence.num_freed
            self._residents.begin_anew(sequence.state)
            self._residents.give_back(sequence.state, num_freed)
        sequence.has_hot_slots = True
        pages = np.array([hot_blocks], np.int32)
        self._work.device.write(self._work.pages, (sequence.state, 0), pages)

    def _take_in(self, sequence: CudaSequence, kept: KeptBlocks) -> None:
        """Where the server keeps blocks, as the device reads them."""
        found = self._arena_of(kept.file_id)
        if found is None:
            return
        if found.arena not in sequence.arenas:
            sequence.arenas.append(found.arena)
        addresses = found.mapped.addresses(kept.offsets, self._slot_bytes)
        stop = min(kept.first + len(addresses), self._work.shape.max_blocks)
        addresses = addresses[: stop - kept.first]
        if stop > len(sequence.addresses):
            grown = np.zeros(max(stop, 2 * len(sequence.addresses)), np.int64)
            grown[: len(sequence.addresses)] = sequence.addresses
            sequence.addresses = grown
        sequence.addresses[kept.first : stop] = addresses
        if len(addresses):
            self._work.device.write(self._work.arena, (sequence.state, kept.first), addresses[None])

    def _give_rows(self, sequence: CudaSequence) -> None:
        """Sees to it that each block of the context has a row."""
        tokens, known = self._work.shape.block_tokens, len(sequence.rows)
        needed = min(-(-sequence.context_tokens // tokens), self._work.shape.max_blocks)
        if needed <= known or sequence.is_lost:
            return
        more = min(max(needed - known, ROWS_AT_A_TIME), self._work.shape.max_blocks - known)
        more = max(min(more, len(self._free_rows)), needed - known)
        if more > len(self._free_rows):
            self.lose(
                sequence,
                f"no room for its representations: {len(self._free_rows)} of {more} rows are "
                "free; raise hotkv.representation_tokens",
            )
            return
        rows = np.array([self._free_rows.pop() for _ in range(more)], np.int32)
        sequence.rows = np.concatenate([sequence.rows, rows])
        self._work.device.write(self._work.rows, (sequence.state, known), rows[None])

    def _give_back(self, sequence: CudaSequence, num_freed: int) -> None:
        if num_freed > self._residents.num_sinks:
            away = sequence.addresses[self._residents.num_sinks : num_freed]
            if len(away) < num_freed - self._residents.num_sinks or not away.all():
                self.lose(sequence, "it is not known where the server keeps some of its blocks")
                return
            if not sequence.has_hot_slots and sequence.is_sparse:
                self.lose(sequence, "it has no hot slots")
                return
        sequence.num_freed = num_freed
        self._residents.give_back(sequence.state, num_freed)
