"""How far chains of blocks agree from their beginning.

A block's hash stands for all tokens up to its end. So if two chains have the same block at one
place they are the same before it, and a binary search finds where they part.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv.table import Words
from hotkv_server.core.values import Int64s

ChainKeys = NDArray[np.uint64]
"""The first eight bytes of each hash of a chain [n]."""


def chain_keys(hashes: Words) -> ChainKeys:
    """What tells the blocks of a chain apart; `hashes` [n, 8] words."""
    return np.ascontiguousarray(hashes[:, :2]).view(np.uint64).reshape(-1)


def common_blocks(chains: Sequence[ChainKeys], keys: ChainKeys) -> Int64s:
    """How many blocks each of the chains has in common with `keys`, from the first on [chains]."""
    lengths = np.array([len(chain) for chain in chains], np.int64)
    low, high = np.zeros(len(chains), np.int64), np.minimum(lengths, len(keys))
    if not high.any():
        return low
    flat = np.concatenate(chains)
    starts = np.cumsum(lengths) - lengths
    while (going := np.flatnonzero(low < high)).size:
        middle = (low[going] + high[going]) // 2
        agrees = flat[starts[going] + middle] == keys[middle]
        low[going] = np.where(agrees, middle + 1, low[going])
        high[going] = np.where(agrees, high[going], middle)
    return low
