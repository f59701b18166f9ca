"""Low-rank summaries of keys, a published alternative to sketches, for comparison.

A summary describes a block's keys in a KV head by a mean, `rank` directions and each token's
coefficients: k ~ mean + coefficients · directions; built from the block alone, without calibration.
Sizes and rounding are those of LOCKS (locks-kv 0.1.4, `rki4`): mean in 8 bits, directions in 4 with
a scale each, coefficients in 8 with a scale per token, scales in 2 bytes. Score: logsumexp over
tokens of q · k.

Here the approximate keys themselves are stored, which score alike. Shapes: L layers, H KV heads,
Q query heads, B blocks, T tokens of a block, S tokens, R directions, D channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
MEAN_BITS, DIRECTION_BITS, COEFFICIENT_BITS = 8, 4, 8
SCALE_BYTES = 2
_TINY = 1e-12


def _rounded(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """To `bits` bits, with a bfloat16 scale along `dim`; returns what the integers stand for."""
    largest = (1 << (bits - 1)) - 1
    scale = (x.abs().amax(dim=dim, keepdim=True) / largest).clamp_min(_TINY).bfloat16().float()
    return (x / scale).round().clamp(-largest - 1, largest) * scale


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank` directions, fewer than a block's tokens."""

    rank: int

    def page_bytes(self, block_tokens: int, head_size: int) -> int:
        """A summary's bytes for one block and KV head."""
        mean = head_size * MEAN_BITS // 8 + SCALE_BYTES
        directions = self.rank * (head_size * DIRECTION_BITS // 8 + SCALE_BYTES)
        coefficients = block_tokens * (self.rank * COEFFICIENT_BITS // 8 + SCALE_BYTES)
        return mean + directions + coefficients

    def approximate(self, keys_HBTD: torch.Tensor) -> torch.Tensor:
        """Keys as their summaries give them: float32 [H, B, T, D]. Singular value decomposition,
        rounded as stored."""
        mean = keys_HBTD.mean(dim=2, keepdim=True)
        x = keys_HBTD - mean
        energy, left = torch.linalg.eigh(x @ x.transpose(-1, -2))
        size = energy[..., None, -self.rank :].clamp_min(_TINY).sqrt()
        left_R = left[..., -self.rank :]
        directions = _rounded(x.transpose(-1, -2) @ left_R / size, -2, DIRECTION_BITS)
        coefficients = _rounded(left_R * size, -1, COEFFICIENT_BITS)
        return _rounded(mean, -1, MEAN_BITS) + coefficients @ directions.transpose(-1, -2)


LOW_RANKS = {"lowrank4": LowRank(4)}


class LowRankScorer:
    """keys_LHSD: of the first tokens, whole blocks.
    num_more: tokens, whole blocks, to reserve behind them.
    """

    def __init__(
        self,
        low_rank: LowRank,
        keys_LHSD: Sequence[torch.Tensor],
        block_tokens: int,
        num_more: int,
    ) -> None:
        self._low_rank = low_rank
        self._block_tokens = block_tokens
        self._shared = [self._approximate(keys_HSD) for keys_HSD in keys_LHSD]
        self._tails = [
            keys_HSD.new_zeros(keys_HSD.shape[0], num_more, keys_HSD.shape[2])
            for keys_HSD in keys_LHSD
        ]

    def _approximate(self, keys_HSD: torch.Tensor) -> torch.Tensor:
        blocks = keys_HSD.unflatten(1, (-1, self._block_tokens))
        return self._low_rank.approximate(blocks).flatten(1, 2)

    def block_filled(self, layer: int, block: int, keys_THD: F32) -> None:
        first = block * self._block_tokens - self._shared[layer].shape[1]
        keys_HTD = torch.from_numpy(keys_THD).transpose(0, 1)
        filled = slice(first, first + self._block_tokens)
        self._tails[layer][:, filled] = self._approximate(keys_HTD)

    def scores(self, layer: int, query_QD: F32, candidates_S: I32) -> F32:
        """Of consecutive blocks: estimated log mass, float32 [Q, candidates]."""
        shared, tail = self._shared[layer], self._tails[layer]
        kv_heads, num_shared, head_size = shared.shape
        query_HGD = torch.from_numpy(query_QD).view(kv_heads, -1, head_size) / math.sqrt(head_size)
        first, last = (
            int(block) * self._block_tokens for block in (candidates_S[0], candidates_S[-1] + 1)
        )
        parts = [
            query_HGD @ keys.transpose(1, 2)
            for keys in (shared[:, first:last], tail[:, : max(last - num_shared, 0)])
        ]
        tokens_HGS = torch.cat(parts, dim=-1).unflatten(-1, (-1, self._block_tokens))
        result: F32 = tokens_HGS.logsumexp(dim=-1).flatten(0, 1).numpy()
        return result

    def copy(self) -> "LowRankScorer":
        """For another variant over the same prompt."""
        other = object.__new__(LowRankScorer)
        other.__dict__.update(self.__dict__)
        other._tails = [tail.clone() for tail in self._tails]
        return other
