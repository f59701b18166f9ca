"""What no policy can beat: a cache without end, and one that knows the future.

Both count what the policies are judged by: blocks of the contiguous prefix. They need a trace whose
ids stand for a block and all before it; then a block's next use is never before that of the block
it follows.
"""

import heapq
from itertools import pairwise

import numpy as np

from hotkv_server.simulate.trace import Int64s, Trace


def unbounded(trace: Trace) -> Int64s:
    """Prefix lengths [R] where nothing is ever evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """For each access [B] the next one to the same block; B where there is none."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Prefix lengths [R] of the best cache of that many blocks: Belady's rule with bypass, a
    request at a time.

    Of the blocks it holds and those of the request just served it keeps the ones used again
    soonest, and need not keep any. Choosing so which stretches between two uses to bridge serves
    the most blocks (greedy colouring of interval graphs, Carlisle and Lloyd 1995). Of blocks used
    again by the same request the deepest goes first, so what is held is closed under prefixes.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # Next uses of what is held, the farthest first; those gone by lie at the end and don't count as
    # held.
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
