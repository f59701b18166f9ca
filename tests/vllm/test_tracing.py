"""Spans of the connector: what they say of a request, that the server's lie below them, and that
all lie in the trace of vLLM's own span. Off, nothing of it is there."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client.types import BlockRun
from hotkv_proto.blocks import NO_RETENTION, StoreOptions
from hotkv_proto.traces import Span, Traces
from hotkv_server.testing.otlp_receiver import OtlpReceiver, ReceivedSpan
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.scheduler.stores import Tails
from hotkv_vllm.tracing.requests import RequestTrace, open_traces
from tests.support.waiting import wait_for
from tests.vllm.harness import prompt
from tests.vllm.processes import EngineProcess
from tests.vllm.runs import prompts
from tests.vllm.tiny import write_model
from tests.wire.recorded import Recorded, begun

PROMPT = prompt(1, 200)
PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"
HEADERS = {"traceparent": PARENT}


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as one:
        yield one


def flushed(one: Any, collector: OtlpReceiver) -> dict[str, ReceivedSpan]:
    """Returns the last span of each name, once the engine has exported all."""
    one.connector._scheduler.requests._traces.flush()
    return {span.name: span for span in collector.spans}


def root_of(spans: dict[str, ReceivedSpan]) -> ReceivedSpan:
    root = spans["hotkv.request"]
    assert {span.parent_id for span in spans.values() if span is not root} == {root.span_id}
    return root


def test_a_request_that_stores_and_one_that_loads(
    engine: Any, server: Any, collector: OtlpReceiver
) -> None:
    one = engine(extra={"tracing": collector.url})
    one.add("cold", PROMPT, 2, trace_headers=HEADERS)
    one.run()
    spans = flushed(one, collector)
    root, store = root_of(spans), spans["hotkv.store"]
    assert (root.trace_id, root.parent_id) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert root.service == "hotkv-connector"
    numbers = {"hotkv.prompt_tokens": 200, "hotkv.device_hit_tokens": 0, "hotkv.hit_tokens": 0}
    assert numbers.items() <= root.attributes.items()
    assert root.attributes["hotkv.miss_reason"] == "absent"
    assert store.attributes["hotkv.blocks"] == store.attributes["hotkv.stored_blocks"] > 0
    assert "hotkv.load" not in spans
    one.drop_local()
    collector.spans.clear()
    one.add("hit", PROMPT, 2, trace_headers=HEADERS)
    one.run()
    spans = flushed(one, collector)
    root, load = root_of(spans), spans["hotkv.load"]
    assert root.attributes["hotkv.hit_tokens"] == load.attributes["hotkv.tokens"] == 192
    assert spans["hotkv.lease"].attributes["hotkv.found_blocks"] == load.attributes["hotkv.blocks"]
    assert root.encloses(spans["hotkv.lease"]) and root.encloses(load) and not load.error
    assert spans["hotkv.lease"].ended_ns <= load.began_ns


def test_the_server_is_told_the_span_of_each_call(
    engine: Any, server: Any, collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotkv_client.testing.fake_session import FakeSession

    told: dict[str, list[Any]] = {"lookup": [], "acquire": [], "load": [], "store": []}

    def listen(name: str) -> None:
        whole = getattr(FakeSession, name)

        def call(*arguments: Any) -> Any:
            options = [one for one in arguments if isinstance(one, StoreOptions)]
            told[name].append(options[0].traceparent if options else arguments[-1])
            return whole(*arguments)

        monkeypatch.setattr(FakeSession, name, call)

    for name in told:
        listen(name)
    server.table = False
    one = engine(extra={"tracing": collector.url})
    for name, content, headers in (
        ("plain", prompt(2, 200), None),
        ("cold", PROMPT, HEADERS),
        ("hit", PROMPT, HEADERS),
    ):
        one.add(name, content, 2, trace_headers=headers)
        one.run()
        one.drop_local()
    spans = flushed(one, collector)
    assert spans["hotkv.request"].attributes["hotkv.lookup_calls"] == 1
    for call, name in (("lookup", "lookup"), ("acquire", "lease"), ("load", "load")):
        span = spans[f"hotkv.{name}"]
        assert told[call][-1] == f"00-{span.trace_id}-{span.span_id}-01"
    (store,) = [span for span in collector.spans if span.name == "hotkv.store"]
    assert f"00-{store.trace_id}-{store.span_id}-01" in told["store"] and "" in told["store"]
    assert told["lookup"][0] is None


def test_requests_of_one_step_have_stores_of_their_own_if_traced(
    engine: Any, server: Any, collector: OtlpReceiver
) -> None:
    one = engine(extra={"tracing": collector.url})
    other = f"00-{0x123:032x}-{1:016x}-01"
    one.add("a", PROMPT, 1, trace_headers=HEADERS)
    one.add("b", prompt(2, 40), 1, trace_headers={"traceparent": other})
    one.add("c", prompt(3, 10), 1)
    one.run()
    flushed(one, collector)
    stores = [span for span in collector.spans if span.name == "hotkv.store"]
    assert {span.trace_id for span in stores} == {f"{0xABC:032x}", f"{0x123:032x}"}


def test_a_tail_keeps_the_trace_of_its_request() -> None:
    trace = RequestTrace(begun(Recorded().traces))
    run = BlockRun(0, [bytes(32)], np.array([3], np.int32))
    tails = Tails()
    tails.add(NO_RETENTION, [run], trace)
    tails.add(NO_RETENTION, [run])
    tails.drop_written({4})
    assert [found for _, found, _ in tails.take()] == [trace, None]


def test_a_load_that_fails_and_one_that_is_cancelled_say_so(
    engine: Any, server: Any, collector: OtlpReceiver
) -> None:
    engine().generate("cold", PROMPT, 2)
    server.fail_loads = True
    one = engine(extra={"tracing": collector.url})
    one.add("hit", PROMPT, 2, trace_headers=HEADERS)
    one.run()
    assert flushed(one, collector)["hotkv.load"].error == "FAILED"
    server.fail_loads, server.hold = False, {"load"}
    other = engine(extra={"tracing": collector.url})
    other.add("late", PROMPT, 2, trace_headers=HEADERS)
    for _ in range(4):
        other.step()
    other.abort("late")
    server.settle()
    other.run()
    assert flushed(other, collector)["hotkv.load"].error == "CANCELLED"


@pytest.mark.parametrize("how", ["it breaks", "its end breaks", "hotkv is off", "other ranks"])
def test_a_request_that_goes_on_without_hotkv_has_its_span(
    engine: Any, server: Any, collector: OtlpReceiver, how: str
) -> None:
    """Else what lies below would have no parent."""
    engine().generate("cold", PROMPT, 2)
    one = engine(extra={"tracing": collector.url})
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
    spans = flushed(one, collector)
    assert root_of(spans).error == "LEFT"
    assert not side.requests.states


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": PARENT[:-1] + "0"}])
def test_requests_that_nobody_traces_have_no_spans(
    engine: Any, server: Any, collector: OtlpReceiver, headers: Any
) -> None:
    one = engine(extra={"tracing": collector.url})
    one.add("a", PROMPT, 2, trace_headers=headers)
    one.run()
    assert not flushed(one, collector)


def test_a_share_of_them_may_begin_traces(
    engine: Any, server: Any, collector: OtlpReceiver
) -> None:
    one = engine(extra={"tracing": collector.url, "tracing_sample_ratio": 1})
    one.generate("a", PROMPT, 2)
    assert root_of(flushed(one, collector)).parent_id == ""


def test_no_span_has_hashes_tokens_or_names_of_requests(
    engine: Any, server: Any, collector: OtlpReceiver
) -> None:
    one = engine(extra={"tracing": collector.url})
    for name in ("secret-1", "secret-2"):
        one.add(name, PROMPT, 2, trace_headers=HEADERS)
        one.run()
        one.drop_local()
    flushed(one, collector)
    assert len(collector.spans) > 4
    for span in collector.spans:
        assert "secret" not in repr(span)
        assert all(
            isinstance(value, int | float) or value in ("absent", "unknown")
            for value in span.attributes.values()
        )


# ------------------------------------------------------------------------------------------- off


def test_off_no_call_is_added_to_a_request(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of spans were called or imported would raise, and a hook that raises is counted."""
    from hotkv_vllm.costs import answer_time
    from hotkv_vllm.scheduler import stores_in_flight
    from hotkv_vllm.tracing import requests as traces

    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("called")

    for owner, name in (
        (Traces, "begin"),
        (Span, "child"),
        (traces.RequestTraces, "begin"),
        *((traces.RequestTrace, n) for n in ("lookup", "lease", "load", "load_ended", "store")),
        (traces.RequestTrace, "ended"),
        (answer_time, "end_call"),
        (stores_in_flight, "end_store"),
    ):
        monkeypatch.setattr(owner, name, broken)
    monkeypatch.setitem(sys.modules, "hotkv_proto.traces", None)
    one = engine()
    for name in ("cold", "hit"):
        one.add(name, PROMPT, 2, trace_headers=HEADERS)
        one.run()
        one.drop_local()
    assert one.external["hit"] == 192
    assert "hook_errors" not in one.connector._scheduler.totals.data


