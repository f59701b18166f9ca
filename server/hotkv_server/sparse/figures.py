"""Sums engines' reports of sparse decode for each layer, and makes figures for operators.

Always true: an engine has at most `MAX_LAYERS` layers, so memory is bounded by the number of
engines. Totals over all engines never fall, even after an engine's last session has closed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.reports import SPARSE_COUNTERS, sparse_figures
from hotkv_server.node.capability import Figures, Samples
from hotkv_server.node.names import DisplayNames
from hotkv_server.sparse.book import MAX_LAYERS

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerGrowth:
    """By how much the counters of a layer's sparse decode have grown: since an engine's previous
    report, or since the start if several reports were added.

    values: float64 [counters], in the order of SPARSE_COUNTERS.
    """

    layer_index: int
    values: F64


class LayerFigures:
    """Sums up, for each layer of a model, the counters of sparse decode that engines report:
    separately for each engine, and over all engines since the server started."""

    def __init__(self) -> None:
        self._engines: dict[str, F64] = {}
        self._totals: F64 = np.zeros((0, len(SPARSE_COUNTERS)))

    def __repr__(self) -> str:
        return f"LayerFigures({len(self._engines)} engines, {len(self._totals)} layers)"

    def add(self, engine_id: str, growth: LayerGrowth) -> None:
        """Adds an engine's report about the sparse decode of a layer, whose index must be below
        MAX_LAYERS."""
        assert 0 <= growth.layer_index < MAX_LAYERS, "the layer was not checked"
        self._engines[engine_id] = _added(self._engines.get(engine_id, self._totals[:0]), growth)
        self._totals = _added(self._totals, growth)

    def drop(self, engine_id: str) -> None:
        """Removes the counters of an engine that has no session left. The totals keep its
        counts."""
        self._engines.pop(engine_id, None)

    def rows(self) -> Iterator[tuple[str, LayerGrowth]]:
        """Yields a pair for each layer of each engine: the engine's id, and the layer's counters.
        The pairs are in the order of engine ids and layers. Skips layers whose counters are all
        0."""
        for engine_id in sorted(self._engines):
            for growth in _rows(self._engines[engine_id]):
                yield engine_id, growth

    def totals(self) -> Iterator[LayerGrowth]:
        """Yields the counters of sparse decode of each layer, summed over all engines since the
        start. Skips layers whose counters are all 0."""
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
    """Returns the counters of sparse decode: a row for each layer of each engine that has a
    session."""
    rows = [
        {"engine_id": engine_id, "engine_name": names.engine(engine_id), **_row(growth)}
        for engine_id, growth in figures.rows()
    ]
    return {"layers": rows}


def layers(figures: LayerFigures) -> list[Figures]:
    """Returns the counters of sparse decode: a row for each layer, over all engines since the
    start."""
    return [_row(growth) for growth in figures.totals()]


def _row(growth: LayerGrowth) -> Figures:
    counted = dict(zip(SPARSE_COUNTERS, growth.values.tolist(), strict=True))
    return {"layer_index": growth.layer_index, **counted, **sparse_figures(counted)}


def samples(figures: LayerFigures) -> list[Samples]:
    """Returns the counters of sparse decode as metrics. Each metric has a sample per layer, summed
    over all engines."""
    rows = list(figures.totals())
    return [
        Samples(
            f"sparse_layer_{name}",
            "counter",
            [((str(growth.layer_index),), float(growth.values[place])) for growth in rows],
        )
        for place, name in enumerate(SPARSE_COUNTERS)
    ]
