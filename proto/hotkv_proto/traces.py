"""Records traces with OpenTelemetry's SDK. Needs the extra `otel`, so it is imported by name, and
only if traces are configured.

Always true: recording neither blocks nor raises, from any thread. Queue and spans per second are
bounded; spans beyond are dropped and counted. Only the SDK's thread and the helper thread of
`_Bounds` send. The log says when and why the collector stops accepting spans, and when it
accepts them again. The SDK's own log lines are suppressed.
"""

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import hotkv_proto

FROM_ENVIRONMENT = "env"
"""As `endpoint`: the variables OTEL_EXPORTER_OTLP_* name it."""
PATH = "/v1/traces"
MAX_SPANS_PER_S = 1000
"""One takes about 100 us."""
QUEUE_SPANS = 4096
BATCH_SPANS = 512
PAUSE_MS = 1000
"""Between two batches; a full batch is sent at once."""
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0
"""Longest wait of `flush` and `close` for the last batch."""
MAX_REASON_CHARS = 300
PROTOBUF = "application/x-protobuf"
TRACEPARENT = "traceparent"
MAX_TRACEPARENT_CHARS = 128
"""Version 00 has 55."""
_W3C = TraceContextTextMapPropagator()

Value = str | bool | int | float
"""Of a span's attribute: never prompts or hashes."""


@final
class Span:
    """`attributes` may be set until it ends."""

    __slots__ = ("_span", "_traces", "attributes")

    def __init__(self, traces: "Traces", span: trace.Span) -> None:
        self._traces = traces
        self._span = span
        self.attributes: dict[str, Value] = {}

    def __repr__(self) -> str:
        return f"Span({self.traceparent}, {self.attributes})"

    @property
    def traceparent(self) -> str:
        """W3C header, with which another process begins children."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span))
        return carrier[TRACEPARENT]

    @property
    def began_ns(self) -> int:
        """Since 1970."""
        return int(self._span.start_time)  # type: ignore[attr-defined]

    def child(self, name: str, began_ns: int = 0, *, is_call: bool = False) -> "Span":
        """began_ns: since 1970; 0: now.
        is_call: to another process.
        """
        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        return self._traces.start(name, self._span, kind, began_ns)

    def end(self, error: str = "", ended_ns: int = 0) -> None:
        """Only the first end counts.

        error: name of a reason; empty for success.
        ended_ns: since 1970; 0: now.
        """
        if self._span.is_recording():
            self._span.set_attributes(self.attributes)
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            # The clock may have been set back since the span began.
            self._span.end(max(ended_ns or time.time_ns(), self.began_ns))


class Traces:
    """Begins spans, and exports those that have ended.

    sample_ratio: traced share of the calls without a traceparent, 0 to 1.
    where: name of the collector in the log.
    num_failed: sent and not accepted.
    num_dropped: not sent, because of a bound.
    num_malformed: traceparents that could not be read.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        service: str,
        logger: logging.Logger,
        where: str = "the collector",
        sample_ratio: float = 0.0,
        max_spans_per_s: int = MAX_SPANS_PER_S,
        queue_spans: int = QUEUE_SPANS,
    ) -> None:
        self.num_malformed = 0
        self._sample_ratio = sample_ratio
        self._export = _Export(exporter, logger, where)
        self._bounds = _Bounds(self._export, max_spans_per_s, queue_spans)
        provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            id_generator=_Ids(),
            # `begin` decides which calls are traced. Otherwise the variable OTEL_TRACES_SAMPLER
            # could make the SDK drop spans.
            sampler=ALWAYS_ON,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._bounds)
        self._tracer = provider.get_tracer("hotkv", hotkv_proto.__version__)
        self._is_off = isinstance(self._tracer, trace.NoOpTracer)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Traces({self.num_exported} exported, {self.num_dropped} dropped)"

    @property
    def num_exported(self) -> int:
        return self._export.num_exported

    @property
    def num_failed(self) -> int:
        return self._export.num_failed

    @property
    def num_dropped(self) -> int:
        return self._bounds.num_dropped

    def begin(self, name: str, traceparent: str, *, is_served: bool = False) -> Span | None:
        """Begins the span of a call; None if it is not traced.

        traceparent: the caller's span, traced if it is sampled. Empty or unreadable: with the
            probability `sample_ratio`. OTEL_SDK_DISABLED=true turns all off.
        """
        if self._is_off:
            return None
        kind = SpanKind.SERVER if is_served else SpanKind.INTERNAL
        if traceparent:
            parent: trace.Span = trace.INVALID_SPAN
            if len(traceparent) <= MAX_TRACEPARENT_CHARS:
                parent = trace.get_current_span(_W3C.extract({TRACEPARENT: traceparent}))
            context = parent.get_span_context()
            if context.is_valid:
                return self.start(name, parent, kind) if context.trace_flags.sampled else None
            with self._lock:
                self.num_malformed += 1
        if self._sample_ratio and _chance.random() < self._sample_ratio:
            return self.start(name, trace.INVALID_SPAN, kind)
        return None

    def start(self, name: str, parent: trace.Span, kind: SpanKind, began_ns: int = 0) -> Span:
        """parent: INVALID_SPAN begins a trace.
        began_ns: since 1970; 0: now.
        """
        context = trace.set_span_in_context(parent)
        return Span(self, self._tracer.start_span(name, context, kind, start_time=began_ns or None))

    def flush(self) -> None:
        """Exports the queued spans. Blocks for CLOSE_S at most."""
        self._bounds.within(self._bounds.batches.force_flush)

    def close(self) -> None:
        """Exports the queued spans and refuses others. Blocks for CLOSE_S at most."""
        self._bounds.shutdown()


