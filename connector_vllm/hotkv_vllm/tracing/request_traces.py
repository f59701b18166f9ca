"""Spans that show what hotkv does for a request, and how long it takes.

`hotkv.request` covers a request; its parent, named in the trace headers, is also that of vLLM's
`llm_request`. Calls, loads and stores are its children, the server's spans theirs.

Without the setting `tracing` no object of this module exists, and OpenTelemetry is not imported.
Recording does not wait: a thread exports. Scheduler thread only; any thread may end a call's
span.
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
"""Unless the environment names another; vLLM's own default."""


@final
class RequestTrace:
    def __init__(self, root: "Span") -> None:
        self._root = root
        self._num_lookups = 0
        self._loading: Span | None = None

    def __repr__(self) -> str:
        return f"RequestTrace({self._root.traceparent})"

    def lookup(self, groups: Sequence[GroupHashes]) -> "Span":
        """The caller ends it with the answer."""
        self._num_lookups += 1
        return self._call("hotkv.lookup", groups)

    def lease(self, groups: Sequence[GroupHashes]) -> "Span":
        """The caller ends it with the answer."""
        return self._call("hotkv.lease", groups)

    def _call(self, name: str, groups: Sequence[GroupHashes]) -> "Span":
        span = self._root.child(name, is_call=True)
        span.attributes["hotkv.blocks"] = sum(len(one.hashes) for one in groups)
        return span

    def load(self, job: LoadJob, num_tokens: int) -> str:
        """The span's traceparent, which makes the server's spans its children."""
        span = self._loading = self._root.child("hotkv.load", is_call=True)
        span.attributes["hotkv.tokens"] = num_tokens
        span.attributes["hotkv.blocks"] = sum(len(run.block_ids) for run in job.runs)
        return span.traceparent

    def load_ended(self, failed: bool) -> None:
        if self._loading is not None:
            self._loading.end("FAILED" if failed else "")
            self._loading = None

    def store(self, num_blocks: int, num_bytes: int) -> "Span":
        """`end_store` ends it."""
        span = self._root.child("hotkv.store", is_call=True)
        span.attributes["hotkv.blocks"] = num_blocks
        span.attributes["hotkv.bytes"] = num_bytes
        return span

    def ended(
        self, prompt_tokens: int, device_hit_tokens: int, hit_tokens: int, miss: Miss, wait_s: float
    ) -> None:
        """device_hit_tokens: in vLLM's own prefix cache.
        hit_tokens: to load from hotkv.
        miss: why the hit was not longer.
        wait_s: for answers about the hit.
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
        """The request goes on without hotkv."""
        if self._loading is not None:
            self._loading.end("CANCELLED")
        self._root.end("LEFT")


@final
class RequestTraces:
    def __init__(self, traces: "Traces") -> None:
        self._traces = traces

    def __repr__(self) -> str:
        return f"RequestTraces({self._traces})"

    def begin(self, request: Any) -> RequestTrace | None:
        """None if not traced: the client's trace context decides, else a random share of
        `tracing_sample_ratio`."""
        headers: Mapping[str, str] = request.trace_headers or {}
        root = self._traces.begin("hotkv.request", headers.get(TRACEPARENT, ""))
        return None if root is None else RequestTrace(root)

    def flush(self) -> None:
        """Blocks for a bounded time."""
        self._traces.flush()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._traces.close()


def open_traces(config: ConnectorConfig) -> RequestTraces | None:
    """None if the setting `tracing` is empty. Raises ConfigError if spans can't be exported."""
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
    """results: by rank, a byte (`BlockResult`) per block; empty if its transfer failed."""
    for value, count in Counter(b"".join(results)).items():
        span.attributes[f"hotkv.{BlockResult(value).name.lower()}_blocks"] = count
    span.end("" if results and all(results) else "FAILED")
