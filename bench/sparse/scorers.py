"""Scores of a variant's blocks, by their compact keys: packed representations of hotkv_sparse.

Shapes: L layers, B blocks, S tokens or candidate blocks, T tokens of a block, H KV heads, Q query
heads, D channels, N bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from bench.sparse.calibration import Calibration
from bench.sparse.variants import CENTRED, Variant
from hotkv_sparse import FORMATS, build, prepare, score
from hotkv_sparse.axes import Axes
from hotkv_sparse.centre import LayerCentre

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Scorer(Protocol):
    """One variant's compact keys, all layers."""

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        """A block has just become complete."""

    def scores(self, layer: int, query_QD: F32, candidates_S: I32) -> F32:
        """Log mass [Q, S] of consecutive blocks."""

    def copy(self) -> "Scorer":
        """One for another variant over the same prompt."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A format of `hotkv_sparse`: pools [L][B, H, N], and their centres (None: 0)."""

    name: str
    pools: list[U8]
    centres_L: Sequence[LayerCentre | None]

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        build(
            self.name,
            keys_THD[None],
            _mu(self.centres_L[layer]),
            out=self.pools[layer][block : block + 1],
            axes=_axes(self.centres_L[layer]),
        )

    def scores(self, layer: int, query_QD: F32, candidates_S: I32) -> F32:
        centre = self.centres_L[layer]
        bias = None if centre is None else centre.bias.get(self.name)
        query = prepare(self.name, query_QD, _mu(centre), bias=bias, axes=_axes(centre))
        return score(query, self.pools[layer], candidates_S)

    def copy(self) -> "Packed":
        return Packed(self.name, [pool.copy() for pool in self.pools], self.centres_L)


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
) -> Scorer | None:
    """A scorer that knows the first `num_shared` keys and has room for `max_tokens`; None if a
    variant needs none."""
    name, _, centre = variant.scorer.partition(CENTRED)
    if name not in FORMATS:
        return None
    centres: Sequence[LayerCentre | None] = (
        calibration.centres[centre] if centre else [None] * len(keys_LHSD)
    )
    pools = []
    for layer, keys_HSD in enumerate(keys_LHSD):
        kv_heads, _, head_size = keys_HSD.shape
        keys_BTHD = (
            keys_HSD[:, :num_shared]
            .transpose(0, 1)
            .reshape(-1, variant.block_tokens, kv_heads, head_size)
        )
        known_blocks = build(
            name,
            keys_BTHD.contiguous().numpy(),
            _mu(centres[layer]),
            axes=_axes(centres[layer]),
        )
        pool = np.zeros((-(-max_tokens // variant.block_tokens), *known_blocks.shape[1:]), np.uint8)
        pool[: len(known_blocks)] = known_blocks
        pools.append(pool)
    return Packed(name, pools, centres)
