"""Records trace spans that show what hotkv does for each request, and how long it takes.

The span `hotkv.request` covers a request. The client names its parent in the request's trace
headers; vLLM's own span `llm_request` has the same parent. Calls, loads and stores are children of
`hotkv.request`, and the server's spans are children of these.

Always true: without the setting `tracing` no object of this module is created, and OpenTelemetry is
not imported. Methods that record spans do not wait, because a thread exports the spans. Scheduler
thread only, except that the span of a call may be ended by any thread.
"""

import atexit
import importlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
"""The protocol by which spans are exported, unless the environment names another protocol. It is
also vLLM's default for its own spans."""


@final
class RequestTrace:
    """Records the spans of one request.

    root: the span `hotkv.request`.
    """

    def __init__(self, root: "Span") -> None:
        self._root = root
        self._num_lookups = 0
        self._loading: Span | None = None

    def __repr__(self) -> str:
        return f"RequestTrace({self._root.traceparent})"

    def lookup(self, groups: Sequence[GroupHashes]) -> "Span":
        """Begins the span of a lookup call to the server. The caller ends it with the answer."""
        self._num_lookups += 1
        return self._call("hotkv.lookup", groups)

    def lease(self, groups: Sequence[GroupHashes]) -> "Span":
        """Begins the span of a call that acquires a lease. The caller ends it with the answer."""
        return self._call("hotkv.lease", groups)

    def _call(self, name: str, groups: Sequence[GroupHashes]) -> "Span":
        span = self._root.child(name, is_call=True)
        span.attributes["hotkv.blocks"] = sum(len(one.hashes) for one in groups)
        return span

    def load(self, job: LoadJob, num_tokens: int) -> str:
        """Begins the span of a load. Returns the span's traceparent, a text that the load's call
        carries, so that the server's spans become children of this span.

        num_tokens: number of tokens to load.
        """
        span = self._loading = self._root.child("hotkv.load", is_call=True)
        span.attributes["hotkv.tokens"] = num_tokens
        span.attributes["hotkv.blocks"] = sum(len(run.block_ids) for run in job.runs)
        return span.traceparent

    def load_ended(self, failed: bool) -> None:
        """Ends the span of the load, because the load has ended in all ranks."""
        if self._loading is not None:
            self._loading.end("FAILED" if failed else "")
            self._loading = None

    def store(self, num_blocks: int, num_bytes: int) -> "Span":
        """Begins the span of a store. `end_store` ends it."""
        span = self._root.child("hotkv.store", is_call=True)
        span.attributes["hotkv.blocks"] = num_blocks
        span.attributes["hotkv.bytes"] = num_bytes
        return span

    def ended(
        self, prompt_tokens: int, device_hit_tokens: int, hit_tokens: int, miss: Miss, wait_s: float
    ) -> None:
        """Ends the request's span, with figures about its hit.

        device_hit_tokens: length of the hit in vLLM's own prefix cache.
        hit_tokens: number of tokens to load from hotkv.
        miss: why the hit was not longer.
        wait_s: how long the request waited for answers about its hit.
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
    """Decides which requests are traced, and begins their traces."""

    def __init__(self, traces: "Traces") -> None:
        self._traces = traces

    def __repr__(self) -> str:
        return f"RequestTraces({self._traces})"

    def begin(self, request: Any) -> RequestTrace | None:
        """Begins the trace of a request; returns None if the request is not traced. If the client
        sends a trace context (header `traceparent`), this says whether to trace the request. Of the
        other requests, a random share is traced (`tracing_sample_ratio`).

        request: vLLM's `Request`.
        """
        headers: Mapping[str, str] = request.trace_headers or {}
        root = self._traces.begin("hotkv.request", headers.get(TRACEPARENT, ""))
        return None if root is None else RequestTrace(root)

    def flush(self) -> None:
        """Exports the spans that wait for their export. Blocks for a bounded time."""
        self._traces.flush()

    def close(self) -> None:
        """Exports the spans that wait for their export, and stops recording."""
        atexit.unregister(self.close)
        self._traces.close()


def open_traces(config: ConnectorConfig) -> RequestTraces | None:
    """Begins to export spans, and returns the object that begins traces. Returns None if the
    setting `tracing` is empty. Raises ConfigError if spans can't be exported, for example because
    OpenTelemetry is not installed."""
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


def end_store(span: "Span", results: Collection[bytes]) -> None:
    """Ends the span of a store, and records in the span how many blocks had each `BlockResult`.

    results: for each rank, a byte per block with the server's `BlockResult` (such as STORED or
        NO_SPACE); empty for a rank whose transfer failed.
    """
    for value, count in Counter(b"".join(results)).items():
        span.attributes[f"hotkv.{BlockResult(value).name.lower()}_blocks"] = count
    span.end("" if results and all(results) else "FAILED")
