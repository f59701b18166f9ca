"""`Histogram`: counts values by size and sums them, so that it need not store each value.

Always true: counts and sum never fall. A value equal to a bound counts under that bound, as in
Prometheus. Adding a value costs a search among few bounds and two additions. Not thread-safe: a
single thread adds values.
"""

import bisect
import itertools

import numpy as np
from numpy.typing import NDArray

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds, in seconds, for the durations of a server's calls: from lookups, the shortest calls, to
loads from a remote tier, the longest."""
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)
"""Bounds for ages of blocks, in seconds: from a second to a week."""
SIZES_BYTES = tuple(float(1 << power) for power in range(12, 37, 2))
"""Bounds for transfers: 4 KiB to 64 GiB."""


class Histogram:
    """Counts of values by upper bound, and their sum.

    bounds: upper bounds, rising.
    counts: for each bound, the number of values at most that bound and above the bound before it.
        The last count is of the values above all bounds.
    sum: sum of all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds do not rise"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"Histogram({self.count} values, mean {self.sum / max(1, self.count):.4g})"

    def add(self, value: float) -> None:
        """Counts a value."""
        self.sum += value
        self.counts[bisect.bisect_left(self.bounds, value)] += 1

    def add_all(self, values: NDArray[np.float64]) -> None:
        """Counts all values."""
        places = np.searchsorted(self.bounds, values)
        for at, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[at] += count
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        """Number of values that were added."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns for each bound a pair: the bound as text, and the number of values that are at
        most this bound. The last bound is `+Inf`. This is the form of a Prometheus histogram."""
        names = [*map(str, self.bounds), "+Inf"]
        sums = map(float, itertools.accumulate(self.counts))
        return list(zip(names, sums, strict=True))
