"""Check values: 64 bits in a block's record that must match its bytes.

A check value covers 1 line of 64 bytes in every `stride` lines, at a place that shifts from stride
to stride, and the last line of every shard. A stride of 1 covers all bytes. The value is bound to
the block's key, so another block's bytes do not pass. Its low 4 bits hold the stride, so a table
may have values of different strides; 0 stands for no check value. It does not protect against an
adversary: a process that can write to the arena can also write to the table. The sums of lines and
shards are added up, so the copy that writes a shard can compute the shard's sum (`sums`).

Pure: arrays in, arrays out. It imports nothing of the server.
"""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Sums = NDArray[np.uint64]

_KEY_FACTOR, _TAG = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(15)


def sealed(sums: Sums, keys: Sums, stride: int) -> Sums:
    """Returns the check values [n] of blocks, from the sums over all their shards and their mixed
    keys [n]; zeros if `stride` is 0."""
    if not stride:
        return np.zeros(len(sums), np.uint64)
    values: Sums = _bound(sums, keys) | np.uint64(stride.bit_length())
    return values


def strides_of(checks: Sums) -> Int64s:
    """Returns the stride (distance of the lines that the sum covers) of each check value [n]; 0 for
    a missing check value."""
    tags = (checks & _TAG).astype(np.int64)
    return np.where(tags > 0, np.left_shift(1, np.maximum(tags - 1, 0)), 0)


def agree(sums: Sums, keys: Sums, checks: Sums) -> NDArray[np.bool_]:
    """Returns a mask [n] of the blocks whose sum and mixed key match their check value; False for a
    missing check value."""
    tags = checks & _TAG
    agreeing: NDArray[np.bool_] = (tags > 0) & (_bound(sums, keys) | tags == checks)
    return agreeing


def _bound(sums: Sums, keys: Sums) -> Sums:
    bound: Sums = (sums ^ (keys * _KEY_FACTOR)) & ~_TAG
    return bound
