"""What transfers take, as far as a few measured ones say."""

import numpy as np
from numpy.typing import ArrayLike

WIDE = 2.0
"""The largest size is so many times the smallest: then a cost that does not grow with it is one of
any transfer."""


def fitted(sizes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """Seconds of any transfer, and seconds a unit of size beyond, of transfers of `sizes` [n] that
    took `seconds` [n].

    Least squares, neither below 0. Of sizes that are much alike all is put down to size. Zeros if
    no size is above 0.
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
