"""Decides to which blocks each row of a batch attends in a CPU engine with residency, and copies
the pages that this needs from the mapped arena. "On the device" means in the engine's own KV cache.

Each row is treated in one of three ways, separately in each layer:
- Sparse: a row that the scheduler lists. The hot set is chosen as by `worker.SparseWorker`;
  blocks that are not on the device are copied into hot slots. These are blocks of vLLM's pool, so
  one call of attention serves the batch.
- Sparse, but short: a hot set has room for the whole context. If the hot slots have room too, all
  blocks that are not on the device are copied into them, once.
- Dense: all other rows, and all rows of a layer in which the choice raised. If blocks of such a
  context are not on the device, the pages of the whole batch are copied side by side into a
  *staging area*, which attention reads.

Always true: attention reads no freed block. A page copied from the arena is valid only if its
block was still pinned afterwards. If not (`find_lost`), the request is reported as lost: vLLM
drops the step's token and computes it anew.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse import SparseConfig, build
from hotkv_sparse.selection import Source
from hotkv_sparse.vllm.cpu.batch import (
    Batch,
    Context,
    Rewrite,
    SparseLayer,
    SparseRow,
    StepPlan,
    settled_tokens,
)
from hotkv_sparse.vllm.cpu.first_prompt import NO_TURNING, Turning
from hotkv_sparse.vllm.cpu.resident_pages import (
    LostBytesError,
    ResidentPages,
    SlotPlaces,
    staged_places,
)
from hotkv_sparse.vllm.cpu.resident_sequences import (
    MORE_ROWS,
    KeptRows,
    ResidentSequence,
    ResidentSequences,
)
from hotkv_sparse.vllm.cpu.swap import OptimizedSwapHandler, PageCopier, SwapIn
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.step import ResidentStep
from hotkv_vllm.compat import NULL_BLOCK

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Positions = npt.NDArray[np.integer[Any]]
NOTHING = np.empty(0, np.int64)
BUILD_PAGES = 64
"""Copied from the arena at a time, to build sketches."""


@dataclass(slots=True)
class BatchRow:
    """A row of vLLM's batch with its request.

    context_tokens: with the step's tokens.
    settled_tokens: without drafts.
    blocks: the block table, int32. Entries of freed blocks must not be used.
    whole_table: `blocks` with hot slots in place of the freed blocks, if these all have copies
        there. None until a layer needs it.
    """

    sequence: ResidentSequence
    context_tokens: int
    settled_tokens: int
    blocks: I32
    whole_table: I32 | None = None

    def is_away(self, positions: Positions, num_sinks: int) -> npt.NDArray[np.bool_]:
        """Mask of the positions whose blocks are only in the arena."""
        away: npt.NDArray[np.bool_] = (positions >= num_sinks) & (
            positions < self.sequence.num_freed
        )
        return away


@dataclass(slots=True)
class ResidentPlan(StepPlan):
    """A `StepPlan` with the rows' requests.

    residents: by index of the row; lacks rows that the scheduler's message does not list.
    """

    residents: dict[int, BatchRow] = field(default_factory=dict)


class ResidentWorker(SparseWorker):
    """Used by one thread."""

    def __init__(
        self,
        config: SparseConfig,
        layers: list[SparseLayer],
        places: SlotPlaces,
        turning: Turning = NO_TURNING,
        longest_blocks: int = 0,
        *,
        most_drafts: int = 0,
    ) -> None:
        """layers: in the order in which they attend."""
        super().__init__(config, layers, turning, most_drafts=most_drafts)
        self._num_sinks = -(-config.sink_tokens // layers[0].shape.block_tokens)
        self._kept = KeptRows(self.sketches)
        self.swap = OptimizedSwapHandler(PageCopier(method=config.copy_method))
        self._pages = ResidentPages(layers, places, self.swap, longest_blocks)
        self.residents = ResidentSequences(self._kept)

    def __repr__(self) -> str:
        return f"ResidentWorker({self.residents}, {self._kept}, {self.sketches})"

    # ---------------------------------------------------------------------------------------- steps

    def begin_resident(self, step: ResidentStep) -> None:
        for request_id in step.preempted:
            self.end(request_id)
        self.residents.begin_step(step.rows)
        self.residents.lose_named(step.lost)

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self.residents.end(request_id)

    def start_over(self) -> None:
        """Forgets all requests, because the scheduler's message was missing. Those with blocks
        only in host memory are lost."""
        self.residents.begin_step(())
        self.residents.forget_all("a step's plan was lost")
        super().start_over()

    def take_counters(self) -> dict[str, float]:
        return {**super().take_counters(), **self._pages.take_counters()}

    def gave_up(self, layer_name: str) -> None:
        """vLLM's own attention has run and read freed blocks: requests that have some are lost."""
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
        """Decides what rows attend to, and copies the pages. Returns the block tables with which
        vLLM's attention must run; None if its own are right. With a staging area (`Rewrite.pages`)
        attention must read this.

        key: vLLM's metadata object; a step is planned once per object and group.
        batch: called when the plan is made.
        query_of: token in the batch to query, float32 [query heads, channels].
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
        """Finds each row's request and the sparse rows, and discards the sketches of blocks that
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
            settled = settled_tokens(context, int(num_queries[row]), self._most_drafts)
            one = BatchRow(sequence, context, settled, blocks)
            plan.residents[row] = one
            self._give_rows(one, tokens)
            request_id = self._request_of.get(int(blocks[-1]))
            if request_id is not None:
                kept = sequence.rows[: len(blocks)]
                about = Context(self._config, context, tokens)
                own = range(*batch.starts[row : row + 2].tolist())
                plan.rows.append(SparseRow.of(row, own, request_id, blocks, kept, about))
        return plan

    # ------------------------------------------------------------------------------ sketches

    def _give_rows(self, one: BatchRow, block_tokens: int) -> None:
        sequence, count = one.sequence, len(one.blocks)
        if self._is_kept(one) and count > len(sequence.rows):
            ahead = max(16, min(len(sequence.rows), MORE_ROWS))
            more = max(count - len(sequence.rows), ahead)
            sequence.rows = np.concatenate([sequence.rows, self._kept.take(more)])

    def _is_kept(self, one: BatchRow) -> bool:
        return one.sequence.may_outgrow or one.context_tokens >= self._config.min_context_tokens

    def _keep(self, layer: SparseLayer, one: BatchRow) -> None:
        """Stores sketches of newly complete blocks in `KeptRows`."""
        sequence, index = one.sequence, layer.index
        known = sequence.num_kept.get(index, 0)
        complete = one.settled_tokens // layer.shape.block_tokens
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
        """As `_keep`, for blocks in the arena: copies their sketches, or builds those that the
        server lacks from the keys."""
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
        """Never: most keys of the context are not on the device."""
        return False

    # ------------------------------------------------------------------------------------ rewriting

    def _chosen(
        self, layer: SparseLayer, plan: ResidentPlan, query_of: Callable[[int], F32]
    ) -> dict[int, I32]:
        """Positions to attend to, for each sparse row whose block table must be rewritten
        (`_hot_table`). Empty if that raised: all rows then attend to their whole context."""
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
        swaps: list[SwapIn] = []
        for row, positions in chosen.items():
            one = plan.residents[row]
            try:
                tables[row], swap_in = self._hot_table(layer, one, positions)
            except (LostBytesError, IndexError) as error:
                self.residents.lose(one.sequence, str(error))
                tables[row], swap_in = one.blocks[positions], None
            if swap_in is not None:
                swaps.append(swap_in)
        if swaps:
            self.swap.transfer_async(layer.index, SwapIn.joined(swaps))
            self.swap.wait((layer.index,))
        if not tables and not whole:
            return None
        rewrite = plan.rewritten_with(tables, layer.shape.block_tokens)
        if whole:
            self._stage(layer, plan, rewrite, whole)
        return rewrite

    def _hot_table(
        self, layer: SparseLayer, one: BatchRow, positions: I32
    ) -> tuple[I32, SwapIn | None]:
        """Block table of a decode row, and the pages to copy into hot slots first."""
        chosen = self._sequences.get(one.sequence.request_id)
        own = None if chosen is None else chosen.layers.get(layer.name)
        if own is None:
            return self._whole_table(layer, one, positions)
        return self._pages.hot_table(
            layer, one.sequence, own.slots_of, one.blocks, positions, self._num_sinks
        )

    def _whole_table(
        self, layer: SparseLayer, one: BatchRow, positions_C: I32
    ) -> tuple[I32, SwapIn | None]:
        """Block table of the whole context, with hot slots for the freed blocks. Raises
        LostBytesError if the row has too few. In each layer hot slot i holds the i-th freed
        block, so all layers of a step share this table."""
        sequence, away = one.sequence, slice(self._num_sinks, one.sequence.num_freed)
        held, slots = positions_C[away], positions_C[: away.stop - away.start]
        content = sequence.hot_content(layer.index)[: len(held)]
        swap_in = None
        if not np.array_equal(content, held):
            _, swap_in = self._pages.hot_slots(layer, sequence, slots, held)
        if one.whole_table is None:
            one.whole_table = one.blocks.copy()
            one.whole_table[away] = sequence.hot_blocks[slots]
        return one.whole_table, swap_in

    def _stage(
        self, layer: SparseLayer, plan: ResidentPlan, rewrite: Rewrite, whole: dict[int, BatchRow]
    ) -> None:
        """Copies all pages of the batch into a staging area, because those of `whole` are in two
        memories and attention reads one. Tables in `rewrite` become positions in this area."""
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
