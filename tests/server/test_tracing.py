"""Tests traces, with collectors that work, are away, refuse, or are slow, and without."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import traces
from hotkv_proto.blocks import StoreOptions
from hotkv_proto.errors import HotKVError
from hotkv_proto.traces import Traces
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc
from hotkv_server.node.capability import Offers
from hotkv_server.settings import Settings, load_settings
from hotkv_server.startup import StartError
from hotkv_server.startup.preflight import check_start
from hotkv_server.tracing.capability import TracingCapability, _open, check
from hotkv_server.wire import calls
from hotkv_server.wire.edge import calls_of
from tests.doubles.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.server.support import PATIENT, hashes
from tests.support.waiting import wait_for

PAGE_BYTES, LAYERS = 64 << 10, 2
SLOT_BYTES = PAGE_BYTES * LAYERS


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as one:
        yield one


@pytest.fixture(scope="module")
def traced(collector: OtlpReceiver) -> Iterator[Server]:
    """Its spans go to the collector."""
    with runtime_folder(256 << 20) as folder:
        flags = ("--tracing.endpoint", collector.url)
        disk = ("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB")
        with Server(folder, "16MiB", *flags, *disk, *PATIENT) as running:
            running.wait_ready()
            yield running


class Request:
    """An engine whose calls belong to one trace."""

    def __init__(self, target: str) -> None:
        name, shape = os.urandom(8).hex(), {"layers": LAYERS, "page_bytes": PAGE_BYTES}
        self.engine = PagedEngine(target, engine_id=name, model=name, **shape).connect()
        self.session = self.engine.session
        self.trace_id = os.urandom(15).hex() + "01"
        self.traceparent = f"00-{self.trace_id}-{7:016x}-01"

    def store(self, blocks: list[bytes], traceparent: str = "") -> None:
        name, ids = os.urandom(8).hex(), np.arange(len(blocks), dtype=np.int32)
        ended = self.session.store(
            name, name, [BlockRun(0, blocks, ids)], 20, StoreOptions(traceparent=traceparent)
        )
        assert ended.result(60).num_bytes == len(blocks) * SLOT_BYTES

    def load(self, blocks: list[bytes], traceparent: str | None = None) -> None:
        name, ids = os.urandom(8).hex(), np.arange(len(blocks), dtype=np.int32)
        groups = [GroupHashes(0, blocks)]
        assert self.session.acquire(name, groups, 20, traceparent).result(60).pinned[0].all()
        run = LoadRun(0, ids, ids)
        ended = self.session.load(name, name, [run], 20, traceparent=traceparent).result(60)
        assert ended.num_bytes == len(blocks) * SLOT_BYTES
        self.session.release(name)

    def spans(self, collector: OtlpReceiver, *names: str) -> dict[str, ReceivedSpan]:
        """The trace's spans by name, once all of these are there."""

        def mine(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
            return {one.name: one for one in spans if one.trace_id == self.trace_id}

        return mine(collector.wait_for(lambda spans: set(names) <= mine(spans).keys()))


@pytest.fixture
def request_(traced: Server) -> Iterator[Request]:
    one = Request(traced.target)
    yield one
    one.engine.close()


def test_request_is_traced_from_lookup_to_disk(
    request_: Request, traced: Server, collector: OtlpReceiver
) -> None:
    """No span has a block hash or a client's name."""
    blocks, parent = hashes(8), request_.traceparent
    request_.store(blocks, parent)
    assert request_.session.lookup([GroupHashes(0, [*blocks, *hashes(2)])], parent).result(60)
    request_.load(blocks, parent)
    names = ("lookup", "lease", "load", "store", "tier.write", "wait", "copy")
    spans = request_.spans(collector, *(f"hotkv.{name}" for name in names))
    lookup, lease, load, store = calls = [spans[f"hotkv.{name}"] for name in names[:4]]
    assert {(one.parent_id, one.kind) for one in calls} == {(f"{7:016x}", "server")}
    assert {one.service for one in spans.values()} == {"hotkv-server"}
    found = {"hotkv.blocks": 10, "hotkv.found_blocks": 8}
    assert found.items() <= lookup.attributes.items()
    assert lease.attributes["hotkv.found_blocks"] == 8
    for one in (load, store):
        moved = {"hotkv.blocks": 8, "hotkv.bytes": 8 * SLOT_BYTES}
        assert moved.items() <= one.attributes.items()
    assert store.attributes["hotkv.stored_blocks"] == 8
    write = spans["hotkv.tier.write"]
    assert write.parent_id == store.span_id
    assert write.attributes == {"hotkv.tier": "disk", "hotkv.blocks": 8}
    mine = [one for one in collector.spans if one.trace_id == request_.trace_id]
    below = {one.name: one for one in mine if one.parent_id == store.span_id}
    wait, copy = below["hotkv.wait"], below["hotkv.copy"]
    assert store.encloses(wait) and store.encloses(copy) and wait.ended_ns == copy.began_ns
    assert copy.attributes == {"hotkv.bytes": 8 * SLOT_BYTES}
    assert not store.error and not copy.error
    for one in mine:
        assert all(isinstance(value, int) or len(value) < 16 for value in one.attributes.values())
        assert not any(block.hex() in repr(one) for block in blocks)
    wait_for(lambda: traced.counter("trace_spans_exported_total") > 0)
    assert traced.counter("trace_spans_failed_total") == 0
    assert traced.counter("trace_spans_dropped_total") == 0


def test_disk_reads_lie_below_the_waiting_lease(
    request_: Request, traced: Server, collector: OtlpReceiver
) -> None:
    blocks, others, parent = hashes(8), hashes(8), request_.traceparent
    before = traced.counter("tier_demoted_blocks_total")
    request_.store([*blocks, *others])
    wait_for(lambda: traced.counter("tier_demoted_blocks_total") >= before + 16)
    with AdminClient(traced.target) as admin:
        admin.evict(everything=True)
    # Promotions belong to no earlier call's trace.
    promoted = traced.counter("tier_promoted_blocks_total")
    for _ in range(2):
        request_.session.lookup([GroupHashes(0, hashes(1))], parent).result(60)
        request_.load(others)
    assert traced.counter("tier_promoted_blocks_total") > promoted
    wait_for(lambda: len(names_in(collector, request_)) >= 2)
    assert names_in(collector, request_) == ["hotkv.lookup"] * 2
    request_.load(blocks, parent)
    spans = request_.spans(collector, "hotkv.lease", "hotkv.tier.read")
    lease, read = spans["hotkv.lease"], spans["hotkv.tier.read"]
    assert read.parent_id == lease.span_id and lease.encloses(read)
    assert read.attributes["hotkv.tier"] == "disk"
    assert read.attributes["hotkv.found_blocks"] == read.attributes["hotkv.blocks"] > 0
    # The blocks' store was not traced.
    assert "hotkv.tier.write" not in spans


def names_in(collector: OtlpReceiver, request: Request) -> list[str]:
    return [span.name for span in collector.spans if span.trace_id == request.trace_id]


def test_failing_call_says_why_not_what(
    request_: Request, traced: Server, collector: OtlpReceiver
) -> None:
    """The lease's id must not be in the span."""
    ids, parent = np.arange(1, dtype=np.int32), request_.traceparent
    with pytest.raises(HotKVError, match="unknown"):
        runs = [LoadRun(0, ids, ids)]
        request_.session.load("t", "a-secret", runs, 5, traceparent=parent).result(60)
    load = request_.spans(collector, "hotkv.load")["hotkv.load"]
    assert load.error == "UNKNOWN_LEASE" and "a-secret" not in repr(load)
    with grpc.insecure_channel(traced.target) as channel:
        group = cache_pb2.GroupHashes(group_index=0, hashes=b"".join(hashes(3)))
        asked = cache_pb2.LookupRequest(key_space_id=1, groups=[group], traceparent=parent)
        cache_pb2_grpc.CacheServiceStub(channel).Lookup(asked)
    assert request_.spans(collector, "hotkv.lookup")["hotkv.lookup"].kind == "server"


def test_calls_with_odd_context_go_untraced(
    request_: Request, traced: Server, collector: OtlpReceiver
) -> None:
    before = traced.counter("trace_contexts_malformed_total")
    blocks = hashes(2)
    request_.store(blocks)
    request_.load(blocks, request_.traceparent.replace("-01", "-00"))
    for context in ("nonsense", "00-" + "0" * 1_000_000, request_.traceparent):
        assert request_.session.lookup([GroupHashes(0, blocks)], context).result(60)[0].all()
    assert traced.counter("trace_contexts_malformed_total") == before + 2
    # Spans come in order, so those of the lookups would be here.
    request_.spans(collector, "hotkv.lookup")
    assert names_in(collector, request_) == ["hotkv.lookup"]


# ------------------------------------------------------------------------------- odd collectors


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Traces]]:
    """Opens traces, whose spans are sent at `flush`."""
    monkeypatch.setattr(traces, "PAUSE_MS", 3_600_000)
    monkeypatch.setattr(traces, "CLOSE_S", 60.0)
    made: list[Traces] = []

    def make(url: str) -> Traces:
        log = logging.getLogger("tests.tracing")
        made.append(traces.open_traces(url, "test", log, max_spans_per_s=10**6))
        return made[-1]

    yield make
    for one in made:
        one.close()


