"""Tests tracing: a call is traced exactly if its caller is, and spans are bounded."""

import os
import random
import time

import pytest

from hotkv_proto.traces import MAX_TRACEPARENT_CHARS
from tests.wire.recorded import GOOD, SPAN, TRACE, Recorded, begun


def test_calls_are_traced_as_their_callers_are() -> None:
    one = Recorded(sample_ratio=1.0)
    child, root = begun(one.traces), begun(one.traces, "")
    assert one.traces.begin("a", GOOD[:-1] + "0") is None
    assert Recorded().traces.begin("a", "") is None
    assert child.traceparent.startswith(f"00-{TRACE}-") and child.traceparent.endswith("-01")
    assert SPAN not in child.traceparent and TRACE not in root.traceparent
    child.end()
    root.end()
    of_child, of_root = one.spans()
    assert of_child.parent is not None and of_child.parent.is_remote
    assert f"{of_child.parent.span_id:016x}" == SPAN and of_root.parent is None


@pytest.mark.parametrize("sampler", ["always_off", "traceidratio", "parentbased_always_off"])
def test_sampler_named_by_environment_does_not_decide(
    monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    one = Recorded(sample_ratio=1.0)
    for text in (GOOD, ""):
        span = begun(one.traces, text)
        span.child("b", span.began_ns).end()
        span.end()
    assert len(one.spans()) == 4


def test_process_with_sdk_off_traces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    one = Recorded(sample_ratio=1.0)
    assert one.traces.begin("a", GOOD) is None and one.traces.begin("a", "") is None


@pytest.mark.parametrize("text", [f"00-{TRACE}-{SPAN}-03", f"01-{TRACE}-{SPAN}-01-more"])
def test_unknown_flags_and_parts_are_skipped(text: str) -> None:
    assert begun(Recorded().traces, text).traceparent.startswith(f"00-{TRACE}-")


@pytest.mark.parametrize(
    "text",
    [
        "x",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-{'x' * MAX_TRACEPARENT_CHARS}",
    ],
)
def test_unreadable_context_counts_as_none(text: str) -> None:
    traces = Recorded().traces
    assert traces.begin("a", text) is None and traces.num_malformed == 1


def test_a_span_ends_once() -> None:
    one = Recorded()
    span = begun(one.traces)
    child = span.child("b", span.began_ns)
    child.attributes["hotkv.blocks"] = 3
    child.end("LATE")
    child.end()
    span.end()
    of_child, of_span = one.spans()
    assert (of_child.name, of_child.status.description) == ("b", "LATE")
    assert of_child.attributes == {"hotkv.blocks": 3} and of_span.status.is_unset
    assert of_child.parent is not None and not of_child.parent.is_remote
    assert f"{of_child.parent.span_id:016x}" in span.traceparent


def test_engines_seeded_alike_name_spans_differently() -> None:
    traces = Recorded().traces
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, begun(traces).traceparent.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    names = {os.read(reader, 100).decode(), begun(traces).traceparent}
    os.close(reader)
    os.close(writer)
    for _ in range(2):
        random.seed(0)
        names.add(begun(traces).traceparent)
    assert len(names) == 4


def test_spans_beyond_the_rate_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the call counts: parts of a transfer may be seconds apart."""
    now_s = [7.0]
    one = Recorded(max_spans_per_s=3)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    parent = begun(one.traces)
    for at in range(5):
        parent.child("b", 1).end(ended_ns=10**9 * (1 + at % 2))
    now_s[0] = 8.0
    parent.end()
    monkeypatch.undo()
    assert (len(one.spans()), one.traces.num_dropped) == (4, 2)


def test_no_span_ends_before_it_began() -> None:
    """Viewers show a negative duration as centuries."""
    one = Recorded()
    span = begun(one.traces)
    span.child("b", span.began_ns).end(ended_ns=span.began_ns - 1)
    (early,) = one.spans()
    assert early.end_time == early.start_time == span.began_ns
