"""From scores of query heads to one weight per block: what share of the attention mass it would
get.

Shapes: Q query heads, H KV heads (Q / H query heads share one), S scored blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Weights:
    """`per_head` float32 [H, S] and `shared` float32 [S], their mean; `always` float32 [H]: the
    share of what is always kept.

    `always[h] + per_head[h].sum()` is 1 unless nothing at all was scored.
    """

    per_head: F32
    shared: F32
    always: F32

    @property
    def always_shared(self) -> float:
        """The share of what is always kept, mean over the heads."""
        return float(self.always.mean())


def aggregate(scores_QS: F32, always_log_mass_Q: F32, kv_heads: int) -> Weights:
    """w_b = mean over the group's query heads of exp(S_hb - Z_h), Z_h = logaddexp(L_h, logsumexp_b
    S_hb) (docs/sparse.md).

    `always_log_mass_Q` float32 [Q] is L_h: the exact log mass of sinks and recent window (-inf:
    nothing is kept). INVALID_FIELD.
    """
    num_heads = scores_QS.shape[0]
    if kv_heads < 1 or num_heads % kv_heads or always_log_mass_Q.shape != (num_heads,):
        need = f"[{num_heads}] and a number of KV heads that divides it"
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"always_log_mass is {list(always_log_mass_Q.shape)} and kv_heads {kv_heads}; pass "
                f"{need}"
            ),
        )
    kernels = native.load("hotkv_sparse.kernels")
    if kernels is None:
        return aggregate_reference(scores_QS, always_log_mass_Q, kv_heads)
    per_head, shared = (
        np.empty((kv_heads, scores_QS.shape[1]), np.float32),
        np.empty(scores_QS.shape[1], np.float32),
    )
    always = np.empty(kv_heads, np.float32)
    scores, log_mass = (
        np.ascontiguousarray(scores_QS, np.float32),
        np.ascontiguousarray(always_log_mass_Q, np.float32),
    )
    kernels.aggregate(scores, log_mass, per_head, shared, always)
    return Weights(per_head, shared, always)


def aggregate_reference(scores_QS: F32, always_log_mass_Q: F32, kv_heads: int) -> Weights:
    """`aggregate` in plain numpy."""
    total = _log_total(scores_QS, always_log_mass_Q)
    share_QS = np.exp(scores_QS - total[:, None])
    per_head = share_QS.reshape(kv_heads, len(scores_QS) // kv_heads, scores_QS.shape[1]).mean(
        axis=1
    )
    always = np.exp(always_log_mass_Q - total).reshape(kv_heads, -1).mean(axis=1)
    return Weights(
        per_head.astype(np.float32),
        per_head.mean(axis=0).astype(np.float32),
        always.astype(np.float32),
    )


def _log_total(scores_QS: F32, always_log_mass_Q: F32) -> F32:
    """Z float32 [Q]; finite even if nothing has mass."""
    everything = np.concatenate([scores_QS, always_log_mass_Q[:, None]], axis=1)
    peak = np.maximum(everything.max(axis=1), np.float32(-1e30))
    total: F32 = (
        peak + np.log(np.maximum(np.exp(everything - peak[:, None]).sum(axis=1), np.float32(1e-30)))
    ).astype(np.float32)
    return total


def fuse(
    scores_QS: Sequence[F32], exponents: Sequence[float], always_log_mass_Q: F32
) -> tuple[F32, F32]:
    """Weighted geometric mean of the shares that several scorers give: (scores, always_log_mass)
    for `aggregate`.

    Each scorer's shares are normalised with its own Z first, so that scorers of unlike units meet
    as shares.
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
