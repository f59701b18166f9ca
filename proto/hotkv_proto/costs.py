"""Estimates how many seconds transfers of a given size take, from the durations of a few measured
transfers."""

import numpy as np
from numpy.typing import ArrayLike

WIDE = 2.0
"""Needed spread of the measured sizes (largest divided by smallest). If the measured costs do not
grow with the size, `fitted` treats the cost as independent of the size only with at least this
spread: with similar sizes, equal costs prove nothing."""


def fitted(sizes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """Splits the cost of transfers (their duration) into a fixed part and a part that grows with
    the size. Returns the fixed seconds of a transfer, and the seconds per unit of size.

    sizes: size of each measured transfer.
    seconds: duration of each of these transfers.

    Fits a line by least squares, with three exceptions:
    - If the fixed part would be negative, the whole cost counts as cost per unit.
    - If the cost does not grow with the size, the whole cost counts as fixed cost. But if the sizes
      differ by less than a factor of WIDE, it counts as cost per unit.
    - If no size is above 0, both results are 0.
    """
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
