"""Sums over the bytes of slots, read without the GIL."""

import itertools
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.checksums import Int64s, Sums, agree, strides_of
from hotkv_server.integrity.evidence import Evidence
from hotkv_server.memory.clerk import full_pool

MAX_SUM_THREADS = 8
PART_BYTES = 32 << 20
"""Least bytes for each thread."""
_SALTS = np.array(
    [(0x2545_F491 * (2 * i + 1) + 0x9E37_79B9 * i * i) & 0xFFFF_FFFF for i in range(16)], np.uint32
)
_SEED_FACTOR = 0xA076_1D64_78BD_642F


def add_sums(
    memory: Region, offsets: Int64s, num_bytes: int, shard: int, strides: Int64s, sums: Sums
) -> None:
    """Adds the sums of one shard of n blocks. Releases the GIL. The bytes must not change
    meanwhile. Raises ValueError if a range leaves the memory.

    `offsets` [n]: of the shard in each block's slot, in bytes.
    `strides` [n]: one line in each `strides[i]` is read.
    """
    if len(offsets) and (
        int(offsets.min()) < 0 or int(offsets.max()) + num_bytes > memory.num_bytes
    ):
        raise ValueError(f"checks leave {memory.name} of {memory.num_bytes} bytes")
    kernels = native.require("hotkv_server.integrity.sum_kernels")
    offsets, strides = (
        np.ascontiguousarray(offsets, np.int64),
        np.ascontiguousarray(strides, np.int64),
    )
    kernels.add_sums(memory.address, offsets, num_bytes, _seed(shard), strides, _SALTS, sums)


class SumThreads:
    """Several, because a store from a GPU is copied faster than one thread sums."""

    def __init__(self, num_threads: int = 0) -> None:
        """0 for half of the processors, at most MAX_SUM_THREADS."""
        self._num_threads = num_threads or min(
            MAX_SUM_THREADS, max(1, len(os.sched_getaffinity(0)) // 2)
        )
        self._threads = full_pool(self._num_threads, "hotkv-sums")

    def __repr__(self) -> str:
        return f"SumThreads({self._num_threads})"

    def add_sums(
        self,
        memory: Region,
        offsets: Int64s,
        num_bytes: int,
        shard: int,
        strides: Int64s,
        sums: Sums,
    ) -> None:
        """As the function; blocks until all parts have ended. Thread-safe."""
        num_parts = min(self._num_threads, len(offsets) * num_bytes // PART_BYTES)
        if num_parts < 2:
            add_sums(memory, offsets, num_bytes, shard, strides, sums)
            return
        bounds = np.linspace(0, len(offsets), num_parts + 1).astype(np.int64).tolist()
        parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        begun = [
            self._threads.submit(
                add_sums, memory, offsets[part], num_bytes, shard, strides[part], sums[part]
            )
            for part in parts
        ]
        for future in begun:
            future.result()

    def close(self) -> None:
        """Does not wait for the threads' end."""
        self._threads.shutdown(wait=False)


def _seed(shard: int) -> np.uint64:
    return np.uint64((shard + 1) * _SEED_FACTOR & 0xFFFF_FFFF_FFFF_FFFF)


def holds(memory: Region, evidence: Evidence) -> NDArray[np.bool_]:
    """Blocks whose bytes match; False without a checksum. Blocks the thread."""
    strides = np.maximum(strides_of(evidence.checks), 1)
    sums = sums_of(memory, evidence.offsets, evidence.shard_bytes, strides)
    return agree(sums, evidence.keys, evidence.checks)


def sums_of(memory: Region, offsets: Int64s, shard_bytes: Sequence[int], strides: Int64s) -> Sums:
    """Over all shards of n blocks, uint64 [n]."""
    sums, begin = np.zeros(len(offsets), np.uint64), 0
    for shard, num_bytes in enumerate(shard_bytes):
        add_sums(memory, offsets + begin, num_bytes, shard, strides, sums)
        begin += num_bytes
    return sums
