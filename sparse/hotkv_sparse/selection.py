"""Selects the blocks that a layer attends to in a decode step.

`select_layer` works as follows:
1. `span` splits the blocks of the context. The first blocks (sinks) and the last blocks (recent
   window) are always kept; all blocks between them are candidates.
2. `scores.score` scores each candidate with the step's query. A score estimates the log mass of a
   block: the logarithm of its attention mass, which is the sum of exp(q · k * scale) over the
   block's tokens.
3. `choose` computes each candidate's share of the context's attention mass, the mean over the query
   heads. It chooses the candidates with the largest shares, up to a budget of blocks.

Engines call `select_layer` for every layer; the server calls it for clients that can't map its
memory. All KV heads of a layer share the selection, because they share a block table. Of blocks
with equal shares, the block with the lower position is preferred, so equal shares give the same
selection on every machine.

Shapes: Q query heads, H KV heads, G query heads that share a KV head, D channels, C blocks of the
context, S candidate blocks, R tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.axes import Axes
from hotkv_sparse.config import MIN_ADAPTIVE_TOKENS, SparseConfig
from hotkv_sparse.scores import prepare, score

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]


# -------------------------------------------------------------------------------------------- spans


@dataclass(frozen=True, slots=True)
class CandidateSpan:
    """The parts of a context, in blocks. Blocks [0, first) (sinks, the first tokens) and [last,
    count) (recent window, the last tokens) are always kept: every step attends to them. Blocks
    [first, last) are the candidates: a selection chooses among them."""

    first: int
    last: int
    count: int

    @property
    def num_always(self) -> int:
        """Returns the number of blocks that are always kept."""
        return self.count - (self.last - self.first)

    @property
    def always(self) -> I32:
        """Returns the blocks that are always kept, int32, ascending."""
        return np.concatenate(
            [
                np.arange(self.first, dtype=np.int32),
                np.arange(self.last, self.count, dtype=np.int32),
            ]
        )


def span(config: SparseConfig, context_tokens: int, block_tokens: int) -> CandidateSpan:
    """Divides the blocks of a context into sinks, candidates and recent window (see
    `CandidateSpan`).

    A last block that is not full always belongs to the recent window.
    """
    count = -(-context_tokens // block_tokens)
    first = min(-(-config.sink_tokens // block_tokens), count)
    complete = context_tokens // block_tokens
    last = min(max(context_tokens - config.recent_tokens, 0) // block_tokens, complete)
    return CandidateSpan(first, max(first, last), count)


@dataclass(frozen=True, slots=True)
class Selection:
    """The blocks that a layer should attend to.

    blocks: int32, positions in the context, ascending, including the always kept blocks.
    weights: float32, estimated share of the attention mass of each block; inf for always kept
        blocks.
    mass: estimated share of the attention mass that all `blocks` have together, 0 to 1.
    """

    blocks: I32
    weights: F32
    mass: float


# ------------------------------------------------------------------------------------------- fusion


def _log_total(scores_QS: F32, always_log_mass_Q: F32) -> F32:
    """Returns for each query head the log of the total attention mass of the scored blocks and the
    always kept blocks, float32 [query heads]. `fuse` divides masses by it. The result is finite
    even if all masses are zero."""
    everything = np.concatenate([scores_QS, always_log_mass_Q[:, None]], axis=1)
    peak = np.maximum(everything.max(axis=1), np.float32(-1e30))
    total: F32 = (
        peak + np.log(np.maximum(np.exp(everything - peak[:, None]).sum(axis=1), np.float32(1e-30)))
    ).astype(np.float32)
    return total


def fuse(
    scores_QS: Sequence[F32], exponents: Sequence[float], always_log_mass_Q: F32
) -> tuple[F32, F32]:
    """Combines the scores of several scorers (formats of sketches) to a weighted geometric
    mean.

    A score is the log of an estimated attention mass. The masses of each scorer are first divided
    by their total, so that scorers with different units can be combined. Returns (scores,
    always_log_mass), which are arguments of `choose`. Raises INVALID_FIELD unless every scorer has
    an exponent above 0.

    scores_QS: for each scorer, float32 [query heads, candidate blocks].
    exponents: for each scorer, its weight in the mean. Only their ratios matter.
    always_log_mass_Q: float32 [query heads], exact log of the attention mass of the always kept
        blocks.
    """
    if len(scores_QS) != len(exponents) or not scores_QS or min(exponents) <= 0:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"fusion of {len(scores_QS)} scorers has exponents {list(exponents)}; pass one "
            "above 0 for each",
        )
    totals = [_log_total(scores, always_log_mass_Q) for scores in scores_QS]
    # Divides the exponents by the largest, so that neither their sum nor float32 overflows.
    relative = np.array(exponents, np.float64) / max(exponents)
    shares = (relative / relative.sum()).astype(np.float32)
    fused = sum(
        share * (scores - total[:, None])
        for share, scores, total in zip(shares, scores_QS, totals, strict=True)
    )
    always = sum(
        share * (always_log_mass_Q - total) for share, total in zip(shares, totals, strict=True)
    )
    return np.asarray(fused, np.float32), np.asarray(always, np.float32)


# ------------------------------------------------------------------------------------------ choices


def choose(
    scores_QS: F32,
    always_log_mass_Q: F32,
    where: CandidateSpan,
    budget_blocks: int,
    *,
    adaptive_p: float | None = None,
    floor_blocks: int = 0,
) -> Selection:
    """Chooses the `budget_blocks` best blocks of a context, the same blocks for all heads.

    Always kept blocks count towards the budget. If there are more of them than the budget, only
    they are chosen. Raises INVALID_FIELD if scores do not fit the span or the masses.

    The weight of a candidate is its estimated share of the attention mass: the mean over the query
    heads h of exp(S_hb - Z_h) for candidate b. S_hb is its score, an estimate of the log of its
    mass. Z_h is the log of the head's total mass: Z_h = logaddexp(L_h, logsumexp_b S_hb), with L_h
    from `always_log_mass_Q` (docs/sparse.md).

    scores_QS: float32 [query heads, candidates], a score for each candidate of `where`.
    always_log_mass_Q: float32 [query heads], exact log of the attention mass of the always kept
        blocks; -inf if there are no such blocks.
    where: the blocks of the context, and which of them are candidates.
    adaptive_p: share of the attention mass to reach, together with the always kept blocks. Chooses
        only as many of the heaviest candidates as this share needs, within the budget. None:
        chooses the whole budget.
    floor_blocks: with `adaptive_p`, the least number of candidates to choose.
    """
    num_heads, num_candidates = scores_QS.shape
    if always_log_mass_Q.shape != (num_heads,):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"always_log_mass is {list(always_log_mass_Q.shape)}; pass [{num_heads}]",
        )
    if num_candidates != where.last - where.first:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"scores are of {num_candidates} blocks; the span has {where.last - where.first} "
            "candidates",
        )
    kernels = native.require("hotkv_sparse.all_kernels")
    num_always = where.count - num_candidates
    num_blocks = num_always + min(max(budget_blocks - num_always, 0), num_candidates)
    blocks, chosen = np.empty(num_blocks, np.int32), np.empty(num_blocks, np.float32)
    scores, log_mass = (
        np.ascontiguousarray(scores_QS, np.float32),
        np.ascontiguousarray(always_log_mass_Q, np.float32),
    )
    always_mass, mass = kernels.choose(scores, log_mass, where.first, where.count, blocks, chosen)
    if adaptive_p is not None:
        middle = slice(where.first, num_blocks - (where.count - where.last))
        weights_S = chosen[middle]
        kept = enough(weights_S, always_mass, adaptive_p, floor_blocks)
        mass = float(weights_S[kept].sum(dtype=np.float64))
        parts = (np.arange(where.first), where.first + kept, np.arange(middle.stop, num_blocks))
        blocks, chosen = blocks[np.concatenate(parts)], chosen[np.concatenate(parts)]
    return Selection(blocks, chosen, min(always_mass + mass, 1.0))


def enough(weights: F32, always_mass: float, p: float, floor_blocks: int) -> npt.NDArray[np.intp]:
    """Returns the indices of the heaviest candidates that a selection with `adaptive_p` needs, in
    ascending order of index. They are as few as possible, so that the sum of their weights and
    `always_mass` reaches `p`, but at least `floor_blocks`.

    weights: float32 [candidates], share of the attention mass of each candidate.
    always_mass: share of the attention mass of the always kept blocks.
    p: share of the attention mass to reach, 0 to 1.
    """
    order = np.argsort(-weights, kind="stable")
    reached = np.concatenate(
        [[always_mass], always_mass + np.cumsum(weights[order], dtype=np.float64)]
    )
    # If all blocks together do not reach p, all of them are returned.
    num_needed = int(np.searchsorted(reached, p))
    return np.sort(order[: max(num_needed, floor_blocks)])


def floor_blocks(block_tokens: int) -> int:
    """Returns the least number of candidates that a selection with `adaptive_p` has:
    `MIN_ADAPTIVE_TOKENS`, in blocks."""
    return -(-MIN_ADAPTIVE_TOKENS // block_tokens)


def top(weights_S: F32, count: int) -> I32:
    """Returns the indices of the `count` largest weights, int32, ascending.

    Of equal weights, the lower index is preferred. Weights that are not above 0 count as 0.
    """
    if count >= len(weights_S):
        return np.arange(len(weights_S), dtype=np.int32)
    out = np.empty(count, np.int32)
    native.require("hotkv_sparse.all_kernels").top(np.ascontiguousarray(weights_S, np.float32), out)
    return out


# ---------------------------------------------------------------------------------------- one layer


@dataclass(frozen=True, slots=True)
class Source:
    """The sketches (compact forms of blocks' keys) of a layer in one format, with what is
    needed to score blocks by them.

    pool: uint8 [blocks, KV heads, bytes], a row for each block.
    mu: float32 [KV heads, channels], the centre (mean key of each head) with which the
        sketches were built; None: 0.
    bias: by how much scores with this centre overestimate the log of a block's attention mass, in
        nats; None: the format's bias.
    axes: the principal axes with which the sketches were built; None if the format has no
        axes.
    """

    pool: U8
    mu: F32 | None = None
    bias: float | None = None
    axes: Axes | None = None


def select_layer(
    config: SparseConfig,
    layer: int,
    query_QD: F32,
    sources: Mapping[str, Source],
    rows_C: I32,
    always_log_mass_Q: F32,
    context_tokens: int,
    block_tokens: int,
    *,
    scale: float | None = None,
    budget_blocks: int | None = None,
) -> Selection:
    """Selects the blocks of a context to which `layer` should attend in this step.

    Raises INVALID_FIELD if a source is missing or the layer is dense.

    query_QD: float32 [query heads, channels], after positional encoding.
    sources: the layer's sketches (compact forms of blocks' keys), by the name of their
        format.
    rows_C: int32, for each block of the context, the row of its sketch in the sources'
        pools; ignored for always kept blocks.
    always_log_mass_Q: float32 [query heads], exact log of the attention mass of the always kept
        blocks (`exact_log_mass`).
    context_tokens: tokens of the context.
    scale: scale of attention; None: 1 / sqrt(D).
    budget_blocks: number of blocks to select, including the always kept blocks; None: the budget of
        `config`.
    """
    where = span(config, context_tokens, block_tokens)
    if budget_blocks is None:
        budget_blocks = config.budget_blocks(context_tokens, block_tokens)
    scorers = config.scorers_of(layer)
    missing = [name for name in scorers if name not in sources]
    if not scorers or missing:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"layer {layer} "
            + (f"has no source for {missing[0]}" if missing else "is dense; attend to all of it"),
        )
    rows_S = rows_C[where.first : where.last]
    scored = [
        score(
            prepare(
                name, query_QD, sources[name].mu, scale, sources[name].bias, sources[name].axes
            ),
            sources[name].pool,
            rows_S,
        )
        for name in scorers
    ]
    scores, log_mass = (
        (scored[0], always_log_mass_Q)
        if len(scored) == 1
        else fuse(scored, list(scorers.values()), always_log_mass_Q)
    )
    return choose(
        scores,
        log_mass,
        where,
        budget_blocks,
        adaptive_p=config.adaptive_p,
        floor_blocks=floor_blocks(block_tokens),
    )


def estimated_log_mass(
    query_QD: F32, sources: Mapping[str, Source], rows: I32, scale: float | None = None
) -> F32:
    """Estimates the log of the attention mass that blocks have together, float32 [query heads];
    -inf without blocks. Uses the first scorer (format of sketches) in `sources`.

    sources: the layer's sketches (compact forms of blocks' keys), by the name of their
        scorer.
    rows: the rows of the blocks in the pool of sketches.
    scale: scale of attention; None: 1 / sqrt(D).
    """
    name, source = next(iter(sources.items()))
    query = prepare(name, query_QD, source.mu, scale, source.bias, source.axes)
    scores = score(query, source.pool, rows)
    log_mass: F32 = np.logaddexp.reduce(scores, axis=1, initial=-np.inf).astype(np.float32)
    return log_mass


def exact_log_mass(query_QD: F32, keys_RHD: F32, scale: float | None = None) -> F32:
    """Returns the exact log of the attention mass of tokens: the logsumexp of q · k * scale over
    the tokens, float32 [query heads]; -inf without keys.

    keys_RHD: float32 [tokens, KV heads, channels], the keys of the tokens.
    """
    num_heads, head_size = query_QD.shape
    num_tokens, kv_heads, _ = keys_RHD.shape
    if not num_tokens:
        return np.full(num_heads, -np.inf, np.float32)
    scale = 1.0 / np.sqrt(head_size) if scale is None else scale
    grouped_HGD = query_QD.reshape(kv_heads, num_heads // kv_heads, head_size)
    scores_QR = (grouped_HGD @ keys_RHD.transpose(1, 2, 0)).reshape(
        num_heads, num_tokens
    ) * np.float32(scale)
    peak = scores_QR.max(axis=1)
    return np.asarray(peak + np.log(np.exp(scores_QR - peak[:, None]).sum(axis=1)), np.float32)
