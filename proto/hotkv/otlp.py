"""Exports spans over OTLP, with the SDK of OpenTelemetry. Importing this needs the extra `otel`.

Always true: the queue is bounded, and a span that finds it full is refused; only the SDK's thread
speaks to the collector. A collector that is away costs its spans and two lines in the log: one when
it goes, one when it is back.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import hotkv
from hotkv.spans import Kind, Span, TraceContext

FROM_ENVIRONMENT = "env"
"""In place of an endpoint: the variables OTEL_EXPORTER_OTLP_* have it."""
PATH = "/v1/traces"
QUEUE_SPANS = 4096
BATCH_SPANS = 512
PAUSE_MS = 1000
"""Between two batches, unless one is full before."""
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0
"""Longest wait for the last batch."""
_KINDS = {
    Kind.INTERNAL: SpanKind.INTERNAL,
    Kind.SERVER: SpanKind.SERVER,
    Kind.CLIENT: SpanKind.CLIENT,
}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("hotkv", hotkv.__version__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A span in the SDK's queue. It is made readable on the SDK's thread: a span of the SDK's own
    would take the caller twenty times as long, for samplers and locks that it has no use for."""

    span: Span
    context: ClassVar[SpanContext] = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
    """All that the queue looks at: that it is sampled."""


class OtlpSink:
    """See the module; a `hotkv.spans.SpanSink`. `where`: the collector, for the log."""

    def __init__(
        self,
        exporter: SpanExporter,
        service: str,
        logger: logging.Logger,
        where: str = "the collector",
        queue_spans: int = QUEUE_SPANS,
    ) -> None:
        self.num_exported = self.num_failed = 0
        self._queue_spans = queue_spans
        self._num_emitted = self._num_taken = 0
        self._exporter = exporter
        self._resource = Resource.create({"service.name": service})
        self._logger, self._where = logger, where
        self._is_away = False
        self._processor = BatchSpanProcessor(
            _Watched(self),
            max_queue_size=queue_spans,
            schedule_delay_millis=PAUSE_MS,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )

    def __repr__(self) -> str:
        waiting = self._num_emitted - self._num_taken
        return f"OtlpSink({self._where}, {waiting} waiting, {self.num_exported} exported)"

    def emit(self, span: Span) -> bool:
        """Takes a span; False if the queue is full. Calls must not overlap."""
        if self._num_emitted - self._num_taken >= self._queue_spans:
            return False
        self._num_emitted += 1
        self._processor.on_end(cast(ReadableSpan, _Waiting(span)))
        return True

    def export(self, waiting: Sequence[_Waiting]) -> SpanExportResult:
        """Sends a batch. On the SDK's thread."""
        self._num_taken += len(waiting)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export([self._readable(one.span) for one in waiting])
        finally:
            self._exported(len(waiting), is_away=result is not SpanExportResult.SUCCESS)
        return result

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            _context(span.context, is_remote=False),
            None if span.parent is None else _context(span.parent, is_remote=span.is_parent_remote),
            self._resource,
            span.attributes,
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.began_ns,
            end_time=span.ended_ns,
            instrumentation_scope=_SCOPE,
        )

    def _exported(self, num_spans: int, *, is_away: bool) -> None:
        if is_away:
            self.num_failed += num_spans
        else:
            self.num_exported += num_spans
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                self._logger.warning("traces: %s takes no spans; they are lost", self._where)
            else:
                self._logger.info("traces: %s takes spans again", self._where)

    def flush(self) -> None:
        """Exports what waits, for CLOSE_S at most."""
        flushing = threading.Thread(target=self._processor.force_flush, daemon=True)
        flushing.start()
        flushing.join(CLOSE_S)

    def close(self) -> None:
        """Exports what waits, for CLOSE_S at most."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            # Ends the wait between two tries.
            self._exporter.shutdown()


class _Watched(SpanExporter):
    """The exporter that the SDK calls."""

    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._sink.export(cast(Sequence[_Waiting], spans))

    def shutdown(self) -> None:
        self._sink._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _context(one: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(one.trace_id, one.span_id, is_remote, _SAMPLED)


def open_sink(
    endpoint: str,
    service: str,
    logger: logging.Logger,
    headers: Mapping[str, str] | None = None,
    certificate: str | None = None,
    queue_spans: int = QUEUE_SPANS,
    default_protocol: str = "http/protobuf",
) -> OtlpSink:
    """Begins to export to a collector, which need not be there.

    `endpoint`: the URL of an OTLP/HTTP receiver, to which /v1/traces is added if it has no path; or
    FROM_ENVIRONMENT. Then `default_protocol` counts unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (or
    ..._PROTOCOL) names one. `certificate`: PEM file of the authority that signed the collector's.
    Raises ValueError for another protocol, and ImportError if its package is missing.
    """
    if endpoint != FROM_ENVIRONMENT:
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        exporter: SpanExporter = OTLPSpanExporter(
            url, certificate, headers=dict(headers or {}), timeout=EXPORT_TIMEOUT_S
        )
        return OtlpSink(exporter, service, logger, url, queue_spans)
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or default_protocol
    )
    where = "the collector of OTEL_EXPORTER_OTLP_*"
    if protocol == "http/protobuf":
        exporter = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
    elif protocol == "grpc":
        exporter = _grpc_exporter()
    else:
        raise ValueError(f"OTLP protocol {protocol!r}: allowed are http/protobuf and grpc")
    return OtlpSink(exporter, service, logger, where, queue_spans)


def _grpc_exporter() -> SpanExporter:
    """As vLLM makes its own: without TLS unless the URL begins with https."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT", ""
    )
    return GrpcExporter(
        url or None, insecure=not url.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )
