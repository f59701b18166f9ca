"""Counters of sparse decode, by layer. They only grow; each `take` returns the growth since its
last call.

Counting costs a few additions of Python floats; tables are made only when counters are taken.
"""

from collections.abc import Iterable

import numpy as np

from hotkv_proto.reports import SPARSE_COUNTERS
from hotkv_vllm.sparse.sequence import Attended

PREFIX = "sparse_"
_COLUMN = {name: column for column, name in enumerate(SPARSE_COUNTERS)}
_STEP = tuple(
    _COLUMN[name]
    for name in (
        "selects", "context_blocks", "selected_blocks", "attended_blocks", "seeded_blocks",
        "corrected_blocks", "prefetched_blocks",
        "wanted_blocks", "hit_blocks", "estimated_mass", "swap_bytes",
    )
)  # fmt: skip


class LayerCounters:
    """Counters of the layers `indices`, by the names of `hotkv_proto.reports.SPARSE_COUNTERS`."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._rows = {index: [0.0] * len(SPARSE_COUNTERS) for index in indices}
        self._taken = [0.0] * len(SPARSE_COUNTERS)
        self._taken_by_layer = np.zeros((len(self._rows), len(SPARSE_COUNTERS)))

    def __repr__(self) -> str:
        return (
            f"LayerCounters(layers {len(self._rows)}, selects "
            f"{sum(row[_COLUMN['selects']] for row in self._rows.values()):.0f})"
        )

    def add(self, index: int, name: str, value: float) -> None:
        self._rows[index][_COLUMN[name]] += value

    def add_step(
        self, index: int, attended: Attended, context_blocks: int, page_bytes: int
    ) -> None:
        """Counts one selection of a layer whose blocks have pages of `page_bytes`."""
        row = self._rows[index]
        num_joined = attended.num_seeded + attended.num_corrected + attended.num_prefetched
        values = (
            1, context_blocks, len(attended.selection.blocks), len(attended.blocks),
            attended.num_seeded, attended.num_corrected, attended.num_prefetched,
            attended.num_wanted,
            attended.num_hits, attended.selection.mass,
            num_joined * page_bytes,
        )  # fmt: skip
        for column, value in zip(_STEP, values, strict=True):
            row[column] += value

    def take(self) -> dict[str, float]:
        """Returns the growth over all layers, by name prefixed with `sparse_`. Counters that did
        not grow are left out."""
        # Once a step, so without an array.
        totals: list[float] = [
            sum(column, 0.0) for column in zip(*self._rows.values(), strict=True)
        ] or self._taken
        growth = [total - taken for total, taken in zip(totals, self._taken, strict=True)]
        self._taken = totals
        return {
            PREFIX + name: value
            for name, value in zip(SPARSE_COUNTERS, growth, strict=True)
            if value
        }

    def take_by_layer(self) -> dict[int, dict[str, float]]:
        """Returns the growth by layer and name. Layers and counters that did not grow are left
        out."""
        totals = np.array(list(self._rows.values())).reshape(self._taken_by_layer.shape)
        growth, self._taken_by_layer = totals - self._taken_by_layer, totals
        found = {
            index: {name: value for name, value in zip(SPARSE_COUNTERS, row, strict=True) if value}
            for index, row in zip(self._rows, growth.tolist(), strict=True)
        }
        return {index: row for index, row in found.items() if row}
