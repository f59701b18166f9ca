"""Bounds that no policy can beat: a cache without end, and one that knows the future.

Both count as the policies are judged: blocks of the contiguous prefix. They need a trace whose ids
stand for a block and all before it; then a block's next use is never before that of the block that
it follows.
"""

import heapq
from itertools import pairwise

import numpy as np

from hotkv_server.simulate.trace import Int64s, Trace


def unbounded(trace: Trace) -> Int64s:
    """Prefix lengths [R] if nothing is ever evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """For each access [B] the next one to the same block; B if there is none."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Prefix lengths [R] of the best cache of that many blocks: Belady's rule with bypass, a
    request at a time.

    Of the blocks it holds and those of the request just served it keeps the ones that are used
    again soonest, and need not keep any. Choosing so which stretches between two uses to bridge
    serves the most blocks (greedy colouring of interval graphs, Carlisle and Lloyd 1995). Of blocks
    that the same request uses again the deepest is dropped first, so the blocks held are closed
    under prefixes.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # Next uses of held blocks, the farthest first; those in the past are at the end and don't
    # count as held.
    farthest: list[int] = []
    num_held = 0
    starts = trace.starts.tolist()
    for start, end in pairwise(starts):
        num_held -= kept.count(1, start, end)
        for use in uses[start:end]:
            if use == len(uses):
                continue
            kept[use] = 1
            if num_held < capacity_blocks:
                heapq.heappush(farthest, -use)
                num_held += 1
            else:
                kept[-heapq.heappushpop(farthest, -use)] = 0
    return trace.prefix_lengths(np.frombuffer(kept, np.bool_))
