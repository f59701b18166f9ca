"""Copies pages between the engine's memory, the mapped arena and staging areas, by address.

The copies of a call are shared among a few threads, which hold no GIL.
"""

import ctypes
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto import native

I64 = npt.NDArray[np.int64]
MAX_THREADS = 4
BYTES_PER_THREAD = 1 << 20
"""Fewer bytes are not worth another thread."""


class PageCopier:
    """Copies pages. One caller at a time."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: as many as there are cores, up to MAX_THREADS, if not said."""
        usual = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._num_threads = num_threads or usual
        self._threads: ThreadPoolExecutor | None = None
        self._kernels: Any = native.load("hotkv_proto.kernels")
        self._sizes = np.empty(0, np.int64)

    def __repr__(self) -> str:
        return f"PageCopier({self._num_threads} threads)"

    def copy(self, to: I64, source: I64, page_bytes: int) -> None:
        """memcpy of `page_bytes` from each of the addresses `source` [n] to that of `to` [n], both
        contiguous; pages don't overlap. Returns when all are there."""
        count = len(to)
        if not count:
            return
        self._sizes_for(count, page_bytes)
        parts = min(self._num_threads, 1 + count * page_bytes // BYTES_PER_THREAD)
        if parts == 1 or self._kernels is None:
            self._part(to, source, page_bytes)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads - 1, "hotkv-pages")
        edges = np.linspace(0, count, parts + 1).astype(int)
        others = [
            self._threads.submit(self._part, to[a:b], source[a:b], page_bytes)
            for a, b in itertools.pairwise(edges[1:])
        ]
        self._part(to[: edges[1]], source[: edges[1]], page_bytes)
        for other in others:
            other.result()

    def _part(self, to: I64, source: I64, page_bytes: int) -> None:
        if self._kernels is None:
            for place, origin in zip(to.tolist(), source.tolist(), strict=True):
                ctypes.memmove(place, origin, page_bytes)
            return
        self._kernels.copy_runs(0, 0, to, source, self._sizes, 0, len(to), False)

    def _sizes_for(self, count: int, page_bytes: int) -> None:
        """Sees to it that `_sizes` has `page_bytes` at least `count` times; most calls find it."""
        if len(self._sizes) < count or self._sizes[0] != page_bytes:
            self._sizes = np.full(max(count, 64), page_bytes, np.int64)
