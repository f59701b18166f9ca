"""What is told of sparse decode: figures per layer, as engines report them."""

from hotkv_proto.reports import SPARSE_COUNTERS, sparse_figures
from hotkv_server.node.capability import Samples
from hotkv_server.node.topics import Figures
from hotkv_server.sparse.book.figures import LayerFigures, LayerGrowth


def engines(figures: LayerFigures) -> Figures:
    """A row for each layer of each engine that has a session."""
    rows = ({"engine_id": engine_id, **_row(growth)} for engine_id, growth in figures.rows())
    return {"layers": list(rows)}


def layers(figures: LayerFigures) -> list[Figures]:
    """A row for each layer, over all engines since the start."""
    return [_row(growth) for growth in figures.totals()]


def _row(growth: LayerGrowth) -> Figures:
    counted = dict(zip(SPARSE_COUNTERS, growth.values.tolist(), strict=True))
    return {"layer_index": growth.layer_index, **counted, **sparse_figures(counted)}


def samples(figures: LayerFigures) -> list[Samples]:
    """Each counter, by layer."""
    rows = list(figures.totals())
    return [
        Samples(
            f"sparse_layer_{name}",
            "counter",
            [((str(growth.layer_index),), float(growth.values[place])) for growth in rows],
        )
        for place, name in enumerate(SPARSE_COUNTERS)
    ]
