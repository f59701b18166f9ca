"""Measures a selection against exact attention. It reads every key of a context, so it is for
samples only.

Shapes: Q query heads, H KV heads, D channels, C blocks of the context.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.selection import exact_log_mass, top
from hotkv_vllm.sparse.sequence import Attended

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Recall:
    """Quality of a selection.

    `recall`: share of the exactly heaviest blocks, as many as were selected, that was attended.
    `mass`: exact share of the attention mass that was attended."""

    recall: float
    mass: float


def block_mass(
    keys_of: Callable[[I32], F32],
    query_QD: F32,
    blocks_C: I32,
    context_tokens: int,
    block_tokens: int,
    scale: float,
) -> npt.NDArray[np.float64]:
    """Returns each block's exact share of the attention mass, mean over query heads; float64 [C],
    sum 1."""
    log_mass = np.empty((len(query_QD), len(blocks_C)))
    for place, block in enumerate(blocks_C):
        keys = keys_of(np.array([block], np.int32))[0]
        log_mass[:, place] = exact_log_mass(
            query_QD, keys[: context_tokens - place * block_tokens], scale
        )
    share = np.exp(log_mass - log_mass.max(axis=1, keepdims=True))
    mean: npt.NDArray[np.float64] = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
    return mean


def measure(
    keys_of: Callable[[I32], F32],
    query_QD: F32,
    blocks_C: I32,
    context_tokens: int,
    block_tokens: int,
    scale: float,
    attended: Attended,
) -> Recall:
    """Measures what one row attended to against its exact attention."""
    share = block_mass(keys_of, query_QD, blocks_C, context_tokens, block_tokens, scale)
    best = top(share.astype(np.float32), len(attended.selection.blocks))
    return Recall(float(np.isin(best, attended.blocks).mean()), float(share[attended.blocks].sum()))
