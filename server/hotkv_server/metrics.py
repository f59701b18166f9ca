"""Metrics of a node for Prometheus, as they were last read.

Always true: the node is read on its own event loop, and Prometheus' registry only gets what was
read. `metric_help` has the texts.
"""

import itertools

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hotkv.counters import SPARSE_COUNTERS
from hotkv.errors import Reason
from hotkv_server.device.devices import Devices
from hotkv_server.metric_help import HELP, SPARSE_LAYER_HELP
from hotkv_server.runtime import tier_figures
from hotkv_server.runtime.ledger import LiveLedger
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.sparse import SparseDecode
from hotkv_server.runtime.stats import census, counters, gauges
from hotkv_server.runtime.tier_reads import READ_BOUNDS_S
from hotkv_server.sparse.figures import LATENCY_BOUNDS_S

DEVICE = "device"
"""An engine's own memory, beside the names of tiers."""
REFUSED = "refused_total"
"""Labelled here: a sum beside it would count each refusal twice."""


class NodeCollector(Collector):
    """The registry's source: the metrics that `read` took last."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._metrics: list[Metric] = []

    async def read(self) -> None:
        """Reads all metrics off the node. On the node's loop."""
        counted = await census(self._node)
        counts = counters(self._node)
        del counts[REFUSED]
        self._metrics = [
            *(_counter(name, value) for name, value in counts.items()),
            *(
                _gauge(in_seconds(name), value)
                for name, value in gauges(self._node, counted).items()
            ),
            *_sparse_metrics(self._node.sparse),
            _refusals(self._node),
            *_device_metrics(self._node.devices),
            _tier_reads(self._node),
            *_ledger_metrics(self._node.ledger),
        ]

    def collect(self) -> list[Metric]:
        return self._metrics

    def describe(self) -> list[Metric]:
        return []


def in_seconds(name: str) -> str:
    """A name whose unit is written as Prometheus does: `build_seconds` of `build_s`."""
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


def _help(name: str) -> str:
    return HELP.get(name, name.replace("_", " "))


def _counter(
    name: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> CounterMetricFamily:
    return CounterMetricFamily(
        f"hotkv_{name}", _help(name), value=value, labels=labels if value is None else None
    )


def _gauge(
    name: str, value: float | None = None, labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    return GaugeMetricFamily(
        f"hotkv_{name}", _help(name), value=value, labels=labels if value is None else None
    )


def _refusals(node: Node) -> Metric:
    """How often each reason was given."""
    family = _counter(REFUSED, labels=("reason",))
    for reason in Reason:
        family.add_metric([reason.name.lower()], float(node.refusals[reason]))
    return family


def _tier_reads(node: Node) -> Metric:
    """How long reads from each tier took."""
    name = "tier_read_seconds"
    family = HistogramMetricFamily(f"hotkv_{name}", _help(name), labels=["tier"])
    bounds = [*map(str, READ_BOUNDS_S), "+Inf"]
    for tier in tier_figures.states(node.tiers):
        sums = list(zip(bounds, itertools.accumulate(tier.reads.counts), strict=True))
        family.add_metric([tier.name], sums, tier.reads.sum_s)
    return family


def _ledger_metrics(ledger: LiveLedger) -> list[Metric]:
    """Where the tokens of all prompts came from, and what that has saved."""
    total = ledger.total
    hits = _counter("ledger_hit_tokens_total", labels=("tier",))
    for tier, count in {DEVICE: total.device_hit_tokens, **total.hit_tokens}.items():
        hits.add_metric([tier], float(count))
    missed = _counter("ledger_missed_tokens_total", labels=("reason",))
    for reason, count in total.missed_tokens.items():
        missed.add_metric([reason.name.lower()], float(count))
    return [
        hits,
        missed,
        _counter("ledger_saved_seconds_total", total.saved_s),
        _counter("ledger_waited_seconds_total", total.waited_s),
    ]


def _device_metrics(devices: Devices) -> list[Metric]:
    """Metrics of devices' copy engines, by device."""
    by_method, by_device = ("device", "direction", "method"), ("device",)
    moved = _counter("device_copied_bytes_total", labels=by_method)
    pieces = _counter("device_pieces_total", labels=by_method)
    failed = _counter("device_failed_jobs_total", labels=by_device)
    queued = _gauge("device_pieces_queued", labels=by_device)
    flying = _gauge("device_pieces_in_flight", labels=by_device)
    usable = _gauge("device_usable", labels=by_device)
    for info, figures in devices.figures():
        device = str(info.number)
        for part in figures.moved:
            labels = [device, part.direction.value, part.method]
            moved.add_metric(labels, float(part.num_bytes))
            pieces.add_metric(labels, float(part.num_pieces))
        failed.add_metric([device], float(figures.num_failed))
        queued.add_metric([device], float(figures.num_queued))
        flying.add_metric([device], float(figures.num_in_flight))
        usable.add_metric([device], float(not figures.problem))
    return [moved, pieces, failed, queued, flying, usable]


def _sparse_metrics(sparse: SparseDecode) -> list[Metric]:
    """What engines have reported, by layer (at most MAX_LAYERS), and the latency of the server's
    own selections."""
    rows = list(sparse.figures.totals())
    metrics: list[Metric] = []
    for place, name in enumerate(SPARSE_COUNTERS):
        text = SPARSE_LAYER_HELP.get(name, name)
        exported = f"hotkv_sparse_layer_{in_seconds(name)}"
        family = CounterMetricFamily(exported, text, labels=["layer"])
        for growth in rows:
            family.add_metric([str(growth.layer_index)], float(growth.values[place]))
        metrics.append(family)
    latency = HistogramMetricFamily("hotkv_sparse_select_seconds", _help("sparse_select_seconds"))
    counted = sparse.selections.latency
    names = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    sums = list(zip(names, itertools.accumulate(counted.counts), strict=True))
    latency.add_metric([], sums, counted.sum_s)
    return [*metrics, latency]
