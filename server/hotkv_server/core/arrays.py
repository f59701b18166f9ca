"""Small array questions that numpy answers slowly in the case that is usual here: all equal, or all
different."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv.table import Words


def rows(hashes: Words, places: NDArray[np.int64]) -> Words:
    """Rows at rising places of words [n, 8], each place once; the words themselves where that is
    all."""
    return hashes if len(places) == len(hashes) else hashes[places]


def first_occurrences(hashes: Words) -> NDArray[np.int64]:
    """Rows [m] of words [n, 8] that no earlier row equals, in rising order."""
    prefixes = np.sort(hashes.view(np.uint64)[:, 0])
    if not (prefixes[1:] == prefixes[:-1]).any():
        return np.arange(len(hashes))
    _, first = np.unique(hashes, axis=0, return_index=True)
    return np.sort(first)


def without(entries: NDArray[np.uint32], gone: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Entries that are not among `gone`; no entry is listed twice."""
    if not len(gone):
        return entries
    if len(gone) == len(entries) and np.array_equal(gone, entries):
        return entries[:0]
    return entries[~np.isin(entries, gone)]


def repeats(entries: Sequence[NDArray[np.uint32]]) -> bool:
    """Whether an entry comes twice in all of these lists."""
    if not entries:
        return False
    rising = np.sort(np.concatenate(entries))
    return bool(np.any(rising[1:] == rising[:-1]))
