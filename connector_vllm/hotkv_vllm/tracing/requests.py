"""Spans of an engine's requests: the work of hotkv for each, and its duration.

Always true: without tracing these objects don't exist, and OpenTelemetry is not imported. The
methods do not wait: a thread exports spans. When a request has ended, vLLM makes its own span of
it, `llm_request`, below the span that the client named. `hotkv.request` has the same parent. Calls,
loads and stores are below `hotkv.request`, and the server's spans are below these. Scheduler
thread, except for the ends of calls.
"""

import atexit
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from hotkv_client.types import GroupHashes
from hotkv_proto import extras
from hotkv_proto.blocks import BlockResult
from hotkv_proto.reports import Miss
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

if TYPE_CHECKING:
    from hotkv_proto.traces import Span, Traces

SERVICE = "hotkv-connector"
TRACEPARENT = "traceparent"
VLLM_PROTOCOL = "grpc"
"""The protocol by which vLLM exports its own spans, unless the environment names another."""


@final
class RequestTrace:
    """The spans of a request."""

    def __init__(self, root: "Span") -> None:
        self._root = root
        self._num_lookups = 0
        self._loading: Span | None = None

    def __repr__(self) -> str:
        return f"RequestTrace({self._root.traceparent})"

    def lookup(self, groups: Sequence[GroupHashes]) -> "Span":
        """Begins the span of a lookup that asks the server."""
        self._num_lookups += 1
        return self._call("hotkv.lookup", groups)

    def lease(self, groups: Sequence[GroupHashes]) -> "Span":
        """Begins the span of a lease."""
        return self._call("hotkv.lease", groups)

    def _call(self, name: str, groups: Sequence[GroupHashes]) -> "Span":
        span = self._root.child(name, is_call=True)
        span.attributes["hotkv.blocks"] = sum(len(one.hashes) for one in groups)
        return span

    def load(self, job: LoadJob, num_tokens: int) -> str:
        """Begins the span of a load; returns its name for the server."""
        span = self._loading = self._root.child("hotkv.load", is_call=True)
        span.attributes["hotkv.tokens"] = num_tokens
        span.attributes["hotkv.blocks"] = sum(len(run.block_ids) for run in job.runs)
        return span.traceparent

    def load_ended(self, failed: bool) -> None:
        """Ends the load's span: the load has ended in all ranks."""
        if self._loading is not None:
            self._loading.end("FAILED" if failed else "")
            self._loading = None

    def store(self, num_blocks: int, num_bytes: int) -> "Span":
        """Begins the span of a store."""
        span = self._root.child("hotkv.store", is_call=True)
        span.attributes["hotkv.blocks"] = num_blocks
        span.attributes["hotkv.bytes"] = num_bytes
        return span

    def ended(
        self, prompt_tokens: int, device_hit_tokens: int, hit_tokens: int, miss: Miss, wait_s: float
    ) -> None:
        """Ends the request's span.

        hit_tokens: tokens that were to come from hotkv.
        miss: why the hit was not longer.
        wait_s: how long the request waited for answers.
        """
        if self._loading is not None:
            self._loading.end("CANCELLED")
        self._root.attributes = {
            "hotkv.prompt_tokens": prompt_tokens,
            "hotkv.device_hit_tokens": device_hit_tokens,
            "hotkv.hit_tokens": hit_tokens,
            "hotkv.miss_reason": miss.name.lower(),
            "hotkv.wait_s": wait_s,
            "hotkv.lookup_calls": self._num_lookups,
        }
        self._root.end()

    def left(self) -> None:
        """Ends the spans of a request that continues without hotkv."""
        if self._loading is not None:
            self._loading.end("CANCELLED")
        self._root.end("LEFT")


@final
class RequestTraces:
    """Begins the traces of requests."""

    def __init__(self, traces: "Traces") -> None:
        self._traces = traces

    def __repr__(self) -> str:
        return f"RequestTraces({self._traces})"

    def begin(self, request: Any) -> RequestTrace | None:
        """Begins the trace of a request if its client traces it. Of the requests without a trace
        context a sampled share is traced. Returns None for a request that is not traced."""
        headers: Mapping[str, str] = request.trace_headers or {}
        root = self._traces.begin("hotkv.request", headers.get(TRACEPARENT, ""))
        return None if root is None else RequestTrace(root)

    def flush(self) -> None:
        """Exports the waiting spans, for a bounded time."""
        self._traces.flush()

    def close(self) -> None:
        """Exports the waiting spans, and stops recording."""
        atexit.unregister(self.close)
        self._traces.close()


def open_traces(config: ConnectorConfig) -> RequestTraces | None:
    """Begins to export spans; None if the settings don't ask for it. Raises ConfigError if this
    environment can't export spans."""
    if not config.tracing:
        return None
    try:
        opened = importlib.import_module("hotkv_proto.traces").open_traces(
            config.tracing,
            SERVICE,
            logger,
            default_protocol=VLLM_PROTOCOL,
            sample_ratio=config.tracing_sample_ratio,
        )
    except ImportError as error:
        raise ConfigError(
            f"hotkv.tracing = {config.tracing!r}: {error.name or error} is not installed: "
            f"{extras.advice('otel')}, or leave the setting out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"hotkv.tracing = {config.tracing!r}: {error}") from None
    traces = RequestTraces(opened)
    atexit.register(traces.close)
    return traces


def end_store(span: "Span", results: Sequence[bytes]) -> None:
    """Ends the span of a store. `results`: BlockResult bytes of its blocks by rank, empty for a
    rank that failed."""
    for value, count in Counter(b"".join(results)).items():
        span.attributes[f"hotkv.{BlockResult(value).name.lower()}_blocks"] = count
    span.end("" if results and all(results) else "FAILED")
