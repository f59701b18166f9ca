"""Free slots of one size, in the order in which they are handed out.

Always true: the slot that came last is handed out first. Offsets are kept in chunks: one array of
millions would be copied at every change.
"""

from collections.abc import Callable

import numpy as np

from hotkv_server.cache.values import BoolMask, Int64s

CHUNK_SLOTS = 1 << 14
"""Freed slots join the chunk before them as long as that has no more slots."""


class FreeSlots:
    """Offsets of free slots."""

    __slots__ = ("_chunks", "_num")

    def __init__(self) -> None:
        self._chunks: list[Int64s] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"FreeSlots({self._num})"

    def add(self, offsets: Int64s) -> None:
        """Adds slots; they are handed out first."""
        if self._chunks and len(self._chunks[-1]) + len(offsets) <= CHUNK_SLOTS:
            self._chunks[-1] = np.concatenate((self._chunks[-1], offsets))
        elif len(offsets):
            self._chunks.append(offsets)
        self._num += len(offsets)

    def add_below(self, offsets: Int64s) -> None:
        """Adds slots; they are handed out after all others."""
        if len(offsets):
            self._chunks.insert(0, offsets)
        self._num += len(offsets)

    def take(self, count: int) -> Int64s:
        """Removes and returns the last `count`, or all there are, the last one first."""
        taken: list[Int64s] = []
        missing = min(count, self._num)
        self._num -= missing
        while missing:
            chunk = self._chunks[-1]
            taken.append(chunk[max(0, len(chunk) - missing) :][::-1])
            if len(chunk) > missing:
                self._chunks[-1] = chunk[: len(chunk) - missing]
            else:
                self._chunks.pop()
            missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def keep(self, is_kept: Callable[[Int64s], BoolMask]) -> None:
        """Drops the slots for which `is_kept` is False; the rest stays in order."""
        kept = []
        for chunk in self._chunks:
            mask = is_kept(chunk)
            kept.append(chunk if mask.all() else chunk[mask])
        self._chunks = [chunk for chunk in kept if len(chunk)]
        self._num = sum(map(len, self._chunks))

    def all(self) -> Int64s:
        """All free slots, the last one last."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)
