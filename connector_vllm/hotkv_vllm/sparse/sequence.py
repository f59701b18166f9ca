"""Decides, step by step, which blocks a sequence (a decoding request) attends to in a layer: the
sequence's *hot set* in this layer.

With residency (contexts larger than device memory) only the hot set's blocks must be on the device;
other blocks may be only in host memory. Adding a block to the hot set then costs a copy, so a step
adds only a few blocks. Without residency no block is copied, but hot sets follow the same rules.

Always true: the hot set includes the sinks (first blocks), the recent window and the partial last
block. Each step's query *selects* the best other blocks. Selected blocks that are not in the hot
set are added to it: in each step after the first, at most `max_correction_blocks` at once, and
others at the beginning of the next step, as far as there are free slots.

A step selects half of the blocks that the hot set may have (`SparseConfig.selected_blocks`), so
that blocks stay in it after a step that does not select them. The first step fills it with the best
blocks. `max_correction_blocks` does not limit the first step, because all blocks are still on the
device after the prefill. The hot set has at most `SparseConfig.budget_blocks`, or the always kept
blocks if these are more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse import AdaptiveCapacity, CandidateSpan, HotSet, Selection, SparseConfig, span
from hotkv_sparse.decode import Always, Scorer, decode
from hotkv_sparse.selection import Source, select_layer

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of a decode step of a sequence in a layer: the blocks to attend to, and counts for
    the statistics.

    blocks: the hot set after the step, to which the layer must attend: positions in the context,
        ascending, int32.
    selection: the blocks that the step's query has selected; `blocks` may lack some of them.
    num_seeded: in the sequence's first step: number of blocks added to the hot set; otherwise 0.
    num_corrected: in later steps: number of blocks that this step has selected and added; in the
        first step 0.
    num_prefetched: number of blocks that the previous step has selected and this step has added.
    num_wanted: number of selected blocks, without the blocks that are always attended.
    num_hits: number of the blocks of `num_wanted` that were in the hot set before this step.
    """

    blocks: I32
    selection: Selection
    num_seeded: int
    num_corrected: int
    num_prefetched: int
    num_wanted: int
    num_hits: int


class LayerSequence:
    """The hot set (blocks to attend to) of a sequence (decoding request) in a layer. All KV heads
    of the layer attend to the same hot set. The methods `step` and `decode` do the same; each call
    is one decode step.

    layer: number of the layer in the model.
    block_tokens: tokens of a block.
    """

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
        """Returns the index of the hot slot (place in the hot set) of each block at `positions`,
        int32. With residency, each hot slot has a device block, and the caller copies the block's
        page into it.

        positions: positions in the context of blocks of the present hot set, int32.
        """
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
        """Makes a decode step: selects the best blocks for the step's query, and updates the hot
        set. Supports all settings, in numpy code, which is slower than `decode`.

        query_QD: the step's query, float32 [query heads, channels], after RoPE.
        sources: by format, the layer's sketches (compact forms of blocks' keys, by which
            blocks are scored).
        rows_C: for each block of the context, the row of its sketch in `sources`, int32.
        always_log_mass_Q: the log of the attention mass (sum of exp(q · k * scale) over the tokens)
            of the blocks that are always attended, float32 [query heads].
        context_tokens: length of the context, including the step's token.
        scale: the factor of the layer's attention scores.
        """
        config = self._config
        where = span(config, context_tokens, self._block_tokens)
        is_first = self._hot is None
        hot = self._follow(where, context_tokens)
        num_prefetched = self._adopt(hot)
        selection = select_layer(
            config,
            self._layer,
            query_QD,
            sources,
            rows_C,
            always_log_mass_Q,
            context_tokens,
            self._block_tokens,
            scale=scale,
            budget_blocks=self._selected_blocks(context_tokens, is_first),
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
        where: CandidateSpan,
        selected: npt.NDArray[np.bool_],
    ) -> Attended:
        """Makes a decode step as `step` does, in one compiled call. Does not support the settings
        `fusion` and `adaptive_p` of `SparseConfig`.

        scorer: the layer's sketches (compact forms of blocks' keys), prepared for the
            kernel.
        query_QD: the step's query, float32 [query heads, channels], after RoPE.
        rows_C: for each block of the context, the row of its sketch in `scorer`, int32.
        always: the blocks that are always attended, and where their keys are.
        context_tokens: length of the context, including the step's token.
        where: which blocks of the context can be chosen, and which are always attended.
        selected: a mask over the blocks of the context. The call sets it to True for the selected
            blocks.
        """
        is_first = self._hot is None
        hot = self._follow(where, context_tokens)
        found = decode(
            hot,
            scorer,
            query_QD,
            rows_C,
            always,
            self._selected_blocks(context_tokens, is_first),
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

    def _selected_blocks(self, context_tokens: int, is_first: bool) -> int:
        """Returns how many blocks a step selects; `is_first`: the first step of the sequence."""
        config = self._config
        most = config.budget_blocks if is_first else config.selected_blocks
        return most(context_tokens, self._block_tokens)

    def _follow(self, where: CandidateSpan, context_tokens: int) -> HotSet:
        """Returns the hot set (blocks to attend to), after it was extended to the present length of
        the context. Creates it in the first step.

        where: which blocks of the context can be chosen, and which are always attended.
        """
        budget_blocks = self._config.budget_blocks(context_tokens, self._block_tokens)
        capacity = max(budget_blocks, where.num_always)
        num_complete = context_tokens // self._block_tokens
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
            capacity = self._adaptive.capacity_blocks
        if capacity != hot.capacity_blocks:
            hot.resize(capacity)
        if where != hot.span or num_complete != self._num_complete:
            hot.swapped_out(hot.extend(where, num_complete, num_complete).swap_out, True)
            hot.seed(where.always)
            self._num_complete = num_complete
        return hot

    def _adopt(self, hot: HotSet) -> int:
        """Called at the beginning of a step. Adds blocks to the hot set (the blocks to attend to)
        that the previous step has selected but not added, because `max_correction_blocks` limits
        how many blocks a step adds. Returns the number of blocks that were added now."""
        if not len(self._arriving):
            return 0
        hot.finish_prefetch(self._arriving)
        self._arriving = NO_BLOCKS
        return len(hot.adopt().blocks)
