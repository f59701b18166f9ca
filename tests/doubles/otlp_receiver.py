"""An OTLP collector over HTTP for tests, with faults on demand. Always true: `spans` are exactly
those acknowledged with status 200, in order of arrival."""

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids are hexadecimal; `parent_id` is empty without a parent."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, str | bool | int | float]
    error: str

    def encloses(self, other: "ReceivedSpan") -> bool:
        """In time."""
        return self.began_ns <= other.began_ns and other.ended_ns <= self.ended_ns


class OtlpReceiver:
    """Listens on a free port in a `with` block.

    status: of answers; spans are recorded only if it is 200.
    delay_s: before each answer.
    headers: of the last request, lower case.
    answer, answer_headers: of each answer.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: dict[str, str] = {}
        self.paths: list[str] = []
        self.status, self.delay_s = 200, 0.0
        self.answer = ExportTraceServiceResponse().SerializeToString()
        self.answer_headers = {"content-type": "application/x-protobuf"}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.paths.append(self.path)
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                status = receiver._take(body)
                self.send_response(status)
                for name, value in receiver.answer_headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(receiver.answer)))
                self.end_headers()
                self.wfile.write(receiver.answer)

            def log_message(self, *_: object) -> None:
                """Requests stay out of standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __repr__(self) -> str:
        return f"OtlpReceiver({self.url}, {len(self.spans)} spans)"

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "OtlpReceiver":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(
        self, is_enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 120.0
    ) -> list[ReceivedSpan]:
        """Spans once `is_enough`. Raises TimeoutError."""
        until_s = time.monotonic() + timeout_s
        while not is_enough(spans := list(self.spans)):
            if time.monotonic() > until_s:
                raise TimeoutError(f"only {[one.name for one in spans]} have come")
            time.sleep(0.02)
        return spans

    def _take(self, body: bytes) -> int:
        time.sleep(self.delay_s)
        status = self.status
        if status == 200:
            self.spans += received(ExportTraceServiceRequest.FromString(body))
        return status


def received(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource in request.resource_spans:
        names = {one.key: _value(one.value) for one in resource.resource.attributes}
        service = str(names.get("service.name", ""))
        for scope in resource.scope_spans:
            found += [_span(service, one) for one in scope.spans]
    return found


def _span(service: str, one: SpanMessage) -> ReceivedSpan:
    return ReceivedSpan(
        service,
        one.name,
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        SpanMessage.SpanKind.Name(one.kind).removeprefix("SPAN_KIND_").lower(),
        one.start_time_unix_nano,
        one.end_time_unix_nano,
        {item.key: _value(item.value) for item in one.attributes},
        one.status.message if one.status.code == Status.STATUS_CODE_ERROR else "",
    )


def _value(value: AnyValue) -> str | bool | int | float:
    kind = value.WhichOneof("value")
    found: str | bool | int | float = getattr(value, kind) if kind else ""
    return found
