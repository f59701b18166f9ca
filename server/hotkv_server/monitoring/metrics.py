"""A node's metrics for Prometheus.

Always true: the node is read on its event loop; Prometheus' registry only gets the latest
reading. Names and units follow Prometheus' rules. Counters start at 0 with the server, and never
fall. `metric_help` has the HELP texts and the labels.
"""

import itertools
import platform
import time
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hotkv_proto import __version__
from hotkv_proto.errors import Reason
from hotkv_proto.versions import NEWEST_VERSION
from hotkv_server.cache import inspect
from hotkv_server.cache.histogram import Histogram
from hotkv_server.dataplane.cuda.values import Direction, Method
from hotkv_server.dataplane.engines import Outcome
from hotkv_server.device.devices import Devices
from hotkv_server.monitoring.counts import RecentCensus, counters, gauges
from hotkv_server.monitoring.metric_help import HELP, LABELS, SPARSE_LAYER_HELP
from hotkv_server.node.capability import Samples
from hotkv_server.node.node import Node
from hotkv_server.node.transfers import LOAD, STORE, Timings

REFUSED = "refused_total"
"""Exported only with the label `reason`: with a sum, each refusal would be counted twice."""


def in_seconds(name: str) -> str:
    """`build_s` becomes `build_seconds`, as Prometheus writes the unit."""
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


LAYER_HELP = {f"sparse_layer_{in_seconds(name)}": text for name, text in SPARSE_LAYER_HELP.items()}


class NodeCollector(Collector):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._census = RecentCensus(node)
        self._metrics: list[Metric] = []

    def prepare(self) -> None:
        """Starts a census in the background, so that the first `read` need not wait for it. On
        the node's event loop."""
        self._census.begin()

    async def read(self) -> None:
        """On the node's event loop."""
        node, counted = self._node, await self._census.read()
        counts = counters(node)
        del counts[REFUSED]
        self._metrics = [
            *_health(node, time.monotonic()),
            *(_counter(name, value) for name, value in counts.items()),
            *(_gauge(in_seconds(name), value) for name, value in gauges(node, counted).items()),
            *_timings(node.timings),
            _histogram("eviction_age_seconds", inspect.eviction_ages(node.core)),
            _refusals(node),
            *_device_metrics(node.devices),
            *(_of(samples) for one in node.capabilities for samples in one.samples()),
        ]

    def collect(self) -> list[Metric]:
        return self._metrics

    def describe(self) -> list[Metric]:
        return []


def _help(name: str) -> str:
    return HELP.get(name) or LAYER_HELP.get(name) or name.replace("_", " ")


def _labels(name: str) -> tuple[str, ...] | None:
    return ("layer",) if name in LAYER_HELP else LABELS.get(name)


def _counter(name: str, value: float | None = None) -> CounterMetricFamily:
    """`value`: None with labels; the caller then adds the samples."""
    return CounterMetricFamily(f"hotkv_{name}", _help(name), value, _labels(name))


def _gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hotkv_{name}", _help(name), value, _labels(name))


def _histogram(name: str, counted: Histogram | None = None) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"hotkv_{name}", _help(name), labels=_labels(name))
    if counted is not None:
        family.add_metric([], counted.cumulative(), counted.sum)
    return family


def _health(node: Node, now_s: float) -> Iterator[Metric]:
    built = _gauge("build_info")
    built.add_metric([__version__, str(NEWEST_VERSION), platform.python_version()], 1.0)
    found = node.health.by_component(now_s)
    ready = not node.core.draining and not node.health.problems(now_s)
    problem = _gauge("problem")
    for name, said in found.items():
        # Names of parts are as "the event loop"; the label leaves out the article.
        problem.add_metric([name.removeprefix("the ").removeprefix("a ")], float(bool(said)))
    for tier in node.offers.tier_rows():
        problem.add_metric([f"tier {tier['name']}"], float(not tier["activity"]["is_up"]))
    yield from (built, _gauge("ready", float(ready)), problem)


def _timings(timings: Timings) -> Iterator[Metric]:
    yield _histogram("lookup_seconds", timings.lookup_s)
    yield _histogram("lease_seconds", timings.lease_s)
    yield _histogram("load_seconds", timings.load_s)
    yield _histogram("store_seconds", timings.store_s)
    yield _histogram("load_bytes", timings.load_bytes)
    yield _histogram("store_bytes", timings.store_bytes)
    yield _histogram("copy_wait_seconds", timings.wait_s)
    ends = _counter("transfers_total")
    for direction in (LOAD, STORE):
        for outcome in Outcome:
            ends.add_metric([direction, outcome.value], float(timings.ends[direction, outcome]))
    yield ends


def _refusals(node: Node) -> Metric:
    family = _counter(REFUSED)
    for reason in Reason:
        family.add_metric([reason.name.lower()], float(node.refusals[reason]))
    return family


def _device_metrics(devices: Devices) -> list[Metric]:
    """With a sample for each GPU."""
    moved, pieces = _counter("device_copied_bytes_total"), _counter("device_pieces_total")
    busy, failed = _counter("device_busy_seconds_total"), _counter("device_failed_jobs_total")
    queued, flying = _gauge("device_pieces_queued"), _gauge("device_pieces_in_flight")
    usable, demoted = _gauge("device_usable"), _gauge("device_method_demoted")
    failures = _counter("device_method_failures_total")
    retried = _counter("device_retried_jobs_total")
    for info, figures in devices.figures():
        device = str(info.number)
        for part in figures.moved:
            labels = [device, part.direction.value, part.method]
            moved.add_metric(labels, float(part.num_bytes))
            pieces.add_metric(labels, float(part.num_pieces))
        for direction, busy_s in figures.busy_s.items():
            busy.add_metric([device, direction.value], busy_s)
        failed.add_metric([device], float(figures.num_failed))
        queued.add_metric([device], float(figures.num_queued))
        flying.add_metric([device], float(figures.num_in_flight))
        usable.add_metric([device], float(not figures.problem))
        replaced = {(one.direction, one.method) for one in figures.failures.demoted}
        for way in itertools.product(Direction, Method):
            labels = [device, *(part.value for part in way)]
            demoted.add_metric(labels, float(way in replaced))
            failures.add_metric(labels, float(figures.failures.num_failed.get(way, 0)))
        retried.add_metric([device], float(figures.failures.num_retried))
    return [moved, pieces, busy, failed, queued, flying, usable, demoted, failures, retried]


def _of(samples: Samples) -> Metric:
    name = in_seconds(samples.name)
    if samples.kind == "histogram":
        family = _histogram(name)
        for labels, counted in samples.samples:
            assert isinstance(counted, Histogram), "a histogram's samples are histograms"
            family.add_metric(labels, counted.cumulative(), counted.sum)
        return family
    counter = _counter(name) if samples.kind == "counter" else _gauge(name)
    for labels, value in samples.samples:
        assert not isinstance(value, Histogram), "a counter's samples are numbers"
        counter.add_metric(labels, value)
    return counter
