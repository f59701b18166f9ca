"""Decides to which blocks each request of a batch attends, and copies the pages that this needs, in
a CPU engine with residency. There the old blocks of a long context are not in the engine's own KV
cache ("on the device"), but only in the server's arena, which the engine maps. A page is the KV of
a block in one layer; a row is a request of the batch.

Each row is treated in one of three ways, separately in each layer:
- Sparse: the scheduler says which rows decode with sparse attention. For such a row the worker
  chooses a *hot set* (the blocks to attend to), as `sparse.worker.SparseWorker` does. Chosen blocks
  that are not on the device are copied into the request's *hot slots*. Hot slots are blocks of
  vLLM's pool, so one call of vLLM's attention serves the whole batch.
- Sparse, but short: if a hot set has room for the whole context, no choice is needed. If the hot
  slots have room too, all blocks that are not on the device are copied into them, once.
- Dense: all other rows, and all rows of a layer in which the choice raised an exception, attend to
  their whole context. If blocks of such a context are not on the device, the pages of the whole
  batch are copied side by side into a *staging area*, and attention reads this area.

Always true: attention reads no freed block. A page copied from the arena is valid only if the
server still pinned the block after the copy. If it did not (`find_lost`), the request is reported
as lost: vLLM drops the token of the step and computes the request anew.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse import SparseConfig, build
from hotkv_sparse.selection import Source
from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.residency.pages import LostBytesError, ResidentPages, SlotPlaces, staged_places
from hotkv_vllm.residency.sequences import (
    MORE_ROWS,
    KeptRows,
    ResidentSequence,
    ResidentSequences,
)
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.sparse.batch import Batch, Context, Rewrite, SparseLayer, SparseRow, StepPlan
from hotkv_vllm.sparse.first_prompt import NO_TURNING, Turning
from hotkv_vllm.sparse.worker import SparseWorker

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer[Any]]
NOTHING = np.empty(0, np.int64)
BUILD_PAGES = 64
"""Number of blocks whose pages are copied from the arena at a time, to build sketches of the
blocks. A sketch is a compact form of a block's keys, by which blocks are chosen."""


@dataclass(slots=True)
class BatchRow:
    """A row of vLLM's batch (a request of the step), with the worker's record of its request.

    sequence: the worker's record of the request.
    context_tokens: length of the context, including the step's tokens.
    blocks: the row's block table: by position, the id of the block on the device, int32. Entries of
        blocks that were freed on the device must not be used.
    whole_table: only for a request whose hot slots (device blocks for copies) hold copies of all
        its freed blocks: `blocks` with the ids of the hot slots in place of the freed blocks. None
        until a layer needs it.
    """

    sequence: ResidentSequence
    context_tokens: int
    blocks: I32
    whole_table: I32 | None = None

    def is_away(self, positions: Positions, num_sinks: int) -> npt.NDArray[np.bool_]:
        """Returns a mask of `positions`: True if the block at the position is only in the server's
        arena.

        positions: positions of blocks in the context.
        num_sinks: number of the context's first blocks that always stay on the device (sinks).
        """
        away: npt.NDArray[np.bool_] = (positions >= num_sinks) & (
            positions < self.sequence.num_freed
        )
        return away


@dataclass(slots=True)
class ResidentPlan(StepPlan):
    """A step's plan (`StepPlan`) with the requests of the batch.

    residents: by index of the row in the batch, its request. Lacks rows that the scheduler's
        message does not list.
    """

    residents: dict[int, BatchRow] = field(default_factory=dict)


