"""Which slabs to empty for a slot size: arithmetic over arrays with one value per slab.

Always true: a run is as many neighbouring slabs as one slot needs; a run costs what its dearest
slab costs, and a slab that cannot be emptied costs inf.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.books import Parts
from hotkv_server.cache.values import BoolMask, Int64s

RUNS_PER_PART = 8
"""Runs of several slabs that one part chooses."""


def cheapest_run(cost: NDArray[np.float64], length: int) -> tuple[int, float]:
    """Start and cost of the cheapest run of `length` slabs; inf if there is none."""
    if length > len(cost):
        return 0, np.inf
    highest = (
        cost if length == 1 else np.lib.stride_tricks.sliding_window_view(cost, length).max(axis=1)
    )
    start = int(np.argmin(highest))
    return start, float(highest[start])


def choose_runs(
    cost: NDArray[np.float64], length: int, limits: NDArray[np.float64], chosen: BoolMask
) -> Parts[int]:
    """Marks the cheapest runs one by one, the i-th while it costs less than `limits[i]`; returns
    how many. Their `cost` becomes inf."""
    if length == 1:
        order = np.argsort(cost, kind="stable")[: len(limits)]
        is_cheap = np.append(cost[order] < limits[: len(order)], False)
        order = order[: int(np.argmin(is_cheap))]
        chosen[order], cost[order] = True, np.inf
        return len(order)
    for number, limit in enumerate(limits.tolist()):
        start, highest = cheapest_run(cost, length)
        if not highest < limit:
            return number
        chosen[start : start + length] = True
        cost[start : start + length] = np.inf
        if number % RUNS_PER_PART == RUNS_PER_PART - 1:
            yield
    return len(limits)


def limits_of(own: NDArray[np.float64], num_slots: int, slots_per_slab: int) -> NDArray[np.float64]:
    """What each further run may cost, float64 [runs that `num_slots` slots need].

    `own`: heat of the size's own coldest blocks, rising. A run that spares the first i of them may
    cost as much as the next one; inf if there are too few: any slab is better than a refusal.
    """
    spared = np.arange(0, num_slots, slots_per_slab)
    next_own = np.append(own, np.inf)[np.minimum(spared, max(0, len(own) - 1))]
    limits: NDArray[np.float64] = np.where(len(own) >= num_slots - spared, next_own, np.inf)
    return limits


def blocks_in(first: Int64s, last: Int64s, counted: BoolMask, num_slabs: int) -> Int64s:
    """Per slab, how many of the counted blocks lie in it, wholly or in part. Block i lies in slabs
    `first[i]` to `last[i]`."""
    starts, ends = (
        np.bincount(at[counted] + after, minlength=num_slabs + 1)
        for at, after in ((first, 0), (last, 1))
    )
    blocks: Int64s = np.cumsum(starts - ends)[:-1]
    return blocks
