"""Selects the blocks that a layer attends to: from a query through scores and weights to a
selection.

`select_layer` does all of it for a layer and step. Engines call it for every layer, and the
server calls it for clients that can't. The layer's KV heads share the selection, because they share
block tables. Blocks that are always kept are not candidates: `Span` names them, and a selection
adds them. Of equal weights the lower block wins, so the same weights give the same selection
everywhere.

Shapes: Q query heads, H KV heads (Q / H query heads share one), D channels, B blocks of a pool, N
bytes of a block and head, C blocks of the context, S candidate blocks, R resident tokens.
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
class Span:
    """The blocks of a context: [0, first) and [last, count) are always kept, [first, last) are
    candidates."""

    first: int
    last: int
    count: int

    @property
    def num_always(self) -> int:
        """Returns the number of blocks that are always kept."""
        return self.count - (self.last - self.first)

    @property
    def always(self) -> I32:
        """Returns the always kept blocks, ascending."""
        return np.concatenate(
            [
                np.arange(self.first, dtype=np.int32),
                np.arange(self.last, self.count, dtype=np.int32),
            ]
        )

    @property
    def candidates(self) -> I32:
        """Returns the candidate blocks, ascending."""
        return np.arange(self.first, self.last, dtype=np.int32)


def span(config: SparseConfig, context_tokens: int, block_tokens: int) -> Span:
    """Returns the sinks, candidates and recent window of a context, in blocks.

    The window always covers the partial block.
    """
    count = -(-context_tokens // block_tokens)
    first = min(-(-config.sink_tokens // block_tokens), count)
    complete = context_tokens // block_tokens
    last = min(max(context_tokens - config.recent_tokens, 0) // block_tokens, complete)
    return Span(first, max(first, last), count)


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection.

    blocks: int32, ascending, always kept blocks included.
    weights: float32, inf for always kept blocks.
    mass: estimated share of the attention mass that the blocks have together.
    """

    blocks: I32
    weights: F32
    mass: float


# ------------------------------------------------------------------------------------------- fusion


def _log_total(scores_QS: F32, always_log_mass_Q: F32) -> F32:
    """Returns Z float32 [Q]; finite even if all masses are zero."""
    everything = np.concatenate([scores_QS, always_log_mass_Q[:, None]], axis=1)
    peak = np.maximum(everything.max(axis=1), np.float32(-1e30))
    total: F32 = (
        peak + np.log(np.maximum(np.exp(everything - peak[:, None]).sum(axis=1), np.float32(1e-30)))
    ).astype(np.float32)
    return total


def fuse(
    scores_QS: Sequence[F32], exponents: Sequence[float], always_log_mass_Q: F32
) -> tuple[F32, F32]:
    """Fuses several scorers: a weighted geometric mean of the shares that they give.

    Each scorer's shares are normalised with its own Z first, so scorers with different units become
    comparable. Returns (scores, always_log_mass) for `choose`.
    """
    if len(scores_QS) != len(exponents) or not scores_QS or min(exponents) <= 0:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"fusion of {len(scores_QS)} scorers has exponents {list(exponents)}; pass one "
                "above "
                "0 for each"
            ),
        )
    totals = [_log_total(scores, always_log_mass_Q) for scores in scores_QS]
    shares = np.array(exponents, np.float32) / np.float32(sum(exponents))
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
    where: Span,
    budget_blocks: int,
    *,
    adaptive_p: float | None = None,
    floor_blocks: int = 0,
) -> Selection:
    """Chooses the `budget_blocks` best blocks of a context, shared by all heads.

    Always kept blocks come first. A budget smaller than these keeps only these. Raises
    INVALID_FIELD if scores do not fit the span or the masses.

    A candidate's weight is w_b = mean over the query heads of exp(S_hb - Z_h), Z_h = logaddexp(L_h,
    logsumexp_b S_hb) (docs/sparse.md). All query heads count equally, because the groups that share
    a KV head are equal in size.

    always_log_mass_Q: float32 [Q], L_h: exact log mass of sinks and recent window (-inf: no block
        is kept).
    adaptive_p: choose the fewest of the heaviest blocks with always_mass + sum w >= p, but at least
        `floor_blocks`.
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
    kernels = native.require("hotkv_sparse.kernels")
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
    """Returns the fewest of the heaviest blocks whose weights and `always_mass` reach `p` together.

    The result is ascending indices, at least `floor_blocks` of them.
    """
    order = np.argsort(-weights, kind="stable")
    reached = np.concatenate(
        [[always_mass], always_mass + np.cumsum(weights[order], dtype=np.float64)]
    )
    # If all of them together stay below p, all of them are kept.
    num_needed = int(np.searchsorted(reached, p))
    return np.sort(order[: max(num_needed, floor_blocks)])


def floor_blocks(block_tokens: int) -> int:
    """Returns the least number of candidates of an adaptive selection."""
    return -(-MIN_ADAPTIVE_TOKENS // block_tokens)


def top(weights_S: F32, count: int) -> I32:
    """Returns the indices of the `count` largest weights, ascending; of equal weights the lowest.

    Weights not above 0 rank as 0.
    """
    if count >= len(weights_S):
        return np.arange(len(weights_S), dtype=np.int32)
    out = np.empty(count, np.int32)
    native.require("hotkv_sparse.kernels").top(np.ascontiguousarray(weights_S, np.float32), out)
    return out


# ---------------------------------------------------------------------------------------- one layer


@dataclass(frozen=True, slots=True)
class Source:
    """The representations of a layer in one format.

    pool: uint8 [B, H, N].
    mu, bias: their centre and bias; None: 0 and the format's bias.
    axes: their axes, if the format needs them.
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
) -> Selection:
    """Selects the blocks of a context that `layer` attends to.

    Raises INVALID_FIELD if a source is missing or the layer is dense.

    rows_C: int32, pool row of each block of the context; ignored for always kept blocks.
    always_log_mass_Q: float32 [Q], exact log mass of the always kept blocks (`exact_log_mass`).
    """
    where = span(config, context_tokens, block_tokens)
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
        config.budget_blocks(context_tokens, block_tokens),
        adaptive_p=config.adaptive_p,
        floor_blocks=floor_blocks(block_tokens),
    )


def exact_log_mass(query_QD: F32, keys_RHD: F32, scale: float | None = None) -> F32:
    """Returns logsumexp over tokens of q · k * scale, float32 [Q], for keys float32 [R, H, D].

    -inf without keys.
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
