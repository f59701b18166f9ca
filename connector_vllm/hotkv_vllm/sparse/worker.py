"""Decides, for every layer of a step, what each row of the batch attends to.

What is always true: rows that no rule makes sparse keep their block table and length; a row that is sparse keeps the order of its
blocks and ends with its last one, so that its length says how many tokens of that one count. Where hot set and context are the
same, the row is left alone: a budget that covers the context is exact.

Dense are: prefill, contexts below `min_context_tokens`, rows the scheduler has not named, layers that were not attached.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv.sparse import SparseConfig, span
from hotkv.sparse.selector import exact_log_mass
from hotkv_vllm import link
from hotkv_vllm.sparse.pool import BlockReprManager, LayerShape
from hotkv_vllm.sparse.recall import measure
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.sparse.sequence import Attended, LayerSequence

logger = link.logger
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer that may be sparse. `index` counts the model's layers; `group` is its KV cache group.

    `keys_of(blocks)`: unpacked keys float32 [B, T, H, D]. `sink_logits` float32 [Q]: learned sinks of the softmax, if any.
    """

    name: str
    index: int
    group: int
    shape: LayerShape
    scale: float
    keys_of: Callable[[I32], F32]
    sink_logits: F32 | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows as vLLM's metadata has them, numpy views: `starts` [R + 1] of queries, `seq_lens` [R], `tables` [R, ≥ C].

    `written_slots`: slots that the step has written; negative ones are padding.
    """

    starts: I32
    seq_lens: I32
    tables: I32
    written_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """A row that may be sparse."""

    row: int
    request_id: str
    context_tokens: int
    blocks_C: I32


@dataclass(frozen=True, slots=True)
class Rewrite:
    """New block tables int32 [R, width] and lengths int32 [R] of the whole batch."""

    tables: I32
    seq_lens: I32


@dataclass(slots=True)
class _Plan:
    """What all layers of a group share in a step. `key`: the metadata object it was made from."""

    key: object
    batch: Batch
    rows: list[Row] = field(default_factory=list)
    complete: list[I32] = field(default_factory=list)


class SparseWorker:
    """Owns the representations, the hot sets of all sequences and the counters of this rank. One thread."""

    def __init__(self, config: SparseConfig, layers: list[SparseLayer], recall_steps: int = 0) -> None:
        self._config = config
        self.layers = {layer.name: layer for layer in layers}
        self._order = {layer.name: place for place, layer in enumerate(layers)}
        self._recall_steps = recall_steps
        self._reprs = BlockReprManager({layer.index: layer.shape for layer in layers}, {layer.index: layer.keys_of for layer in layers})
        self._sequences: dict[str, dict[str, LayerSequence]] = {}
        self._request_of: dict[int, str] = {}
        self._plans: dict[int, _Plan] = {}
        self._num_steps = 0
        self._said: set[str] = set()
        self._counters: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"SparseWorker(layers {len(self.layers)}, sequences {len(self._sequences)}, {self._reprs})"

    # ------------------------------------------------------------------------------------------------------------ steps

    def begin_step(self, rows: SparseRows) -> None:
        """The scheduler's word on the step that comes."""
        for request_id in rows.ended:
            self._sequences.pop(request_id, None)
        self._request_of = dict(zip(rows.block_ids, rows.request_ids, strict=True))
        self._plans.clear()
        self._num_steps += bool(rows.request_ids)

    def will_write(self, blocks: I32) -> None:
        """Somebody else, such as a load, is about to write these blocks."""
        self._reprs.forget(blocks)

    def take_counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        taken, self._counters = self._counters, {}
        return taken

    def fault(self, layer_name: str) -> None:
        """Called where an exception is handled: logs the first one of a layer, counts all, and starts that layer's sequences anew."""
        self._count("sparse_faults", 1)
        for layers in self._sequences.values():
            layers.pop(layer_name, None)
        if layer_name not in self._said:
            self._said.add(layer_name)
            logger.exception("hotkv: sparse attention of %s broke; the layer attends to everything in this step", layer_name)

    # ----------------------------------------------------------------------------------------------------------- layers

    def attend(self, layer: SparseLayer, key: object, batch: Callable[[], Batch], query_of: Callable[[int], F32]) -> Rewrite | None:
        """What `layer` attends to in the present step; None: to everything.

        `key` stands for the step's metadata: layers of a group that pass the same object share a plan. `query_of(row)` is the query
        float32 [Q, D] of a row of one token. The step's keys are in the pages already.
        """
        plan = self._plans.get(layer.group)
        if plan is None or plan.key is not key:
            plan = self._plans[layer.group] = self._planned(layer, key, batch())
        self._build(layer, plan)
        if not plan.rows:
            return None
        began_s = time.perf_counter()
        chosen = [(row, self._select(layer, row, query_of(row.row))) for row in plan.rows]
        chosen = [(row, blocks) for row, blocks in chosen if self._leaves_out(row, blocks)]
        rewrite = self._rewritten(layer, plan.batch, chosen) if chosen else None
        self._count("sparse_select_s", time.perf_counter() - began_s)
        return rewrite

    def _build(self, layer: SparseLayer, plan: _Plan) -> None:
        """Representations of blocks that are new to this layer, or were overwritten."""
        began_s = time.perf_counter()
        num_built = sum(self._reprs.update(layer.index, blocks) for blocks in plan.complete)
        if num_built:
            self._count("sparse_built_blocks", num_built)
            self._count("sparse_build_s", time.perf_counter() - began_s)

    def _planned(self, layer: SparseLayer, key: object, batch: Batch) -> _Plan:
        """Forgets what the step has overwritten, and finds the rows that matter."""
        block_tokens, plan = layer.shape.block_tokens, _Plan(key, batch)
        written = batch.written_slots[batch.written_slots >= 0] // block_tokens
        indices = [other.index for other in self.layers.values() if other.group == layer.group]
        self._reprs.forget(np.unique(written).astype(np.int32), indices)
        num_queries = np.diff(batch.starts)
        for row in np.flatnonzero((batch.seq_lens >= self._config.min_context_tokens) & (num_queries > 0)).tolist():
            context_tokens = int(batch.seq_lens[row])
            blocks = batch.tables[row, : -(-context_tokens // block_tokens)].copy()
            plan.complete.append(blocks[: context_tokens // block_tokens])
            request_id = self._request_of.get(int(blocks[-1])) if num_queries[row] == 1 else None
            if request_id is not None:
                plan.rows.append(Row(row, request_id, context_tokens, blocks))
        return plan

    def _select(self, layer: SparseLayer, row: Row, query_QD: F32) -> I32:
        """Blocks of the row's context to attend to, ascending positions."""
        block_tokens = layer.shape.block_tokens
        if self._config.budget_blocks(row.context_tokens, block_tokens) >= len(row.blocks_C):
            return np.arange(len(row.blocks_C), dtype=np.int32)
        layers = self._sequences.setdefault(row.request_id, {})
        sequence = layers.get(layer.name)
        if sequence is None:
            sequence = layers[layer.name] = LayerSequence(self._config, layer.index, block_tokens)
        always = self._always_log_mass(layer, row, query_QD)
        attended = sequence.step(query_QD, self._reprs.sources(layer.index), row.blocks_C, always, row.context_tokens, layer.scale)
        self._count_step(attended, len(row.blocks_C))
        if self._is_sampled(layer):
            self._sample(layer, row, query_QD, attended)
        return attended.blocks

    def _always_log_mass(self, layer: SparseLayer, row: Row, query_QD: F32) -> F32:
        """Exact log mass float32 [Q] of what is always attended."""
        always = span(self._config, row.context_tokens, layer.shape.block_tokens).always
        keys = layer.keys_of(row.blocks_C[always])
        # The partial block is the last one, so the tokens that do not exist yet are at the end.
        keys_RHD = keys.reshape(-1, *keys.shape[2:])
        excess = len(row.blocks_C) * layer.shape.block_tokens - row.context_tokens
        mass = exact_log_mass(query_QD, keys_RHD[: len(keys_RHD) - excess], layer.scale)
        return mass if layer.sink_logits is None else np.logaddexp(mass, layer.sink_logits)

    @staticmethod
    def _leaves_out(row: Row, blocks: I32) -> bool:
        return len(blocks) < len(row.blocks_C)

    @staticmethod
    def _rewritten(layer: SparseLayer, batch: Batch, chosen: list[tuple[Row, I32]]) -> Rewrite:
        tables, seq_lens = batch.tables.copy(), batch.seq_lens.copy()
        for row, blocks in chosen:
            tables[row.row, : len(blocks)] = row.blocks_C[blocks]
            seq_lens[row.row] -= (len(row.blocks_C) - len(blocks)) * layer.shape.block_tokens
        return Rewrite(tables, seq_lens)

    # --------------------------------------------------------------------------------------------------------- counters

    def _count(self, name: str, value: float) -> None:
        self._counters[name] = self._counters.get(name, 0) + value

    def _count_step(self, attended: Attended, context_blocks: int) -> None:
        for name, value in (
            ("sparse_selects", 1),
            ("sparse_context_blocks", context_blocks),
            ("sparse_selected_blocks", len(attended.selection.blocks)),
            ("sparse_attended_blocks", len(attended.blocks)),
            ("sparse_seeded_blocks", attended.num_seeded),
            ("sparse_corrected_blocks", attended.num_corrected),
            ("sparse_prefetched_blocks", attended.num_prefetched),
            ("sparse_wanted_blocks", attended.num_wanted),
            ("sparse_hit_blocks", attended.num_hits),
            ("sparse_estimated_mass", attended.selection.mass),
        ):
            self._count(name, value)

    def _is_sampled(self, layer: SparseLayer) -> bool:
        """Every `recall_steps` steps one layer, each in its turn."""
        if not self._recall_steps or self._num_steps % self._recall_steps:
            return False
        return self._order[layer.name] == self._num_steps // self._recall_steps % len(self._order)

    def _sample(self, layer: SparseLayer, row: Row, query_QD: F32, attended: Attended) -> None:
        found = measure(layer.keys_of, query_QD, row.blocks_C, row.context_tokens, layer.shape.block_tokens, layer.scale, attended)
        self._count("sparse_recall_samples", 1)
        self._count("sparse_recall", found.recall)
        self._count("sparse_true_mass", found.mass)
