"""A step's batch as sparse decode sees it: its layers, its rows (requests), and the block tables
that sparse decode returns.

Always true: arrays of vLLM are views and are not written; a `Rewrite` has its own arrays.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse import Span, SparseConfig, span
from hotkv_vllm.sparse.pages import KeyPages
from hotkv_vllm.sparse.pool import LayerShape
from hotkv_vllm.sparse.sequence import holds_all

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer that may be sparse. `index` counts the model's layers; `group` is its KV cache group.

    `sink_logits` float32 [Q]: learned sinks of the softmax, if any.
    """

    name: str
    index: int
    group: int
    shape: LayerShape
    scale: float
    pages: KeyPages
    sink_logits: F32 | None = None

    def keys_of(self, blocks: I32) -> F32:
        """Returns the unpacked keys float32 [B, T, H, D] of blocks int32 [B]."""
        return self.pages.keys_of(blocks)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows from vLLM's metadata, as numpy views.

    starts: [R + 1], first query of each row.
    seq_lens: [R].
    tables: [R, ≥ C].
    written_slots: slots that the step has written; negative slots are padding.
    """

    starts: I32
    seq_lens: I32
    tables: I32
    written_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Context:
    """The length of a row's context, and the limits of the choice among its blocks."""

    config: SparseConfig
    num_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row that may be sparse; its query is token `token` of the batch.

    where, budget_blocks: the context's blocks that can be chosen (candidates), and the most blocks
        of a selection.
    always_blocks: int32, the blocks that are always attended (sinks, recent window, partial block).
        Of all their tokens the first `always_tokens` exist; the last block may be partial.
    attends_to_all: True if the hot set (the blocks on the device) would hold the whole context.
    """

    row: int
    token: int
    request_id: str
    context_tokens: int
    blocks_C: I32
    where: Span
    budget_blocks: int
    always_blocks: I32
    always_tokens: int
    attends_to_all: bool

    @property
    def positions_C(self) -> I32:
        """Returns the positions of all blocks of the context."""
        return np.arange(len(self.blocks_C), dtype=np.int32)

    @staticmethod
    def of(
        row: int, token: int, request_id: str, table_C: I32, rows_C: I32, context: "Context"
    ) -> "SparseRow":
        """Returns the row.

        table_C: the row's block table.
        rows_C: for each block, the row of its representation (compact form of its keys) in the
            pool.
        """
        config, tokens = context.config, context.num_tokens
        where = span(config, tokens, context.block_tokens)
        always = table_C[where.always]
        # The last block may be partial, so the missing tokens are at the end.
        missing = len(table_C) * context.block_tokens - tokens
        num_tokens = len(always) * context.block_tokens - missing
        budget = config.budget_blocks(tokens, context.block_tokens)
        has_all = holds_all(config, where, budget)
        return SparseRow(
            row, token, request_id, tokens, rows_C, where, budget, always, num_tokens, has_all
        )


@dataclass(slots=True)
class Rewrite:
    """Block tables int32 [R, width] and lengths int32 [R] of the whole batch. The group's next
    layer overwrites these arrays.

    made: data that the engine's side builds around the arrays, once per step.
    pages: a tensor to which the tables point in place of the layer's pages.
    """

    tables: I32
    seq_lens: I32
    made: object = None
    pages: torch.Tensor | None = None


@dataclass(slots=True)
class StepPlan:
    """The data that sparse decode needs about a step's batch, computed once and shared by all
    layers of a KV cache group.

    key: vLLM's metadata object of the step, from which the plan was made.
    complete: the complete blocks of the contexts, an array for each row. These blocks need
        representations (compact forms of keys, by which blocks are selected).
    lacking: layers without representations of some of these blocks.
    num_forgets: the pool's `num_forgets` (how often it has dropped representations) when `lacking`
        was computed; if it has changed since, `lacking` is computed again.
    rewrite: the batch's block tables as the last layer that left blocks out used them; None before
        such a layer.
    written: by row, the block tables in `rewrite` that differ from the batch's.
    """

    key: object
    batch: Batch
    rows: list[SparseRow] = field(default_factory=list)
    complete: list[I32] = field(default_factory=list)
    lacking: set[int] = field(default_factory=set)
    num_forgets: int = -1
    rewrite: Rewrite | None = None
    written: Mapping[int, I32] = field(default_factory=dict)

    def rewritten_with(self, tables: Mapping[int, I32], block_tokens: int) -> Rewrite:
        """Returns the batch's block tables with these tables in place of some rows' tables
        (`Rewrite`). All other rows keep the batch's tables.

        A table that is the same object as in the layer before is not written again.
        """
        batch = self.batch
        if self.rewrite is None:
            self.rewrite = Rewrite(batch.tables.copy(), batch.seq_lens.copy())
        rewrite, written, self.written = self.rewrite, self.written, tables
        rewrite.pages = None
        for row in written.keys() - tables.keys():
            rewrite.tables[row] = batch.tables[row]
            rewrite.seq_lens[row] = batch.seq_lens[row]
        for row, table in tables.items():
            if written.get(row) is not table:
                rewrite.tables[row, : len(table)] = table
                tokens = int(batch.seq_lens[row])
                left_out = -(-tokens // block_tokens) - len(table)
                rewrite.seq_lens[row] = tokens - left_out * block_tokens
        return rewrite
