"""Exports spans over OTLP, with the SDK of OpenTelemetry. Importing this needs the extra `otel`.

Always true: the queue is bounded, and a span that finds it full is refused; only the SDK's thread
speaks to the collector, or one that flushes. A collector that is away costs its spans and two lines
in the log: one when it goes, with the reason, one when it is back. What the SDK says of its own is
left out.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
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
MAX_REASON_CHARS = 300
PROTOBUF = "application/x-protobuf"
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


class _Answers(threading.local):
    """What has become of the batch that this thread exports. `num_refused`: spans that the
    collector has not taken with the others; `said`: the first that was said of it."""

    is_exporting = False
    num_refused = 0
    said = ""

    def begin(self) -> None:
        self.is_exporting, self.num_refused, self.said = True, 0, ""

    def say(self, said: str) -> None:
        self.said = self.said or said[:MAX_REASON_CHARS]

    def filter(self, record: logging.LogRecord) -> bool:
        """As a filter of the SDK's logs: has what is said of an export."""
        if self.is_exporting:
            self.say(record.getMessage())
        return not self.is_exporting

    def judge(self, response: requests.Response, *_: Any, **__: Any) -> None:
        """As a hook of `requests`: the SDK takes a redirection, which it does not follow, for
        success, and passes over what a success says."""
        if 300 <= response.status_code < 400:
            response.close()
            raise requests.TooManyRedirects(f"{response.status_code}, a redirection")
        if response.ok and response.headers.get("content-type", "").startswith(PROTOBUF):
            try:
                answer = ExportTraceServiceResponse.FromString(response.content)
            except DecodeError:
                return
            self.num_refused = answer.partial_success.rejected_spans
            if self.num_refused:
                self.say(answer.partial_success.error_message)


_answers = _Answers()


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
        _hear_the_sdk()
        self.num_exported = self.num_failed = 0
        self._queue_spans = queue_spans
        self._num_emitted = self._num_taken = 0
        self._exporter = exporter
        self._resource = Resource.create({"service.name": service})
        self._logger, self._where = logger, where
        self._is_away = self._is_closed = self._is_shut_down = False
        self._processor = BatchSpanProcessor(
            _Watched(self),
            max_queue_size=queue_spans,
            schedule_delay_millis=PAUSE_MS,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )
        # Made here: from Python 3.12 on none can be made when the interpreter ends.
        self._asked = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        threading.Thread(target=self._help, name="hotkv-traces", daemon=True).start()

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
        """Sends a batch. On the SDK's thread, or the helper."""
        self._num_taken += len(waiting)
        result = SpanExportResult.FAILURE
        _answers.begin()
        try:
            result = self._exporter.export([self._readable(one.span) for one in waiting])
        except requests.RequestException as error:  # Of older SDKs.
            _answers.say(str(error))
        finally:
            _answers.is_exporting = False
            is_away = result is not SpanExportResult.SUCCESS
            num_lost = len(waiting) if is_away else min(_answers.num_refused, len(waiting))
            self._exported(len(waiting), num_lost)
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

    def _exported(self, num_spans: int, num_lost: int) -> None:
        self.num_failed += num_lost
        self.num_exported += num_spans - num_lost
        is_away = num_lost > 0
        if is_away != self._is_away:
            self._is_away = is_away
            if is_away:
                kind = "no spans" if num_lost == num_spans else "not all spans"
                self._logger.warning(
                    "traces: %s takes %s; they are lost reason=%r", self._where, kind, _answers.said
                )
            else:
                self._logger.info("traces: %s takes spans again", self._where)

    def flush(self) -> None:
        """Exports what waits, for CLOSE_S at most."""
        self._within(self._processor.force_flush)

    def close(self) -> None:
        """Exports what waits, for CLOSE_S at most."""
        if not self._within(self._end):
            # Ends the wait between two tries.
            self._shut_down()

    def _within(self, call: Callable[[], object]) -> bool:
        """Has the helper make a call; False if that takes longer than CLOSE_S."""
        is_done = threading.Event()
        self._asked.put((call, is_done))
        return self._is_closed or is_done.wait(CLOSE_S)

    def _help(self) -> None:
        while not self._is_closed:
            call, is_done = self._asked.get()
            call()
            is_done.set()

    def _end(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._is_closed = True

    def _shut_down(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class _Watched(SpanExporter):
    """The exporter that the SDK calls."""

    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._sink.export(cast(Sequence[_Waiting], spans))

    def shutdown(self) -> None:
        self._sink._shut_down()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _hear_the_sdk() -> None:
    """Has what the SDK says of an export come to the sink instead of the log. Its loggers are known
    by now."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry"):
            logging.getLogger(name).addFilter(_answers.filter)


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
        parts = urlsplit(endpoint)
        url = endpoint if parts.path.strip("/") else parts._replace(path=PATH).geturl()
        exporter: SpanExporter = OTLPSpanExporter(
            url,
            certificate,
            headers=dict(headers or {}),
            timeout=EXPORT_TIMEOUT_S,
            session=_session(),
        )
        return OtlpSink(exporter, service, logger, url, queue_spans)
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or default_protocol
    )
    where = "the collector of OTEL_EXPORTER_OTLP_*"
    if protocol == "http/protobuf":
        exporter = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S, session=_session())
    elif protocol == "grpc":
        exporter = _grpc_exporter()
    else:
        raise ValueError(f"OTLP protocol {protocol!r}: allowed are http/protobuf and grpc")
    return OtlpSink(exporter, service, logger, where, queue_spans)


def _session() -> requests.Session | None:
    """What the exporter sends by; None leaves that to a provider of credentials that the
    environment names for the SDK."""
    if any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return None
    session = requests.Session()
    session.hooks["response"].append(_answers.judge)
    return session


def _grpc_exporter() -> SpanExporter:
    """As vLLM makes its own: without TLS unless the URL begins with https. It does not tell what a
    collector has refused of a batch."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT", ""
    )
    return GrpcExporter(
        url or None, insecure=not url.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )
