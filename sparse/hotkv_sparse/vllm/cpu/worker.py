"""Decides, for every layer of a step in a CPU engine, the hot set of each row. vLLM's attention
then runs with a shorter block table.

Always true:
- Only rows that the scheduler lists (`scheduler.rows`) may attend sparsely; all others retain their
  block table and length.
- A hot set is in the order of the context and includes its last block. So the length in the row's
  metadata is right: all blocks but the last are full.
- If the hot set is the whole context, the row is unchanged, so its attention is exact.

Attention is dense in rows that are not listed, in layers without a worker, in layers whose sketches
can't be built yet, and for a while in layers that keep failing.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a
    block.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_sparse import SparseConfig
from hotkv_sparse.selection import Source
from hotkv_sparse.vllm.cpu.batch import (
    Batch,
    Context,
    Rewrite,
    SparseLayer,
    SparseRow,
    StepPlan,
    by_kv_head,
    settled_tokens,
)
from hotkv_sparse.vllm.cpu.counters import LayerCounters, measure
from hotkv_sparse.vllm.cpu.first_prompt import NO_TURNING, FirstPrompt, Turning
from hotkv_sparse.vllm.cpu.pool import BlockReprManager
from hotkv_sparse.vllm.cpu.sequence import Attended, LayerDecoder, LayerSequence
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_vllm import link

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
logger = link.logger
NOTHING = np.empty(0, np.int32)
RECALL_STEPS = 256
"""Once in so many decode steps, one layer's selection is measured against exact attention."""
MAX_IN_A_ROW = 3
FIRST_REST_STEPS = 16
LONGEST_REST_STEPS = 4096


# ------------------------------------------------------------------------------------------- faults


@dataclass(slots=True)
class _Trouble:
    in_a_row: int = 0
    rest_steps: int = FIRST_REST_STEPS
    until_step: int = 0


class LayerFaults:
    """Turns sparse attention off for a layer that keeps failing: exceptions would cost more than
    dense attention.

    After `MAX_IN_A_ROW` faults a layer attends densely for `FIRST_REST_STEPS` steps. Each
    further fault doubles these, up to `LONGEST_REST_STEPS`; a step without a fault resets all. A
    layer's first fault and first rest are logged.
    """

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._said: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        counts = (f"{name}: {trouble.in_a_row}" for name, trouble in self._troubles.items())
        return f"LayerFaults({', '.join(counts)})"

    def rests(self, layer_name: str, step: int) -> bool:
        trouble = self._troubles.get(layer_name)
        return trouble is not None and step < trouble.until_step

    def good_step(self, layer_name: str) -> None:
        if self._troubles:
            self._troubles.pop(layer_name, None)

    def broke(self, layer_name: str, step: int) -> None:
        """Must be called while the exception is handled, because it is logged."""
        trouble = self._troubles.setdefault(layer_name, _Trouble())
        trouble.in_a_row += 1
        if self._is_new(layer_name, "fault"):
            logger.exception(
                "hotkv: sparse attention of %s broke; the layer attends to everything in this step",
                layer_name,
            )
        if trouble.in_a_row < MAX_IN_A_ROW:
            return
        trouble.until_step = step + 1 + trouble.rest_steps
        if self._is_new(layer_name, "rest"):
            message = (
                "hotkv: sparse attention of %s broke %d times in a row; it rests for %d "
                "steps, and longer should it break again"
            )
            logger.warning(message, layer_name, trouble.in_a_row, trouble.rest_steps)
        trouble.rest_steps = min(2 * trouble.rest_steps, LONGEST_REST_STEPS)

    def _is_new(self, layer_name: str, what: str) -> bool:
        is_new = (layer_name, what) not in self._said
        self._said.add((layer_name, what))
        return is_new


# --------------------------------------------------------------------------------------- the worker


@dataclass(slots=True)
class _Sequence:
    """layers: hot sets by layer name.
    selected: mask over the context's blocks, selected by any layer since the last report to the
        server.
    """

    layers: dict[str, LayerSequence] = field(default_factory=dict)
    selected: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def selected_of(self, num_blocks: int) -> npt.NDArray[np.bool_]:
        """Enlarged for a context of `num_blocks`."""
        if num_blocks > len(self.selected):
            self.selected = np.concatenate([self.selected, np.zeros(max(num_blocks, 64), np.bool_)])
        return self.selected


