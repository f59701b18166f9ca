"""Representations of all complete blocks of resident contexts, by layer and row.

A block that is given back takes its row in the pool of the device's blocks (`pool`) with it. So
each resident request has rows of its own here, one a block, for as long as it runs. One thread.
Memory grows with the contexts that run at a time, to about 7 % of their KV.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hotkv_sparse.selection import Source
from hotkv_vllm.sparse.pool import BlockReprManager

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
FIRST_ROWS = 1024


class KeptRows:
    """Owns the rows. What is always true: a row belongs to one request at a time; formats, centres
    and axes are those of `pool`."""

    def __init__(self, pool: BlockReprManager) -> None:
        self._pool = pool
        self._num_rows = 0
        self._free: list[int] = []
        self._rows: dict[tuple[int, str], U8] = {}
        self._sources: dict[int, dict[str, tuple[Source, int, Source]]] = {}

    def __repr__(self) -> str:
        return f"KeptRows({self.num_taken} of {self._num_rows} rows)"

    @property
    def num_taken(self) -> int:
        """Rows that requests have."""
        return self._num_rows - len(self._free)

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """A layer's representations by format; they hold until the next `take`."""
        of_pool = self._pool.sources(layer_idx)
        known = self._sources.setdefault(layer_idx, {})
        for name, source in of_pool.items():
            # Asked in every layer of a step, so they are made anew only if something has changed.
            one = known.get(name)
            if one is None or one[0] is not source or one[1] != self._num_rows:
                mine = replace(source, pool=self._of(layer_idx, name, source))
                known[name] = source, self._num_rows, mine
        return {name: one[2] for name, one in known.items()}

    def take(self, count: int) -> I32:
        """Takes `count` free rows, int32 [count]; makes more if too few are free."""
        if count > len(self._free):
            more = max(FIRST_ROWS, self._num_rows, count)
            self._free = [*range(self._num_rows + more - 1, self._num_rows - 1, -1), *self._free]
            self._num_rows += more
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, rows: I32) -> None:
        """These rows, each taken, are nobody's again."""
        self._free.extend(sorted(rows.tolist(), reverse=True))

    def copy(self, layer_idx: int, rows: I32, blocks: I32) -> None:
        """Copies the representations of `blocks` [n] out of the pool of the device's blocks."""
        for name, source in self._pool.sources(layer_idx).items():
            self._of(layer_idx, name, source)[rows] = source.pool[blocks]

    def _of(self, layer_idx: int, name: str, source: Source) -> U8:
        """A layer's rows of one format, uint8 [rows, H, N]."""
        rows = self._rows.get((layer_idx, name))
        if rows is None or len(rows) < self._num_rows:
            grown = np.zeros((self._num_rows, *source.pool.shape[1:]), np.uint8)
            if rows is not None:
                grown[: len(rows)] = rows
            rows = self._rows[layer_idx, name] = grown
        return rows
