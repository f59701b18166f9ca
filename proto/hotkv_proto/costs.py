"""Estimates how long transfers take, from a few measured ones."""

import numpy as np
from numpy.typing import ArrayLike

WIDE = 2.0
"""Sizes must spread so much (largest by smallest) to prove that cost does not grow with size."""


def fitted(sizes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """Fixed seconds of a transfer, and seconds per unit of size, by least squares. But all cost
    is per unit if the fixed part would be negative; all is fixed if it does not grow over sizes
    that spread by WIDE; 0 without sizes above 0."""
    all_sizes, all_seconds = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    has_some = all_sizes > 0
    some, took_s = all_sizes[has_some], all_seconds[has_some]
    if not len(some):
        return 0.0, 0.0
    spread = some - some.mean()
    variance = float(spread @ spread)
    each_s = float(spread @ took_s) / variance if variance else 0.0
    fixed_s = float(took_s.mean() - each_s * some.mean())
    if each_s > 0 and fixed_s >= 0:
        return fixed_s, each_s
    if each_s <= 0 and some.max() >= WIDE * some.min():
        return float(took_s.mean()), 0.0
    return 0.0, float(took_s.sum() / some.sum())
