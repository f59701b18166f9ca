"""Copies of blocks between host memory and hot slots, by `copy_method`.

Runs that are contiguous on both sides are merged first. `memcpy` copies run by run, `batch` hands
all blocks over in one call, `kernel` runs the compiled loop without the GIL (elsewhere than on a
CPU it would be a gather kernel), `auto` takes the kernel if there is one, else `memcpy`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv import native
from hotkv.errors import HotKVError, Reason
from hotkv_sparse.config import COPY_METHODS

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Runs:
    """Consecutive blocks: `counts[i]` of them from `sources[i]` to `destinations[i]`; int64 arrays
    of equal length."""

    sources: I64
    destinations: I64
    counts: I64


def merged(sources: I32, destinations: I32) -> Runs:
    """The fewest runs that copy `sources[i]` to `destinations[i]`, in this order."""
    if not len(sources):
        none = np.empty(0, np.int64)
        return Runs(none, none, none)
    broken = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
    starts = np.concatenate([[0], np.flatnonzero(broken) + 1])
    counts = np.diff(np.append(starts, len(sources)))
    return Runs(
        sources[starts].astype(np.int64),
        destinations[starts].astype(np.int64),
        counts.astype(np.int64),
    )


def copy_blocks(source: U8, destination: U8, sources: I32, destinations: I32, method: str) -> None:
    """Copies rows of `source` to rows of `destination`, both uint8 [blocks, bytes] and contiguous;
    INVALID_FIELD if they don't fit."""
    if method not in COPY_METHODS:
        raise HotKVError(
            Reason.INVALID_FIELD, f"copy_method is {method!r}; use one of {', '.join(COPY_METHODS)}"
        )
    _check(source, sources, "source")
    _check(destination, destinations, "destination")
    if source.shape[1] != destination.shape[1] or len(sources) != len(destinations):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"blocks of {source.shape[1]} and {destination.shape[1]} bytes; they must be equal",
        )
    kernels = native.load("hotkv.kernels") if method in ("kernel", "auto") else None
    if method == "batch":
        destination[destinations] = source[sources]
        return
    runs = merged(sources, destinations)
    if kernels is None:
        for start, to, count in zip(
            runs.sources.tolist(), runs.destinations.tolist(), runs.counts.tolist(), strict=True
        ):
            destination[to : to + count] = source[start : start + count]
        return
    size = source.shape[1]
    offsets = runs.destinations * size, runs.sources * size, runs.counts * size
    kernels.copy_runs(
        destination.ctypes.data, source.ctypes.data, *offsets, 0, len(runs.counts), False
    )


def _check(blocks: U8, rows: I32, name: str) -> None:
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or not blocks.flags.c_contiguous:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{name} is {blocks.dtype} {list(blocks.shape)}; pass contiguous uint8 [blocks, bytes]",
        )
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(blocks):
        raise HotKVError(Reason.INVALID_FIELD, f"{name} blocks must be from 0 to {len(blocks) - 1}")
