"""Decides, step by step, the hot set of a sequence (a decoding request) in a layer.

With residency, adding a block costs a copy, so a step adds only a few. The same rules hold without.

Always true: the hot set includes sinks, recent window and partial last block. Each step adds
selected blocks that it lacks. After the first step at most `max_correction_blocks` are added at
once, others at the beginning of the next step, as far as slots are free.

A step selects half of the blocks that the hot set may have (`SparseConfig.selected_blocks`), so
that blocks outlive a step without them. The first step fills it without the limit, because after
the prefill all blocks are on the device. It has at most `SparseConfig.budget_blocks`, or the
always kept blocks if these are more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse import AdaptiveCapacity, CandidateSpan, HotSet, Selection, SparseConfig, span
from hotkv_sparse.decode import Always, Scorer, decode
from hotkv_sparse.selection import Source, select_layer
from hotkv_sparse.vllm.cpu.batch import SparseLayer

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of a decode step of a sequence in a layer.

    blocks: the hot set after the step, ascending, int32.
    selection: `blocks` may lack some of it.
    num_seeded: added in the first step.
    num_corrected: selected and added in a later step.
    num_prefetched: selected in the step before, added in this one.
    num_wanted: selected, without those always attended; of these `num_hits` were in the hot set
        before.
    """

    blocks: I32
    selection: Selection
    num_seeded: int
    num_corrected: int
    num_prefetched: int
    num_wanted: int
    num_hits: int


class LayerSequence:
    """Shared by the layer's KV heads. `step` and `decode` do the same; each call is one decode
    step."""

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
        """Hot slots of blocks of the present hot set, int32. With residency the caller copies
        the pages there."""
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
        """Decodes in numpy, with all settings.

        query_QD: after RoPE.
        sources: by format; `rows_C` are rows in them, int32.
        always_log_mass_Q: of the always attended blocks.
        context_tokens: with the step's token.
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
        """Decodes in one compiled call, without the settings `fusion` and `adaptive_p`.

        rows_C: in `scorer`, int32.
        selected: mask over the context's blocks; selected ones become True.
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
        config = self._config
        most = config.budget_blocks if is_first else config.selected_blocks
        return most(context_tokens, self._block_tokens)

    def _follow(self, where: CandidateSpan, context_tokens: int) -> HotSet:
        """The hot set at the present length; created in the first step."""
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
        if capacity > hot.capacity_blocks:
            hot.resize(capacity)
        if where != hot.span or num_complete != self._num_complete:
            hot.swapped_out(hot.extend(where, num_complete, num_complete).swap_out, True)
            hot.seed(where.always)
            self._num_complete = num_complete
        # After the blocks of rejected drafts have left, lest others are evicted for them.
        if capacity < hot.capacity_blocks:
            hot.resize(capacity)
        return hot

    def _adopt(self, hot: HotSet) -> int:
        """Adds blocks that the previous step has selected but not added. Returns their number."""
        if not len(self._arriving):
            return 0
        hot.finish_prefetch(self._arriving)
        self._arriving = NO_BLOCKS
        return len(hot.adopt().blocks)


class LayerDecoder:
    """Decodes in a layer, for any sequence."""

    def __init__(self, config: SparseConfig, layer: SparseLayer) -> None:
        self._config = config
        self._layer = layer
        # `fusion` and `adaptive_p` need the numpy code.
        self._is_compiled = not config.fusion and config.adaptive_p is None
        self._scorer: Scorer | None = None

    def __repr__(self) -> str:
        return f"LayerDecoder(layer {self._layer.index})"

    def begin(self) -> LayerSequence:
        return LayerSequence(self._config, self._layer.index, self._layer.shape.block_tokens)

    def step(
        self,
        own: LayerSequence,
        sources: Mapping[str, Source],
        query_QD: F32,
        rows_C: I32,
        always_blocks: I32,
        always_tokens: int,
        context_tokens: int,
        where: CandidateSpan,
        selected: npt.NDArray[np.bool_],
    ) -> Attended:
        """One decode step of the sequence `own`.

        sources: by format; `rows_C` are rows in them, int32.
        query_QD: after RoPE, in the order of `by_kv_head`.
        always_blocks: device blocks of the always kept ones, int32, with `always_tokens` tokens.
        selected: mask over the context's blocks; selected ones become True.
        """
        layer = self._layer
        about, sinks = (always_blocks, always_tokens, layer.scale), layer.sinks_of(len(query_QD))
        if self._is_compiled:
            return own.decode(
                self._scorer_for(sources[self._config.scorer], query_QD),
                query_QD,
                rows_C,
                layer.pages.always(query_QD, *about, sinks),
                context_tokens,
                where,
                selected,
            )
        always = layer.pages.log_mass(query_QD, *about)
        if sinks is not None:
            always = np.logaddexp(always, sinks)
        attended = own.step(query_QD, sources, rows_C, always, context_tokens, layer.scale)
        selected[attended.selection.blocks] = True
        return attended

    def _scorer_for(self, source: Source, query_QD: F32) -> Scorer:
        if self._scorer is None or self._scorer.source is not source:
            heads, head_size = query_QD.shape
            name, scale = self._config.scorer, self._layer.scale
            self._scorer = Scorer.of(name, source, heads, head_size, scale)
        return self._scorer
