"""A step's batch as sparse decode sees it: its layers and rows, and the block tables that it
returns.

Always true: arrays of vLLM are views and are not written; a rewrite has its own arrays.

Shapes: R rows, C blocks of a context, Q query heads, H KV heads, D channels, T tokens of a block.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotkv_sparse import SparseConfig, span
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
    """How long a row's context is, and how it is chosen from."""

    config: SparseConfig
    num_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row that may be sparse; its query is token `token` of the batch.

    always_blocks: int32, the blocks that are always attended, whose first `always_tokens` tokens
        exist.
    attends_to_all: True if the hot set would hold the whole context.
    """

    row: int
    token: int
    request_id: str
    context_tokens: int
    blocks_C: I32
    always_blocks: I32
    always_tokens: int
    attends_to_all: bool

    @staticmethod
    def of(
        row: int, token: int, request_id: str, table_C: I32, rows_C: I32, context: "Context"
    ) -> "SparseRow":
        """Returns the row.

        table_C: the row's block table.
        rows_C: the places of the blocks' representations.
        """
        config, tokens = context.config, context.num_tokens
        where = span(config, tokens, context.block_tokens)
        always = table_C[where.always]
        # The last block may be partial, so the missing tokens are at the end.
        missing = len(table_C) * context.block_tokens - tokens
        num_tokens = len(always) * context.block_tokens - missing
        has_all = holds_all(config, where, config.budget_blocks(tokens, context.block_tokens))
        return SparseRow(row, token, request_id, tokens, rows_C, always, num_tokens, has_all)


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
    """A plan that all layers of a group share in a step. `key`: the metadata object it was made
    from; `rewritten`: rows that `rewrite` changes."""

    key: object
    batch: Batch
    rows: list[SparseRow] = field(default_factory=list)
    complete: list[I32] = field(default_factory=list)
    rewrite: Rewrite | None = None
    rewritten: list[int] = field(default_factory=list)

    def restored(self) -> Rewrite:
        """Returns the rewrite, without the changes of the layer before."""
        batch = self.batch
        if self.rewrite is None:
            self.rewrite = Rewrite(batch.tables.copy(), batch.seq_lens.copy())
        rewrite = self.rewrite
        rewrite.pages = None
        for row in self.rewritten:
            rewrite.tables[row] = batch.tables[row]
            rewrite.seq_lens[row] = batch.seq_lens[row]
        self.rewritten = []
        return rewrite

    def rewritten_with(self, chosen: list[tuple[SparseRow, I32]], block_tokens: int) -> Rewrite:
        """Writes the blocks that the rows of a layer attend to.

        chosen: per row, the positions of the blocks, int32.
        """
        rewrite = self.restored()
        self.rewritten = [one.row for one, _ in chosen]
        for one, blocks in chosen:
            rewrite.tables[one.row, : len(blocks)] = one.blocks_C[blocks]
            rewrite.seq_lens[one.row] -= (len(one.blocks_C) - len(blocks)) * block_tokens
        return rewrite
