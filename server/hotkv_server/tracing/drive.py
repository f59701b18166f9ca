"""Records spans of the server's work: spans of calls, with child spans of waits, copies and tiers.

When the blocks of a store are later written to tiers, the store's span gets child spans for these
writes. Always true: without tracing a node has no `Tracing` object, and this module is not called.
For child spans of writes, a bounded number of stores is remembered for a bounded time. Spans
contain the server's numbers and names, never hashes, token ids or bytes. On the event loop only.
"""

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from hotkv_proto.errors import HotKVError
from hotkv_proto.table import Words

if TYPE_CHECKING:
    from hotkv_proto.traces import Span, Traces

MAX_STORED_BLOCKS, MAX_BLOCKS_OF_STORE = 1 << 14, 1 << 12
"""Most blocks that are remembered in order to trace their later writes to tiers: of all traced
stores together, and of a single traced store."""
STORED_S = 60.0
"""If a block is written to a tier within this time after its store, in seconds, the write is
traced."""
MAX_WRITE_SPANS = 16
"""Most spans that one write to a tier gets. A write may contain blocks of many traced stores, and
each of these stores gets a child span."""
PREFIX = "hotkv."

_current: "ContextVar[Span | None]" = ContextVar("hotkv_span", default=None)
"""The span of the call that the server is serving. Tasks that the call starts inherit it."""


class Tracing:
    """Begins the spans of a node's calls. Remembers which traced store stored which blocks, so that
    a later write of these blocks to a tier becomes a child span of the store."""

    def __init__(self, traces: "Traces") -> None:
        self.traces = traces
        # For each remembered block, by its number (`_names`): the span of the store, and when the
        # block is forgotten. An OrderedDict, because removing the first key of a plain dict becomes
        # slower and slower.
        self._stored: OrderedDict[int, tuple[Span, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Tracing({self.traces!r}, {len(self._stored)} stored blocks)"

    # Calls

    def begin(self, name: str, traceparent: str) -> "Span | None":
        """Begins the span of a call and returns it; None if the call is not traced.

        traceparent: the caller's span as a W3C header; empty without a span.
        """
        return self.traces.begin(PREFIX + name, traceparent, is_served=True)

    @contextlib.contextmanager
    def serving(self, span: "Span") -> Iterator[None]:
        """Makes all spans that begin in the `with` block children of this span, also in tasks. If
        the `with` block raises, ends the span."""
        before = _current.set(span)
        try:
            yield
        except BaseException as error:
            span.end(reason(error))
            raise
        finally:
            _current.reset(before)

    def child(self, name: str) -> "Span | None":
        """Begins a child span of the span of the current call. Returns None if the call is not
        traced."""
        span = _current.get()
        return None if span is None else span.child(PREFIX + name)

    # Writes to tiers

    def stored(self, span: "Span", runs: Iterable[Words]) -> None:
        """Remembers the first blocks of a traced store, so that `begin_writes` later finds the
        store's span by these blocks.

        runs: for each run (consecutive blocks of a group), the hashes [n, words].
        """
        stored, value = self._stored, (span, time.monotonic() + STORED_S)
        room = MAX_BLOCKS_OF_STORE
        for hashes in runs:
            for name in _names(hashes[:room]):
                stored[name] = value
                # An existing name keeps its place in the dict: move it to the end, so that it is
                # forgotten last.
                stored.move_to_end(name)
            room -= len(hashes)
            if room <= 0:
                break
        while len(stored) > MAX_STORED_BLOCKS:
            stored.popitem(last=False)

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """Begins spans for a write of these blocks to a tier. Each traced store that has stored
        some of the blocks gets a child span. Begins at most MAX_WRITE_SPANS spans, for the stores
        with the most of these blocks.

        tier: name of the tier, which becomes an attribute of the spans.
        """
        if not self._stored:
            return []
        now_s, counts = time.monotonic(), Counter["Span"]()
        for name in _names(hashes):
            store, until_s = self._stored.get(name, (None, 0.0))
            if store is not None and now_s < until_s:
                counts[store] += 1
        spans = []
        for store, num_blocks in counts.most_common(MAX_WRITE_SPANS):
            span = store.child(PREFIX + "tier.write")
            span.attributes = {"hotkv.tier": tier, "hotkv.blocks": num_blocks}
            spans.append(span)
        return spans


def _names(hashes: Words) -> list[int]:
    """Returns a number for each block, by which the block is remembered: the first 64 bits of its
    hash. Blocks of different groups may have the same number. This does no harm, because such
    blocks belong to the same prompt."""
    first = np.ascontiguousarray(hashes[:, :2])
    names: list[int] = first.view(np.uint64)[:, 0].tolist()
    return names


def reason(error: BaseException) -> str:
    """Returns a short description of an error for a span: the reason of a HotKVError, otherwise the
    type of the error. Contains no data of clients."""
    return error.reason.name if isinstance(error, HotKVError) else type(error).__name__


def wall_ns(monotonic_s: float) -> int:
    """Converts a time of the monotonic clock to nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
