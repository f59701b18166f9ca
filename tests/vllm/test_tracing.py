"""Spans of the connector: below vLLM's, above the server's."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from demo.processes import Server, runtime_folder
from hotkv_proto.blocks import BlockResult
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.tracing import request_traces as traces
from tests.doubles.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.support.waiting import wait_for
from tests.vllm.harness import prompt
from tests.vllm.processes import Engines
from tests.vllm.runs import prompts
from tests.vllm.tiny import write_model

PROMPT = prompt(1, 200)
TRACE = f"{0xABC:032x}"
PARENT = f"00-{TRACE}-{0xDEF:016x}-01"
HEADERS = {"traceparent": PARENT}


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as one:
        yield one


@pytest.fixture
def traced(engine: Any, collector: OtlpReceiver) -> Any:
    return lambda **extra: engine(extra={"tracing": collector.url, **extra})


def ask(one: Any, name: str, tokens: list[int] = PROMPT, headers: Any = HEADERS) -> None:
    one.add(name, tokens, 2, trace_headers=headers)
    one.run()
    one.drop_local()


def flushed(one: Any, collector: OtlpReceiver) -> dict[str, ReceivedSpan]:
    """The last span of each name."""
    one.connector._scheduler.requests._traces.flush()
    return {span.name: span for span in collector.spans}


def root_of(spans: dict[str, ReceivedSpan]) -> ReceivedSpan:
    root = spans["hotkv.request"]
    assert {span.parent_id for span in spans.values() if span is not root} == {root.span_id}
    return root


def test_a_request_that_stores_and_one_that_loads(traced: Any, collector: OtlpReceiver) -> None:
    one = traced()
    ask(one, "secret-1")
    spans = flushed(one, collector)
    root, store = root_of(spans), spans["hotkv.store"]
    assert (root.trace_id, root.parent_id) == (TRACE, f"{0xDEF:016x}")
    assert root.service == "hotkv-connector" and "hotkv.load" not in spans
    numbers = {"hotkv.prompt_tokens": 200, "hotkv.device_hit_tokens": 0, "hotkv.hit_tokens": 0}
    assert (numbers | {"hotkv.miss_reason": "absent"}).items() <= root.attributes.items()
    assert store.attributes["hotkv.blocks"] == store.attributes["hotkv.stored_blocks"] > 0
    ask(one, "secret-2")
    spans = flushed(one, collector)
    del spans["hotkv.store"]
    root, load, lease = root_of(spans), spans["hotkv.load"], spans["hotkv.lease"]
    assert root.attributes["hotkv.hit_tokens"] == load.attributes["hotkv.tokens"] == 192
    assert lease.attributes["hotkv.found_blocks"] == load.attributes["hotkv.blocks"]
    assert root.encloses(lease) and root.encloses(load) and not load.error
    assert lease.ended_ns <= load.began_ns
    # Spans have no hashes, tokens or names.
    for span in collector.spans:
        values = span.attributes.values()
        words = {value for value in values if not isinstance(value, int | float)}
        assert "secret" not in repr(span) and words <= {"absent", "partial_block", "unknown"}


def test_traced_requests_of_a_step_store_separately(engine: Any, collector: OtlpReceiver) -> None:
    """A request's blocks may be sent with the next step."""
    one = engine(extra={"tracing": collector.url}, pipelined=True)
    other = f"00-{0x123:032x}-{1:016x}-01"
    one.add("a", prompt(1, 60), 5, trace_headers=HEADERS)
    one.add("b", prompt(2, 40), 1, trace_headers={"traceparent": other})
    one.add("c", prompt(3, 10), 1)
    one.run()
    one.generate("end", prompt(4, 10), 1)
    flushed(one, collector)
    stores = [span for span in collector.spans if span.name == "hotkv.store"]
    blocks: dict[str, int] = {}
    for span in stores:
        blocks[span.trace_id] = blocks.get(span.trace_id, 0) + span.attributes["hotkv.blocks"]
    assert blocks == {TRACE: 2, f"{0x123:032x}": 1}


def test_failed_and_cancelled_loads_say_so(
    engine: Any, traced: Any, server: Any, collector: OtlpReceiver
) -> None:
    engine().generate("cold", PROMPT, 2)
    server.fail_loads = True
    one = traced()
    ask(one, "hit")
    spans = flushed(one, collector)
    assert spans["hotkv.load"].error == "FAILED"
    said = [
        spans["hotkv.request"].attributes[f"hotkv.{name}"] for name in ("hit_tokens", "miss_reason")
    ]
    assert said == [0, "failed_load"]
    server.fail_loads, server.hold = False, {"load"}
    one.add("late", PROMPT, 2, trace_headers=HEADERS)
    one.steps(4)
    one.abort("late")
    server.settle()
    one.run()
    assert flushed(one, collector)["hotkv.load"].error == "CANCELLED"


@pytest.mark.parametrize("how", ["it breaks", "its end breaks", "hotkv is off", "other ranks"])
def test_request_without_hotkv_has_its_span(
    engine: Any, traced: Any, collector: OtlpReceiver, how: str
) -> None:
    """Without it the server's spans would lack their parent."""
    engine().generate("cold", PROMPT, 2)
    one = traced()
    one.add("a", PROMPT, 4, trace_headers=HEADERS)
    one.step()
    side = one.connector._scheduler
    assert side.requests.states["a"].trace is not None
    if how == "it breaks":
        side.requests.request_broke("a")
    elif how == "its end breaks":
        side.requests.end_broke("a")
    elif how == "hotkv is off":
        side.turn_off()
    else:
        (handshake,) = side.sharing._handshakes
        side.connect([replace(handshake, host="another")])
    one.run()
    assert root_of(flushed(one, collector)).error == "LEFT" and not side.requests.states


