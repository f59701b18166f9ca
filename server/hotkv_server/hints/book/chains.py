"""How far chains of blocks agree from their beginning.

A block's hash stands for all tokens up to its end. So if two chains have the same block at one
place they are the same before it, and a binary search finds where they part.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words
from hotkv_server.cache.values import Int64s

ChainKeys = NDArray[np.uint64]
"""The first eight bytes of each hash of a chain [n]."""


def chain_keys(hashes: Words) -> ChainKeys:
    """What tells the blocks of a chain apart; `hashes` [n, 8] words."""
    return np.ascontiguousarray(hashes[:, :2]).view(np.uint64).reshape(-1)


def common_blocks(one: ChainKeys, other: ChainKeys, least: int = 0) -> int:
    """How many blocks two chains have in common, from the first on. `least`: if there are no more
    than so many this is the answer, after a single comparison."""
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
    """Chains that many others are compared with, one behind the other in memory of their own."""

    def __init__(self, chains: Sequence[ChainKeys]) -> None:
        self._lengths = np.array([len(chain) for chain in chains], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._keys = np.concatenate([*chains, np.empty(0, np.uint64)])

    def common_blocks(self, keys: ChainKeys) -> Int64s:
        """How many blocks each of the chains has in common with `keys`, from the first on
        [chains]. Chains with another first block cost next to nothing."""
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
