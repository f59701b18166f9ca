"""Checksums (checksums): 64 bits in the record of a block, which must match the block's bytes.

A checksum covers one line of 64 bytes in each `stride` lines, and the last line of each shard
(the part of a block that one rank stores). The position of the covered line shifts from one group
of `stride` lines to the next. With a stride of 1 a checksum covers all bytes. Its low 4 bits
encode the stride, so the blocks of a block table may have different strides. The value 0 means that
there is no checksum.

A checksum is computed from the block's key and a sum over its lines, so the bytes of another
block do not match. The sum of a block is the sum of its shards, so the copy that writes a shard can
compute the shard's part (`sums`).

Checksums detect damage, but not forgery: a process that can write to the arena can also write to
the block table.

Pure: arrays in, arrays out. This module imports nothing of the server.
"""

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Sums = NDArray[np.uint64]

_KEY_FACTOR, _TAG = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(15)


def sealed(sums: Sums, keys: Sums, stride: int) -> Sums:
    """Returns the checksums of n blocks, uint64 [n].

    `sums`: sums over the covered lines (64 bytes each) of all shards (the ranks' parts) of each
        block, uint64 [n].
    `keys`: the blocks' keys, uint64 [n]: numbers that `BlockIndex.mixed` computes from each block's
        hash, key space and group.
    `stride`: the sums cover one line in each `stride` lines, and the last line of each shard. 0:
        the server computes no checksums, so the result is zeros.
    """
    if not stride:
        return np.zeros(len(sums), np.uint64)
    values: Sums = _bound(sums, keys) | np.uint64(stride.bit_length())
    return values


def strides_of(checks: Sums) -> Int64s:
    """Returns the stride that each checksum encodes, int64 [n]; 0 for a missing checksum. With the
    stride s, a checksum covers one line (64 bytes) in each s lines."""
    tags = (checks & _TAG).astype(np.int64)
    return np.where(tags > 0, np.left_shift(1, np.maximum(tags - 1, 0)), 0)


def agree(sums: Sums, keys: Sums, checks: Sums) -> NDArray[np.bool_]:
    """Returns a mask [n]: True for each block whose checksum was made from this sum of its bytes
    and this key; False also if the checksum is missing. `sums`, `keys`: see `sealed`. `checks`:
    checksums, uint64 [n]."""
    tags = checks & _TAG
    agreeing: NDArray[np.bool_] = (tags > 0) & (_bound(sums, keys) | tags == checks)
    return agreeing


def _bound(sums: Sums, keys: Sums) -> Sums:
    bound: Sums = (sums ^ (keys * _KEY_FACTOR)) & ~_TAG
    return bound
