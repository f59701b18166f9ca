"""Opens the export of spans, if the settings ask for it. Nothing of OpenTelemetry is imported
otherwise."""

import importlib
import logging

from hotkv_server.security.path_checks import UnsafeError, check_private_key
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import TracingSettings
from hotkv_server.startup import StartError
from hotkv_server.tracing.drive import Tracing

log = logging.getLogger("hotkv_server.tracing")

GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"
"""Needed if the environment names the protocol grpc; no extra has it."""


def check_tracing(settings: Settings) -> None:
    """Raises StartError if traces are asked for and can't be exported from here."""
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


def open_tracing(settings: TracingSettings) -> Tracing | None:
    """Begins to record spans; None if the settings name no collector. Raises StartError."""
    if not settings.endpoint:
        return None
    try:
        traces = importlib.import_module("hotkv_proto.traces")
        opened = traces.open_traces(
            settings.endpoint,
            settings.service_name,
            log,
            _headers(settings),
            None if settings.certificate is None else str(settings.certificate),
            sample_ratio=settings.sample_ratio,
            max_spans_per_s=settings.max_spans_per_s,
            queue_spans=settings.queue_spans,
        )
    except ImportError as error:
        raise _not_installed(error) from error
    except ValueError as error:
        raise StartError(f"tracing.endpoint: {error}") from error
    return Tracing(opened)


def _not_installed(error: ImportError) -> StartError:
    missing = str(error.name or error)
    package = GRPC_PACKAGE if ".grpc" in missing else "'hotkv[otel]'"
    return StartError(
        f"tracing.endpoint is set, but {missing} is not installed: pip install {package}, or leave "
        "the setting out"
    )


def _headers(settings: TracingSettings) -> dict[str, str]:
    """The headers of the file, by name. Raises StartError."""
    path, headers = settings.headers_file, dict[str, str]()
    if path is None:
        return headers
    try:
        check_private_key(path)
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
