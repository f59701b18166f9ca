"""Sums engines' reports per layer, and makes figures for operators.

Always true: an engine has at most `MAX_LAYERS` layers. Totals over all engines never fall, even
after an engine's last session has closed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.sparse_counters import SPARSE_COUNTERS, sparse_figures
from hotkv_server.node.capability import Figures, Samples
from hotkv_server.node.names import DisplayNames
from hotkv_sparse.server.select.book import MAX_LAYERS

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerGrowth:
    """Growth of a layer's counters since the engine's previous report; a sum if several were added.

    values: float64 [counters], in the order of SPARSE_COUNTERS.
    """

    layer_index: int
    values: F64


class LayerFigures:
    def __init__(self) -> None:
        self._engines: dict[str, F64] = {}
        self._totals: F64 = np.zeros((0, len(SPARSE_COUNTERS)))

    def __repr__(self) -> str:
        return f"LayerFigures({len(self._engines)} engines, {len(self._totals)} layers)"

    def add(self, engine_id: str, growth: LayerGrowth) -> None:
        """The layer must be below MAX_LAYERS."""
        assert 0 <= growth.layer_index < MAX_LAYERS, "the layer was not checked"
        self._engines[engine_id] = _added(self._engines.get(engine_id, self._totals[:0]), growth)
        self._totals = _added(self._totals, growth)

    def drop(self, engine_id: str) -> None:
        """The totals keep the engine's counts."""
        self._engines.pop(engine_id, None)

    def rows(self) -> Iterator[tuple[str, LayerGrowth]]:
        """(engine id, layer's counters) by engine and layer, without layers whose counters are
        all 0."""
        for engine_id in sorted(self._engines):
            for growth in _rows(self._engines[engine_id]):
                yield engine_id, growth

    def totals(self) -> Iterator[LayerGrowth]:
        """Over all engines, without layers whose counters are all 0."""
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


# ----------------------------------------------------------------------------------- how it is told


def engines(figures: LayerFigures, names: DisplayNames) -> Figures:
    """A row per layer of each engine with a session."""
    rows = [
        {"engine_id": engine_id, "engine_name": names.engine(engine_id), **_row(growth)}
        for engine_id, growth in figures.rows()
    ]
    return {"layers": rows}


def layers(figures: LayerFigures) -> list[Figures]:
    """A row per layer, over all engines since the start."""
    return [_row(growth) for growth in figures.totals()]


def _row(growth: LayerGrowth) -> Figures:
    counted = dict(zip(SPARSE_COUNTERS, growth.values.tolist(), strict=True))
    return {"layer_index": growth.layer_index, **counted, **sparse_figures(counted)}


def samples(figures: LayerFigures) -> list[Samples]:
    """One sample per layer, over all engines."""
    rows = list(figures.totals())
    return [
        Samples(
            f"sparse_layer_{name}",
            "counter",
            [((str(growth.layer_index),), float(growth.values[place])) for growth in rows],
        )
        for place, name in enumerate(SPARSE_COUNTERS)
    ]
