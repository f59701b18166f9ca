"""Records spans as a trace collector would receive them."""

import logging
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hotkv_proto.traces import Span, Traces

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


class Recorded:
    """`Traces` and what it has exported. `bounds`: its limits."""

    def __init__(self, **bounds: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = Traces(self._exporter, "test", logging.getLogger("tests.traces"), **bounds)

    def spans(self) -> list[ReadableSpan]:
        self.traces.flush()
        return list(self._exporter.get_finished_spans())


def begun(traces: Traces, traceparent: str = GOOD) -> Span:
    span = traces.begin("a", traceparent, is_served=True)
    assert span is not None
    return span
