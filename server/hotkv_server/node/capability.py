"""The seam between the node and its capabilities: parts that the node can do without.

The node holds a tuple of capabilities. It calls each when something happens, and asks each for its
figures and for the calls that it serves. Capabilities do not know each other: what one asks of
another is a protocol here, and the node joins them. Every method of `Capability` has a default that
adds nothing. All methods run on the event loop and wait for no file and for no other machine,
unless they say so.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import Flushed, RunContent
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import EndedRequest, LoadEnd, RequestReport
from hotkv_proto.table import Words
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.values import BoolMask, Entries, EvictionNotice, HashList, Medium, Run
from hotkv_server.node.health import Health
from hotkv_server.node.session import LiveSession

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


# Topics: what a server tells of itself, as plain figures that any view can show.
#
# Field names are those that `hotkv --json` shows; numbers are plain, hashes are hexadecimal, states
# are words. An answer is made on the event loop and is bounded.


Figures = dict[str, Any]
"""Ready for JSON."""
MAX_KEY_SPACE_ID = (1 << 31) - 1


class Filters:
    """What a question is narrowed to: texts by name. Raises INVALID_FIELD for a value that can't be
    meant."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"Filters({dict(self._given)!r})"

    def text(self, name: str) -> str:
        """Empty if it is not given."""
        return self._given.get(name, "")

    def whole(self, name: str, most: int) -> int:
        """A whole number from 0 to `most`; 0 if it is not given."""
        text = self.text(name) or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise HotKVError(
                Reason.INVALID_FIELD, f"{name} is {text[:40]!r}; give a whole number, 0 to {most}"
            )
        return int(text)

    def page_size(self, default: int, most: int) -> int:
        """How many rows to tell of; `default` for 0 and if it is not given."""
        return self.whole("page_size", most) or default

    def seconds(self, name: str) -> float:
        """A time; 0 if it is not given."""
        text = self.text(name) or "0"
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found >= 0):
            raise HotKVError(
                Reason.INVALID_FIELD, f"{name} is {text[:40]!r}; give seconds, 0 for all"
            )
        return found


NO_FILTERS = Filters({})


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `filters`: the names of those that it heeds."""

    tell: Callable[[Filters], "Figures | Awaitable[Figures]"]
    filters: tuple[str, ...] = ()


async def tell(topics: Mapping[str, Topic], name: str, given: Mapping[str, str]) -> Figures:
    """What there is to say of one topic; of no topic the list of topics. Raises INVALID_FIELD, and
    as the topic."""
    if not name:
        return {"topics": {name: list(topic.filters) for name, topic in topics.items()}}
    topic = topics.get(name)
    if topic is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"topic is {name[:40]!r}; this server tells of {', '.join(topics)}",
        )
    for known in given:
        if known not in topic.filters:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"filters has {known[:40]!r}; {name} heeds {', '.join(topic.filters) or 'none'}",
            )
    told = topic.tell(Filters(given))
    return told if isinstance(told, dict) else await told


# What capabilities ask of each other, and of the node


@dataclass(frozen=True, slots=True)
class Lying:
    """Where blocks of some lists lie in one tier: a mask a list. `is_up`: the tier can be read.
    `bytes_per_s`: rate of its last reads, 0 if none has found any."""

    name: str
    masks: list[BoolMask]
    is_up: bool
    bytes_per_s: float


class Epochs(Protocol):
    """Flushes, here and in tiers that nodes share."""

    def may_serve(self, key_space_id: int) -> bool:
        """Returns whether blocks in host memory are surely of after all flushes."""

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits until that is known, for a bounded time; returns whether it is so."""

    async def meet(self, key_space_id: int) -> None:
        """Asks shared tiers for the epoch of a key space that has become known."""

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space here and in all tiers."""


class Lookups(Protocol):
    """Questions for blocks below host memory."""

    def must_ask(self, session: LiveSession | None, groups: list[HashList]) -> bool:
        """Returns whether a lookup must wait for a tier's answer."""

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Waits until tiers have answered, for a bounded time."""

    def lies_elsewhere(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Returns which blocks are known to lie below, or to be on their way up, one mask a list.
        `ready`: which are in host memory. `tokens_per_s`: prefill speed of the engine; blocks that
        would come later than it computes them are left out, but for 0."""

    async def find(self, key_space_id: int, groups: list[HashList]) -> list[Lying]:
        """Asks every tier, for operators."""


