"""A CUDA worker's book of resident requests, with their entries in the kernels' arrays.

Always true:
- Each state index (place of a request in the device's arrays) and each row of sketches belongs to
  at most one request.
- A block counts as freed only after its arena address is in device memory. Without the address the
  request is lost, and takes no part in a step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_client.arena import Arena
from hotkv_sparse.cuda.mapped_arena import MappedArena
from hotkv_sparse.cuda.workspace import Workspace
from hotkv_sparse.vllm.step import FileId, KeptBlocks, ResidentRow
from hotkv_sparse.vllm.worker.resident_book import ResidentBook, ResidentRecord

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
NO_ROWS = np.empty(0, np.int32)
ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """An arena that this process and the device map."""

    arena: Arena
    mapped: MappedArena


@dataclass(slots=True, eq=False)
class CudaSequence(ResidentRecord):
    """state: index of its entries in the kernels' arrays.
    num_built: leading blocks whose sketches are built, at the latest by the present step.
    context_tokens: with the step's `new_tokens`.
    is_sparse: in the present step.
    has_hot_slots: they are known.
    rows: of sketches, by position, int32.
    addresses: of slots as the device reads them, by position, int64; 0 if unknown.
    """

    state: int = -1
    num_built: int = 0
    context_tokens: int = 0
    new_tokens: int = 0
    is_sparse: bool = False
    has_hot_slots: bool = False
    rows: I32 = field(default_factory=lambda: NO_ROWS)
    addresses: I64 = field(default_factory=lambda: np.empty(0, np.int64))


class CudaSequences(ResidentBook[CudaSequence]):
    """Allocates states and rows.

    num_rows: for sketches, one per block.
    slot_bytes: of a block in the arena.
    """

    def __init__(
        self,
        workspace: Workspace,
        num_rows: int,
        slot_bytes: int,
        arena_of: Callable[[FileId], DeviceArena | None],
    ) -> None:
        super().__init__()
        assert workspace.residents is not None, "a workspace without an engine"
        self._work, self._residents = workspace, workspace.residents
        self._slot_bytes, self._arena_of = slot_bytes, arena_of
        self._free_states = list(range(workspace.shape.states - 1, -1, -1))
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._by_state: dict[int, CudaSequence] = {}

    def of_state(self, state: int) -> CudaSequence | None:
        return self._by_state.get(state)

    # ------------------------------------------------------------------------------------ lifetime

    def _begin(self, request_id: str) -> CudaSequence:
        if not self._free_states:
            raise RuntimeError("more requests than vLLM's max_num_seqs")
        sequence = CudaSequence(request_id, state=self._free_states.pop())
        self._by_state[sequence.state] = sequence
        self._residents.begin_anew(sequence.state)
        return sequence

    def end(self, request_id: str) -> None:
        sequence = self._records.pop(request_id, None)
        if sequence is not None:
            del self._by_state[sequence.state]
            self._free_states.append(sequence.state)
            self._free_rows.extend(sequence.rows.tolist())

    def follow(self, row: ResidentRow, is_sparse: bool) -> CudaSequence | None:
        """Updates the request and its entries in the kernels' arrays. None if it is not
        resident."""
        if not row.may_outgrow:
            return None
        sequence = self._named(row)
        if sequence.is_sparse and not is_sparse:
            # While it attended to its whole context, it may have gained more blocks than hot
            # slots.
            self._begin_anew(sequence)
        sequence.first_block, sequence.is_sparse = row.first_block, is_sparse
        sequence.context_tokens, sequence.new_tokens = row.context_tokens, row.new_tokens
        if not 1 <= row.new_tokens <= row.context_tokens:
            self.lose(sequence, "the step does not say how long its context is")
        if row.hot_blocks:
            self._take_hot_slots(sequence, row.hot_blocks)
        self._take_news(sequence, row)
        self._give_rows(sequence)
        self._give_back(sequence, row.num_freed)
        return sequence

    def lose_rows(self, first_blocks: Iterable[int], why: str) -> None:
        """Reports first blocks even without a known request."""
        found = set(first_blocks)
        for sequence in self:
            if sequence.first_block in found:
                self.lose(sequence, why)
        self._lost |= found

    def lose_away(self, among: Iterable[CudaSequence], why: str) -> None:
        for sequence in among:
            if sequence.num_freed:
                self.lose(sequence, why)

    # ------------------------------------------------------------------------------- device memory

    def _take_hot_slots(self, sequence: CudaSequence, hot_blocks: tuple[int, ...]) -> None:
        num_slots = self._work.shape.num_slots
        if len(hot_blocks) != num_slots:
            self.lose(sequence, f"it has {len(hot_blocks)} hot slots, not {num_slots}")
            return
        if sequence.has_hot_slots:
            self._begin_anew(sequence)
        sequence.has_hot_slots = True
        pages = np.array([hot_blocks], np.int32)
        self._work.device.write(self._work.pages, (sequence.state, 0), pages)

    def _begin_anew(self, sequence: CudaSequence) -> None:
        self._residents.begin_anew(sequence.state)
        self._residents.give_back(sequence.state, sequence.num_freed)

    def _take_in(self, sequence: CudaSequence, kept: KeptBlocks) -> bool:
        """Records the addresses at which the device reads blocks that the server has pinned, and
        writes them to device memory. Returns False if this process does not map their arena."""
        found = self._arena_of(kept.file_id)
        if found is None:
            return False
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
        return True

    def _forget_kept(self, sequence: CudaSequence) -> None:
        """Forgets the arena addresses of all blocks of a request."""
        sequence.addresses, sequence.arenas, sequence.unmapped = np.empty(0, np.int64), [], []
        nothing = np.zeros((1, self._work.shape.max_blocks), np.int64)
        self._work.device.write(self._work.arena, (sequence.state, 0), nothing)

    def _give_rows(self, sequence: CudaSequence) -> None:
        """Allocates rows of sketches; too few lose the request."""
        tokens, known = self._work.shape.block_tokens, len(sequence.rows)
        needed = min(-(-sequence.context_tokens // tokens), self._work.shape.max_blocks)
        if needed <= known or sequence.is_lost:
            return
        more = min(max(needed - known, ROWS_AT_A_TIME), self._work.shape.max_blocks - known)
        more = max(min(more, len(self._free_rows)), needed - known)
        if more > len(self._free_rows):
            self.lose(
                sequence,
                f"no room for its sketches: {len(self._free_rows)} of {more} rows are "
                "free; raise hotkv.sketch_tokens",
            )
            return
        rows = np.array([self._free_rows.pop() for _ in range(more)], np.int32)
        sequence.rows = np.concatenate([sequence.rows, rows])
        self._work.device.write(self._work.rows, (sequence.state, known), rows[None])

    def _give_back(self, sequence: CudaSequence, num_freed: int) -> None:
        if sequence.is_lost:
            return
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
