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

Used by one thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hotkv_client.arena import Arena
from hotkv_sparse.cuda.device import Array
from hotkv_sparse.cuda.mapped_arena import MappedArena
from hotkv_sparse.cuda.residents import EngineBatch, NamedRow, PagePlaces
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import Workspace
from hotkv_sparse.vllm.cuda.sequences import CudaSequence, CudaSequences, DeviceArena
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.step import FileId, ResidentStep
from hotkv_vllm import link

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
logger = link.logger
NO_ROWS = np.empty(0, np.int32)
ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """A layer as the worker's kernels use it.

    scale: factor of attention scores.
    pages: [P, H, T, 2 * D]: pages, KV heads, tokens of a block, channels of key and value.
    query_scale: what queries in fp8 must be multiplied by, [1] or [H].
    """

    name: str
    scale: float
    selector: CudaSelector
    places: PagePlaces
    pages: torch.Tensor
    query_scale: torch.Tensor | None = None


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
        self.sequences.age_reports()
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
        self.sequences.lose_named(step.lost)
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
        away = [one for one in self._step if not one.is_sparse and one.num_freed]
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
        if query.dtype.itemsize == 1:
            query = self._dequantized(layer, query)
        kind = str(query.dtype).removeprefix("torch.")
        queries = Queries(query, kind, query.stride(0), query.stride(1))
        selector.hot.grow()
        selector.step(queries, layer.scale)

    @staticmethod
    def _dequantized(layer: CudaLayer, query: torch.Tensor) -> torch.Tensor:
        assert layer.query_scale is not None, "a query in fp8 without a scale"
        scale = layer.query_scale.reshape(1, -1, 1, 1)
        grouped = query.reshape(len(query), scale.shape[1], -1, query.shape[-1])
        return (grouped.float() * scale).reshape(query.shape)

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
        away = [one for one in self._step if one.num_freed and not one.is_lost]
        if away:
            faults = self._work.device.read(self._work.faults)
            self._counted["resident_pulled_pages"] += int(faults[2])
            if faults.any():
                self._work.device.write(self._work.faults, (0,), np.zeros(3, np.int32))
            if faults[0] or faults[1]:
                self.sequences.lose_away(self._step, "blocks had no slot or no address")
            for sequence in away:
                if not sequence.is_lost and not sequence.is_pinned():
                    self.sequences.lose(sequence, "the server pins it no more")
        self._step = []

    def take_lost(self) -> set[int]:
        """First blocks of newly lost requests. Called after a step's last layer; may wait for
        the device."""
        self.find_lost()
        return self.sequences.take_reports()

    def all_away(self) -> set[int]:
        return self.sequences.all_away()

    def take_counters(self) -> dict[str, float]:
        counted, self._counted = self._counted, Counter()
        return dict(counted)
