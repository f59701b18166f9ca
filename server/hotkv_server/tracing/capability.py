"""Tracing, as a capability of the node."""

from collections.abc import Mapping

from hotkv_server.node.capability import Capability, Tracer
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.tracing.calls import TracedCalls
from hotkv_server.tracing.drive import Tracing
from hotkv_server.tracing.start import check_tracing, open_tracing
from hotkv_server.wire.edge import Calls


def check(settings: Settings) -> None:
    """Raises StartError if traces are asked for and can't be exported from here."""
    check_tracing(settings)


def attach(settings: Settings, node: Node) -> "TracingCapability":
    """Tracing of this node. Raises StartError."""
    return TracingCapability(open_tracing(settings.tracing))


class TracingCapability(Capability):
    """See the folder's README. `tracing`: None if no collector is named; then nothing is traced and
    its metrics are 0."""

    def __init__(self, tracing: Tracing | None) -> None:
        self.tracing = tracing

    def __repr__(self) -> str:
        return f"TracingCapability({self.tracing!r})"

    def release(self) -> None:
        if self.tracing is not None:
            self.tracing.traces.close()

    def counters(self) -> Mapping[str, float]:
        traces = None if self.tracing is None else self.tracing.traces
        return {
            "trace_spans_exported_total": float(traces.num_exported if traces else 0),
            "trace_spans_failed_total": float(traces.num_failed if traces else 0),
            "trace_spans_dropped_total": float(traces.num_dropped if traces else 0),
            "trace_contexts_malformed_total": float(traces.num_malformed if traces else 0),
        }

    def traced(self, calls: Calls) -> Calls:
        return calls if self.tracing is None else TracedCalls(self.tracing, calls)

    @property
    def tracer(self) -> Tracer | None:
        return self.tracing
