"""Decides, step by step, which blocks a sequence attends to in a layer.

Always true: sinks, recent window and the partial block are attended. The hot set has the blocks of
the sequence that are on the device for the layer. After the first step, at most
`max_correction_blocks` other blocks join the hot set within a step. Further wanted blocks join in
the next step, through spare slots.

The first step fills the whole hot set, which is twice the budget, with the best blocks. It may,
because prefill has just had all blocks on the device. In an engine without residency all blocks
stay in the engine's memory; there every complete block is treated like a block in host memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotkv_sparse import AdaptiveCapacity, HotSet, Selection, Span, SparseConfig, span
from hotkv_sparse.decode import Always, Scorer, decode
from hotkv_sparse.hotset import USUAL_SETS
from hotkv_sparse.selection import Source, select_layer

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of a layer's step. The caller must attend to `blocks`: int32, ascending positions
    in the context.

    Numbers of blocks:
    num_seeded: blocks that the first step added to the hot set.
    num_corrected: blocks that this step's query selected and that were added to the hot set now.
    num_prefetched: blocks that the previous step selected and that were added to the hot set now.
    num_wanted: blocks that this step's query selected, without the blocks that are always attended.
    num_hits: the wanted blocks that were in the hot set before this step.
    """

    blocks: I32
    selection: Selection
    num_seeded: int
    num_corrected: int
    num_prefetched: int
    num_wanted: int
    num_hits: int


class LayerSequence:
    """The hot set (the blocks on the device) of a sequence and layer, shared by the layer's KV
    heads."""

    def __init__(self, config: SparseConfig, layer: int, block_tokens: int) -> None:
        self._config = config
        self._layer = layer
        self._block_tokens = block_tokens
        self._hot: HotSet | None = None
        self._adaptive: AdaptiveCapacity | None = None
        self._num_complete = 0
        self._arriving = NO_BLOCKS

    def __repr__(self) -> str:
        return f"LayerSequence(layer {self._layer}, {self._hot})"

    def slots_of(self, positions: I32) -> I32:
        """Returns the hot slots (places on the device) of blocks to which the last step
        attended."""
        assert self._hot is not None, "no step yet"
        return self._hot.slot_of[positions]

    def step(
        self,
        query_QD: F32,
        sources: Mapping[str, Source],
        rows_C: I32,
        always_log_mass_Q: F32,
        context_tokens: int,
        scale: float,
    ) -> Attended:
        """Selects blocks with the step's query and brings the hot set (the blocks on the device) up
        to date. The arguments are those of `hotkv_sparse.selection.select_layer`."""
        config = self._config
        where = span(config, context_tokens, self._block_tokens)
        budget = config.budget_blocks(context_tokens, self._block_tokens)
        is_first = self._hot is None
        hot = self._follow(where, context_tokens // self._block_tokens, budget)
        num_prefetched = self._adopt(hot)
        selection = select_layer(
            _filling(config) if is_first else config,
            self._layer,
            query_QD,
            sources,
            rows_C,
            always_log_mass_Q,
            context_tokens,
            self._block_tokens,
            scale=scale,
        )
        step = hot.step(selection, where.count if is_first else config.max_correction_blocks)
        self._arriving = hot.begin_prefetch(step.prefetch).slots
        if self._adaptive is not None:
            hot.resize(self._adaptive.observe(len(selection.blocks), len(step.prefetch)))
        loaded = step.load.blocks
        num_moved = int(np.count_nonzero((loaded >= where.first) & (loaded < where.last)))
        return Attended(
            step.map.blocks,
            selection,
            num_moved if is_first else 0,
            0 if is_first else num_moved,
            num_prefetched,
            step.num_selected,
            step.num_resident,
        )

    def decode(
        self,
        scorer: Scorer,
        query_QD: F32,
        rows_C: I32,
        always: Always,
        context_tokens: int,
        where: Span,
        budget_blocks: int,
        selected: npt.NDArray[np.bool_],
    ) -> Attended:
        """Selects blocks with the step's query and brings the hot set (the blocks on the device) up
        to date, in one compiled call. Supports neither fusion nor `adaptive_p`.

        where, budget_blocks: of the context, the same in all layers.
        The other arguments are those of `hotkv_sparse.decode.decode`.
        """
        is_first = self._hot is None
        hot = self._follow(where, context_tokens // self._block_tokens, budget_blocks)
        if is_first:
            config = _filling(self._config)
            budget_blocks = config.budget_blocks(context_tokens, self._block_tokens)
        found = decode(
            hot,
            scorer,
            query_QD,
            rows_C,
            always,
            budget_blocks,
            where.count if is_first else self._config.max_correction_blocks,
            self._arriving,
            selected,
        )
        self._arriving = found.ahead
        return Attended(
            found.map.blocks,
            found.selection,
            found.num_loaded if is_first else 0,
            0 if is_first else found.num_loaded,
            found.num_adopted,
            found.num_selected,
            found.num_resident,
        )

    def _follow(self, where: Span, num_complete: int, budget_blocks: int) -> HotSet:
        """Returns the hot set (the blocks on the device), extended to the present context."""
        capacity = USUAL_SETS * max(budget_blocks, where.num_always)
        hot = self._hot
        if hot is None:
            hot = self._hot = HotSet(capacity, policy=self._config.cache_policy)
            if self._config.adaptive_p is not None:
                self._adaptive = AdaptiveCapacity(budget_blocks, where.num_always)
        elif self._adaptive is not None:
            self._adaptive.budget_blocks, self._adaptive.always_blocks = (
                budget_blocks,
                where.num_always,
            )
        elif capacity > hot.capacity_blocks:
            hot.resize(capacity)
        if where != hot.span or num_complete != self._num_complete:
            hot.swapped_out(hot.extend(where, num_complete, num_complete).swap_out, True)
            hot.seed(where.always)
            self._num_complete = num_complete
        return hot

    def _adopt(self, hot: HotSet) -> int:
        """Adds the blocks to the hot set that the previous step selected but could not add within
        the step's limit. Returns the number of added blocks."""
        if not len(self._arriving):
            return 0
        hot.finish_prefetch(self._arriving, True)
        self._arriving = NO_BLOCKS
        return len(hot.adopt().blocks)


def holds_all(config: SparseConfig, where: Span, budget_blocks: int) -> bool:
    """Returns True if a hot set (the blocks on the device) can hold the whole context, so that no
    choice is needed."""
    keeps_all = config.adaptive_p is None and config.cache_policy != "none"
    sets = USUAL_SETS if keeps_all else 1
    return sets * max(budget_blocks, where.num_always) >= where.count


def _filling(config: SparseConfig) -> SparseConfig:
    """Returns a configuration whose selections are as large as a hot set (the blocks on the
    device)."""
    topk = config.sparse_topk
    return replace(
        config,
        sparse_topk=USUAL_SETS * topk if isinstance(topk, int) else min(USUAL_SETS * topk, 1.0),
    )
