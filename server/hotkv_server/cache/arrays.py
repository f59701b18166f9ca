"""Array functions with fast paths for two cases that numpy handles slowly: all elements equal,
and all different. A hash is a row of eight uint32 words."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words

Integer = TypeVar("Integer", bound=np.integer[Any])


_FIRST = np.arange(1 << 12)


def first_numbers(count: int) -> NDArray[np.int64]:
    """0 to `count` - 1; not to be written to."""
    return _FIRST[:count] if count <= len(_FIRST) else np.arange(count)


def rows(hashes: Words, places: NDArray[np.int64]) -> Words:
    """Rows at distinct, rising `places`; `hashes` itself, uncopied, if these are all rows."""
    return hashes if len(places) == len(hashes) else hashes[places]


def first_occurrences(hashes: Words) -> NDArray[np.int64]:
    """Positions, rising, of the first occurrence of each hash."""
    prefixes = np.sort(hashes.view(np.uint64)[:, 0])
    if not (prefixes[1:] == prefixes[:-1]).any():
        return np.arange(len(hashes))
    # Don't use np.unique: it takes ten times as long for rows that begin alike, and clients choose
    # the hashes, so a client could slow the server down.
    order = np.lexsort(hashes.view(np.uint64).T)
    ordered = hashes[order]
    return np.sort(order[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))])


def each_once(entries: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Drops repetitions; each entry stays at its first place."""
    ordered = np.sort(entries)
    if not np.any(ordered[1:] == ordered[:-1]):
        return entries
    return entries[np.sort(np.unique(entries, return_index=True)[1])]


def without(entries: NDArray[np.uint32], gone: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Neither array may list an entry twice."""
    if not len(gone):
        return entries
    if len(gone) == len(entries) and np.array_equal(gone, entries):
        return entries[:0]
    return entries[~np.isin(entries, gone)]


def distinct(values: NDArray[Integer]) -> NDArray[Integer]:
    """As np.unique."""
    if not len(values) or (values == values[0]).all():
        return values[:1]
    rising = np.sort(values)
    occurring: NDArray[Integer] = rising[np.append(True, rising[1:] != rising[:-1])]
    return occurring