class SparseWorker:
    """Owns the sketches, the hot sets of all requests, and the counters of a rank. Used by one
    thread.

    layers: that may attend sparsely, by name.
    most_drafts: that speculative decoding adds to a row.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: list[SparseLayer],
        turning: Turning = NO_TURNING,
        *,
        most_drafts: int = 0,
    ) -> None:
        self._config = config
        self._most_drafts = most_drafts
        self.layers = {layer.name: layer for layer in layers}
        self._order = {layer.name: place for place, layer in enumerate(layers)}
        self.sketches = BlockReprManager(
            {layer.index: layer.shape for layer in layers},
            {layer.index: layer.keys_of for layer in layers},
        )
        self.first_prompt = FirstPrompt.of(layers, turning, self.sketches.calibrate)
        self._sequences: dict[str, _Sequence] = {}
        # Request id of each listed row, by the id of its last block.
        self._request_of: dict[int, str] = {}
        self._plans: dict[int, StepPlan] = {}
        self._num_steps = self._sampled_step = 0
        self._faults = LayerFaults()
        self._decoders = {layer.index: LayerDecoder(config, layer) for layer in layers}
        self._counters = LayerCounters(layer.index for layer in layers)
        self.is_off = False
        """For good: all layers attend to everything."""

    def __repr__(self) -> str:
        return (
            f"SparseWorker(layers {len(self.layers)}, sequences {len(self._sequences)}, "
            f"{self.sketches})"
        )

    # ---------------------------------------------------------------------------------------- steps

    def begin_step(self, rows: SparseRows) -> None:
        for request_id in rows.ended:
            self.end(request_id)
        self._request_of = dict(zip(rows.block_ids, rows.request_ids, strict=True))
        self._plans.clear()
        self._num_steps += bool(rows.request_ids)

    def end(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def start_over(self) -> None:
        """A step came without the scheduler's message: discards all hot sets and sketches."""
        self._request_of, self._plans, self._sequences = {}, {}, {}
        self.sketches.forget_all()

    def will_write(self, blocks: I32) -> None:
        """Discards the sketches of blocks that are about to be written."""
        self.sketches.forget(blocks)

    def build(self, group: int, blocks: I32) -> None:
        """Builds missing sketches of complete blocks in all layers of vLLM's group."""
        for index in self._layers_of(group):
            self._update(index, [blocks])

    def loaded(self, group: int, blocks: I32) -> None:
        """The blocks were loaded with their sketches."""
        for index in self._layers_of(group):
            self.sketches.mark_built(index, blocks)
            self._counters.add(index, "loaded_blocks", len(blocks))

    def _layers_of(self, group: int) -> list[int]:
        return [layer.index for layer in self.layers.values() if layer.group == group]

    def take_counters(self) -> dict[str, float]:
        """Growth over all layers, by names of `counter_help.COUNTERS`."""
        return self._counters.take()

    def take_layer_counters(self) -> dict[int, dict[str, float]]:
        """Growth by layer index and names of `hotkv_proto.sparse_counters.SPARSE_COUNTERS`."""
        return self._counters.take_by_layer()

    def take_steps(self) -> dict[str, I32]:
        """Newly selected positions, by request id, ascending, int32. Includes the always
        attended blocks."""
        taken = {}
        for request_id, sequence in self._sequences.items():
            positions = np.flatnonzero(sequence.selected).astype(np.int32)
            if len(positions):
                taken[request_id] = positions
                sequence.selected[positions] = False
        return taken

    def fault(self, layer_name: str) -> None:
        """Counts an exception in a layer and discards its hot sets, which it may have left
        wrong. Must be called while the exception is handled."""
        self._counters.add(self.layers[layer_name].index, "faults", 1)
        for sequence in self._sequences.values():
            sequence.layers.pop(layer_name, None)
        self._faults.broke(layer_name, self._num_steps)
        if self._faults.rests(layer_name, self._num_steps + 1):
            # While the layer rests, it is not tracked which blocks are overwritten.
            layer = self.layers[layer_name]
            self.sketches.forget(np.arange(layer.shape.num_blocks, dtype=np.int32), [layer.index])

    def gave_up(self, layer_name: str) -> None:
        """The backend could not use the selection: all rows attend to everything in this step.
        An exception that is being handled counts as a fault."""
        if sys.exception() is not None:
            self.fault(layer_name)

    # --------------------------------------------------------------------------------------- layers

    def attend(
        self,
        layer: SparseLayer,
        key: object,
        batch: Callable[[], Batch],
        query_of: Callable[[int], F32],
    ) -> Rewrite | None:
        """Chooses the rows' blocks. Returns the tables with which vLLM's attention must run, valid
        until the group's next layer; None if all rows attend to everything. The step's keys must be
        in the pages.

        key: vLLM's metadata object; layers of a group that pass the same one share a plan.
        batch: called when the plan is made.
        query_of: returns the query of a token, given its place in the batch: float32 [query
            heads, channels].
        """
        if self.is_off or self._faults.rests(layer.name, self._num_steps):
            return None
        plan = self._plans.get(layer.group)
        if plan is None or plan.key is not key:
            plan = self._plans[layer.group] = self._planned(layer, key, batch())
        if plan.num_forgets != self.sketches.num_forgets:
            plan.num_forgets = self.sketches.num_forgets
            plan.lacking = self.sketches.lacking(np.concatenate([NOTHING, *plan.complete]))
        if layer.index in plan.lacking:
            self._update(layer.index, plan.complete)
        if not plan.rows or not self.sketches.is_calibrated(layer.index):
            return None
        began_s = time.perf_counter()
        chosen = [(row, self._select(layer, row, query_of)) for row in plan.rows]
        tables = {
            row.row: row.blocks_C[blocks] for row, blocks in chosen if self._leaves_out(row, blocks)
        }
        rewrite = plan.rewritten_with(tables, layer.shape.block_tokens) if tables else None
        self._faults.good_step(layer.name)
        self._counters.add(layer.index, "select_s", time.perf_counter() - began_s)
        return rewrite

    @staticmethod
    def _leaves_out(row: SparseRow, blocks: I32) -> bool:
        return len(blocks) < len(row.blocks_C)

    def _update(self, index: int, blocks: list[I32]) -> None:
        """Builds missing sketches of complete blocks, and counts them."""
        began_s = time.perf_counter()
        num_built = sum(self.sketches.update(index, part) for part in blocks)
        if num_built:
            self._counters.add(index, "built_blocks", num_built)
            self._counters.add(index, "build_s", time.perf_counter() - began_s)

    def _forget_written(self, layer: SparseLayer, batch: Batch) -> None:
        """In all layers of the group."""
        written = batch.written_slots[batch.written_slots >= 0] // layer.shape.block_tokens
        indices = self._layers_of(layer.group)
        self.sketches.forget(np.unique(written).astype(np.int32), indices)

    def _planned(self, layer: SparseLayer, key: object, batch: Batch) -> StepPlan:
        """Finds the sparse rows, and the complete blocks that need sketches."""
        block_tokens, plan = layer.shape.block_tokens, StepPlan(key, batch)
        self._forget_written(layer, batch)
        num_queries, lengths = np.diff(batch.starts), batch.seq_lens
        # All long rows, listed or not: sketches are built before a row becomes sparse.
        is_long = lengths >= self._config.min_context_tokens
        for row in np.flatnonzero(is_long & (lengths > 0) & (num_queries > 0)).tolist():
            context_tokens = int(lengths[row])
            blocks = batch.tables[row, : -(-context_tokens // block_tokens)].copy()
            request_id = self._request_of.get(int(blocks[-1]))
            settled = settled_tokens(context_tokens, int(num_queries[row]), self._most_drafts)
            plan.complete.append(blocks[: settled // block_tokens])
            if request_id is not None:
                context = Context(self._config, context_tokens, block_tokens)
                tokens = range(*batch.starts[row : row + 2].tolist())
                plan.rows.append(SparseRow.of(row, tokens, request_id, blocks, blocks, context))
        return plan

    def _select(self, layer: SparseLayer, row: SparseRow, query_of: Callable[[int], F32]) -> I32:
        """Positions of the blocks that the row attends to, ascending."""
        if row.attends_to_all:
            return row.positions_C
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            sequence = self._sequences[row.request_id] = _Sequence()
        own = sequence.layers.get(layer.name)
        if own is None:
            own = sequence.layers[layer.name] = self._decoders[layer.index].begin()
        query_QD = by_kv_head([query_of(token) for token in row.tokens], layer.shape.kv_heads)
        attended = self._decoders[layer.index].step(
            own,
            self._sources(layer),
            query_QD,
            row.blocks_C,
            row.always_blocks,
            row.always_tokens,
            row.context_tokens,
            row.where,
            sequence.selected_of(len(row.blocks_C)),
        )
        self._counters.add_step(layer.index, attended, len(row.blocks_C), layer.pages.page_bytes)
        if self._is_sampled(layer):
            self._sample(layer, row, query_QD, attended)
        return attended.blocks

    def _sources(self, layer: SparseLayer) -> Mapping[str, Source]:
        """Keyed by format; `SparseRow.blocks_C` are indices in them."""
        return self.sketches.sources(layer.index)

    # ------------------------------------------------------------------------------------- sampling

    def _is_sampled(self, layer: SparseLayer) -> bool:
        """Whether to compare this selection with exact attention: one row and layer in every
        `RECALL_STEPS`-th step, each time in the next layer, because it reads all keys of a
        context."""
        if self._num_steps % RECALL_STEPS:
            return False
        if self._sampled_step == self._num_steps:
            return False
        return self._order[layer.name] == self._num_steps // RECALL_STEPS % len(self._order)

    def _sample(
        self, layer: SparseLayer, row: SparseRow, query_QD: F32, attended: Attended
    ) -> None:
        self._sampled_step = self._num_steps
        tokens, block_tokens = row.context_tokens, layer.shape.block_tokens
        found = measure(
            layer.keys_of,
            query_QD,
            row.blocks_C,
            tokens,
            block_tokens,
            layer.scale,
            attended,
            layer.sinks_of(len(query_QD)),
        )
        self._counters.add(layer.index, "recall_samples", 1)
        self._counters.add(layer.index, "recall", found.recall)
        self._counters.add(layer.index, "true_mass", found.mass)