def test_wrong_settings_and_a_missing_package_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting, value in (("tracing", "collector:4317"), ("tracing_sample_ratio", 2)):
        with pytest.raises(ConfigError, match=f"hotkv.{setting} = {value!r}: allowed"):
            ConnectorConfig.from_extra_config({f"hotkv.{setting}": value})
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        ConnectorConfig.from_extra_config({"hotkv.tracing": "https://me:secret@far"})
    assert "secret" not in str(refused.value)
    config = ConnectorConfig.from_extra_config({"hotkv.tracing": "http://127.0.0.1:1"})
    monkeypatch.setitem(sys.modules, "hotkv_proto.traces", None)
    with pytest.raises(ConfigError, match=r"pip install 'hotkv\[otel\]'"):
        open_traces(config)


# ------------------------------------------------------------------------------------- real vLLM


CALLS = ("hotkv.lease", "hotkv.load", "hotkv.store")


def is_whole(spans: list[ReceivedSpan]) -> bool:
    """Returns whether two requests have all their spans, the second of which has hit."""
    names = [span.name for span in spans]
    served = {span.name for span in spans if span.kind == "server"}
    return names.count("llm_request") == names.count("hotkv.request") == 2 and served > {*CALLS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_engine_and_server_are_in_one_trace(tmp_path: Path, collector: OtlpReceiver) -> None:
    endpoint = f"{collector.url}/v1/traces"
    with runtime_folder(256 << 20) as folder:
        flags = ("--tracing.endpoint", collector.url)
        with Server(folder, "64MiB", *flags) as server:
            server.wait_ready()
            engine = EngineProcess(
                write_model(tmp_path / "model"),
                tmp_path / "engine.log",
                server.target,
                connector={"tracing": "env"},
                enable_prefix_caching=True,
                otlp_traces_endpoint=endpoint,
                environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            )
            try:
                engine.ask("wait", connected=True, timeout_s=60)
                (asked,) = prompts(5, (500,))
                for _ in range(2):
                    engine.ask("traced", prompt=asked, max_tokens=2, headers=HEADERS)
                    wait_for(lambda: server.counter("stored_blocks_total") == 500 // 32)
                    engine.ask("reset", connector=False)
                spans = collector.wait_for(
                    lambda spans: (
                        len([s for s in spans if s.name in ("llm_request", "hotkv.request")]) == 4
                        and any(s.name == "hotkv.copy" for s in spans)
                    )
                )
            finally:
                engine.stop()
    mine = [span for span in spans if span.trace_id == f"{0xABC:032x}"]
    services = {span.service for span in mine}
    assert {"hotkv-connector", "hotkv-server"} < services and len(services) == 3
    by_id = {span.span_id: span for span in mine}
    for name in ("llm_request", "hotkv.request"):
        assert {s.parent_id for s in mine if s.name == name} == {f"{0xDEF:016x}"}
    for name in CALLS:
        (served, *_) = [s for s in mine if s.name == name and s.kind == "server"]
        asking = by_id[served.parent_id]
        assert (asking.name, asking.kind, asking.service) == (name, "client", "hotkv-connector")
        assert asking.encloses(served) and by_id[asking.parent_id].name == "hotkv.request"
    copies = [span for span in mine if span.name == "hotkv.copy"]
    assert {by_id[copy.parent_id].kind for copy in copies} == {"server"}
    hits = [s.attributes["hotkv.hit_tokens"] for s in mine if s.name == "hotkv.request"]
    assert hits[0] == 0 and hits[1] > 400
