"""A variant at work: from a step's query to the blocks that it attends to, with what `hotkv_sparse`
itself does at every stage.

A `Chooser` is one variant over one text. Representations are built when blocks fill and hot sets
live as they do in an engine; the only copies that are missing are those of keys and values, which
all lie in memory anyway.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.sparse.scorers import Scorer
from bench.sparse.variants import ENDS, FRESH, LRU, ORACLE, PREVIOUS, Variant
from hotkv_sparse import HotSet, Selection, Span, aggregate, select, span

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
USUAL_SETS = 2
"""A hot set is so many budgets large."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`blocks_of_set`: int32, ascending, for all KV heads or for each; `num_moved`: blocks that
    came in for this step, all sets."""

    blocks_of_set: tuple[I32, ...]
    num_moved: int


@dataclass(frozen=True, slots=True)
class Context:
    """Input of a selection: `always_log_mass` float32 [Q] of the blocks that are always kept;
    `block_mass` [Q, B], exact, if it is known."""

    tokens: int
    query_QD: F32
    always_log_mass: F32
    block_mass: F32 | None


class Chooser:
    """See the module. `scorer` knows the first `num_shared` tokens, which are those before the
    first step; none if none is needed."""

    def __init__(
        self,
        variant: Variant,
        num_layers: int,
        kv_heads: int,
        num_shared: int,
        max_tokens: int,
        scorer: Scorer | None,
    ) -> None:
        self.variant = variant
        self.config = variant.config()
        self.kv_heads = kv_heads
        self._scorer = scorer
        self._num_host = num_shared // variant.block_tokens
        num_sets = 1 if variant.shared else kv_heads
        self._last: list[list[Selection | None]] = [[None] * num_sets for _ in range(num_layers)]
        num_hot = num_sets if variant.freshness == LRU else 0
        self._hot = [
            [
                HotSet(
                    USUAL_SETS * self._budget_blocks(max_tokens),
                    policy=self.config.cache_policy,
                )
                for _ in range(num_hot)
            ]
            for _ in range(num_layers)
        ]

    def _budget_blocks(self, context_tokens: int) -> int:
        return self.config.budget_blocks(context_tokens, self.variant.block_tokens)

    def span(self, context_tokens: int) -> Span:
        """The blocks of a context that are always kept, and the candidates."""
        return span(self.config, context_tokens, self.variant.block_tokens)

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        """A block has just become complete."""
        if self._scorer:
            self._scorer.block_filled(layer, block, keys_THD)

    def choose(self, layer: int, context: Context) -> Choice:
        """The blocks to attend to."""
        where = self.span(context.tokens)
        if self.variant.scorer == ENDS:
            return Choice((where.always,), 0)
        selections = self._select(layer, where, context)
        if self.variant.freshness == LRU:
            return self._through_hot_sets(layer, where, context.tokens, selections)
        if self.variant.freshness == FRESH:
            return Choice(tuple(selection.blocks for selection in selections), 0)
        assert self.variant.freshness == PREVIOUS
        # There is nothing before the first step; it uses its own.
        last = [before or now for before, now in zip(self._last[layer], selections, strict=True)]
        self._last[layer] = list(selections)
        return Choice(
            tuple(
                np.union1d(selection.blocks, where.always).astype(np.int32) for selection in last
            ),
            0,
        )

    def _select(self, layer: int, where: Span, context: Context) -> list[Selection]:
        if self._scorer:
            scores = self._scorer.scores(layer, context.query_QD, where.candidates)
        else:
            assert self.variant.scorer == ORACLE and context.block_mass is not None
            scores = context.block_mass[:, where.first : where.last]
        weights = aggregate(scores, context.always_log_mass, self.kv_heads)
        of_sets = [(weights.shared, weights.always_shared)]
        if not self.variant.shared:
            of_sets = [
                (weights.per_head[head], float(weights.always[head]))
                for head in range(self.kv_heads)
            ]
        budget = self._budget_blocks(context.tokens)
        if self.variant.freshness == LRU and self._hot[layer][0].span.count == 0:
            # A sequence starts with a full hot set: prefill has just had everything on the device.
            budget *= USUAL_SETS
        return [select(of_set, always_mass, where, budget) for of_set, always_mass in of_sets]

    def _through_hot_sets(
        self, layer: int, where: Span, context_tokens: int, selections: Sequence[Selection]
    ) -> Choice:
        maps, num_moved = [], 0
        for hot, selection in zip(self._hot[layer], selections, strict=True):
            begins = hot.span.count == 0
            growth = hot.extend(
                where, context_tokens // self.variant.block_tokens, self._num_host if begins else 0
            )
            hot.swapped_out(growth.swap_out, True)
            num_moved += len(hot.adopt().blocks)
            step = hot.step(
                selection, len(selection.blocks) if begins else self.variant.corrections
            )
            num_moved += 0 if begins else len(step.load.blocks)
            prefetch = hot.begin_prefetch(step.prefetch)
            hot.finish_prefetch(prefetch.slots, True)
            maps.append(step.map.blocks)
        return Choice(tuple(maps), num_moved)
