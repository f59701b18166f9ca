"""HTTP for probes and Prometheus: /metrics, /livez, /readyz.

Runs on threads of its own and asks the event loop for figures, so an answer also proves that the loop turns. /livez fails where only a
restart helps, /readyz also while the server drains; both say what it is.
"""

import asyncio
import itertools
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hotkv.counters import SPARSE_COUNTERS
from hotkv.errors import Reason
from hotkv_server.runtime.devices import Devices
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.sparse import SparseDecode
from hotkv_server.runtime.stats import counters, gauges
from hotkv_server.sparse.figures import LATENCY_BOUNDS_S

ANSWER_TIMEOUT_S = 2.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _NodeCollector(Collector):
    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._loop = loop

    def collect(self) -> list[Metric]:
        async def read() -> tuple[dict[str, float], dict[str, float], list[Metric]]:
            labelled = [*_sparse_metrics(self._node.sparse), _refusals(self._node), *_device_metrics(self._node.devices)]
            return counters(self._node), gauges(self._node), labelled

        totals, levels, labelled = asyncio.run_coroutine_threadsafe(read(), self._loop).result(ANSWER_TIMEOUT_S)
        metrics: list[Metric] = []
        for name, value in totals.items():
            metrics.append(
                CounterMetricFamily(f"hotkv_{name}", name.removesuffix("_total").replace("_", " ") + " since start", value=value)
            )
        for name, value in levels.items():
            metrics.append(GaugeMetricFamily(f"hotkv_{name}", name.replace("_", " "), value=value))
        return metrics + labelled

    def describe(self) -> list[Metric]:
        return []


def _refusals(node: Node) -> Metric:
    """How often each reason was given."""
    family = CounterMetricFamily("hotkv_refused_by_reason", "refusals by reason, since start", labels=["reason"])
    for reason in Reason:
        family.add_metric([reason.name.lower()], float(node.refusals[reason]))
    return family


def _device_metrics(devices: Devices) -> list[Metric]:
    """What copy engines of devices have moved, and what waits."""
    moved = CounterMetricFamily(
        "hotkv_device_copied_bytes", "bytes that devices have copied since start", labels=["device", "direction", "method"]
    )
    pieces = CounterMetricFamily("hotkv_device_pieces", "pieces of those copies since start", labels=["device", "direction", "method"])
    failed = CounterMetricFamily("hotkv_device_failed_jobs", "copy jobs of a device that failed, since start", labels=["device"])
    queued = GaugeMetricFamily("hotkv_device_pieces_queued", "pieces that wait for a device", labels=["device"])
    flying = GaugeMetricFamily("hotkv_device_pieces_in_flight", "pieces that a device is copying", labels=["device"])
    usable = GaugeMetricFamily("hotkv_device_usable", "1 while a device copies, 0 once it is lost", labels=["device"])
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
    """What engines have reported per layer, at most MAX_LAYERS of them, and how long selections by the server took."""
    rows = list(sparse.figures.totals())
    metrics: list[Metric] = []
    for place, name in enumerate(SPARSE_COUNTERS):
        title = f"sparse decode: {name.replace('_', ' ')} of a layer, over all engines since start"
        family = CounterMetricFamily(f"hotkv_sparse_layer_{name}", title, labels=["layer"])
        for growth in rows:
            family.add_metric([str(growth.layer_index)], float(growth.values[place]))
        metrics.append(family)
    latency = HistogramMetricFamily("hotkv_sparse_select_seconds", "selections by the server, from request to answer")
    names = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    latency.add_metric([], list(zip(names, itertools.accumulate(sparse.latency.counts), strict=True)), sparse.latency.sum_s)
    return [*metrics, latency]


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    last_turn_s = 0.0

    def service_actions(self) -> None:
        """Called once a turn, twice a second at least."""
        self.last_turn_s = time.monotonic()

    def end(self) -> None:
        """Stops listening; returns when the serving thread has left its loop. That looks twice a second, so it is woken."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()


def _probe(node: Node, *, also_draining: bool) -> tuple[int, bytes]:
    """Status and body of a probe."""
    problems = node.health.problems(time.monotonic())
    if also_draining and node.core.draining:
        problems += ("the server drains",)
    return (503, ("\n".join(problems) + "\n").encode()) if problems else (200, b"ok\n")


class HttpServer:
    """Serves until closed. Raises OSError where it can't listen."""

    def __init__(self, host: str, port: int, node: Node) -> None:
        registry = CollectorRegistry()
        loop = asyncio.get_running_loop()
        registry.register(_NodeCollector(node, loop))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                try:
                    status, body = self._answer(self.path.partition("?")[0])
                except Exception as error:  # noqa: BLE001 The edge of HTTP: a loop that does not answer is a failed probe.
                    status, body = 503, f"{type(error).__name__}: the event loop does not answer\n".encode()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _answer(self, path: str) -> tuple[int, bytes]:
                async def probe() -> tuple[int, bytes]:
                    return _probe(node, also_draining=path == "/readyz")

                match path:
                    case "/metrics":
                        return 200, generate_latest(registry)
                    case "/livez" | "/readyz":
                        return asyncio.run_coroutine_threadsafe(probe(), loop).result(ANSWER_TIMEOUT_S)
                return 404, b"try /metrics, /livez or /readyz\n"

            def log_message(self, format: str, *args: object) -> None:
                """Probes are not logged."""

        self._server = _Listener((host, port), Handler)
        self._server.last_turn_s = time.monotonic()
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="hotkv-http", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """False where the thread has died."""
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """How long ago the thread last took something up; it does so all the time."""
        return now_s - self._server.last_turn_s

    def close(self) -> None:
        """Stops listening."""
        self._server.end()
