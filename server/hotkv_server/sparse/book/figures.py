"""Figures of sparse decode: what engines report per layer.

Always true: memory is bounded by engines and `MAX_LAYERS`; totals over engines never fall, even
when an engine is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.reports import SPARSE_COUNTERS

F64 = NDArray[np.float64]
MAX_LAYERS = 256
LATENCY_BOUNDS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
"""Upper bounds for the time of a selection by the server."""


@dataclass(frozen=True, slots=True)
class LayerGrowth:
    """Growth of one layer's counters, float64 in the order of SPARSE_COUNTERS."""

    layer_index: int
    values: F64


class LayerFigures:
    """Counters per engine and layer, and their sums over all engines there ever were."""

    def __init__(self) -> None:
        self._engines: dict[str, F64] = {}
        self._totals: F64 = np.zeros((0, len(SPARSE_COUNTERS)))

    def __repr__(self) -> str:
        return f"LayerFigures({len(self._engines)} engines, {len(self._totals)} layers)"

    def add(self, engine_id: str, growth: LayerGrowth) -> None:
        """Counts what an engine reports of a layer below MAX_LAYERS."""
        assert 0 <= growth.layer_index < MAX_LAYERS, "the layer was not checked"
        self._engines[engine_id] = _added(self._engines.get(engine_id, self._totals[:0]), growth)
        self._totals = _added(self._totals, growth)

    def drop(self, engine_id: str) -> None:
        """Forgets an engine that is not there any more; totals keep what it has counted."""
        self._engines.pop(engine_id, None)

    def rows(self) -> Iterator[tuple[str, LayerGrowth]]:
        """Engine and its counters, by engine and layer; layers without selections or
        representations are left out."""
        for engine_id in sorted(self._engines):
            for growth in _rows(self._engines[engine_id]):
                yield engine_id, growth

    def totals(self) -> Iterator[LayerGrowth]:
        """Per layer, over all engines since the start."""
        return _rows(self._totals)


def _added(table: F64, growth: LayerGrowth) -> F64:
    missing = growth.layer_index + 1 - len(table)
    if missing > 0:
        table = np.concatenate([table, np.zeros((missing, table.shape[1]))])
    table[growth.layer_index] += growth.values
    return table


def _rows(table: F64) -> Iterator[LayerGrowth]:
    for layer in np.flatnonzero(table.any(axis=1)).tolist():
        yield LayerGrowth(layer, table[layer])
