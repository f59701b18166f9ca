"""One layer's selection from a query to blocks: scores, fusion, weights, budget, in the order that
the configuration says.

Engines call it for every layer of a decode step, and the server for clients that can't.
The set is shared by the layer's KV heads, as block tables are.

Shapes: Q query heads, H KV heads, D channels, B blocks of a pool, N bytes of a block and head, C
blocks of the context, R resident tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.axes import Axes
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.scores import prepare, score
from hotkv_sparse.topk import Selection, Span, enough, floor_blocks, select, span
from hotkv_sparse.weights import aggregate, fuse

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a layer's representations of one format lie: pool uint8 [B, H, N], their centre and
    bias (None: 0, the format's), and their axes, if the format needs them."""

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
    """Blocks of a context that `layer` should attend to; INVALID_FIELD if a source is missing or
    the layer is dense.

    `rows_C` int32: the pool row of each block of the context (of no meaning if always kept).
    `always_log_mass_Q` float32 [Q]: exact log mass of the always kept blocks (`exact_log_mass`).
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


def choose(
    scores_QS: F32,
    always_log_mass_Q: F32,
    where: Span,
    budget_blocks: int,
    *,
    adaptive_p: float | None = None,
    floor_blocks: int = 0,
) -> Selection:
    """`weights.aggregate` and `topk.select` of all heads together, in one kernel; arguments and
    errors as theirs.

    Heads count alike, whatever KV heads share them: groups are equal in size.
    """
    kernels = native.load("hotkv_sparse.kernels")
    num_heads, num_candidates = scores_QS.shape
    if (
        kernels is None
        or always_log_mass_Q.shape != (num_heads,)
        or num_candidates != where.last - where.first
    ):
        weights = aggregate(scores_QS, always_log_mass_Q, 1)
        return select(
            weights.shared,
            weights.always_shared,
            where,
            budget_blocks,
            adaptive_p=adaptive_p,
            floor_blocks=floor_blocks,
        )
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


def exact_log_mass(query_QD: F32, keys_RHD: F32, scale: float | None = None) -> F32:
    """logsumexp over tokens of q · k * scale, float32 [Q], of keys float32 [R, H, D] at hand; -inf
    of none."""
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