_chance = random.Random()
"""Engines seed the global generator: several processes would choose equal ids."""
os.register_at_fork(after_in_child=_chance.seed)


class _Ids(IdGenerator):
    def generate_span_id(self) -> int:
        return _chance.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return _chance.getrandbits(128) or 1


class _Bounds(SpanProcessor):
    """Passes ended spans to the SDK's queue, up to the bounds; drops and counts the others."""

    def __init__(self, export: "_Export", max_spans_per_s: int, queue_spans: int) -> None:
        self.num_dropped = 0
        self.batches = BatchSpanProcessor(
            export,
            max_queue_size=queue_spans,
            schedule_delay_millis=PAUSE_MS,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
        )
        self._export = export
        self._max_spans_per_s = max_spans_per_s
        self._queue_spans = queue_spans
        self._num_emitted = 0
        self._lock = threading.Lock()
        # Current second, and spans that ended in it.
        self._second = self._num_in_second = 0
        # From Python 3.12 on no thread can start while the interpreter ends.
        self._asked = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        self._is_closed = False
        threading.Thread(target=self._help, name="hotkv-traces", daemon=True).start()

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            # By the time of this call, not of the span's end: a transfer records all its spans
            # in one moment, although its parts may have ended seconds apart.
            second = int(time.monotonic())
            if second != self._second:
                self._second = second
                self._num_in_second = 0
            self._num_in_second += 1
            if (
                self._num_in_second > self._max_spans_per_s
                or self._num_emitted - self._export.num_taken >= self._queue_spans
            ):
                self.num_dropped += 1
                return
            self._num_emitted += 1
        self.batches.on_end(span)

    def shutdown(self) -> None:
        if not self.within(self._end):
            # Ends its wait between two retries.
            self._export.shutdown()

    def within(self, call: Callable[[], object]) -> bool:
        """Runs a call on the helper thread. False if it takes longer than CLOSE_S: a collector
        may hang."""
        is_done = threading.Event()
        self._asked.put((call, is_done))
        return self._is_closed or is_done.wait(CLOSE_S)

    def _help(self) -> None:
        while not self._is_closed:
            call, is_done = self._asked.get()
            call()
            is_done.set()

    def _end(self) -> None:
        self.batches.shutdown()  # type: ignore[no-untyped-call]
        self._is_closed = True


class _Answers(threading.local):
    """Of the batch that the current thread exports.

    said: first message of SDK or collector.
    """

    is_exporting = False
    num_refused = 0
    said = ""

    def begin(self) -> None:
        self.is_exporting = True
        self.num_refused = 0
        self.said = ""

    def say(self, said: str) -> None:
        self.said = self.said or said[:MAX_REASON_CHARS]

    def filter(self, record: logging.LogRecord) -> bool:
        """During an export, stores the message of a record of the SDK and suppresses the record."""
        if self.is_exporting:
            self.say(record.getMessage())
        return not self.is_exporting

    def judge(self, response: requests.Response, *_: Any, **__: Any) -> None:
        """Response hook of `requests` for two failures that the SDK ignores: raises
        TooManyRedirects for a redirection, and counts the spans refused in a partial success."""
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


class _Export(SpanExporter):
    """Counts spans, and logs when the collector stops accepting them and when it accepts them
    again."""

    def __init__(self, exporter: SpanExporter, logger: logging.Logger, where: str) -> None:
        _hear_the_sdk()
        self.num_exported = self.num_failed = self.num_taken = 0
        self._exporter = exporter
        self._logger = logger
        self._where = where
        self._is_away = self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Runs on the SDK's thread or the helper thread."""
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        _answers.begin()
        try:
            result = self._exporter.export(spans)
        except requests.RequestException as error:  # Older SDKs raise this instead of returning.
            _answers.say(str(error))
        finally:
            _answers.is_exporting = False
            is_away = result is not SpanExportResult.SUCCESS
            num_lost = len(spans) if is_away else min(_answers.num_refused, len(spans))
            self._exported(len(spans), num_lost)
        return result

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

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _hear_the_sdk() -> None:
    """Must be called after the SDK has created its loggers."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry"):
            logging.getLogger(name).addFilter(_answers.filter)


def open_traces(
    endpoint: str,
    service: str,
    logger: logging.Logger,
    headers: Mapping[str, str] | None = None,
    certificate: str | None = None,
    default_protocol: str = "http/protobuf",
    **bounds: Any,
) -> Traces:
    """The collector may be absent. Raises ValueError for an unknown protocol, ImportError if its
    package is missing.

    endpoint: URL of an OTLP/HTTP receiver, without a path /v1/traces; or FROM_ENVIRONMENT, without
        `headers` and `certificate`.
    certificate: PEM file of the collector's authority.
    default_protocol: with FROM_ENVIRONMENT, unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (or
        ..._PROTOCOL) names one.
    bounds: of `Traces`.
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
        return Traces(exporter, service, logger, url, **bounds)
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
    return Traces(exporter, service, logger, where, **bounds)


def _session() -> requests.Session | None:
    """None if the environment names a provider of credentials: the SDK then makes the session
    itself."""
    if any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return None
    session = requests.Session()
    session.hooks["response"].append(_answers.judge)
    return session


def _grpc_exporter() -> SpanExporter:
    """Follows vLLM: no TLS unless the URL begins with https. Does not report a partial success:
    refused spans count as accepted."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT", ""
    )
    return GrpcExporter(
        url or None, insecure=not url.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )
