"""The worker of a CUDA engine with residency. In each layer, kernels choose the blocks that each
row attends to, and copy those that are only in the arena into hot slots. In decode, a CUDA graph
may replay these kernels.

In each step these methods of `CudaWorker` are called, with vLLM's model runner V1 in this order
(runner V2 calls `begin_batch` before `begin_resident`):

    begin_resident(step, rows)   gets the scheduler's message; the connector calls it
    begin_batch(batch)           gets the step's batch; vLLM's metadata builder calls it
    layer_step(…)                runs before each layer's attention; captured in graphs of decode

Always true:

- A step that a graph replays needs no Python in its layers.
- Rows that the scheduler lists attend sparsely, all others to their whole context.
- A row that attends to its whole context, some of it only in host memory, is copied layer by layer
  into a *staging area*. A CUDA graph can't make this copy. So if one may replay the step, the
  scheduler lists every such row as sparse.
- Bytes read from the arena are valid only if their blocks were still pinned after the step's last
  kernel. To test this, `take_lost` waits for the device.
- Each state index (place of a request in the device's arrays) and each row of sketches belongs to
  at most one request.
- A block counts as freed only after its arena address is in device memory. Without the address the
  request is *lost*, takes no part in a step, and vLLM computes it anew.

Used by one thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened
from hotkv_sparse.cuda.device import Array
from hotkv_sparse.cuda.mapped_arena import MappedArena
from hotkv_sparse.cuda.residents import EngineBatch, NamedRow, PagePlaces
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import Workspace
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.step import FileId, KeptBlocks, ResidentRow, ResidentStep
from hotkv_sparse.vllm.worker.resident_sequences import STEPS_IN_FLIGHT
from hotkv_vllm import link

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
logger = link.logger
NO_ROWS = np.empty(0, np.int32)
ROWS_AT_A_TIME = 64


# ------------------------------------------------------------------------------------- the requests


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """An arena that this process and the device map."""

    arena: Arena
    mapped: MappedArena


@dataclass(slots=True, eq=False)
class CudaSequence:
    """A worker's record of a resident request. A position is the index of a block in the context.

    state: index of its entries in the kernels' arrays.
    first_block: the device block by which the request is reported as lost.
    num_freed: the blocks between the sinks and this position are not on the device.
    num_built: leading blocks whose sketches are built, at the latest by the present step.
    context_tokens: with the step's `new_tokens`.
    is_sparse: in the present step.
    has_hot_slots: they are known.
    rows: of sketches, by position, int32.
    addresses: of slots as the device reads them, by position, int64; 0 if unknown.
    pin: of the blocks at `addresses`; None before the scheduler has sent it.
    arenas: the arenas in which the addresses are.
    unmapped: as `ResidentSequence.unmapped`.
    is_lost: True if the request must be computed anew.
    """

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
    unmapped: list[KeptBlocks] = field(default_factory=list)
    is_lost: bool = False

    def still_holds(self) -> bool:
        pin = self.pin
        return pin is not None and all(arena.holds(pin) for arena in self.arenas)


class CudaSequences:
    """Holds the `CudaSequence` of each resident request and its entries in the kernels' arrays, to
    which it allocates states and rows. Used by one thread.

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
        assert workspace.residents is not None, "a workspace without an engine"
        self._work, self._residents = workspace, workspace.residents
        self._slot_bytes, self._arena_of = slot_bytes, arena_of
        self._free_states = list(range(workspace.shape.states - 1, -1, -1))
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._sequences: dict[str, CudaSequence] = {}
        self._by_state: dict[int, CudaSequence] = {}
        self._lost: set[int] = set()
        # By first block of each request that `forget_all` has reported as lost: how many more steps
        # may arrive that the scheduler has planned before it got this report.
        self._reported: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"CudaSequences({len(self._sequences)} requests, {len(self._free_rows)} free rows)"

    def __iter__(self) -> Iterator[CudaSequence]:
        return iter(list(self._sequences.values()))

    def of_state(self, state: int) -> CudaSequence | None:
        return self._by_state.get(state)

    def of(self, request_id: str) -> CudaSequence | None:
        return self._sequences.get(request_id)

    def is_lost(self, request_id: str) -> bool:
        """Whether this step may compute wrong KV for the request; True if it is unknown."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.is_lost

    def is_away(self, sequence: CudaSequence) -> bool:
        return sequence.num_freed > self._residents.num_sinks

    # ------------------------------------------------------------------------------------ lifetime

    def begin_step(self) -> None:
        """Must be called before `follow`."""
        self._reported = {block: left - 1 for block, left in self._reported.items() if left}

    def end(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            del self._by_state[sequence.state]
            self._free_states.append(sequence.state)
            self._free_rows.extend(sequence.rows.tolist())

    def follow(self, row: ResidentRow, is_sparse: bool) -> CudaSequence | None:
        """Updates the request and its entries in the kernels' arrays. None if it is not
        resident."""
        if not row.may_outgrow:
            return None
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            if not self._free_states:
                raise RuntimeError("more requests than vLLM's max_num_seqs")
            sequence = CudaSequence(row.request_id, self._free_states.pop())
            self._sequences[row.request_id] = self._by_state[sequence.state] = sequence
            self._residents.begin_anew(sequence.state)
            begins = not row.num_freed or row.pin is not None
            # The scheduler may have planned this step before it got the workers' report of a
            # loss.
            sequence.is_lost = row.first_block in self._reported and not begins
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
        if row.pin is not None:
            sequence.pin = row.pin
        if row.kept and not row.kept[0].first and (sequence.arenas or sequence.unmapped):
            # The message lists the request's pinned blocks from the first block on, although some
            # were known: the server had lost them, and has pinned them again at other places.
            self._forget_kept(sequence)
        told = (*sequence.unmapped, *row.kept)
        sequence.unmapped = [kept for kept in told if not self._take_in(sequence, kept)]
        self._give_rows(sequence)
        self._give_back(sequence, row.num_freed)
        return sequence

    def lose(self, sequence: CudaSequence, why: str) -> None:
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
            sequence.is_lost = True
            self._lost.add(sequence.first_block)

    def lose_rows(self, first_blocks: Iterable[int], why: str) -> None:
        """Reports first blocks even without a known request."""
        found = set(first_blocks)
        for sequence in self:
            if sequence.first_block in found:
                self.lose(sequence, why)
        self._lost |= found

    def lose_away(self, among: Iterable[CudaSequence], why: str) -> None:
        for sequence in among:
            if self.is_away(sequence):
                self.lose(sequence, why)

    def forget_all(self, why: str) -> None:
        """Forgets all requests; those with blocks only in host memory are lost."""
        for sequence in self:
            if self.is_away(sequence):
                self.lose(sequence, why)
                self._reported[sequence.first_block] = STEPS_IN_FLIGHT
            self.end(sequence.request_id)

    def take_lost(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost

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


# --------------------------------------------------------------------------------------- the worker


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """A layer as the worker's kernels use it.

    scale: factor of attention scores.
    pages: [P, H, T, 2 * D]: pages, KV heads, tokens of a block, channels of key and value.
    """

    name: str
    scale: float
    selector: CudaSelector
    places: PagePlaces
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Rows from `first` to `last` (exclusive) that one call of attention serves.

    staged_blocks: of a single row that attends to a copy of its whole context; 0 for the layer's
        own pages.
    """

    first: int
    last: int
    staged_blocks: int = 0


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step's batch of R rows.

    device: vLLM's arrays, in device memory.
    starts: first token of each row, then the number of all, int32 [R + 1], in host memory.
    last_tokens: of each row, int64 [R], in device memory; None if token r belongs to row r.
    """

    device: EngineBatch
    starts: I32
    last_tokens: torch.Tensor | None

    @staticmethod
    def of(device: EngineBatch, starts: I32, device_starts: torch.Tensor) -> "HostBatch":
        """device_starts: `starts` in device memory."""
        if int(np.diff(starts).max(initial=0)) <= 1:
            return HostBatch(device, starts, None)
        return HostBatch(device, starts, (device_starts[1:] - 1).clamp_min(0).long())


class CudaWorker:
    """plans_in_build: model runner V1: the batch is planned in `begin_batch`, otherwise in
        `begin_resident`.
    device_arena: makes an arena readable for the device.
    staging: one layer's pages of one whole context; `staged_table` is its block table.
    arena_of: the arena that this process maps.
    runs: calls of attention for the present batch.
    """

    def __init__(
        self,
        workspace: Workspace,
        layers: list[CudaLayer],
        num_rows: int,
        slot_bytes: int,
        plans_in_build: bool,
        device_arena: Callable[[Arena], MappedArena],
        staging: torch.Tensor,
    ) -> None:
        assert workspace.residents is not None, "a workspace without an engine"
        self._work, self._residents = workspace, workspace.residents
        self.layers = {layer.name: layer for layer in layers}
        self._plans_in_build = plans_in_build
        self._device_arena, self.staging = device_arena, staging
        self.staged_table: Array = workspace.device.zeros((workspace.shape.max_blocks,), np.int32)
        self._arenas: dict[FileId, DeviceArena] = {}
        self._newest: Arena | None = None
        self.sequences = CudaSequences(workspace, num_rows, slot_bytes, self._arena_of)
        self.arena_of: Callable[[], Arena | None] = lambda: None
        self._batch: HostBatch | None = None
        self._step: list[CudaSequence] = []
        self._is_reported = False
        self.runs: tuple[AttentionRun, ...] = ()
        self._counted: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"CudaWorker(layers {len(self.layers)}, {self.sequences}, {self._work})"

    # ---------------------------------------------------------------------------------------- arena

    def map_arena(self, timeout_s: float | None = None) -> bool:
        """Waits until the device can read the arena. Must be called before vLLM captures graphs:
        during a capture CUDA may refuse to register memory.

        timeout_s: None for no limit.
        """
        found = None if (arena := self.arena_of()) is None else self._arena_of(arena.file_id)
        return found is not None and found.mapped.wait(timeout_s)

    def _arena_of(self, file_id: FileId) -> DeviceArena | None:
        if (found := self._arenas.get(file_id)) is not None:
            return found
        arena = self.arena_of() or self._newest
        if arena is None or arena.file_id != file_id:
            return None
        found = self._arenas[file_id] = DeviceArena(arena, self._device_arena(arena))
        found.mapped.start()
        if not found.mapped.wait():
            logger.warning("hotkv: the device can't read all of the arena: %r", found.mapped)
        return found

    def _close_arenas(self) -> None:
        if len(self._arenas) < 2 or (arena := self.arena_of()) is None:
            return
        used = {arena.file_id, *(one.file_id for own in self.sequences for one in own.arenas)}
        for file_id in self._arenas.keys() - used:
            self._arenas.pop(file_id).mapped.close()

    # ---------------------------------------------------------------------------------------- steps

    def begin_resident(self, step: ResidentStep, rows: SparseRows) -> None:
        """Processes the scheduler's message. Plans the batch with model runner V2."""
        over = (*rows.ended, *step.preempted)
        for request_id in over:
            self.sequences.end(request_id)
        if over:
            self._close_arenas()
        self.sequences.begin_step()
        if step.rows:
            # As `ResidentSequences._newest`.
            self._newest = self.arena_of() or self._newest
        sparse = frozenset(rows.request_ids)
        self._step, names = [], {}
        for row in step.rows:
            sequence = self.sequences.follow(row, row.request_id in sparse)
            if sequence is not None:
                self._step.append(sequence)
                names[row.written_block] = sequence
        for request_id in step.lost:
            lost = self.sequences.of(request_id)
            if lost is not None:
                self.sequences.lose(lost, "the server has lost it")
        self._residents.name_rows(
            {b: NamedRow(o.state, o.is_sparse) for b, o in names.items() if not o.is_lost}
        )
        self._is_reported = True
        if not self._plans_in_build and self._batch is not None:
            self._plan(self._batch)

    def begin_batch(self, batch: HostBatch) -> None:
        """Plans the batch with model runner V1. Otherwise prepares it as one without resident
        requests, as in vLLM's dummy runs and graph captures, until `begin_resident` plans it."""
        self._batch = batch
        if self._plans_in_build and self._is_reported:
            self._plan(batch)
            return
        self._step = []
        self._work.begin_batch(batch.device, is_named=False)
        self.runs = (AttentionRun(0, batch.device.num_rows),)

    def _plan(self, batch: HostBatch) -> None:
        self._is_reported = False
        self._work.begin_batch(batch.device)
        self.runs = self._runs(batch)
        for sequence in self._step:
            if not sequence.is_lost:
                self._catch_up(sequence)

    def _catch_up(self, sequence: CudaSequence) -> None:
        """Builds missing sketches of blocks that were complete before this step, such as those
        of a hit. `layer_step` builds those that the step completes."""
        tokens = self._work.shape.block_tokens
        count = (sequence.context_tokens - sequence.new_tokens) // tokens
        if count > sequence.num_built:
            work, found = self._work, self._residents
            for layer in self.layers.values():
                found.locate_keys(sequence.state, count, layer.places, work.arena, work.rows)
                layer.selector.build(None, found.found_rows, count, found.addresses)
            self._counted["sparse_built_blocks"] += count * len(self.layers)
        sequence.num_built = sequence.context_tokens // tokens

    def _runs(self, batch: HostBatch) -> tuple[AttentionRun, ...]:
        """Divides the rows among calls of attention. Each row that needs the staging area gets
        its own, because it has room for one; to find such rows, waits for the device."""
        num_rows = batch.device.num_rows
        away = [one for one in self._step if not one.is_sparse and self.sequences.is_away(one)]
        if not any(not one.is_lost for one in away):
            return (AttentionRun(0, num_rows),)
        own = self._work.device.read(self._residents.state_of_row)[:num_rows]
        runs, begin = [], 0
        for row in range(num_rows):
            one = self.sequences.of_state(int(own[row])) if own[row] >= 0 else None
            if one is None or one not in away or one.is_lost:
                continue
            if row > begin:
                runs.append(AttentionRun(begin, row))
            count = -(-one.context_tokens // self._work.shape.block_tokens)
            runs.append(AttentionRun(row, row + 1, count))
            self._counted["resident_staged_pages"] += count * len(self.layers)
            begin = row + 1
        if begin < num_rows:
            runs.append(AttentionRun(begin, num_rows))
        return tuple(runs)

    def layer_step(self, layer: CudaLayer, query: torch.Tensor) -> None:
        """Launches the kernels that build sketches of newly complete blocks, choose blocks, and
        copy them from the arena. Then `table` and `lengths` say what the layer's attention must
        read.

        query: [tokens, query heads, head size], after RoPE. The step's keys must be in the
            pages.
        """
        batch, residents, selector = self._batch, self._residents, layer.selector
        assert batch is not None, "a layer before its batch"
        count = residents.num_complete(batch.device.num_rows, batch.device.num_tokens)
        selector.build(residents.complete_pages, residents.complete_rows, count)
        if batch.last_tokens is not None:
            # Only rows with a single token attend sparsely, so a row's last token is its query.
            query = query.index_select(0, batch.last_tokens)
        kind = str(query.dtype).removeprefix("torch.")
        queries = Queries(query, kind, query.stride(0), query.stride(1))
        selector.hot.grow()
        selector.step(queries, layer.scale)

    @property
    def starts(self) -> I32:
        """First token of each row, then the number of all, int32 [rows + 1]."""
        assert self._batch is not None, "no batch yet"
        return self._batch.starts

    @property
    def table(self) -> Array:
        """Written by the last `layer_step`, int32 [rows, blocks]."""
        return self._residents.table

    @property
    def lengths(self) -> Array:
        """Tokens to attend to, int32 [rows]."""
        return self._residents.lengths

    def stage(self, layer: CudaLayer, run: AttentionRun) -> None:
        """Copies a whole context into the staging area, and writes `staged_table`.

        run: of a single row.
        """
        self._residents.stage(
            run.first,
            run.staged_blocks,
            layer.places,
            self._work.arena,
            self.staging.data_ptr(),
            0,
            self.staged_table,
            self._work.faults,
        )

    # --------------------------------------------------------------------------------------- faults

    def gave_up(self, layer_name: str) -> None:
        """vLLM's own attention has run: requests of the step with blocks only in host memory are
        lost. Must be called while the exception is handled."""
        self._counted["sparse_faults"] += 1
        logger.exception("hotkv: sparse attention of %s broke", layer_name)
        self.sequences.lose_away(self._step, f"attention of {layer_name} broke")

    def batch_broke(self, first_blocks: Iterable[int]) -> None:
        """Loses all requests of a batch whose planning raised: a CUDA graph may be replayed with an
        earlier plan.

        first_blocks: of each row.
        """
        self._counted["sparse_faults"] += 1
        logger.exception("hotkv: a batch could not be planned")
        self.runs = ()
        self.sequences.lose_rows(first_blocks, "its batch could not be planned")

    def start_over(self) -> None:
        """Forgets all requests, because the scheduler's message was missing. Those with blocks
        only in host memory are lost."""
        self._step, self._is_reported = [], False
        self._residents.name_rows({})
        self.sequences.forget_all("a step's plan was lost")

    def find_lost(self) -> None:
        """Loses requests whose read blocks are no longer pinned, and all with blocks only in the
        arena if a kernel lacked a hot slot or an address. For such requests it waits for the
        device: pins must be tested after the last read.
        """
        away = [one for one in self._step if self.sequences.is_away(one) and not one.is_lost]
        if away:
            faults = self._work.device.read(self._work.faults)
            self._counted["resident_pulled_pages"] += int(faults[2])
            if faults.any():
                self._work.device.write(self._work.faults, (0,), np.zeros(3, np.int32))
            if faults[0] or faults[1]:
                self.sequences.lose_away(self._step, "blocks had no slot or no address")
            for sequence in away:
                if not sequence.is_lost and not sequence.still_holds():
                    self.sequences.lose(sequence, "the server pins it no more")
        self._step = []

    def take_lost(self) -> set[int]:
        """First blocks of newly lost requests. Called after a step's last layer; may wait for
        the device."""
        self.find_lost()
        return self.sequences.take_lost()

    def all_away(self) -> set[int]:
        return {one.first_block for one in self.sequences if self.sequences.is_away(one)}

    def take_counters(self) -> dict[str, float]:
        counted, self._counted = self._counted, Counter()
        return dict(counted)
