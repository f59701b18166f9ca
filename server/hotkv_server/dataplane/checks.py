"""Sums over the bytes of slots, of which check values are made (`hotkv_server.core.checks`)."""

import numpy as np
from numpy.typing import NDArray

from hotkv import native
from hotkv_server.core.checks import Evidence, Int64s, Sums, agree, strides_of
from hotkv_server.dataplane.plan import Region

LINE_BYTES = 64
_PHASE_STEP = 37
_SALTS = np.array([(0x2545_F491 * (2 * i + 1) + 0x9E37_79B9 * i * i) & 0xFFFF_FFFF for i in range(16)], np.uint32)
_LINE_FACTOR, _FACTOR, _SEED_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xD6E8_FEB8_6659_FD93), 0xA076_1D64_78BD_642F


def add_sums(memory: Region, offsets: Int64s, num_bytes: int, shard: int, strides: Int64s, sums: Sums) -> None:
    """Adds to `sums` [n] those of one shard's `num_bytes` bytes at `offsets` [n] of the memory, one line in every `strides[i]`.

    Without the GIL; the bytes must not change meanwhile. Raises ValueError where a range leaves the memory.
    """
    if len(offsets) and (int(offsets.min()) < 0 or int(offsets.max()) + num_bytes > memory.num_bytes):
        raise ValueError(f"checks leave {memory.name} of {memory.num_bytes} bytes")
    kernels = native.load("hotkv_server.dataplane.kernels")
    if kernels is None:
        add_sums_twin(memory, offsets, num_bytes, shard, strides, sums)
    else:
        offsets, strides = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(strides, np.int64)
        kernels.add_sums(memory.address, offsets, num_bytes, _seed(shard), strides, _SALTS, sums)


def _seed(shard: int) -> np.uint64:
    """What tells the sums of shards apart."""
    return np.uint64((shard + 1) * _SEED_FACTOR & 0xFFFF_FFFF_FFFF_FFFF)


def add_sums_twin(memory: Region, offsets: Int64s, num_bytes: int, shard: int, strides: Int64s, sums: Sums) -> None:
    """`add_sums` in plain numpy."""
    view, num_lines = memory.array(), -(-num_bytes // LINE_BYTES)
    for i, (offset, stride) in enumerate(zip(offsets.tolist(), strides.tolist(), strict=True)):
        if not num_lines:
            continue
        first = np.arange(0, num_lines, stride)
        lines = first + (first // stride * _PHASE_STEP) % stride
        lines = np.append(lines[lines < num_lines - 1], num_lines - 1)
        padded = np.zeros(num_lines * LINE_BYTES, np.uint8)
        padded[:num_bytes] = view[offset : offset + num_bytes]
        words = padded.view(np.uint32).reshape(num_lines, 16)[lines] + _SALTS
        total = (words[:, ::2].astype(np.uint64) * words[:, 1::2].astype(np.uint64)).sum(axis=1, dtype=np.uint64)
        total = (total ^ ((lines.astype(np.uint64) + np.uint64(1)) * _LINE_FACTOR) ^ _seed(shard)) * _FACTOR
        sums[i] += ((total ^ (total >> np.uint64(32))) * _FACTOR).sum(dtype=np.uint64)


def holds(memory: Region, evidence: Evidence) -> NDArray[np.bool_]:
    """Whose bytes are those of their check value [n]; False where there is none. Blocks for as long as reading takes."""
    strides = np.maximum(strides_of(evidence.checks), 1)
    sums, begin = np.zeros(len(strides), np.uint64), 0
    for shard, num_bytes in enumerate(evidence.shard_bytes):
        add_sums(memory, evidence.offsets + begin, num_bytes, shard, strides, sums)
        begin += num_bytes
    return agree(sums, evidence)
