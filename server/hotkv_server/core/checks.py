"""Check values: 64 bits in a block's record by which its bytes are known again.

A check value covers one line of 64 bytes in every `stride`, at a place that shifts from stride to
stride, and the last line of every shard; a stride of 1 covers all bytes. It is bound to the block's
key, so that another block's bytes never pass. Its low 4 bits say the stride, so values of unlike
strides may lie in one table; 0 is no check value. Not against an adversary: who can write the arena
can write the table. Sums over lines and shards are added, so that each shard's may be taken by the
copy that wrote it; `dataplane` takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Sums = NDArray[np.uint64]

MAX_STRIDE = 1 << 14
_KEY_FACTOR, _TAG = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(15)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Blocks of one shape whose bytes are to be compared with their check values.

    `entries` [n] of the index, slot `offsets` [n] in the arena, mixed `keys` [n], check values [n];
    `shard_bytes`: the shape.
    """

    entries: NDArray[np.uint32]
    offsets: Int64s
    shard_bytes: Sequence[int]
    keys: Sums
    checks: Sums


def sealed(sums: Sums, keys: Sums, stride: int) -> Sums:
    """Check values [n] of blocks from the sums over all their shards and their mixed keys [n]; none
    where `stride` is 0."""
    if not stride:
        return np.zeros(len(sums), np.uint64)
    values: Sums = _bound(sums, keys) | np.uint64(stride.bit_length())
    return values


def strides_of(checks: Sums) -> Int64s:
    """Stride of each check value [n]; 0 for none."""
    tags = (checks & _TAG).astype(np.int64)
    return np.where(tags > 0, np.left_shift(1, np.maximum(tags - 1, 0)), 0)


def agree(sums: Sums, evidence: Evidence) -> NDArray[np.bool_]:
    """Whose sums [n] are those of their check value; False where there is none."""
    tags = evidence.checks & _TAG
    agreeing: NDArray[np.bool_] = (tags > 0) & (
        _bound(sums, evidence.keys) | tags == evidence.checks
    )
    return agreeing


def _bound(sums: Sums, keys: Sums) -> Sums:
    bound: Sums = (sums ^ (keys * _KEY_FACTOR)) & ~_TAG
    return bound
