"""Decodes a text's last tokens, teacher-forced, in many variants of sparse attention at once, each
against the dense pass over the same tokens.

Errors accumulate as in real decoding: from the first sparse layer on, each variant has its own
hidden states, keys and queries. The dense layers come first; their output is copied from the
dense pass. Shapes: L layers, V variants, W vocabulary, Q query heads, D channels, N compared
tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from bench.sparse.engine import CALIBRATING, Setup
from bench.sparse.llama import Calibration, Dense, Llama, Own, dense_pass
from bench.sparse.low_rank import LOW_RANKS, LowRankScorer
from bench.sparse.variants import CENTRED, ENDS, LRU, ORACLE, PARTED, Variant
from hotkv_sparse import (
    FORMATS,
    CandidateSpan,
    HotSet,
    Selection,
    build,
    choose,
    prepare,
    score,
    span,
)
from hotkv_sparse.axes import Axes
from hotkv_sparse.centre import LayerCentre
from hotkv_sparse.centre_file import read_centres
from hotkv_sparse.selection import exact_log_mass

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

# -------------------------------------------------------------------------------------------- Pages
# A layer's keys are one array: the shared prompt, then a tail for each variant's decoded tokens.
# Each part is whole blocks long, so attention over selected blocks gathers rows.
# Shapes: L layers, H KV heads, Q query heads, D channels, V variants, N tokens of a tail, R rows, S
# tokens of a context, T tokens of a block.


def open_slots(context_tokens: int, block_tokens: int) -> int:
    """Tokens that the last block still lacks."""
    return -context_tokens % block_tokens


class Pages:
    """Variants share the first `num_shared` tokens; each appends what it decodes to its tail of
    `num_tail`."""

    def __init__(
        self,
        keys_LHSD: Sequence[torch.Tensor],
        values_LHSD: Sequence[torch.Tensor],
        num_shared: int,
        num_tail: int,
        num_variants: int,
    ) -> None:
        self.num_shared = num_shared
        self.num_tail = num_tail
        self.num_variants = num_variants
        self._keys = [self._with_tails(keys) for keys in keys_LHSD]
        self._values = [self._with_tails(values) for values in values_LHSD]

    def _with_tails(self, shared_HSD: torch.Tensor) -> torch.Tensor:
        kv_heads, _, head_size = shared_HSD.shape
        tails = shared_HSD.new_zeros(kv_heads, self.num_variants * self.num_tail, head_size)
        return torch.cat([shared_HSD[:, : self.num_shared], tails], dim=1)

    def _tails(self, array_HSD: torch.Tensor) -> torch.Tensor:
        return array_HSD[:, self.num_shared :].unflatten(1, (self.num_variants, self.num_tail))

    def append(
        self, layer: int, step: int, keys_VHD: torch.Tensor, values_VHD: torch.Tensor
    ) -> None:
        """Appends to every variant's tail."""
        self._tails(self._keys[layer])[:, :, step] = keys_VHD.transpose(0, 1)
        self._tails(self._values[layer])[:, :, step] = values_VHD.transpose(0, 1)

    def rows(self, variant: int, blocks: I32, block_tokens: int) -> torch.Tensor:
        """Indices of a variant's blocks in arrays of blocks: the prompt's are shared, later ones
        in its tail."""
        beyond = variant * (self.num_tail // block_tokens)
        return torch.from_numpy(
            np.where(blocks < self.num_shared // block_tokens, blocks, blocks + beyond).astype(
                np.int64
            )
        )

    def keys(self, layer: int, variant: int, blocks: I32, block_tokens: int) -> torch.Tensor:
        """[H, len(blocks) * T, D]."""
        return self._gather(
            self._keys[layer], self.rows(variant, blocks, block_tokens), block_tokens
        )

    def _gather(
        self, array_HSD: torch.Tensor, rows_R: torch.Tensor, block_tokens: int
    ) -> torch.Tensor:
        kv_heads, _, head_size = array_HSD.shape
        return (
            array_HSD.view(kv_heads, -1, block_tokens * head_size)
            .index_select(1, rows_R)
            .view(kv_heads, -1, head_size)
        )

    def attend(
        self,
        layer: int,
        variant: int,
        query_QD: torch.Tensor,
        blocks_of_set: Sequence[I32],
        context_tokens: int,
        block_tokens: int,
    ) -> torch.Tensor:
        """Exact attention over ascending blocks, the context's last included: [Q, D].
        blocks_of_set: one for all KV heads, or one for each.
        """
        keys, values = self._keys[layer], self._values[layer]
        kv_heads, _, head_size = keys.shape
        per_set = kv_heads // len(blocks_of_set)
        query_HGD = query_QD.view(kv_heads, -1, head_size)
        missing = open_slots(context_tokens, block_tokens)
        attended = []
        for index, blocks in enumerate(blocks_of_set):
            heads = slice(index * per_set, (index + 1) * per_set)
            rows = self.rows(variant, blocks, block_tokens)
            num_tokens = len(blocks) * block_tokens - missing
            some_keys = self._gather(keys[heads], rows, block_tokens)[:, :num_tokens]
            some_values = self._gather(values[heads], rows, block_tokens)[:, :num_tokens]
            scores = query_HGD[heads] @ some_keys.transpose(1, 2) / math.sqrt(head_size)
            attended.append(scores.softmax(dim=-1) @ some_values)
        return torch.cat(attended).view(-1, head_size)

    def block_mass(
        self,
        layer: int,
        query_VQD: torch.Tensor,
        variants: Sequence[int],
        context_tokens: int,
        block_tokens: int,
    ) -> F32:
        """Exact log of the mass (sum of exp(q · k * scale)) of every block: float32 [variants, Q,
        blocks].

        query_VQD: of all variants.
        context_tokens: with what the variants have decoded.
        """
        keys_HSD = self._keys[layer]
        kv_heads, _, head_size = keys_HSD.shape
        query_HVGD = query_VQD[list(variants)].unflatten(1, (kv_heads, -1)).transpose(
            0, 1
        ) / math.sqrt(head_size)
        shared = query_HVGD.flatten(1, 2) @ keys_HSD[:, : self.num_shared].transpose(1, 2)
        own_HVND = self._tails(keys_HSD)[:, list(variants), : context_tokens - self.num_shared]
        own = query_HVGD @ own_HVND.transpose(2, 3)
        own = torch.nn.functional.pad(
            own, (0, open_slots(context_tokens, block_tokens)), value=-torch.inf
        )
        scores_HVGS = torch.cat([shared.unflatten(1, (len(variants), -1)), own], dim=-1)
        mass = scores_HVGS.unflatten(-1, (-1, block_tokens)).logsumexp(dim=-1)
        result: F32 = mass.transpose(0, 1).flatten(1, 2).numpy()
        return result


# ------------------------------------------------------------------------------------------- Scores
# By sketches, or by low-rank summaries (`bench.sparse.low_rank`), to which they are compared.
# Shapes: L layers, B blocks, S tokens or candidates, T tokens of a block, H KV heads, Q query
# heads, D channels, N bytes of a sketch.


@dataclass(frozen=True, slots=True)
class Scorer:
    """By sketches in a format of `hotkv_sparse`.

    pools: of each layer, uint8 [B * parts, H, N].
    centres_L: None: 0.
    parts: sketches of a block.
    """

    name: str
    pools: list[U8]
    centres_L: Sequence[LayerCentre | None]
    parts: int = 1

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        rows = slice(block * self.parts, (block + 1) * self.parts)
        self.pools[layer][rows] = build(
            self.name,
            keys_THD.reshape(self.parts, -1, *keys_THD.shape[1:]),
            _mu(self.centres_L[layer]),
            axes=_axes(self.centres_L[layer]),
        )

    def scores(self, layer: int, query_QD: F32, candidates_S: I32) -> F32:
        """Of consecutive blocks: estimated log mass, float32 [Q, candidates]."""
        centre = self.centres_L[layer]
        bias = None if centre is None else centre.bias.get(self.name)
        query = prepare(self.name, query_QD, _mu(centre), bias=bias, axes=_axes(centre))
        rows = candidates_S[:, None] * self.parts + np.arange(self.parts, dtype=np.int32)
        scores_QR = score(query, self.pools[layer], rows.ravel().astype(np.int32))
        scores_QSP = scores_QR.reshape(len(query_QD), -1, self.parts)
        merged = np.logaddexp if self.name == "mean" else np.maximum
        result: F32 = merged.reduce(scores_QSP, axis=2)
        return result

    def copy(self) -> "Scorer":
        """For another variant over the same prompt."""
        return replace(self, pools=[pool.copy() for pool in self.pools])


def _mu(centre: LayerCentre | None) -> F32 | None:
    return None if centre is None else centre.mu


def _axes(centre: LayerCentre | None) -> Axes | None:
    return None if centre is None else centre.axes


def scorer_of(
    variant: Variant,
    keys_LHSD: Sequence[torch.Tensor],
    num_shared: int,
    max_tokens: int,
    calibration: Calibration,
) -> Scorer | LowRankScorer | None:
    """Knows the first `num_shared` tokens, with space for `max_tokens`. None if the variant
    needs none."""
    name, _, centre = variant.scorer.partition(CENTRED)
    if name in LOW_RANKS:
        shared_LHSD = [keys_HSD[:, :num_shared] for keys_HSD in keys_LHSD]
        more = -(-max_tokens // variant.block_tokens) * variant.block_tokens - num_shared
        return LowRankScorer(LOW_RANKS[name], shared_LHSD, variant.block_tokens, more)
    name, sketch_tokens = PARTED.get(name, (name, variant.block_tokens))
    if name not in FORMATS:
        return None
    centres: Sequence[LayerCentre | None] = (
        calibration.centres[centre] if centre else [None] * len(keys_LHSD)
    )
    parts, pools = variant.block_tokens // sketch_tokens, []
    for layer, keys_HSD in enumerate(keys_LHSD):
        kv_heads, _, head_size = keys_HSD.shape
        keys_BTHD = (
            keys_HSD[:, :num_shared].transpose(0, 1).reshape(-1, sketch_tokens, kv_heads, head_size)
        )
        known_blocks = build(
            name,
            keys_BTHD.contiguous().numpy(),
            _mu(centres[layer]),
            axes=_axes(centres[layer]),
        )
        num_blocks = -(-max_tokens // variant.block_tokens)
        pool = np.zeros((num_blocks * parts, *known_blocks.shape[1:]), np.uint8)
        pool[: len(known_blocks)] = known_blocks
        pools.append(pool)
    return Scorer(name, pools, centres, parts)


# --------------------------------------------------------------------------- From a query to blocks
# Every part of the choice is `hotkv_sparse`'s code. As in an engine, a `Chooser` builds a block's
# sketch when it is full, and updates hot sets in each step; keys and values are in memory anyway.
# Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels.


@dataclass(frozen=True, slots=True)
class Choice:
    """blocks_of_set: int32, ascending; one set for all KV heads, or one for each.
    num_moved: blocks that an engine would have loaded, over all sets.
    """

    blocks_of_set: tuple[I32, ...]
    num_moved: int


@dataclass(frozen=True, slots=True)
class Context:
    """tokens: of the context.
    query_QD: float32.
    always_log_mass: float32 [Q], of the always-kept blocks.
    block_mass: float32 [Q, blocks], exact log mass; None: unknown.
    """

    tokens: int
    query_QD: F32
    always_log_mass: F32
    block_mass: F32 | None


class Chooser:
    """num_shared: tokens before the first decoded one.
    scorer: has their sketches; None: no scores needed.
    """

    def __init__(
        self,
        variant: Variant,
        num_layers: int,
        kv_heads: int,
        num_shared: int,
        max_tokens: int,
        scorer: Scorer | LowRankScorer | None,
    ) -> None:
        self.variant = variant
        self.config = variant.config()
        self.kv_heads = kv_heads
        self._scorer = scorer
        self._num_host = num_shared // variant.block_tokens
        num_sets = 1 if variant.shared else kv_heads
        num_hot = num_sets if variant.freshness == LRU else 0
        self._hot = [
            [
                HotSet(
                    self._budget_blocks(max_tokens),
                    policy=self.config.cache_policy,
                )
                for _ in range(num_hot)
            ]
            for _ in range(num_layers)
        ]

    def _budget_blocks(self, context_tokens: int) -> int:
        return self.config.budget_blocks(context_tokens, self.variant.block_tokens)

    def span(self, context_tokens: int) -> CandidateSpan:
        return span(self.config, context_tokens, self.variant.block_tokens)

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        if self._scorer:
            self._scorer.block_filled(layer, block, keys_THD)

    def choose(self, layer: int, context: Context) -> Choice:
        where = self.span(context.tokens)
        if self.variant.scorer == ENDS:
            return Choice((where.always,), 0)
        selections = self._select(layer, where, context)
        if self.variant.freshness == LRU:
            return self._through_hot_sets(layer, where, context.tokens, selections)
        return Choice(tuple(selection.blocks for selection in selections), 0)

    def _select(self, layer: int, where: CandidateSpan, context: Context) -> list[Selection]:
        if self._scorer:
            scores = self._scorer.scores(
                layer, context.query_QD, np.arange(where.first, where.last, dtype=np.int32)
            )
        else:
            assert self.variant.scorer == ORACLE and context.block_mass is not None
            scores = context.block_mass[:, where.first : where.last]
        num_sets = 1 if self.variant.shared else self.kv_heads
        scores_of_set = np.split(scores, num_sets)
        log_mass_of_set = np.split(context.always_log_mass, num_sets)
        budget = self._budget_blocks(context.tokens)
        if self.variant.freshness == LRU and self._hot[layer][0].span.count:
            # The first selection fills the whole hot set: after prefill all blocks are still on
            # the device.
            budget = self.config.selected_blocks(context.tokens, self.variant.block_tokens)
        return [
            choose(of_set, log_mass, where, budget)
            for of_set, log_mass in zip(scores_of_set, log_mass_of_set, strict=True)
        ]

    def _through_hot_sets(
        self, layer: int, where: CandidateSpan, context_tokens: int, selections: Sequence[Selection]
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
            hot.finish_prefetch(prefetch.slots)
            maps.append(step.map.blocks)
        return Choice(tuple(maps), num_moved)


# ------------------------------------------------------------------------------------------- Decode

STRONG_MASS = 0.1
"""A KV head's strong block has the most of its attention among candidates, and more than this
share."""
TAIL_ALIGN = 64
"""A tail is whole blocks of every block size."""
RECALL_EVERY_STEPS = 4
"""Between measurements of exact mass, for recall; `oracle` needs it in every step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the compared tokens.

    kl: KL(dense || sparse) per token, in nats.
    delta_nll: rise of NLL per token over the dense pass, in nats.
    recall: share of strong blocks attended to; None without any.
    attended_ratio: of the context's tokens, in sparse layers.
    moved_blocks: that an engine would have loaded, per set, layer and step.
    """

    variant: Variant
    kl: float
    delta_nll: float
    recall: float | None
    attended_ratio: float
    moved_blocks: float


class Tally:
    def __init__(self) -> None:
        self.kl = self.delta_nll = self.attended_ratio = 0.0
        self.num_strong = self.num_found = self.num_moved = self.num_sets = 0

    def count_strong(
        self,
        choice: Choice,
        mass_QB: F32,
        always_log_mass: F32,
        where: CandidateSpan,
        kv_heads: int,
    ) -> None:
        """mass_QB: float32 [Q, blocks], exact log mass.
        always_log_mass: float32 [Q], of all always-kept blocks together.
        """
        log_mass = mass_QB[:, where.first : where.last]
        total = np.logaddexp(np.logaddexp.reduce(log_mass, axis=1), always_log_mass)
        shares = np.exp(log_mass - total[:, None])
        weights = shares.reshape(kv_heads, -1, shares.shape[1]).mean(axis=1)
        for head, block in enumerate(weights.argmax(axis=1)):
            if weights[head, block] > STRONG_MASS:
                blocks = choice.blocks_of_set[head % len(choice.blocks_of_set)]
                self.num_strong += 1
                self.num_found += bool((blocks == block + where.first).any())

    def count_choice(self, choice: Choice, context_tokens: int, block_tokens: int) -> None:
        for blocks in choice.blocks_of_set:
            self.attended_ratio += (
                len(blocks) * block_tokens - open_slots(context_tokens, block_tokens)
            ) / context_tokens
        self.num_sets += len(choice.blocks_of_set)
        self.num_moved += choice.num_moved

    def outcome(self, variant: Variant, num_tokens: int) -> Outcome:
        recall = self.num_found / self.num_strong if self.num_strong else None
        sets = max(self.num_sets, 1)
        return Outcome(
            variant,
            self.kl / num_tokens,
            self.delta_nll / num_tokens,
            recall,
            self.attended_ratio / sets,
            self.num_moved / sets,
        )


class Decode:
    """tokens_S: the last is only predicted, not decoded.
    calibration: centres and axes of the sketches.
    """

    def __init__(
        self,
        model: Llama,
        dense: Dense,
        tokens_S: torch.Tensor,
        calibration: Calibration,
        variants: Sequence[Variant],
    ) -> None:
        self.model, self.dense = model, dense
        num_compared = len(dense.inputs_NE)
        self.max_tokens = len(tokens_S) - 1
        self.num_shared = self.max_tokens - num_compared
        self.targets_N = tokens_S[-num_compared:]
        num_tail = -(-num_compared // TAIL_ALIGN) * TAIL_ALIGN
        self.pages = Pages(
            dense.keys_LHSD, dense.values_LHSD, self.num_shared, num_tail, len(variants)
        )
        kv_heads, num_layers = model.shape.kv_heads, len(dense.keys_LHSD)
        built: dict[tuple[str, int], Scorer | LowRankScorer | None] = {}
        self.choosers = []
        for variant in variants:
            key = (variant.scorer, variant.block_tokens)
            if key not in built:
                built[key] = scorer_of(
                    variant, dense.keys_LHSD, self.num_shared, self.max_tokens, calibration
                )
            known = built[key]
            scorer = known.copy() if known else None
            self.choosers.append(
                Chooser(
                    variant,
                    num_layers,
                    kv_heads,
                    self.num_shared,
                    self.max_tokens,
                    scorer,
                )
            )
        self.tallies = [Tally() for _ in variants]

    def run(self) -> list[Outcome]:
        for step in range(len(self.dense.inputs_NE)):
            self._step(step)
        return [
            tally.outcome(chooser.variant, len(self.targets_N))
            for tally, chooser in zip(self.tallies, self.choosers, strict=True)
        ]

    def _step(self, step: int) -> None:
        num_variants, context_tokens = len(self.choosers), self.num_shared + step + 1
        x_VE = self.dense.inputs_NE[step].expand(num_variants, -1)
        positions = torch.full((num_variants,), context_tokens - 1)
        for layer in range(len(self.dense.keys_LHSD)):
            model_layer = self.dense.first_layer + layer
            query_VQD, keys, values = self.model.queries_keys_values(model_layer, x_VE, positions)
            self.pages.append(layer, step, keys, values)
            attended = self._attend(layer, step, query_VQD, context_tokens)
            x_VE = self.model.after_attention(model_layer, x_VE, attended)
        log_probs_VW = self.model.log_probs(x_VE)
        dense_W, target = self.dense.log_probs_NW[step], self.targets_N[step]
        kl_V = (dense_W.exp() * (dense_W - log_probs_VW)).sum(dim=-1)
        for index, tally in enumerate(self.tallies):
            tally.kl += float(kl_V[index])
            tally.delta_nll += float(dense_W[target] - log_probs_VW[index, target])

    def _attend(
        self, layer: int, step: int, query_VQD: torch.Tensor, context_tokens: int
    ) -> torch.Tensor:
        mass = self._block_mass(layer, step, query_VQD, context_tokens)
        attended = []
        for index, chooser in enumerate(self.choosers):
            block_tokens, where = chooser.variant.block_tokens, chooser.span(context_tokens)
            query_QD = query_VQD[index]
            kept = self.pages.keys(layer, index, where.always, block_tokens)
            kept_RHD = (
                kept[:, : kept.shape[1] - open_slots(context_tokens, block_tokens)]
                .transpose(0, 1)
                .numpy()
            )
            always_log_mass = exact_log_mass(query_QD.numpy(), kept_RHD)
            choice = chooser.choose(
                layer, Context(context_tokens, query_QD.numpy(), always_log_mass, mass.get(index))
            )
            attended.append(
                self.pages.attend(
                    layer, index, query_QD, choice.blocks_of_set, context_tokens, block_tokens
                )
            )
            self.tallies[index].count_choice(choice, context_tokens, block_tokens)
            if index in mass and step % RECALL_EVERY_STEPS == 0:
                self.tallies[index].count_strong(
                    choice, mass[index], always_log_mass, where, chooser.kv_heads
                )
            if context_tokens % block_tokens == 0:
                last = np.array([context_tokens // block_tokens - 1], np.int32)
                filled = self.pages.keys(layer, index, last, block_tokens).transpose(0, 1)
                chooser.block_filled(layer, int(last[0]), filled.contiguous().numpy())
        return torch.stack(attended)

    def _block_mass(
        self, layer: int, step: int, query_VQD: torch.Tensor, context_tokens: int
    ) -> dict[int, F32]:
        """Float32 [Q, blocks] of each variant that needs it now: always if it selects by it, now
        and then for recall."""
        needed: dict[int, list[int]] = {}
        for index, chooser in enumerate(self.choosers):
            if step % RECALL_EVERY_STEPS == 0 or chooser.variant.scorer == ORACLE:
                needed.setdefault(chooser.variant.block_tokens, []).append(index)
        mass: dict[int, F32] = {}
        for block_tokens, indices in needed.items():
            mass.update(
                zip(
                    indices,
                    self.pages.block_mass(layer, query_VQD, indices, context_tokens, block_tokens),
                    strict=True,
                )
            )
        return mass


# ----------------------------------------------------------------------------- As an engine decodes
# With an engine's settings, to compare with it.


class Offline:
    """Decodes without an engine. As an engine, takes centres from the first text or the
    settings' file; but from that text's beginning, where an engine sees the whole prompt."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._first: Sequence[LayerCentre] | None = None

    def dense(self, tokens: Sequence[int], num_compared: int, setup: Setup) -> Dense:
        """Calibrates from the first text."""
        dense = dense_pass(self._model, torch.tensor(tokens)[:-1], num_compared, setup.dense_layers)
        if self._first is None:
            self._first = Own.of(dense).moved_L
        return dense

    def decoded(
        self, dense: Dense, tokens: Sequence[int], setups: Sequence[Setup]
    ) -> list[Outcome]:
        """The setups must share dense layers and the file of centres."""
        assert self._first is not None
        centres: Sequence[LayerCentre | None] = self._first
        if file := setups[0].centres:
            layers, first_layer = read_centres(file).layers, dense.first_layer
            centres = [layers.get(first_layer + layer) for layer in range(len(dense.keys_LHSD))]
        variants = [
            Variant(
                f"{setup.scorer}{CENTRED}first"
                if setup.centres or setup.scorer == CALIBRATING
                else setup.scorer,
                setup.budget,
                setup.block_tokens,
                True,
                LRU,
                setup.corrections,
            )
            for setup in setups
        ]
        given = torch.tensor(tokens)
        return Decode(self._model, dense, given, Calibration({"first": centres}), variants).run()
