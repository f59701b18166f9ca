"""Checksums are 64 bits in a block's record. Each covers one *line* of 64 bytes in every `stride`,
at a place that shifts from one group of lines to the next, and each shard's last. The low 4 bits
encode the stride, which may differ in a table; 0 is no checksum.

A checksum is computed from the block's key and the sum of its shards' sums, to which each copy
adds its part. It detects damage, not forgery: who can write to the arena can write to the table.
"""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Sums = NDArray[np.uint64]

_KEY_FACTOR, _TAG = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(15)


def sealed(sums: Sums, keys: Sums, stride: int) -> Sums:
    """Zeros if `stride` is 0. All arrays are uint64 [n].

    `sums`: over the covered lines of all shards.
    `keys`: from `BlockIndex.mixed`.
    """
    if not stride:
        return np.zeros(len(sums), np.uint64)
    values: Sums = _bound(sums, keys) | np.uint64(stride.bit_length())
    return values


def strides_of(checks: Sums) -> Int64s:
    """0 for a missing checksum."""
    tags = (checks & _TAG).astype(np.int64)
    return np.where(tags > 0, np.left_shift(1, np.maximum(tags - 1, 0)), 0)


def agree(sums: Sums, keys: Sums, checks: Sums) -> NDArray[np.bool_]:
    """Blocks whose checksum was made from this sum and key; False if it is missing."""
    tags = checks & _TAG
    agreeing: NDArray[np.bool_] = (tags > 0) & (_bound(sums, keys) | tags == checks)
    return agreeing


def _bound(sums: Sums, keys: Sums) -> Sums:
    bound: Sums = (sums ^ (keys * _KEY_FACTOR)) & ~_TAG
    return bound