class ResidentWorker(SparseWorker):
    """Decides which blocks each row (request) of a batch attends to, and copies blocks that are not
    on the device from the server's arena, as the module describes. Used by one thread.

    residents: the requests, with the addresses of their blocks in the arena.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: list[SparseLayer],
        places: SlotPlaces,
        recall_steps: int = 0,
        turning: Turning = NO_TURNING,
        longest_blocks: int = 0,
    ) -> None:
        """Creates a worker without requests; each step's message from the scheduler names them.

        layers: the layers with sparse attention, in the order in which they attend.
        places: where the layers' pages are in a slot of the arena.
        recall_steps: ignored, because this worker compares no selection with exact attention
            (`_is_sampled`).
        turning: how the model's RoPE rotates keys by their position. The calibration of a layer
            (computing mean and axes of its keys) needs it.
        longest_blocks: number of blocks of the longest context that vLLM admits.
        """
        super().__init__(config, layers, recall_steps, turning)
        self._num_sinks = -(-config.sink_tokens // layers[0].shape.block_tokens)
        self._kept = KeptRows(self.sketches)
        self._pages = ResidentPages(layers, places, longest_blocks)
        self.residents = ResidentSequences(self._kept)

    def __repr__(self) -> str:
        return f"ResidentWorker({self.residents}, {self._kept}, {self.sketches})"

    # ---------------------------------------------------------------------------------------- steps

    def begin_resident(self, step: ResidentStep) -> None:
        """Processes the scheduler's message about the requests of the coming step."""
        for request_id in step.preempted:
            self.end(request_id)
        self.residents.begin_step(step.rows)
        self.residents.lose_named(step.lost)

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self.residents.end(request_id)

    def start_over(self) -> None:
        """Handles a step without the scheduler's message, so that it is not known where blocks are.
        Reports requests with blocks only in host memory as lost, so that vLLM computes them anew.
        Then forgets all requests."""
        self.residents.begin_step(())
        self.residents.forget_all("a step's plan was lost")
        super().start_over()

    def take_counters(self) -> dict[str, float]:
        return {**super().take_counters(), **self._pages.take_counters()}

    def gave_up(self, layer_name: str) -> None:
        """Handles a layer in which hotkv's code raised, so that vLLM's own attention ran with the
        unchanged block tables. For requests with blocks only in host memory, it has read blocks
        that were freed. These requests are marked as lost, and vLLM computes them anew."""
        super().gave_up(layer_name)
        for sequence in self.residents.of_step.values():
            if sequence.num_freed > self._num_sinks:
                self.residents.lose(sequence, f"attention of {layer_name} broke")

    # --------------------------------------------------------------------------------------- layers

    def attend(
        self,
        layer: SparseLayer,
        key: object,
        batch: Callable[[], Batch],
        query_of: Callable[[int], F32],
    ) -> Rewrite | None:
        """Decides which blocks the rows (requests) attend to in this layer, and copies the pages
        that are not on the device. Returns the block tables with which vLLM's attention must run,
        or None if it can run with its own. If the result has a staging area (`Rewrite.pages`, a
        copy of all pages that the batch needs), attention must read this area in place of the
        layer's KV cache.

        key: vLLM's metadata object of the step. The worker plans a step once per such object and
            KV cache group.
        batch: returns the step's batch; called when the plan is made.
        query_of: takes the index of a token in the batch, and returns the token's query in this
            layer, float32 [query heads, channels].
        """
        plan = self._plans.get(layer.group)
        if not isinstance(plan, ResidentPlan) or plan.key is not key:
            plan = self._plans[layer.group] = self._resident_plan(layer, key, batch())
        for one in plan.residents.values():
            try:
                self._keep(layer, one)
            except (LostBytesError, IndexError, ValueError) as error:
                self.residents.lose(one.sequence, f"its sketches can't be had: {error}")
        began_s = time.perf_counter()
        chosen = self._chosen(layer, plan, query_of)
        if plan.rows:
            self._counters.add(layer.index, "select_s", time.perf_counter() - began_s)
        return self._rewritten(layer, plan, chosen)

    def _resident_plan(self, layer: SparseLayer, key: object, batch: Batch) -> ResidentPlan:
        """Plans a step: finds out which request each row of the batch belongs to, and which rows
        attend sparsely. Also discards the sketches (compact forms of keys) of blocks that
        the step overwrites."""
        tokens, plan = layer.shape.block_tokens, ResidentPlan(key, batch)
        self._forget_written(layer, batch)
        num_queries = np.diff(batch.starts)
        for row in np.flatnonzero(num_queries > 0).tolist():
            context = int(batch.seq_lens[row])
            blocks = batch.tables[row, : -(-context // tokens)].copy()
            sequence = self.residents.of_step.get(int(blocks[-1]))
            if sequence is None:
                self.residents.lose_unnamed(int(blocks[0]), bool((blocks == NULL_BLOCK).any()))
                continue
            one = BatchRow(sequence, context, blocks)
            plan.residents[row] = one
            self._give_rows(one, tokens)
            request_id = self._named(int(blocks[-1]), int(num_queries[row]))
            if request_id is not None:
                kept = sequence.rows[: len(blocks)]
                about = Context(self._config, context, tokens)
                token = int(batch.starts[row])
                plan.rows.append(SparseRow.of(row, token, request_id, blocks, kept, about))
        return plan

    # ------------------------------------------------------------------------------ sketches

    def _give_rows(self, one: BatchRow, block_tokens: int) -> None:
        """Allocates memory (rows of `KeptRows`) for the sketches of the context's blocks, if
        the request's decode steps may attend sparsely. A sketch is a compact form of a
        block's keys, by which blocks are chosen."""
        sequence, count = one.sequence, len(one.blocks)
        if self._is_kept(one) and count > len(sequence.rows):
            ahead = max(16, min(len(sequence.rows), MORE_ROWS))
            more = max(count - len(sequence.rows), ahead)
            sequence.rows = np.concatenate([sequence.rows, self._kept.take(more)])

    def _is_kept(self, one: BatchRow) -> bool:
        return one.sequence.may_outgrow or one.context_tokens >= self._config.min_context_tokens

    def _keep(self, layer: SparseLayer, one: BatchRow) -> None:
        """Stores, in the request's rows of `KeptRows`, the sketches (compact forms of keys)
        of the blocks that have become complete since the last call for this layer."""
        sequence, index = one.sequence, layer.index
        known = sequence.num_kept.get(index, 0)
        complete = one.context_tokens // layer.shape.block_tokens
        is_kept = complete > known and self._is_kept(one)
        if not is_kept or not self.sketches.is_calibrated(index):
            return
        positions = np.arange(known, complete)
        is_away = one.is_away(positions, self._num_sinks)
        here = positions[~is_away]
        if len(here):
            blocks = one.blocks[here]
            self._update(index, [blocks])
            self._kept.copy(index, sequence.rows[here], blocks)
        if is_away.any():
            self._keep_away(layer, sequence, positions[is_away])
        sequence.num_kept[index] = complete

    def _keep_away(
        self, layer: SparseLayer, sequence: ResidentSequence, positions: Positions
    ) -> None:
        """Does the same as `_keep` for blocks that are only in the arena. Copies a sketch
        (compact form of keys) from the arena if the server has it, and otherwise builds it from the
        block's keys.

        positions: positions of these blocks in the context.
        """
        sources = self._kept.sources(layer.index)
        has_own = sequence.sketches[positions] >= 0
        there, missing = positions[has_own], positions[~has_own]
        if len(there):
            sequence.has_read = True
            slots = sequence.sketches[there]
            for name, source in sources.items():
                self._pages.copy_rows(layer, name, source.pool, sequence.rows[there], slots)
            self._counters.add(layer.index, "loaded_blocks", len(there))
        for start in range(0, len(missing), BUILD_PAGES):
            began_s = time.perf_counter()
            part = missing[start : start + BUILD_PAGES]
            slots = self._pages.slots(sequence, part)
            pages = self._pages.staging.fill(layer, slots, NOTHING, goes_on=False)
            keys = layer.pages.over(pages).keys_of(np.arange(len(part), dtype=np.int32))
            for name, source in sources.items():
                source.pool[sequence.rows[part]] = build(name, keys, source.mu, axes=source.axes)
            self._counters.add(layer.index, "built_blocks", len(part))
            self._counters.add(layer.index, "build_s", time.perf_counter() - began_s)

    def _sources(self, layer: SparseLayer) -> Mapping[str, Source]:
        return self._kept.sources(layer.index)

    def _is_sampled(self, layer: SparseLayer) -> bool:
        """Returns False: no choice of blocks is compared with exact attention, because most keys of
        the context are not on the device."""
        return False

    # ------------------------------------------------------------------------------------ rewriting

    def _chosen(
        self, layer: SparseLayer, plan: ResidentPlan, query_of: Callable[[int], F32]
    ) -> dict[int, I32]:
        """Chooses blocks for the sparse rows. Returns, by row, the positions of the blocks to
        attend to, for each row whose block table must be rewritten (`_hot_table`): it leaves out
        blocks, or uses hot slots (device blocks for copies). Returns nothing for the other rows, or
        if an exception was raised: all rows then attend to their whole context.

        query_of: takes the index of a token in the batch, and returns the token's query.
        """
        chosen: dict[int, I32] = {}
        is_resting = self.is_off or self._faults.rests(layer.name, self._num_steps)
        if is_resting or not self.sketches.is_calibrated(layer.index):
            return chosen
        for row in plan.rows:
            if plan.residents[row.row].sequence.is_lost:
                continue
            try:
                found = self._select(layer, row, query_of)
            except Exception:  # noqa: BLE001 - as in `backend`: the layer attends to everything
                self.fault(layer.name)
                return {}
            one = plan.residents[row.row]
            fits = row.attends_to_all and 0 < self._num_away(one) <= len(one.sequence.hot_blocks)
            if fits or self._leaves_out(row, found):
                chosen[row.row] = found
        if plan.rows:
            self._faults.good_step(layer.name)
        return chosen

    def _num_away(self, one: BatchRow) -> int:
        """Returns how many blocks of the row are not on the device."""
        return max(0, one.sequence.num_freed - self._num_sinks)

    def _rewritten(
        self, layer: SparseLayer, plan: ResidentPlan, chosen: dict[int, I32]
    ) -> Rewrite | None:
        whole = {
            row: one
            for row, one in plan.residents.items()
            if row not in chosen and self._num_away(one)
        }
        tables: dict[int, I32] = {}
        for row, positions in chosen.items():
            one = plan.residents[row]
            try:
                tables[row] = self._hot_table(layer, one, positions)
            except (LostBytesError, IndexError) as error:
                self.residents.lose(one.sequence, str(error))
                tables[row] = one.blocks[positions]
        if not tables and not whole:
            return None
        rewrite = plan.rewritten_with(tables, layer.shape.block_tokens)
        if whole:
            self._stage(layer, plan, rewrite, whole)
        return rewrite

    def _hot_table(self, layer: SparseLayer, one: BatchRow, positions: I32) -> I32:
        """Returns the block table with which a decode row attends to the blocks at `positions` in
        this layer. A block that is not on the device gets a hot slot (device block for copies): the
        page is copied into it, unless it is there already, and the table has the hot slot's id."""
        sequence = one.sequence
        chosen = self._sequences.get(sequence.request_id)
        own = None if chosen is None else chosen.layers.get(layer.name)
        if own is None:
            return self._whole_table(layer, one, positions)
        table = one.blocks[positions]
        # `positions` ascend, and the blocks that are not on the device are one range of positions.
        edges = positions.searchsorted((self._num_sinks, sequence.num_freed)).tolist()
        if edges[0] < edges[1]:
            run = slice(*edges)
            slots = own.slots_of(positions[run])
            table[run] = self._pages.fill_hot_slots(layer, sequence, slots, positions[run])
        return table

    def _whole_table(self, layer: SparseLayer, one: BatchRow, positions_C: I32) -> I32:
        """Returns a block table with which a decode row attends to its whole context in this layer.
        Blocks that were freed on the device get hot slots (device blocks for copies): copies their
        pages from the arena into the hot slots, unless they are there already. Raises
        LostBytesError if the row has too few hot slots. In each layer hot slot i holds the i-th
        freed block, so all layers of a step share this table.

        positions_C: the positions of all C blocks of the context: 0, 1, 2, ...
        """
        sequence, away = one.sequence, slice(self._num_sinks, one.sequence.num_freed)
        held, slots = positions_C[away], positions_C[: away.stop - away.start]
        content = sequence.hot_content(layer.index)[: len(held)]
        if not np.array_equal(content, held):
            self._pages.fill_hot_slots(layer, sequence, slots, held)
        if one.whole_table is None:
            one.whole_table = one.blocks.copy()
            one.whole_table[away] = sequence.hot_blocks[slots]
        return one.whole_table

    def _stage(
        self, layer: SparseLayer, plan: ResidentPlan, rewrite: Rewrite, whole: dict[int, BatchRow]
    ) -> None:
        """Copies all pages that the batch needs side by side into a staging area, because the pages
        of `whole` are in two memories and attention can read only one. Changes the block tables in
        `rewrite` to positions of pages in this area.

        whole: by row, the requests that attend to their whole context although blocks of it are
            only in host memory.
        """
        rows = np.flatnonzero(np.diff(plan.batch.starts) > 0).tolist()
        counts = [-(-int(rewrite.seq_lens[row]) // layer.shape.block_tokens) for row in rows]
        slots, masks = [NOTHING], []
        for row, count in zip(rows, counts, strict=True):
            is_away = np.zeros(count, np.bool_)
            if row in whole:
                one = whole[row]
                away = np.flatnonzero(one.is_away(np.arange(count), self._num_sinks))
                try:
                    slots.append(self._pages.slots(one.sequence, away))
                    is_away[away] = True
                except LostBytesError as error:
                    self.residents.lose(one.sequence, str(error))
            masks.append(is_away)
        tables = [rewrite.tables[row, :count] for row, count in zip(rows, counts, strict=True)]
        blocks, is_away = np.concatenate(tables), np.concatenate(masks)
        here = self._pages.on_device(layer, layer.pages.tensor, blocks[~is_away])
        parts = np.split(staged_places(is_away), np.cumsum(counts)[:-1])
        for table, places in zip(tables, parts, strict=True):
            table[:] = places
        plan.written = dict.fromkeys(rows, blocks)
        self._pages.counted["resident_staged_pages"] += len(blocks)
        rewrite.pages = self._pages.staging.fill(layer, np.concatenate(slots), here)
