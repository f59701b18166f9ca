"""Computes sums over the bytes of slots (places for blocks). `checksums` makes checksums
(checksums) from these sums.

Reads bytes without the GIL, and writes only its results.
"""

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
"""Least number of bytes for each thread. If there are fewer than 2 * PART_BYTES, a single thread
reads them."""
_SALTS = np.array(
    [(0x2545_F491 * (2 * i + 1) + 0x9E37_79B9 * i * i) & 0xFFFF_FFFF for i in range(16)], np.uint32
)
_SEED_FACTOR = 0xA076_1D64_78BD_642F


def add_sums(
    memory: Region, offsets: Int64s, num_bytes: int, shard: int, strides: Int64s, sums: Sums
) -> None:
    """Adds the sums of one shard (a rank's part) of n blocks to `sums` [n]. Releases the GIL. The
    bytes must not change until the call returns. Raises ValueError if a range is not inside the
    memory.

    `memory`: the memory with the blocks' slots (places for blocks).
    `offsets` [n]: offsets of the shard of each block in the memory, in bytes.
    `num_bytes`: size of the shard.
    `shard`: number of the shard; equal bytes in different shards have different sums.
    `strides` [n]: of block i, only one line (64 bytes) in each `strides[i]` lines is read.
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
    """Threads that run the function `add_sums` in parallel if there are many bytes. They are needed
    because a store from a GPU is copied faster than a single thread computes its sums."""

    def __init__(self, num_threads: int = 0) -> None:
        """Starts the threads. `num_threads`: 0 means half of the processors, but at least 1 and at
        most MAX_SUM_THREADS."""
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
        """Does the same as the function `add_sums`, which explains the arguments, but in parts on
        several threads. Blocks the calling thread until all parts have ended. Thread-safe."""
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
        """Makes the threads end once they are idle. Does not wait for their end."""
        self._threads.shutdown(wait=False)


def _seed(shard: int) -> np.uint64:
    """Returns the seed of a shard (a rank's part of a block): a number that is mixed into its sum,
    so that equal bytes in different shards have different sums."""
    return np.uint64((shard + 1) * _SEED_FACTOR & 0xFFFF_FFFF_FFFF_FFFF)


def holds(memory: Region, evidence: Evidence) -> NDArray[np.bool_]:
    """Compares blocks with their checksums. Returns a mask [n] of the blocks whose
    bytes match; False if the checksum is missing. Reads the bytes, which blocks the calling
    thread.

    `memory`: the memory with the blocks' slots (places for blocks).
    `evidence`: describes the n blocks, with their checksums.
    """
    strides = np.maximum(strides_of(evidence.checks), 1)
    sums = sums_of(memory, evidence.offsets, evidence.shard_bytes, strides)
    return agree(sums, evidence.keys, evidence.checks)


def sums_of(memory: Region, offsets: Int64s, shard_bytes: Sequence[int], strides: Int64s) -> Sums:
    """Returns the sums over all shards (the ranks' parts) of n blocks of the same shape, uint64
    [n].

    `offsets` [n]: offsets of the blocks' slots (places for blocks) in the memory, in bytes.
    `shard_bytes`: size of each shard of a block.
    `strides` [n]: one line (64 bytes) in each `strides[i]` lines is read.
    """
    sums, begin = np.zeros(len(offsets), np.uint64), 0
    for shard, num_bytes in enumerate(shard_bytes):
        add_sums(memory, offsets + begin, num_bytes, shard, strides, sums)
        begin += num_bytes
    return sums
