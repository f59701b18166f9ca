"""The data of a step's batch that sparse decode works with: the layers, the rows (requests) of the
batch, and the block tables with which sparse decode replaces vLLM's, so that attention reads only
the chosen blocks.

Always true: vLLM's arrays are used as views and never written; a `Rewrite` has its own arrays.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse import CandidateSpan, SparseConfig, span
from hotkv_vllm.sparse.pages import KeyPages
from hotkv_vllm.sparse.pool import LayerShape

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer that may attend sparsely.

    index: number of the layer in the model.
    group: number of its KV cache group in vLLM.
    shape: shape and formats of its sketches (compact forms of blocks' keys).
    scale: the factor of its attention scores.
    pages: reads the keys in the layer's pages (KV of blocks in the layer).
    sink_logits: the learned sinks of its softmax, float32 [query heads]; None without sinks.
    """

    name: str
    index: int
    group: int
    shape: LayerShape
    scale: float
    pages: KeyPages
    sink_logits: F32 | None = None

    def keys_of(self, blocks: I32) -> F32:
        """Returns the unpacked keys of blocks, float32 [blocks, tokens, KV heads, channels].

        blocks: ids of the blocks, int32.
        """
        return self.pages.keys_of(blocks)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch from vLLM's metadata, as numpy views.

    starts: index of each row's first token in the batch, and at the end the number of all tokens,
        [rows + 1].
    seq_lens: length of each row's context, [rows].
    tables: block table of each row, [rows, at least the blocks of its context].
    written_slots: vLLM's slot (block id * tokens of a block + place in the block) of each token
        that the step has written; negative slots are padding.
    """

    starts: I32
    seq_lens: I32
    tables: I32
    written_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Context:
    """The length of a request's context, and the settings from which follows how many and which of
    its blocks may be chosen.

    config: the settings of sparse decode.
    num_tokens: length of the context.
    block_tokens: tokens of a block.
    """

    config: SparseConfig
    num_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row (request of a batch) that may attend sparsely.

    row: index of the row in the batch.
    token: index of the row's only token in the batch.
    blocks_C: for each block of the context, the index of its sketch (compact form of keys)
        in the arrays of sketches. In an engine without residency (contexts beyond device
        memory) this is the block id.
    where: which blocks of the context can be chosen, and which are always attended.
    always_blocks: ids of the blocks that are always attended (the sinks, which are the first
        blocks; the recent window; the partial last block), int32.
    always_tokens: number of tokens in these blocks; the last block may be partial.
    attends_to_all: True if the budget covers the context, so that no choice is needed.
    """

    row: int
    token: int
    request_id: str
    context_tokens: int
    blocks_C: I32
    where: CandidateSpan
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
        """Returns the `SparseRow` of a request. The choice of its blocks is limited by the length
        of its context and by the settings (`context`).

        row: index of the row in the batch.
        token: index of the row's only token in the batch.
        table_C: the row's block table.
        rows_C: for each block, the index of its sketch (compact form of keys,
            `SparseRow.blocks_C`).
        """
        config, tokens = context.config, context.num_tokens
        where = span(config, tokens, context.block_tokens)
        always = table_C[where.always]
        # The last block may be partial. `missing` is the number of tokens that it lacks.
        missing = len(table_C) * context.block_tokens - tokens
        num_tokens = len(always) * context.block_tokens - missing
        has_all = config.covers(tokens, context.block_tokens)
        return SparseRow(row, token, request_id, tokens, rows_C, where, always, num_tokens, has_all)


@dataclass(slots=True)
class Rewrite:
    """Block tables and lengths that replace vLLM's for the whole batch in a layer, so that sparse
    rows (requests) attend only to their chosen blocks. The next layer of the KV cache group
    overwrites these arrays.

    tables: ids of the blocks to attend to, int32 [rows, width of vLLM's tables].
    seq_lens: number of tokens in these blocks, int32 [rows].
    made: vLLM's metadata that the backend has built with these arrays; None before that.
    pages: the tensor to whose pages the tables refer; None for the layer's own pages.
    """

    tables: I32
    seq_lens: I32
    made: object = None
    pages: torch.Tensor | None = None


@dataclass(slots=True)
class StepPlan:
    """The plan of sparse decode for a step's batch. Computed once per step and KV cache group, and
    shared by the layers of the group.

    key: vLLM's metadata object of the step. A layer with another object needs a new plan.
    rows: the rows (requests) that attend sparsely.
    complete: for each row with a long context, the ids of its complete blocks. These blocks need
        sketches (compact forms of keys, by which blocks are selected).
    lacking: indices of the layers that lack sketches of some of these blocks.
    num_forgets: the pool of sketches counts in its attribute `num_forgets` how often
        sketches were discarded. This field has the count at the time when `lacking` was
        computed. If the count has changed since, `lacking` is computed again.
    rewrite: the arrays with the block tables of the last layer in which rows attended sparsely, to
        be changed for the next such layer; None before the first.
    written: by row, the block tables in `rewrite` that differ from vLLM's.
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
        """Returns the block tables and lengths of the whole batch for a layer: the tables in
        `tables` for their rows (requests), and vLLM's tables for all other rows.

        tables: by row, the ids of the blocks to attend to, int32. If a table is the same object as
            in the layer before, it is not copied again.
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