def span_of(made: Traces, name: str = "a") -> traces.Span:
    span = made.begin(name, f"00-{9:032x}-{9:016x}-01", is_served=True)
    assert span is not None
    return span


def end_spans(made: Traces, count: int) -> None:
    for _ in range(count):
        span_of(made).end()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "tests.tracing"]


def test_absent_collector_costs_spans_and_two_lines(
    sink: Callable[[str], Traces], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tests.tracing")
    with OtlpReceiver() as one:
        one.status = 400
        made = sink(one.url)
        for _ in range(2):
            end_spans(made, 3)
            made.flush()
        assert (made.num_failed, made.num_exported, one.spans) == (6, 0, [])
        one.status = 200
        end_spans(made, 2)
        made.flush()
        assert (made.num_failed, made.num_exported, len(one.spans)) == (6, 2, 2)
    away, again = lines(caplog)
    assert "takes no spans" in away and "code: 400" in away and "again" in again
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    logging.getLogger("opentelemetry.exporter").warning("somebody else's")
    assert "somebody else's" in [record.getMessage() for record in caplog.records]


PROTOBUF, HTML = ({"content-type": kind} for kind in ("application/x-protobuf", "text/html"))


def refusing(num_spans: int) -> bytes:
    refused = ExportTracePartialSuccess(rejected_spans=num_spans, error_message="too old")
    return ExportTraceServiceResponse(partial_success=refused).SerializeToString()


@pytest.mark.parametrize(
    ("status", "answer", "headers", "exported", "said"),
    [
        (200, refusing(2), PROTOBUF, 1, "not all spans"),
        (200, refusing(3), PROTOBUF, 0, "too old"),
        (302, b"", {"location": "/login"}, 0, "302, a redirection"),
        (301, b"", {"location": "/v1/traces/"}, 0, "301, a redirection"),
        (413, b"", {}, 0, "code: 413"),
        (429, b"", {"retry-after": "3600"}, 0, "Failed to export"),
        (200, b"\xff\x00<html>", PROTOBUF, 3, ""),
        (200, b"<html>", HTML, 3, ""),
        (200, b"", {}, 3, ""),
    ],
)
def test_only_collected_spans_count_as_exported(
    sink: Callable[[str], Traces],
    caplog: pytest.LogCaptureFixture,
    status: int,
    answer: bytes,
    headers: dict[str, str],
    exported: int,
    said: str,
) -> None:
    with OtlpReceiver() as one:
        one.status, one.answer, one.answer_headers = status, answer, headers
        made = sink(one.url)
        end_spans(made, 3)
        made.flush()
        assert (made.num_exported, made.num_failed) == (exported, 3 - exported)
        assert len(one.paths) == 1
    assert [said in line for line in lines(caplog)] == ([True] if said else [])


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.taken: list[Any] = []

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.taken += [span for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


def test_the_environment_may_name_the_collector(
    sink: Callable[[str], Traces], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_EXPORTER_OTLP_* name it. `/v1/traces` is appended if its URL has no path."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=me")
    with OtlpReceiver() as one:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.url)
        for made in (sink(traces.FROM_ENVIRONMENT), sink(one.url + "/otlp/mine")):
            end_spans(made, 1)
            made.flush()
        assert one.paths == ["/v1/traces", "/otlp/mine"] and one.headers["x-tenant"] == "me"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="allowed are"):
        sink(traces.FROM_ENVIRONMENT)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="vLLM brings it")
    server, collector = grpc.server(ThreadPoolExecutor(1)), GrpcCollector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://{address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    made = sink(traces.FROM_ENVIRONMENT)
    end_spans(made, 1)
    made.flush()
    assert (made.num_exported, made.num_failed) == (1, 0)
    (span,) = collector.taken
    assert (span.name, span.trace_id.hex()) == ("a", f"{9:032x}")
    server.stop(0)


