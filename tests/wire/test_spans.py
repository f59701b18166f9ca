"""Trace contexts are read as W3C Trace Context has them, and spans keep to their bounds."""

import os
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv.spans import Kind, Span, SpanLog, TraceContext, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


class ListSink:
    """Keeps spans; refuses them from `room` on."""

    num_exported = num_failed = 0

    def __init__(self, room: int = 1 << 30) -> None:
        self.spans: list[Span] = []
        self.room = room

    def emit(self, span: Span) -> bool:
        if len(self.spans) >= self.room:
            return False
        self.spans.append(span)
        return True

    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_a_traceparent_is_read_and_written() -> None:
    context = parse_traceparent(GOOD)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16)) and context.traceparent == GOOD
    unsampled = parse_traceparent(GOOD[:-1] + "0")
    assert unsampled is not None and not unsampled.is_sampled


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
@settings(max_examples=30)
def test_every_context_comes_back(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert parse_traceparent(context.traceparent) == context


@pytest.mark.parametrize("flags", ["03", "81"])
def test_flags_that_are_not_known_are_passed_over(flags: str) -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}") == parse_traceparent(GOOD)


def test_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == parse_traceparent(GOOD)
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01") == parse_traceparent(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" {GOOD}",
        f"{GOOD}\n",
        f"01-{TRACE}-{SPAN}-01-{'x' * 100}",
        "00-" + "٣" * 32 + f"-{SPAN}-01",
    ],
)
def test_what_is_none_counts_as_none(text: str) -> None:
    log = SpanLog(ListSink())
    assert parse_traceparent(text) is None
    assert log.begin("a", text, Kind.SERVER) is None and log.num_malformed == 1


@given(st.text(max_size=200))
@settings(max_examples=50)
def test_no_text_breaks_the_reader(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or context.trace_id


def test_calls_are_traced_as_their_callers_are() -> None:
    log = SpanLog(ListSink(), sample_ratio=1.0)
    child = log.begin("a", GOOD, Kind.SERVER)
    assert child is not None and child.parent == parse_traceparent(GOOD)
    assert child.context.trace_id == int(TRACE, 16) and child.context != child.parent
    assert log.begin("a", GOOD[:-1] + "0", Kind.SERVER) is None
    root = log.begin("a", "", Kind.SERVER)
    assert root is not None and root.parent is None
    assert SpanLog(ListSink()).begin("a", "", Kind.SERVER) is None


def test_a_span_ends_once() -> None:
    sink = ListSink()
    span = SpanLog(sink, 1.0).begin("a", "", Kind.SERVER)
    assert span is not None
    child = span.child("b", began_ns=span.began_ns)
    child.end("LATE")
    child.end()
    span.end()
    assert [(one.name, one.error) for one in sink.spans] == [("b", "LATE"), ("a", "")]
    assert child.parent == span.context and span.began_ns <= child.ended_ns <= span.ended_ns


def test_engines_that_seed_alike_name_spans_differently() -> None:
    log, ids = SpanLog(ListSink()), set[int]()
    for _ in range(2):
        random.seed(0)
        ids.add(log.child("a", TraceContext(1, 2)).context.span_id)
    assert len(ids) == 2


def test_a_fork_names_spans_differently() -> None:
    log, context = SpanLog(ListSink()), TraceContext(1, 2)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, log.child("a", context).traceparent.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100).decode() != log.child("a", context).traceparent
    os.close(reader)
    os.close(writer)


def test_spans_beyond_the_rate_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their own times: those of the parts of a transfer lie seconds apart."""
    sink, now_s = ListSink(), [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log = SpanLog(sink, max_spans_per_s=3)
    context = TraceContext(1, 2)
    for at in range(5):
        log.child("a", context, began_ns=1).end(ended_ns=10**9 * (1 + at % 2))
    now_s[0] = 8.0
    log.child("a", context).end()
    assert (len(sink.spans), log.num_recorded, log.num_dropped) == (4, 4, 2)


def test_no_span_ends_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks are set back; viewers take what is negative for centuries."""
    log = SpanLog(ListSink(), 1.0)
    span = log.begin("a", "", Kind.SERVER)
    assert span is not None
    monkeypatch.setattr(time, "time_ns", lambda: span.began_ns - 10**9)
    early = span.child("b", began_ns=span.began_ns)
    early.end(ended_ns=span.began_ns - 1)
    span.end()
    assert span.ended_ns == early.ended_ns == span.began_ns


def test_only_the_parent_that_a_caller_has_named_is_remote() -> None:
    log = SpanLog(ListSink(), 1.0)
    served, root = log.begin("a", GOOD, Kind.SERVER), log.begin("a", "", Kind.SERVER)
    assert served is not None and root is not None
    assert served.is_parent_remote
    assert not root.is_parent_remote and not served.child("b").is_parent_remote


def test_spans_that_a_full_queue_refuses_are_counted_from_any_thread() -> None:
    sink = ListSink(room=10)
    log = SpanLog(sink, max_spans_per_s=10**6)

    def record() -> None:
        for _ in range(200):
            log.child("a", TraceContext(1, 2)).end()

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (log.num_recorded, log.num_dropped) == (10, 790)
