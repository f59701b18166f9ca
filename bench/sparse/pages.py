"""Keys and values of one text in many variants: what all share is there once, the tail that each
decodes itself is its own.

A layer is one array of tokens: the shared ones, then one tail per variant. Shared part and tails
are whole numbers of blocks, so a block of a variant is a row of the array seen in blocks, and
attention over selected blocks is a gather.

Shapes: H KV heads, Q query heads, D channels, V variants, N tokens of a tail, R rows, S tokens of a
context, T tokens of a block.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def open_slots(context_tokens: int, block_tokens: int) -> int:
    """Tokens that the last block of a context could still take."""
    return -context_tokens % block_tokens


class Pages:
    """`num_shared` tokens of `keys_LHSD` and `values_LHSD` (any beyond them are left out), and
    `num_variants` empty tails of `num_tail`."""

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
        """Token `step` of every tail."""
        self._tails(self._keys[layer])[:, :, step] = keys_VHD.transpose(0, 1)
        self._tails(self._values[layer])[:, :, step] = values_VHD.transpose(0, 1)

    def rows(self, variant: int, blocks: I32, block_tokens: int) -> torch.Tensor:
        """Where blocks of a variant's context lie in a layer seen in blocks."""
        beyond = variant * (self.num_tail // block_tokens)
        return torch.from_numpy(
            np.where(blocks < self.num_shared // block_tokens, blocks, blocks + beyond).astype(
                np.int64
            )
        )

    def keys(self, layer: int, variant: int, blocks: I32, block_tokens: int) -> torch.Tensor:
        """Keys [H, len(blocks) * T, D] of blocks."""
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
        """Exact attention [Q, D] over ascending blocks, the last block of the context among them;
        one set for all KV heads or one each."""
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
        """Exact log mass float32 [len(variants), Q, blocks] of every block; queries are of all
        variants."""
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
