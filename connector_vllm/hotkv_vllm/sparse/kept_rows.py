"""Representations of all complete blocks of resident contexts, by layer and row.

A block that is given back takes its row in the pool of the device's blocks (`pool`) with it. So
each resident request has rows of its own here, one a block, for as long as it runs. One thread.
Memory grows with the contexts that run at a time, to about 7 % of their KV.

Shapes: n rows, H KV heads, N bytes of a block and head.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hotkv_sparse.selector import Source
from hotkv_vllm.sparse.pool import LayerShape

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
FIRST_ROWS = 1024


class KeptRows:
    """Owns the rows. What is always true: a row belongs to one request at a time."""

    def __init__(self, layers: Mapping[int, LayerShape]) -> None:
        self._layers = dict(layers)
        self._num_rows = 0
        self._free: list[int] = []
        self._sources: dict[int, dict[str, Source]] = {index: {} for index in layers}

    def __repr__(self) -> str:
        return f"KeptRows({self._num_rows - len(self._free)} of {self._num_rows} rows)"

    @property
    def num_taken(self) -> int:
        """Rows that requests have."""
        return self._num_rows - len(self._free)

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """A layer's representations by format; they hold until the next `take`."""
        return self._sources[layer_idx]

    def take(self, count: int) -> I32:
        """Rows [count] that nobody has, lowest first."""
        if count > len(self._free):
            self._grow(max(FIRST_ROWS, 2 * self._num_rows, self._num_rows + count))
        rows = [self._free.pop() for _ in range(count)]
        return np.array(rows, np.int32)

    def give_back(self, rows: I32) -> None:
        """These rows, each taken, are nobody's again."""
        self._free.extend(sorted(rows.tolist(), reverse=True))

    def copy(self, layer_idx: int, rows: I32, pool: Mapping[str, Source], blocks: I32) -> None:
        """Copies the representations of `blocks` [n] out of the pool of the device's blocks."""
        for name, source in self._sources[layer_idx].items():
            source.pool[rows] = pool[name].pool[blocks]

    def write(self, layer_idx: int, name: str, rows: I32, packed_nHN: U8) -> None:
        """Writes representations of one format."""
        self._sources[layer_idx][name].pool[rows] = packed_nHN

    def _grow(self, num_rows: int) -> None:
        for index, shape in self._layers.items():
            for name in shape.formats:
                old = self._sources[index].get(name)
                pool = np.zeros(
                    (num_rows, shape.kv_heads, shape.row_bytes(name) // shape.kv_heads), np.uint8
                )
                if old is not None:
                    pool[: self._num_rows] = old.pool
                self._sources[index][name] = Source(
                    pool, shape.centre_of(name), shape.biases.get(name)
                )
        self._free = [*range(num_rows - 1, self._num_rows - 1, -1), *self._free]
        self._num_rows = num_rows
