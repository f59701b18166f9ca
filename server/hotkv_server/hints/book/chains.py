"""Finds how many leading blocks two prompts have in common. A prompt is given as its chain: the
hashes of its blocks, in order.

A block's hash depends on all tokens up to the block's end. So if two chains have the same hash at a
position, they are equal before it. A binary search finds the position at which they diverge.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words
from hotkv_server.cache.values import Int64s

ChainKeys = NDArray[np.uint64]
"""A chain (a prompt's block hashes, in order), as the first eight bytes of each hash, uint64 [n].
"""


def chain_keys(hashes: Words) -> ChainKeys:
    """Returns the first eight bytes of each hash, uint64 [n]. `hashes`: uint32 words [n, 8]."""
    return np.ascontiguousarray(hashes[:, :2]).view(np.uint64).reshape(-1)


def common_blocks(one: ChainKeys, other: ChainKeys, least: int = 0) -> int:
    """Returns the number of leading blocks that two prompts have in common, but at least `least`.
    Each prompt is given as a chain: the keys of its blocks, in order. If the chains have no more
    than `least` blocks in common, one comparison suffices."""
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
    """Compares many chains with another chain, all at once. A chain is the keys of a prompt's
    blocks, in order. Copies the chains into a contiguous array."""

    def __init__(self, chains: Sequence[ChainKeys]) -> None:
        self._lengths = np.array([len(chain) for chain in chains], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._keys = np.concatenate([*chains, np.empty(0, np.uint64)])

    def common_blocks(self, keys: ChainKeys) -> Int64s:
        """Returns the number of leading blocks that each chain (a prompt's block keys) has in
        common with `keys`, int64 [chains]. A chain whose first block differs takes almost no
        time."""
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