# ------------------------------------------------------------------------------------ spans


# ------------------------------------------------------------------------------------- starting


def settings_of(*flags: str) -> Settings:
    return load_settings(None, flags, "hotkv-server")


ATTACHED = """
import sys
from hotkv_server import daemon
from hotkv_server.settings import load_settings
from hotkv_server.tracing import capability
settings = load_settings(None, (), "hotkv-server")
capability.check(settings)
capability.attach(settings, None)
print([name for name in sys.modules if name.startswith(("opentelemetry", "hotkv_proto.traces"))])
"""


def test_calls_without_tracing_are_the_modules() -> None:
    """OpenTelemetry must not be imported either."""
    node: Any = SimpleNamespace(offers=Offers())
    assert not any(TracingCapability(node, None).counters().values())
    assert calls_of(node) is calls
    assert subprocess.check_output([sys.executable, "-c", ATTACHED]) == b"[]\n"


def test_a_missing_package_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "hotkv_proto.traces", None)
        check(settings_of())
        with pytest.raises(StartError, match=r"pip install .*opentelemetry-sdk"):
            check(settings_of("--tracing.endpoint", "http://127.0.0.1:1"))
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(StartError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        _open(settings_of("--tracing.endpoint", "env").tracing)


def test_headers_come_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer secret\n\nx-tenant: me\n")
    file.chmod(0o600)
    with OtlpReceiver() as one, runtime_folder(64 << 20) as folder:
        flags = ("--tracing.endpoint", one.url, "--tracing.headers-file", str(file))
        with Server(folder, "16MiB", *flags, "--tracing.sample-ratio", "1") as server:
            server.wait_ready()
            with grpc.insecure_channel(server.target) as channel:
                stub = cache_pb2_grpc.CacheServiceStub(channel)
                with pytest.raises(grpc.RpcError):
                    stub.Lookup(cache_pb2.LookupRequest(key_space_id=7))
        # Spans are sent before the server stops.
        (span,) = one.spans
        assert (span.parent_id, span.error) == ("", "UNKNOWN_KEY_SPACE")
        assert one.headers["authorization"] == "Bearer secret" and one.headers["x-tenant"] == "me"
    flags = ("--tracing.endpoint", "http://127.0.0.1:1", "--tracing.headers-file", str(file))
    file.chmod(0o644)
    with pytest.raises(StartError, match="chmod o-rwx"):
        check(settings_of(*flags))
    file.chmod(0o600)
    file.write_text("no colon")
    with pytest.raises(StartError, match="line 1"):
        check(settings_of(*flags))
    settings = settings_of(*flags, "--runtime-dir", str(tmp_path / "run"))
    assert any("headers_file: line 1" in said for said in check_start(settings))


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_serves_and_stops_without_its_collector(hangs: bool) -> None:
    """`hangs`: the collector never answers."""
    with runtime_folder(64 << 20) as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if hangs else 1
        flags = ("--tracing.endpoint", f"http://127.0.0.1:{port}", "--tracing.sample-ratio", "1")
        with Server(folder, "16MiB", *flags) as server:
            server.wait_ready()
            one = Request(server.target)
            one.store(hashes(2))
            if hangs:
                silent.settimeout(20)
                _asking = silent.accept()
            else:
                wait_for(lambda: server.counter("trace_spans_failed_total") > 0)
            one.engine.close()
        said = server.log.read_text()
        assert "hotkv_server.daemon stopped" in said
        assert hangs or said.count("takes no spans") == 1