class BlocksBelow(Protocol):
    """Blocks below host memory."""

    @property
    def epochs(self) -> Epochs: ...

    @property
    def lookups(self) -> Lookups: ...

    @property
    def names(self) -> list[str]:
        """The tiers by their numbers in `Space.origins`, the first of which is 1."""

    def start(
        self,
        health: Health,
        tell: Callable[[], None],
        flush: Callable[[int], Awaitable[int]],
        on_ready: "OnReady",
    ) -> None:
        """Starts moving blocks. `tell` is called when blocks may have been evicted or condemned;
        `flush` flushes a key space in this node alone."""

    def trace(self, tracing: "Tracer") -> None:
        """From now on reads and writes of traced calls have spans."""

    async def close(self) -> None:
        """Begins no move any more and ends those under way, for a bounded time."""

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """Changes how much may be written to the tier below in 24 hours; None for no limit."""

    def fetch_ahead(
        self,
        session: LiveSession,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to bring in what a hit lacks in host memory: its lease follows."""

    def has_some(self, session: LiveSession, groups: list[HashList]) -> bool:
        """Returns whether a lease of these blocks must wait for a tier."""

    async def bring_up(self, session: LiveSession, groups: list[HashList]) -> Any:
        """Brings blocks up and pins them, for a bounded time; `let_go` takes the result."""

    def let_go(self, held: Any) -> None:
        """Gives back the pins of `bring_up`."""

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Brings in what lies below of these lists, as far as there is room, and waits for it until
        then."""


class Tracer(Protocol):
    """Spans of what is done for a call."""

    def child(self, name: str) -> "Span | None":
        """Begins a span below that of the call that is served; None if it is not traced."""

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """Begins a span for each traced store that brought some of these blocks, which are about to
        be written to a tier."""


OnReady = Callable[[Entries, Medium, str], None]
"""Called on the event loop with blocks that are ready in a medium, and the tier's name, empty for
host memory. Entries are of the tier below for DISK, else of host memory."""


def nobody(entries: Entries, medium: Medium, tier: str) -> None:
    """Tells nobody."""


# Capabilities


Report = RequestReport[Words]
Ended = EndedRequest[Words]
SessionCall = Callable[[LiveSession, Any], Any]
"""Serves one kind of message of a session's stream. Returns the message of the answer, a task or an
awaitable of it, or None if there is no answer."""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service. `name` contains its package. `add` registers `servicer` with a server, as the
    code does that grpcio generates. `is_admin`: only operators may call it."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """A metric with labels. `name` lacks the prefix `hotkv_`; `kind` is `counter`, `gauge` or
    `histogram`; `samples` are pairs of labels and value."""

    name: str
    kind: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]


class Capability:
    """A part of a server that adds something to the node."""

    # Its life

    def start(self, health: Health) -> None:
        """Called when the node starts. `health` watches what the capability starts."""

    async def tick(self, now_s: float) -> None:
        """Called with each turn of the node's timer."""

    async def close(self) -> None:
        """Called when the node ends, after all sessions have closed."""

    def save(self) -> None:
        """Writes files for the next server. Blocks, on a clerk's thread."""

    def release(self) -> None:
        """Closes what it holds outside the node. Called after the node has ended, or if it never
        started. Blocks."""

    # What happens

    def key_space_added(self, number: int, key_space: KeySpace) -> None:
        """Called when a key space becomes known."""

    def key_space_forgotten(self, number: int) -> None:
        """Called when a key space without blocks is forgotten."""

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Called when a store has ended. `results`: BlockResult values, an array a run.
        `contents`: one a run, or empty."""

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """Called when a tier has moved blocks; arguments as of `OnReady`."""

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        """Called when blocks were removed from host memory (`notices`) and from the tier below it.
        `flushed_key_space_id`: the key space that a flush has emptied; 0 without a flush."""

    def session_closed(self, session: LiveSession, *, is_last: bool) -> None:
        """Called when a session has closed. `is_last`: its engine has no other session."""

    def request_scheduled(self, session: LiveSession, report: Report) -> None:
        """Called when an engine has reported a request, before its blocks count as used."""

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        """Called when the blocks of a reported request count as used. May let others run."""

    def request_ended(self, session: LiveSession, ended: Ended) -> None:
        """Called when an engine has reported the end of a request."""

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        """Called when the load of a reported request has ended."""

    def bytes_moved(self, session: LiveSession, loaded: int, stored: int) -> None:
        """Called when a transfer has ended, with the bytes that it has loaded and stored."""

    # What it tells

    def topics(self) -> Mapping[str, Topic]:
        """Returns the topics that operators can ask about, by name."""
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Returns fields of the status page. `has_names`: False leaves out names of tenants, models
        and engines. A value may be a function, which is called later on another thread."""
        return {}

    def tiers(self) -> Iterable[Figures]:
        """Returns a row for each tier besides host memory, in the order in which they are asked:
        `name`, `capacity_byte_count`, and its `activity`, if it says so."""
        return ()

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        """Returns columns for the list of sessions: counts by session number, 0 where one is
        missing."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Returns counters by metric name without `hotkv_`. They never fall."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Returns gauges by metric name without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        """Returns metrics with labels."""
        return ()

    # What it does for others

    def services(self, edge: Any) -> Iterable[Service]:
        """Returns the gRPC services for a listener. `edge`: a `wire.edge.Edge`."""
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """Returns calls of a session's stream, by their field in `hotkv.v1.ConnectRequest`."""
        return {}

    def traced(self, calls: Any) -> Any:
        """Returns the calls of `wire.calls`, wrapped if the capability traces them."""
        return calls

    @property
    def tracer(self) -> Tracer | None:
        """Returns who makes spans for work below a call; None without tracing."""
        return None

    @property
    def wants_token_ids(self) -> bool:
        """Returns whether engines must send token ids with their stores."""
        return False

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        """Returns the latest prompts of a session that a router has named: tenant, key space id and
        hash words of each. `tenant`: empty for all tenants."""
        return ()
