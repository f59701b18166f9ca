"""Sparse decode in one rank of a CPU engine: decides, for every layer of a step, which blocks each
row (request) of the batch attends to. The set of these blocks is the row's *hot set* in this layer.
vLLM's attention then runs with a shorter block table, which has only the hot set's blocks.

Always true:
- Only rows that the scheduler lists (`sparse.rows`) may attend sparsely; all other rows retain
  their block table and length.
- The hot set of a sparse row is in the order of the context and includes its last block. So the
  length in the row's metadata is right: all blocks but the last are full.
- If the hot set is the whole context, the row is unchanged, so its attention is exact.

Attention is dense (attends to everything):
- in rows that are not listed,
- in layers to which no worker is attached,
- in layers whose sketches (compact forms of keys, by which blocks are selected) can't be
  built yet,
- for a while in layers that keep failing.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a block.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_sparse import SparseConfig
from hotkv_sparse.decode import Scorer
from hotkv_sparse.selection import Source
from hotkv_vllm import link
from hotkv_vllm.sparse.batch import Batch, Context, Rewrite, SparseLayer, SparseRow, StepPlan
from hotkv_vllm.sparse.counters import LayerCounters, measure
from hotkv_vllm.sparse.first_prompt import NO_TURNING, FirstPrompt, Turning
from hotkv_vllm.sparse.pool import BlockReprManager
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.sparse.sequence import Attended, LayerSequence

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
logger = link.logger
NOTHING = np.empty(0, np.int32)
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
    """Turns sparse attention off for a layer that keeps failing, because an exception in every step
    would cost more than dense attention.

    After `MAX_IN_A_ROW` faults (exceptions) in a row, a layer attends densely for
    `FIRST_REST_STEPS` steps. Each further fault doubles the number of these steps, up to
    `LONGEST_REST_STEPS`. A step without a fault resets the number of faults and of steps. The first
    fault of a layer, and the first time that it is turned off, are logged. The parameter `step` of
    the methods is the number of the present step.
    """

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}
        self._said: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        counts = (f"{name}: {trouble.in_a_row}" for name, trouble in self._troubles.items())
        return f"LayerFaults({', '.join(counts)})"

    def rests(self, layer_name: str, step: int) -> bool:
        """Returns True if sparse attention is turned off for the layer in this step, so that the
        layer attends to everything."""
        trouble = self._troubles.get(layer_name)
        return trouble is not None and step < trouble.until_step

    def good_step(self, layer_name: str) -> None:
        if self._troubles:
            self._troubles.pop(layer_name, None)

    def broke(self, layer_name: str, step: int) -> None:
        """Counts a fault (exception) of the layer, and turns sparse attention off for it if it has
        failed too often in a row. Must be called while the exception is handled, because this
        method logs the exception."""
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
    """The state of a request that decodes sparsely.

    layers: by name of a layer, the request's hot set (the blocks to attend to) in this layer.
    selected: a mask over the blocks of the context, True if any layer has selected the block since
        the last report to the server. By these reports the server knows which blocks are in use.
    """

    layers: dict[str, LayerSequence] = field(default_factory=dict)
    selected: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def selected_of(self, num_blocks: int) -> npt.NDArray[np.bool_]:
        """Returns `selected`, the mask over the blocks of the context. First enlarges it if it is
        too short for a context of `num_blocks`."""
        if num_blocks > len(self.selected):
            self.selected = np.concatenate([self.selected, np.zeros(max(num_blocks, 64), np.bool_)])
        return self.selected


class SparseWorker:
    """Decides which blocks the rows (requests) of a batch attend to, in one rank. Owns the
    sketches (compact forms of blocks' keys, by which blocks are chosen), the hot sets of all
    requests (the blocks to attend to, per layer), and the counters. Used by one thread.

    layers: the layers that may attend sparsely, by name.
    recall_steps: once in this many steps, a choice of blocks is compared with exact attention, for
        the statistics; 0: never.
    turning: how the model's RoPE rotates keys by their position, for `first_prompt`.
    first_prompt: calibrates layers from the first prompts: measures the mean and the principal axes
        of their keys, which some formats of sketches need.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: list[SparseLayer],
        recall_steps: int = 0,
        turning: Turning = NO_TURNING,
    ) -> None:
        self._config = config
        self.layers = {layer.name: layer for layer in layers}
        self._order = {layer.name: place for place, layer in enumerate(layers)}
        self._recall_steps = recall_steps
        self.sketches = BlockReprManager(
            {layer.index: layer.shape for layer in layers},
            {layer.index: layer.keys_of for layer in layers},
        )
        self.first_prompt = FirstPrompt.of(layers, turning, self.sketches.calibrate)
        self._sequences: dict[str, _Sequence] = {}
        self._request_of: dict[int, str] = {}
        self._plans: dict[int, StepPlan] = {}
        self._num_steps = self._sampled_step = 0
        self._faults = LayerFaults()
        self._scorers: dict[int, Scorer] = {}
        self._counters = LayerCounters(layer.index for layer in layers)
        self.is_off = False
        """True once sparse decode is turned off for good: all layers then attend to everything."""

    def __repr__(self) -> str:
        return (
            f"SparseWorker(layers {len(self.layers)}, sequences {len(self._sequences)}, "
            f"{self.sketches})"
        )

    # ---------------------------------------------------------------------------------------- steps

    def begin_step(self, rows: SparseRows) -> None:
        """Processes the scheduler's list of sparse rows for the coming step."""
        for request_id in rows.ended:
            self.end(request_id)
        self._request_of = dict(zip(rows.block_ids, rows.request_ids, strict=True))
        self._plans.clear()
        self._num_steps += bool(rows.request_ids)

    def end(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def start_over(self) -> None:
        """Handles a step without a message from the scheduler: it is not known which rows
        (requests) are sparse, or which blocks the step writes. All its rows attend to everything.
        Discards all hot sets (blocks to attend to) and sketches (compact forms of keys)."""
        self._request_of, self._plans, self._sequences = {}, {}, {}
        self.sketches.forget_all()

    def will_write(self, blocks: I32) -> None:
        """Marks the sketches (compact forms of keys) of `blocks` as not built, because these
        blocks are about to be written, for example by a load."""
        self.sketches.forget(blocks)

    def build(self, group: int, blocks: I32) -> None:
        """Builds the missing sketches (compact forms of keys) of complete blocks, in all
        layers of a KV cache group.

        group: number of the group in vLLM.
        """
        for index in self._layers_of(group):
            self._update(index, [blocks])

    def loaded(self, group: int, blocks: I32) -> None:
        """Marks the sketches (compact forms of keys) of `blocks` as built in all layers of a
        group, because they were loaded with their blocks.

        group: number of the group in vLLM.
        """
        for index in self._layers_of(group):
            self.sketches.mark_built(index, blocks)
            self._counters.add(index, "loaded_blocks", len(blocks))

    def _layers_of(self, group: int) -> list[int]:
        return [layer.index for layer in self.layers.values() if layer.group == group]

    def take_counters(self) -> dict[str, float]:
        """Returns the growth of counters since the last call, summed over all layers, by names of
        `counter_help.COUNTERS`."""
        return self._counters.take()

    def take_layer_counters(self) -> dict[int, dict[str, float]]:
        """Returns the growth of counters since the last call of this method, by layer index and by
        names of `hotkv_proto.reports.SPARSE_COUNTERS`."""
        return self._counters.take_by_layer()

    def take_steps(self) -> dict[str, I32]:
        """Returns, by request id, the positions of the blocks that any layer has selected since the
        last call, ascending, int32. Includes blocks that are always attended. The server is told
        these blocks, so that it does not evict blocks in use."""
        taken = {}
        for request_id, sequence in self._sequences.items():
            positions = np.flatnonzero(sequence.selected).astype(np.int32)
            if len(positions):
                taken[request_id] = positions
                sequence.selected[positions] = False
        return taken

    def fault(self, layer_name: str) -> None:
        """Handles an exception in a layer: counts it, and discards the hot sets (blocks to attend
        to) of all requests in the layer, because the exception may have left them wrong. If the
        layer keeps failing, turns its sparse attention off for a while. Must be called while the
        exception is handled, because this method logs it."""
        self._counters.add(self.layers[layer_name].index, "faults", 1)
        for sequence in self._sequences.values():
            sequence.layers.pop(layer_name, None)
        self._faults.broke(layer_name, self._num_steps)
        if self._faults.rests(layer_name, self._num_steps + 1):
            # Discards the layer's sketches (compact forms of keys), because it is not
            # tracked which blocks are overwritten while the layer's sparse attention is off.
            layer = self.layers[layer_name]
            self.sketches.forget(np.arange(layer.shape.num_blocks, dtype=np.int32), [layer.index])

    def gave_up(self, layer_name: str) -> None:
        """Handles that the backend could not use the chosen blocks in a layer, so that all rows
        (requests) attend to everything in this step. If an exception is being handled, it counts as
        a fault of the layer (`fault`)."""
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
        """Chooses the blocks that the rows (requests) of the batch attend to in `layer`. Returns
        the block tables with which vLLM's attention must run, or None if all rows attend to
        everything. The step's keys must be in the pages already. The result is valid until `attend`
        is called for the next layer of the KV cache group.

        key: vLLM's metadata object of the step. Layers of a group that pass the same object share
            one plan of the step.
        batch: a function that returns the step's batch; called when the plan is made.
        query_of: takes the index of a token in the batch, and returns the token's query in this
            layer, float32 [query heads, channels].
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
        """Returns True if the row (request) does not attend to all blocks of its context, so that
        its block table must be rewritten.

        blocks: positions of the blocks that the row attends to.
        """
        return len(blocks) < len(row.blocks_C)

    def _update(self, index: int, blocks: list[I32]) -> None:
        """Builds the missing sketches (compact forms of keys) of complete blocks in a layer.
        Adds the number of built blocks and the time to the counters.

        index: index of the layer.
        blocks: arrays of block ids.
        """
        began_s = time.perf_counter()
        num_built = sum(self.sketches.update(index, part) for part in blocks)
        if num_built:
            self._counters.add(index, "built_blocks", num_built)
            self._counters.add(index, "build_s", time.perf_counter() - began_s)

    def _forget_written(self, layer: SparseLayer, batch: Batch) -> None:
        """Marks the sketches (compact forms of keys) of the blocks that the step writes as
        not built, in all layers of the group."""
        written = batch.written_slots[batch.written_slots >= 0] // layer.shape.block_tokens
        indices = self._layers_of(layer.group)
        self.sketches.forget(np.unique(written).astype(np.int32), indices)

    def _planned(self, layer: SparseLayer, key: object, batch: Batch) -> StepPlan:
        """Plans a step for a KV cache group: finds the rows (requests) that attend sparsely, and
        the complete blocks that need sketches (compact forms of keys). Also marks
        sketches of blocks that the step writes as not built."""
        block_tokens, plan = layer.shape.block_tokens, StepPlan(key, batch)
        self._forget_written(layer, batch)
        num_queries, lengths = np.diff(batch.starts), batch.seq_lens
        # Examines all rows with long contexts, not only those that the scheduler has listed as
        # sparse: sketches (compact forms of keys) are built before a row becomes sparse.
        is_long = lengths >= self._config.min_context_tokens
        for row in np.flatnonzero(is_long & (lengths > 0) & (num_queries > 0)).tolist():
            context_tokens = int(lengths[row])
            blocks = batch.tables[row, : -(-context_tokens // block_tokens)].copy()
            request_id = self._named(int(blocks[-1]), int(num_queries[row]))
            plan.complete.append(blocks[: context_tokens // block_tokens])
            if request_id is not None:
                context = Context(self._config, context_tokens, block_tokens)
                token = int(batch.starts[row])
                plan.rows.append(SparseRow.of(row, token, request_id, blocks, blocks, context))
        return plan

    def _named(self, written_block: int, num_queries: int) -> str | None:
        """Returns the request id of a row of the batch if the scheduler has listed the row as
        sparse; None otherwise.

        written_block: id of the row's last block, which the step writes.
        num_queries: number of tokens that the step computes for the row.
        """
        return self._request_of.get(written_block) if num_queries == 1 else None

    def _select(self, layer: SparseLayer, row: SparseRow, query_of: Callable[[int], F32]) -> I32:
        """Selects the blocks that the row (request) attends to in the layer. Returns their
        positions in the context, ascending.

        query_of: takes the index of a token in the batch, and returns the token's query.
        """
        if row.attends_to_all:
            return row.positions_C
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            sequence = self._sequences[row.request_id] = _Sequence()
        own = sequence.layers.get(layer.name)
        if own is None:
            own = sequence.layers[layer.name] = LayerSequence(
                self._config, layer.index, layer.shape.block_tokens
            )
        query_QD = query_of(row.token)
        attended = self._step(layer, row, query_QD, own, sequence.selected_of(len(row.blocks_C)))
        self._counters.add_step(layer.index, attended, len(row.blocks_C), layer.pages.page_bytes)
        if self._is_sampled(layer):
            self._sample(layer, row, query_QD, attended)
        return attended.blocks

    def _step(
        self,
        layer: SparseLayer,
        row: SparseRow,
        query_QD: F32,
        own: LayerSequence,
        selected: npt.NDArray[np.bool_],
    ) -> Attended:
        """Makes a decode step of the row (request) in the layer: selects blocks with its query, and
        updates its hot set (the blocks to attend to).

        query_QD: the query, float32 [query heads, channels].
        own: the row's hot set in the layer.
        selected: a mask over the blocks of the context. The method sets it to True for the selected
            blocks.
        """
        sources, about = self._sources(layer), (row.always_blocks, row.always_tokens, layer.scale)
        scorer = self._scorer(layer, sources, query_QD.shape)
        if scorer is not None:
            return own.decode(
                scorer,
                query_QD,
                row.blocks_C,
                layer.pages.always(query_QD, *about, layer.sink_logits),
                row.context_tokens,
                row.where,
                selected,
            )
        always = layer.pages.log_mass(query_QD, *about)
        if layer.sink_logits is not None:
            always = np.logaddexp(always, layer.sink_logits)
        attended = own.step(
            query_QD, sources, row.blocks_C, always, row.context_tokens, layer.scale
        )
        selected[attended.selection.blocks] = True
        return attended

    def _scorer(
        self, layer: SparseLayer, sources: Mapping[str, Source], shape: tuple[int, ...]
    ) -> Scorer | None:
        """Returns the layer's sketches prepared for a decode step in one compiled call
        (`LayerSequence.decode`). Returns None if the settings `fusion` or `adaptive_p` of
        `SparseConfig` need the slower code in numpy.

        sources: by format, the layer's sketches (compact forms of keys).
        shape: shape of a query: number of query heads, number of channels.
        """
        if self._config.fusion or self._config.adaptive_p is not None:
            return None
        known, source = self._scorers.get(layer.index), sources[self._config.scorer]
        if known is None or known.source is not source:
            known = Scorer.of(self._config.scorer, source, shape[0], shape[1], layer.scale)
            self._scorers[layer.index] = known
        return known

    def _sources(self, layer: SparseLayer) -> Mapping[str, Source]:
        """Returns the layer's sketches (compact forms of keys) by format.
        `SparseRow.blocks_C` has the indices of a context's blocks in these arrays."""
        return self.sketches.sources(layer.index)

    # ------------------------------------------------------------------------------------- sampling

    def _is_sampled(self, layer: SparseLayer) -> bool:
        """Returns True if the layer's present choice of blocks is to be compared with exact
        attention. This is done for one row and one layer in every `recall_steps`-th step, each time
        in the next layer, because it reads all keys of a context. Never if `recall_steps` is 0."""
        if not self._recall_steps or self._num_steps % self._recall_steps:
            return False
        if self._sampled_step == self._num_steps:
            return False
        return self._order[layer.name] == self._num_steps // self._recall_steps % len(self._order)

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
            layer.sink_logits,
        )
        self._counters.add(layer.index, "recall_samples", 1)
        self._counters.add(layer.index, "recall", found.recall)
        self._counters.add(layer.index, "true_mass", found.mass)
