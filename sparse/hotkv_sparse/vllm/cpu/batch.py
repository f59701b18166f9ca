"""A step's batch as sparse decode sees it: layers, rows, and the block tables that replace vLLM's.

Always true: vLLM's arrays are used as views and never written; a `Rewrite` has its own.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a
    block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse import CandidateSpan, SparseConfig, span
from hotkv_sparse.vllm.cpu.key_pages import KeyPages
from hotkv_sparse.vllm.cpu.pool import LayerShape

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """A layer that may attend sparsely.

    index: in the model.
    group: vLLM's number.
    scale: factor of attention scores.
    sink_logits: learned sinks of the softmax, float32 [query heads].
    """

    name: str
    index: int
    group: int
    shape: LayerShape
    scale: float
    pages: KeyPages
    sink_logits: F32 | None = None

    def keys_of(self, blocks: I32) -> F32:
        """float32 [blocks, tokens, KV heads, channels]."""
        return self.pages.keys_of(blocks)

    def sinks_of(self, num_queries: int) -> F32 | None:
        """`sink_logits` for so many rows of `by_kv_head`."""
        if self.sink_logits is None:
            return None
        num_tokens = num_queries // len(self.sink_logits)
        return by_kv_head([self.sink_logits[:, None]] * num_tokens, self.shape.kv_heads)[:, 0]


@dataclass(frozen=True, slots=True)
class Batch:
    """vLLM's metadata as numpy views.

    starts: first token of each row, then the number of all, [rows + 1].
    tables: [rows, at least the blocks of its context].
    written_slots: block id * tokens of a block + place in the block, of each written token;
        negative: padding.
    """

    starts: I32
    seq_lens: I32
    tables: I32
    written_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Context:
    config: SparseConfig
    num_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row that may attend sparsely.

    row: in the batch.
    tokens: the row's, in the batch: one, and drafts.
    blocks_C: indices of sketches; without residency the block ids.
    always_blocks: sinks, recent window and partial last block, int32.
    always_tokens: in these blocks.
    attends_to_all: the budget covers the context.
    """

    row: int
    tokens: range
    request_id: str
    context_tokens: int
    blocks_C: I32
    where: CandidateSpan
    always_blocks: I32
    always_tokens: int
    attends_to_all: bool

    @property
    def positions_C(self) -> I32:
        return np.arange(len(self.blocks_C), dtype=np.int32)

    @staticmethod
    def of(
        row: int, tokens: range, request_id: str, table_C: I32, rows_C: I32, context: "Context"
    ) -> "SparseRow":
        """table_C: the row's block table.
        rows_C: see `blocks_C`.
        """
        config, num_tokens = context.config, context.num_tokens
        where = span(config, num_tokens, context.block_tokens)
        always = table_C[where.always]
        # `missing`: tokens that a partial last block lacks.
        missing = len(table_C) * context.block_tokens - num_tokens
        num_always = len(always) * context.block_tokens - missing
        has_all = config.covers(num_tokens, context.block_tokens)
        return SparseRow(
            row, tokens, request_id, num_tokens, rows_C, where, always, num_always, has_all
        )


def settled_tokens(context_tokens: int, num_queries: int, most_drafts: int) -> int:
    """Leading ones of a context that no later step changes: drafts may be rejected."""
    return context_tokens - min(num_queries - 1, most_drafts)


def by_kv_head(queries: Sequence[F32], kv_heads: int) -> F32:
    """Several tokens' queries [Q, D] as those of one token with more query heads per KV head,
    float32 [tokens * Q, D]: a block's weight is then the mean over tokens."""
    if len(queries) == 1:
        return queries[0]
    grouped = np.stack([one.reshape(kv_heads, -1, one.shape[-1]) for one in queries], axis=1)
    return np.ascontiguousarray(grouped.reshape(-1, grouped.shape[-1]))


@dataclass(slots=True)
class Rewrite:
    """Replaces vLLM's tables and lengths in a layer, until the next layer of the group.

    tables: int32 [rows, width of vLLM's tables].
    seq_lens: tokens in these blocks, int32 [rows].
    made: vLLM's metadata with these arrays.
    pages: to which the tables refer; None for the layer's own.
    """

    tables: I32
    seq_lens: I32
    made: object = None
    pages: torch.Tensor | None = None


@dataclass(slots=True)
class StepPlan:
    """Shared by a group's layers.

    key: vLLM's metadata object; another one needs a new plan.
    complete: complete blocks of each long row, which need sketches.
    lacking: layers that lack some of these.
    num_forgets: of the pool when `lacking` was computed.
    rewrite: of the last layer with sparse rows; `written` differs from vLLM's there, by row.
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
        """tables: int32, by row; others are vLLM's. The same object as in the layer before is
        not copied again."""
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
