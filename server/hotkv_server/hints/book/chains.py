"""Finds how many leading blocks prompts have in common. A *chain* is a prompt's block hashes in
order.

A hash depends on all tokens before it, so chains with the same hash at a position are equal
before it, and a binary search finds where they diverge.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words
from hotkv_server.cache.values import Int64s

ChainKeys = NDArray[np.uint64]
"""First eight bytes of each hash of a chain, uint64 [n]."""


def chain_keys(hashes: Words) -> ChainKeys:
    """`hashes`: uint32 words [n, 8]."""
    return np.ascontiguousarray(hashes[:, :2]).view(np.uint64).reshape(-1)


def common_blocks(one: ChainKeys, other: ChainKeys, least: int = 0) -> int:
    """Leading blocks in common, at least `least`. If there are no more than `least`, one
    comparison suffices."""
    low, high = least, min(len(one), len(other))
    if low >= high or one[low] != other[low]:
        return least
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class KnownChains:
    """Compares many chains with another at once. Copies them."""

    def __init__(self, chains: Sequence[ChainKeys]) -> None:
        self._lengths = np.array([len(chain) for chain in chains], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._keys = np.concatenate([*chains, np.empty(0, np.uint64)])

    def common_blocks(self, keys: ChainKeys) -> Int64s:
        """int64 [chains]. A chain whose first block differs costs almost nothing."""
        low, high = np.zeros_like(self._lengths), np.minimum(self._lengths, len(keys))
        going = np.flatnonzero(high)
        going = going[self._keys[self._starts[going]] == keys[:1]]
        while going.size:
            middle = (low[going] + high[going]) // 2
            agrees = self._keys[self._starts[going] + middle] == keys[middle]
            low[going] = np.where(agrees, middle + 1, low[going])
            high[going] = np.where(agrees, high[going], middle)
            going = going[low[going] < high[going]]
        return low
