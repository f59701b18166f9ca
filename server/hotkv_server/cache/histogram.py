"""Counts and sums values without storing them. A value equal to a bound counts under it, as in
Prometheus. Not thread-safe."""

import bisect
import itertools

import numpy as np
from numpy.typing import NDArray

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Durations of calls."""
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)
"""Ages of blocks."""
SIZES_BYTES = tuple(float(1 << power) for power in range(12, 37, 2))
"""Transfers."""


class Histogram:
    """`counts`: for each bound, the values above the bound before it and at most it; last, those
    above all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds do not rise"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"Histogram({self.count} values, mean {self.sum / max(1, self.count):.4g})"

    def add(self, value: float) -> None:
        self.sum += value
        self.counts[bisect.bisect_left(self.bounds, value)] += 1

    def add_all(self, values: NDArray[np.float64]) -> None:
        places = np.searchsorted(self.bounds, values)
        for at, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[at] += count
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: (bound as text, number of values at most this bound); the last
        bound is `+Inf`."""
        names = [*map(str, self.bounds), "+Inf"]
        sums = map(float, itertools.accumulate(self.counts))
        return list(zip(names, sums, strict=True))
