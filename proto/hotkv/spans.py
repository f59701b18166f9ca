"""Spans of traces: how they are named on the wire, begun, ended and bounded.

Always true: recording a span neither blocks nor raises, from any thread; a span that a bound
refuses is counted. Nothing of OpenTelemetry is imported here: `hotkv.otlp` exports what is
recorded.
"""

import enum
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final

MAX_TRACEPARENT_CHARS = 128
"""Longest traceparent that is read; one of version 00 has 55 characters."""
MAX_SPANS_PER_S = 1000
"""Most spans that a process records in a second: recording and exporting one takes some 50 us."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION = "ff"
_SAMPLED = 1

Value = str | bool | int | float
"""Of an attribute: numbers and names; never content of prompts, never hashes."""


class Kind(enum.Enum):
    """OpenTelemetry's kinds of spans, as far as they are used."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class TraceContext(NamedTuple):
    """Names a span: `trace_id` of 128 bits and `span_id` of 64, neither of them 0."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it, version 00."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(text: str) -> TraceContext | None:
    """Reads a `traceparent` by the rules of W3C Trace Context; None for what is none. Of versions
    after 00 only the part that 00 has is read."""
    match = _TRACEPARENT.fullmatch(text) if len(text) <= MAX_TRACEPARENT_CHARS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == _INVALID_VERSION or (version == "00" and rest is not None):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


@final
@dataclass(slots=True)
class Span:
    """A span from its begin to its end. Times are nanoseconds since 1970; `ended_ns` is 0 before
    the end, and never before `began_ns` after it. `is_parent_remote`: the parent is another
    process's. `error`: the name of a reason; empty if it ended well."""

    log: "SpanLog" = field(repr=False)
    name: str
    context: TraceContext
    parent: TraceContext | None
    kind: Kind
    began_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    ended_ns: int = 0
    error: str = ""
    is_parent_remote: bool = False

    @property
    def traceparent(self) -> str:
        """Names this span to those whose spans are to be its children."""
        return self.context.traceparent

    def child(self, name: str, kind: Kind = Kind.INTERNAL, began_ns: int = 0) -> "Span":
        """Begins a child, now or at `began_ns`."""
        return self.log.child(name, self.context, kind, began_ns)

    def end(self, error: str = "", ended_ns: int = 0) -> None:
        """Ends the span, now or at `ended_ns`. Only the first end counts."""
        if not self.ended_ns:
            # The clock may have been set back meanwhile.
            self.ended_ns, self.error = max(ended_ns or time.time_ns(), self.began_ns), error
            self.log.add(self)


class SpanSink(Protocol):
    """What takes ended spans. `num_exported`: that a collector has taken; `num_failed`: that none
    took."""

    num_exported: int
    num_failed: int

    def emit(self, span: Span) -> bool:
        """Takes a span, which does not change any more; False if there is no room. Any thread, does
        not block."""

    def flush(self) -> None:
        """Exports what waits, for a bounded time. Blocks."""

    def close(self) -> None:
        """The same, and takes nothing any more. Blocks."""


class SpanLog:
    """Begins spans and hands ended ones to a sink.

    `sample_ratio`: share of calls without a context that begin a trace. `num_recorded`: spans that
    the sink took; `num_dropped`: that a bound refused; `num_malformed`: contexts that could not be
    read.
    """

    def __init__(
        self, sink: SpanSink, sample_ratio: float = 0.0, max_spans_per_s: int = MAX_SPANS_PER_S
    ) -> None:
        self.sink = sink
        self.num_recorded = self.num_dropped = self.num_malformed = 0
        self._sample_ratio = sample_ratio
        self._max_spans_per_s = max_spans_per_s
        self._lock = threading.Lock()
        # Of the second that runs: its number, and spans in it.
        self._second = self._num_in_second = 0

    def __repr__(self) -> str:
        return f"SpanLog({self.num_recorded} recorded, {self.num_dropped} dropped, {self.sink!r})"

    def begin(self, name: str, traceparent: str, kind: Kind) -> Span | None:
        """Begins the span of a call whose caller has named its own span, or of a sampled share of
        those without; None for a call that is not traced. A context that can't be read counts as
        none."""
        if traceparent:
            parent = parse_traceparent(traceparent)
            if parent is not None:
                if not parent.is_sampled:
                    return None
                span = self.child(name, parent, kind)
                span.is_parent_remote = True
                return span
            with self._lock:
                self.num_malformed += 1
        if self._sample_ratio and _chance.random() < self._sample_ratio:
            context = TraceContext(_random_id(128), _random_id(64))
            return Span(self, name, context, None, kind, time.time_ns())
        return None

    def child(
        self, name: str, parent: TraceContext, kind: Kind = Kind.INTERNAL, began_ns: int = 0
    ) -> Span:
        """Begins a span below another one, now or at `began_ns`."""
        context = TraceContext(parent.trace_id, _random_id(64))
        return Span(self, name, context, parent, kind, began_ns or time.time_ns())

    def add(self, span: Span) -> None:
        """Takes a span that has ended."""
        with self._lock:
            is_taken = self._is_in_time() and self.sink.emit(span)
            self.num_recorded += is_taken
            self.num_dropped += not is_taken

    def _is_in_time(self) -> bool:
        # Not by the spans' own times: those of a transfer's parts lie seconds apart.
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_in_second = second, 0
        self._num_in_second += 1
        return self._num_in_second <= self._max_spans_per_s

    def close(self) -> None:
        """Exports what waits, for a bounded time. Blocks."""
        self.sink.close()


_chance = random.Random()
"""Not the module's own: engines seed that, and would give the same names to other spans."""
os.register_at_fork(after_in_child=_chance.seed)


def _random_id(num_bits: int) -> int:
    return _chance.getrandbits(num_bits) or 1
