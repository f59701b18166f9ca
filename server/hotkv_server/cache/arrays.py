"""Array functions with fast paths for two frequent cases that numpy handles slowly: all elements
equal, and all elements different."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words

Integer = TypeVar("Integer", bound=np.integer[Any])


def rows(hashes: Words, places: NDArray[np.int64]) -> Words:
    """Returns the hashes at the positions `places`, which are distinct and rising. `hashes`: a row
    of eight uint32 words for each block hash. Returns `hashes` itself if `places` names every row.
    """
    return hashes if len(places) == len(hashes) else hashes[places]


def first_occurrences(hashes: Words) -> NDArray[np.int64]:
    """Returns the position of the first occurrence of each different hash, in rising order.
    `hashes`: a row of eight uint32 words for each block hash."""
    prefixes = np.sort(hashes.view(np.uint64)[:, 0])
    if not (prefixes[1:] == prefixes[:-1]).any():
        return np.arange(len(hashes))
    # Don't use np.unique: it takes ten times as long for rows that begin alike, and clients choose
    # the hashes, so a client could slow the server down.
    order = np.lexsort(hashes.view(np.uint64).T)
    ordered = hashes[order]
    return np.sort(order[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))])


def each_once(entries: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns `entries` without repetitions; each entry stays at its first place."""
    ordered = np.sort(entries)
    if not np.any(ordered[1:] == ordered[:-1]):
        return entries
    return entries[np.sort(np.unique(entries, return_index=True)[1])]


def without(entries: NDArray[np.uint32], gone: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns `entries` without the entries (records in the block table) in `gone`. Neither array
    may list an entry twice."""
    if not len(gone):
        return entries
    if len(gone) == len(entries) and np.array_equal(gone, entries):
        return entries[:0]
    return entries[~np.isin(entries, gone)]


def repeats(entries: Sequence[NDArray[np.uint32]]) -> bool:
    """Returns True if an entry occurs twice, in the same list or in two of the lists."""
    if not entries:
        return False
    rising = np.sort(np.concatenate(entries))
    return bool(np.any(rising[1:] == rising[:-1]))


def distinct(values: NDArray[Integer]) -> NDArray[Integer]:
    """Returns the distinct values in rising order, as np.unique does."""
    if not len(values) or (values == values[0]).all():
        return values[:1]
    rising = np.sort(values)
    occurring: NDArray[Integer] = rising[np.append(True, rising[1:] != rising[:-1])]
    return occurring
