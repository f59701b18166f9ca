"""Tracing as a capability. OpenTelemetry is imported only if the settings ask for traces."""

import importlib
import logging
from collections.abc import Mapping
from functools import partial

from hotkv_proto import extras
from hotkv_server.node.capability import Capability
from hotkv_server.node.node import Node
from hotkv_server.security.path_checks import UnsafeError, check_secret
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import TracingSettings
from hotkv_server.startup import StartError
from hotkv_server.tracing.calls import TracedCalls
from hotkv_server.tracing.drive import Tracing

log = logging.getLogger("hotkv_server.tracing")

SERVICE = "hotkv-server"
"""That spans name as theirs."""
MAX_SPANS_PER_S = 1000
GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"
"""Needed if OpenTelemetry's environment variables name the protocol grpc. No extra of hotkv has
it."""


def check(settings: Settings) -> None:
    """Raises StartError if this server can't export the traces that the settings ask for."""
    tracing = settings.tracing
    if not tracing.endpoint:
        return
    try:
        importlib.import_module("hotkv_proto.traces")
    except ImportError as error:
        raise _not_installed(error) from error
    _headers(tracing)
    if tracing.certificate is not None and not tracing.certificate.is_file():
        raise StartError(f"tracing.certificate: there is no file {tracing.certificate}")


def attach(settings: Settings, node: Node) -> "TracingCapability":
    """Raises StartError."""
    return TracingCapability(node, _open(settings.tracing))


def _open(settings: TracingSettings) -> Tracing | None:
    """None if the settings name no collector. Raises StartError."""
    if not settings.endpoint:
        return None
    try:
        traces = importlib.import_module("hotkv_proto.traces")
        opened = traces.open_traces(
            settings.endpoint,
            SERVICE,
            log,
            _headers(settings),
            None if settings.certificate is None else str(settings.certificate),
            sample_ratio=settings.sample_ratio,
            max_spans_per_s=MAX_SPANS_PER_S,
        )
    except ImportError as error:
        raise _not_installed(error) from error
    except ValueError as error:
        raise StartError(f"tracing.endpoint: {error}") from error
    return Tracing(opened)


def _not_installed(error: ImportError) -> StartError:
    missing = str(error.name or error)
    advice = f"pip install {GRPC_PACKAGE}" if ".grpc" in missing else extras.advice("otel")
    return StartError(
        f"tracing.endpoint is set, but {missing} is not installed: {advice}, or leave the setting "
        "out"
    )


def _headers(settings: TracingSettings) -> dict[str, str]:
    """By name. Raises StartError if others can read the file, or it has other lines than
    headers."""
    path, headers = settings.headers_file, dict[str, str]()
    if path is None:
        return headers
    try:
        check_secret(path)
        lines = path.read_text().splitlines()
    except (UnsafeError, OSError, UnicodeDecodeError) as error:
        raise StartError(f"tracing.headers_file: {error}") from error
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon or not name.strip() or not value.strip():
            raise StartError(f"tracing.headers_file: line {number} of {path} is no `name: value`")
        headers[name.strip().lower()] = value.strip()
    return headers


class TracingCapability(Capability):
    """`tracing`: None without a collector; then all metrics are 0."""

    def __init__(self, node: Node, tracing: Tracing | None) -> None:
        self.tracing = tracing
        if tracing is not None:
            node.offers.tracer = tracing
            node.offers.traced = partial(TracedCalls, tracing)

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
