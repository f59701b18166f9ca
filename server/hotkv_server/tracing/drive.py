"""Spans of calls, with child spans of waits, copies and tiers; a store's later writes to tiers too.

Always true: spans have the server's numbers and names, never hashes, token ids or bytes. A
bounded number of stores is remembered for a bounded time. On the event loop only.
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
"""Blocks whose later writes to tiers are traced: of all traced stores, and of one."""
STORED_S = 60.0
"""Later writes of a store's blocks are not traced."""
MAX_WRITE_SPANS = 16
"""A write to a tier may have blocks of many traced stores, each of which gets a span."""
PREFIX = "hotkv."

_current: "ContextVar[Span | None]" = ContextVar("hotkv_span", default=None)
"""Of the call that is served. Tasks that the call starts inherit it."""


class Tracing:
    def __init__(self, traces: "Traces") -> None:
        self.traces = traces
        # By block (`_names`): the store's span, and when the block is forgotten. An OrderedDict,
        # because a plain dict removes its first key slower and slower.
        self._stored: OrderedDict[int, tuple[Span, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Tracing({self.traces!r}, {len(self._stored)} stored blocks)"

    # Calls

    def begin(self, name: str, traceparent: str) -> "Span | None":
        """None if the call is not traced. `traceparent`: the caller's span as a W3C header; may
        be empty."""
        return self.traces.begin(PREFIX + name, traceparent, is_served=True)

    @contextlib.contextmanager
    def serving(self, span: "Span") -> Iterator[None]:
        """Spans that begin in the `with` block, also in its tasks, are children. Ends the span
        if it raises."""
        before = _current.set(span)
        try:
            yield
        except BaseException as error:
            span.end(reason(error))
            raise
        finally:
            _current.reset(before)

    def child(self, name: str) -> "Span | None":
        """None if the current call is not traced."""
        span = _current.get()
        return None if span is None else span.child(PREFIX + name)

    # Writes to tiers

    def stored(self, span: "Span", runs: Iterable[Words]) -> None:
        """Remembers the first blocks of a traced store for `begin_writes`.

        runs: hashes [n, words] of each.
        """
        stored, value = self._stored, (span, time.monotonic() + STORED_S)
        room = MAX_BLOCKS_OF_STORE
        for hashes in runs:
            for name in _names(hashes[:room]):
                stored[name] = value
                # An existing name keeps its place, so move it: it is forgotten last.
                stored.move_to_end(name)
            room -= len(hashes)
            if room <= 0:
                break
        while len(stored) > MAX_STORED_BLOCKS:
            stored.popitem(last=False)

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """At most MAX_WRITE_SPANS, for the stores with the most of these blocks."""
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
    """The first 64 bits of each hash. Equal ones in different groups are of the same prompt."""
    first = np.ascontiguousarray(hashes[:, :2])
    names: list[int] = first.view(np.uint64)[:, 0].tolist()
    return names


def reason(error: BaseException) -> str:
    """For a span, without data of clients."""
    return error.reason.name if isinstance(error, HotKVError) else type(error).__name__


def wall_ns(monotonic_s: float) -> int:
    """From a time of the monotonic clock to nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
