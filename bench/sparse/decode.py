"""Teacher-forced decode of a text's last tokens in many variants at once, each against the dense
pass over the same tokens.

Errors compound as they do in real decoding: a variant's hidden states, keys and queries are its own
from the first sparse layer on. Dense layers come first in the model and attend to everything, so
what they give is the same in every variant and is taken from the dense pass.

Shapes: V variants, W words, Q query heads, D channels, N compared tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bench.sparse.calibration import Calibration
from bench.sparse.choosers import Choice, Chooser, Context
from bench.sparse.llama import Dense, Llama
from bench.sparse.pages import Pages, open_slots
from bench.sparse.scorers import Scorer, scorer_of
from bench.sparse.variants import ORACLE, Variant
from hotkv_sparse import Span, aggregate
from hotkv_sparse.selection import exact_log_mass

F32 = npt.NDArray[np.float32]
STRONG_MASS = 0.1
"""A block is strong if it is a KV head's heaviest candidate and has more than this share of its
attention."""
TAIL_ALIGN = 64
"""Tails are whole blocks of any size that is tried."""
RECALL_EVERY_STEPS = 4
"""Steps between two looks at the exact mass of all blocks; an oracle needs it at each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant on one text; means over the compared tokens.

    `kl`: KL(dense || sparse) per token; `delta_nll`: both in nats. `recall`: share of strong blocks
    that were attended (None: there were none). `attended_ratio`: tokens attended over tokens of the
    context, sparse layers. `moved_blocks`: per set, layer and step.
    """

    variant: Variant
    kl: float
    delta_nll: float
    recall: float | None
    attended_ratio: float
    moved_blocks: float


class Tally:
    """Sums of one variant."""

    def __init__(self) -> None:
        self.kl = self.delta_nll = self.attended_ratio = 0.0
        self.num_strong = self.num_found = self.num_moved = self.num_sets = 0

    def count_strong(
        self, choice: Choice, mass_QB: F32, always_log_mass: F32, where: Span, kv_heads: int
    ) -> None:
        """Adds one layer's strong blocks, judged by exact mass."""
        weights = aggregate(
            mass_QB[:, where.first : where.last], always_log_mass, kv_heads
        ).per_head
        for head, block in enumerate(weights.argmax(axis=1)):
            if weights[head, block] > STRONG_MASS:
                blocks = choice.blocks_of_set[head % len(choice.blocks_of_set)]
                self.num_strong += 1
                self.num_found += bool((blocks == block + where.first).any())

    def count_choice(self, choice: Choice, context_tokens: int, block_tokens: int) -> None:
        """Adds what one layer attended to and moved."""
        for blocks in choice.blocks_of_set:
            self.attended_ratio += (
                len(blocks) * block_tokens - open_slots(context_tokens, block_tokens)
            ) / context_tokens
        self.num_sets += len(choice.blocks_of_set)
        self.num_moved += choice.num_moved

    def outcome(self, variant: Variant, num_tokens: int) -> Outcome:
        """The means."""
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
    """All variants of one pass over one text. `tokens_S` ends with the token that the last compared
    one predicts."""

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
        built: dict[tuple[str, int], Scorer | None] = {}
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
        """Decodes all of it."""
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
        """Exact mass [Q, B] by variant, of those that need it at this step."""
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
