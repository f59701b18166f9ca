"""Selects the blocks that a layer attends to in a decode step.

`select_layer`:
1. `span` splits the context: sinks and recent window are always kept, the rest are candidates.
2. `scores.score` estimates each candidate's *log mass*, the log of the sum of exp(q · k * scale)
   over its tokens.
3. `choose` takes the candidates with the largest shares of the mass, means over the query heads, up
   to a budget.

Engines call it per layer; the server does for clients that can't map its arena. All KV heads of a
layer share the selection, as they share a block table. Of equal shares the lower position wins, so
machines agree.

Shapes: Q query heads, H KV heads, G query heads per KV head, D channels, C blocks of the
    context, S candidates, R tokens.
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
    """Blocks [0, first) are sinks, [last, count) recent window: always kept. [first, last) are
    the candidates."""

    first: int
    last: int
    count: int

    @property
    def num_always(self) -> int:
        return self.count - (self.last - self.first)

    @property
    def always(self) -> I32:
        """Ascending."""
        return np.concatenate(
            [
                np.arange(self.first, dtype=np.int32),
                np.arange(self.last, self.count, dtype=np.int32),
            ]
        )


def span(config: SparseConfig, context_tokens: int, block_tokens: int) -> CandidateSpan:
    """A last block that is not full belongs to the recent window."""
    count = -(-context_tokens // block_tokens)
    first = min(-(-config.sink_tokens // block_tokens), count)
    complete = context_tokens // block_tokens
    last = min(max(context_tokens - config.recent_tokens, 0) // block_tokens, complete)
    return CandidateSpan(first, max(first, last), count)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a layer attends to.

    blocks: int32, ascending positions, always kept ones included.
    weights: float32, estimated shares of the mass; inf for always kept blocks.
    mass: estimated share of all `blocks`, 0 to 1.
    """

    blocks: I32
    weights: F32
    mass: float


# ------------------------------------------------------------------------------------------- fusion


def _log_total(scores_QS: F32, always_log_mass_Q: F32) -> F32:
    """Log of the total mass, float32 [Q]; finite even if all masses are 0."""
    everything = np.concatenate([scores_QS, always_log_mass_Q[:, None]], axis=1)
    peak = np.maximum(everything.max(axis=1), np.float32(-1e30))
    total: F32 = (
        peak + np.log(np.maximum(np.exp(everything - peak[:, None]).sum(axis=1), np.float32(1e-30)))
    ).astype(np.float32)
    return total


def fuse(
    scores_QS: Sequence[F32], exponents: Sequence[float], always_log_mass_Q: F32
) -> tuple[F32, F32]:
    """Weighted geometric mean of several scorers' masses, each divided by its total so that units
    don't matter: (scores, always_log_mass) for `choose`. Raises INVALID_FIELD unless each has an
    exponent above 0.

    scores_QS: for each scorer, float32 [Q, S].
    exponents: only their ratios matter.
    always_log_mass_Q: exact, float32 [Q].
    """
    if len(scores_QS) != len(exponents) or not scores_QS or min(exponents) <= 0:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"fusion of {len(scores_QS)} scorers has exponents {list(exponents)}; pass one "
            "above 0 for each",
        )
    totals = [_log_total(scores, always_log_mass_Q) for scores in scores_QS]
    # Divided by the largest, so that neither their sum nor float32 overflows.
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
    """Chooses the `budget_blocks` best blocks for all heads. Always kept blocks count towards the
    budget; if they exceed it, only they are chosen. Raises INVALID_FIELD if shapes do not fit.

    A candidate's weight is the mean over the heads h of exp(S_hb - Z_h), with Z_h = logaddexp(L_h,
    logsumexp_b S_hb) and L_h from `always_log_mass_Q` (docs/sparse.md).

    scores_QS: float32 [Q, S].
    always_log_mass_Q: exact, float32 [Q]; -inf without always kept blocks.
    adaptive_p: share of the mass to reach with as few of the heaviest candidates as possible,
        within the budget. None: the whole budget.
    floor_blocks: least candidates with `adaptive_p`.
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
    """Ascending indices of the heaviest candidates, as few as possible, at least `floor_blocks`,
    whose weights and `always_mass` reach `p`.

    weights: float32 [S], shares of the mass.
    """
    order = np.argsort(-weights, kind="stable")
    reached = np.concatenate(
        [[always_mass], always_mass + np.cumsum(weights[order], dtype=np.float64)]
    )
    # All, if together they do not reach p.
    num_needed = int(np.searchsorted(reached, p))
    return np.sort(order[: max(num_needed, floor_blocks)])


def floor_blocks(block_tokens: int) -> int:
    """Least candidates of a selection with `adaptive_p`."""
    return -(-MIN_ADAPTIVE_TOKENS // block_tokens)


def top(weights_S: F32, count: int) -> I32:
    """Indices of the `count` largest weights, int32, ascending. Of equal ones the lower index
    wins; weights not above 0 count as 0."""
    if count >= len(weights_S):
        return np.arange(len(weights_S), dtype=np.int32)
    out = np.empty(count, np.int32)
    native.require("hotkv_sparse.all_kernels").top(np.ascontiguousarray(weights_S, np.float32), out)
    return out


# ---------------------------------------------------------------------------------------- one layer


@dataclass(frozen=True, slots=True)
class Source:
    """A layer's sketches in one format.

    pool: uint8 [blocks, H, bytes].
    mu: float32 [H, D]; None: 0.
    bias: by how much scores overestimate the log mass, in nats; None: the format's.
    axes: None if the format has none.
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
    """Raises INVALID_FIELD if a source is missing or the layer is dense.

    query_QD: after positional encoding.
    sources: by format.
    rows_C: int32, row of each block in the pools; ignored for always kept blocks.
    always_log_mass_Q: exact (`exact_log_mass`).
    scale: None: 1 / sqrt(D).
    budget_blocks: always kept ones included; None: of `config`.
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
    """Estimated log mass of blocks together, float32 [Q]; -inf without blocks. Uses the first
    scorer."""
    name, source = next(iter(sources.items()))
    query = prepare(name, query_QD, source.mu, scale, source.bias, source.axes)
    scores = score(query, source.pool, rows)
    log_mass: F32 = np.logaddexp.reduce(scores, axis=1, initial=-np.inf).astype(np.float32)
    return log_mass


def exact_log_mass(query_QD: F32, keys_RHD: F32, scale: float | None = None) -> F32:
    """Logsumexp of q · k * scale over the tokens, float32 [Q]; -inf without keys.

    keys_RHD: float32 [R, H, D].
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