def test_a_store_has_failed_if_a_rank_has() -> None:
    stored, lacking = bytes([BlockResult.STORED]), bytes([BlockResult.NO_SPACE])
    for results, status in (
        ([stored, stored + lacking], ""),
        ([stored, b""], "FAILED"),
        ([], "FAILED"),
    ):
        span = Mock(attributes={})
        traces.end_store(span, results)
        span.end.assert_called_once_with(status)
        joined = b"".join(results)
        assert sum(span.attributes.values()) == len(joined)
        assert span.attributes.get("hotkv.stored_blocks", 0) == joined.count(stored)


def test_requests_that_nobody_traces_have_no_spans(traced: Any, collector: OtlpReceiver) -> None:
    one = traced()
    for number, headers in enumerate((None, {}, {"traceparent": PARENT[:-1] + "0"})):
        ask(one, f"{number}", headers=headers)
    assert not flushed(one, collector)
    # A sample ratio of 1 begins a trace without headers.
    one = traced(tracing_sample_ratio=1)
    one.generate("a", PROMPT, 2)
    spans = flushed(one, collector)
    assert spans["hotkv.request"].parent_id == ""


def test_without_tracing_its_package_is_not_needed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hotkv_proto.traces", None)
    one = engine()
    ask(one, "cold")
    ask(one, "hit")
    assert one.external["hit"] == 192 and "callback_errors" not in one.counters


def test_wrong_settings_and_missing_package_advise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting, value in (("tracing", "collector:4317"), ("tracing_sample_ratio", 2)):
        with pytest.raises(ConfigError, match=f"hotkv.{setting} = {value!r}: allowed"):
            ConnectorConfig.from_extra_config({f"hotkv.{setting}": value})
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        ConnectorConfig.from_extra_config({"hotkv.tracing": "https://me:secret@far"})
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^hotkv.tracing is not a URL: Invalid IPv6 URL$"):
        ConnectorConfig.from_extra_config({"hotkv.tracing": "http://me:secret@[::1"})
    config = ConnectorConfig.from_extra_config({"hotkv.tracing": "http://127.0.0.1:1"})
    monkeypatch.setitem(sys.modules, "hotkv_proto.traces", None)
    with pytest.raises(ConfigError, match=r"pip install .*opentelemetry-sdk"):
        traces.open_traces(config)


# ------------------------------------------------------------------------------------- real vLLM


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_engine_and_server_are_in_one_trace(
    engines: Engines, tmp_path: Path, collector: OtlpReceiver
) -> None:
    settings = {
        "connector": {"tracing": "env"},
        "enable_prefix_caching": True,
        "otlp_traces_endpoint": f"{collector.url}/v1/traces",
        "environment": {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
    }

    def is_whole(spans: list[ReceivedSpan]) -> bool:
        # A span may come before its parent.
        names = [span.name for span in spans]
        served = {span.name for span in spans if span.kind == "server"}
        known = {f"{0xDEF:016x}", *(span.span_id for span in spans)}
        return (
            names.count("llm_request") == names.count("hotkv.request") == 2
            and "hotkv.copy" in names
            and {"hotkv.lease", "hotkv.load", "hotkv.store"} <= served
            and all(span.parent_id in known for span in spans if span.trace_id == TRACE)
        )

    with (
        runtime_folder(256 << 20) as folder,
        Server(folder, "64MiB", "--tracing.endpoint", collector.url) as server,
    ):
        server.wait_ready()
        engine = engines.start(write_model(tmp_path / "model"), server.target, **settings)
        engine.ask("wait", connected=True, timeout_s=60)
        (asked,) = prompts(5, (500,))
        for _ in range(2):
            engine.ask("hinted", prompt=asked, max_tokens=2, headers=HEADERS)
            wait_for(lambda: server.counter("stored_blocks_total") == 500 // 32)
            engine.ask("reset", connector=False)
        spans = collector.wait_for(is_whole)
        engines.stop()
    mine = [span for span in spans if span.trace_id == TRACE]
    services = {span.service for span in mine}
    assert {"hotkv-connector", "hotkv-server"} < services and len(services) == 3
    by_id = {span.span_id: span for span in mine}
    for name in ("llm_request", "hotkv.request"):
        assert {s.parent_id for s in mine if s.name == name} == {f"{0xDEF:016x}"}
    for name in ("hotkv.lease", "hotkv.load", "hotkv.store"):
        (served, *_) = [s for s in mine if s.name == name and s.kind == "server"]
        asking = by_id[served.parent_id]
        assert (asking.name, asking.kind, asking.service) == (name, "client", "hotkv-connector")
        assert asking.encloses(served) and by_id[asking.parent_id].name == "hotkv.request"
    copies = [span for span in mine if span.name == "hotkv.copy"]
    assert {by_id[copy.parent_id].kind for copy in copies} == {"server"}
    hits = [s.attributes["hotkv.hit_tokens"] for s in mine if s.name == "hotkv.request"]
    assert hits[0] == 0 and hits[1] > 400
