"""The interface between the node and its capabilities, the parts that a node can run without.

The node holds a tuple of capabilities. It calls each capability when something happens, and asks
each for its figures and for the calls that it serves. Capabilities do not know each other: if a
capability needs another, a protocol in this module describes the need and the node connects the
two. Every method of `Capability` has a default that adds nothing. All methods run on the event
loop. They wait neither for files nor for other machines, unless their docstring says otherwise.
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


# Topics: the server's reports about itself, as plain figures that any view can show.
#
# Field names are the names that `hotkv --json` shows. Numbers are plain, hashes are hexadecimal,
# states are words. A topic is computed on the event loop and its size is bounded.


Figures = dict[str, Any]
"""Figures that can be written as JSON."""
MAX_KEY_SPACE_ID = (1 << 31) - 1


class Filters:
    """Holds the filters of a question about a topic: texts by name. Methods raise INVALID_FIELD for
    a value that is not valid."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"Filters({dict(self._given)!r})"

    def text(self, name: str) -> str:
        """Returns the filter's text; empty if it is not given."""
        return self._given.get(name, "")

    def whole(self, name: str, most: int) -> int:
        """Returns the filter as a whole number from 0 to `most`; 0 if it is not given."""
        text = self.text(name) or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise HotKVError(
                Reason.INVALID_FIELD, f"{name} is {text[:40]!r}; give a whole number, 0 to {most}"
            )
        return int(text)

    def page_size(self, default: int, most: int) -> int:
        """Returns how many rows to report; `default` if the filter is 0 or not given."""
        return self.whole("page_size", most) or default

    def seconds(self, name: str) -> float:
        """Returns the filter as seconds; 0 if it is not given."""
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
    """A report of the server about itself, which operators can ask for by name.

    tell: computes the answer.
    filters: names of the filters that `tell` uses.
    """

    tell: Callable[[Filters], "Figures | Awaitable[Figures]"]
    filters: tuple[str, ...] = ()


async def tell(topics: Mapping[str, Topic], name: str, given: Mapping[str, str]) -> Figures:
    """Returns the figures of a topic; without a name, the list of topics.

    Raises INVALID_FIELD for an unknown topic or filter, and the topic's own errors.
    """
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


# Protocols: what capabilities need from each other and from the node.


@dataclass(frozen=True, slots=True)
class Lying:
    """Which blocks of some lists lie in a tier.

    name: name of the tier.
    masks: for each list, a mask of its blocks that lie in the tier.
    is_up: True if the tier can be read.
    bytes_per_s: rate of the tier's last reads; 0 if no read has found a block.
    """

    name: str
    masks: list[BoolMask]
    is_up: bool
    bytes_per_s: float


class Epochs(Protocol):
    """Flushes key spaces, in this node and in tiers that nodes share. A shared tier counts the
    flushes of each key space; the count is its epoch."""

    def may_serve(self, key_space_id: int) -> bool:
        """Returns True if all blocks of the key space in host memory are known to be newer than
        every flush, also of other nodes."""

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits, for a bounded time, until `may_serve` returns True. Returns the last answer of
        `may_serve`."""

    async def meet(self, key_space_id: int) -> None:
        """Asks shared tiers for the epoch (number of flushes) of a key space that has just been
        registered."""

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space in this node and in all tiers."""


class Lookups(Protocol):
    """Looks up blocks in the tiers below host memory."""

    def must_ask(self, session: LiveSession | None, groups: list[HashList]) -> bool:
        """Returns whether a lookup must wait for a tier's answer."""

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Asks shared tiers for the blocks and waits, for a bounded time, for their answers."""

    def lies_elsewhere(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Returns which blocks lie in a tier below host memory or are being promoted from there, a
        mask per list.

        ready: for each list, the blocks that are in host memory.
        tokens_per_s: prefill speed of the engine. Blocks that would arrive later than the engine
            computes them are left out; 0 leaves out no block.
        """

    async def find(
        self, key_space_id: int, groups: list[HashList], wait_s: float = ...
    ) -> list[Lying]:
        """Asks every tier which of the blocks it has. Waits for shared tiers at most `wait_s`. For
        operators and routers."""


class BlocksBelow(Protocol):
    """Manages the blocks in the tiers below host memory: disk and shared stores."""

    @property
    def epochs(self) -> Epochs: ...

    @property
    def lookups(self) -> Lookups: ...

    @property
    def names(self) -> list[str]:
        """Returns the tiers' names, in the order of their numbers in `Space.origins`, from 1."""

    def start(
        self,
        health: Health,
        tell: Callable[[], None],
        flush: Callable[[int], Awaitable[int]],
        on_ready: "OnReady",
    ) -> None:
        """Starts moving blocks.

        tell: called when blocks may have been evicted or condemned.
        flush: flushes a key space in this node only.
        on_ready: called when blocks become ready in a medium.
        """

    def trace(self, tracing: "Tracer") -> None:
        """Makes spans, from this call on, for tier reads and writes of traced calls."""

    async def close(self) -> None:
        """Begins no further move and waits, for a bounded time, for the moves under way."""

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """Sets how many bytes may be written to the tier below in 24 hours; None: no limit."""

    def fetch_ahead(
        self,
        session: LiveSession,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to promote the blocks of a lookup's hit, before a lease asks for them.

        ready, elsewhere: for each list, masks of the blocks that are in host memory, and of the
            blocks that lie in a tier below.
        """

    def has_some(self, session: LiveSession, groups: list[HashList]) -> bool:
        """Returns whether a lease of these blocks must wait for a tier."""

    async def bring_up(self, session: LiveSession, groups: list[HashList]) -> Any:
        """Promotes blocks from tiers into host memory and pins them. Waits for a bounded time. Pass
        the result to `let_go`, which unpins the blocks."""

    def let_go(self, held: Any) -> None:
        """Releases the pins of `bring_up`."""

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Promotes the listed blocks that lie in tiers below host memory, as far as there is room.
        Returns when the blocks are promoted, or at `until_s`."""


class Tracer(Protocol):
    """Makes spans for the work of a call."""

    def child(self, name: str) -> "Span | None":
        """Begins a span below the span of the current call; None if the call is not traced."""

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """Begins spans for blocks that are about to be written to a tier: a span for each traced
        store that brought some of them."""


OnReady = Callable[[Entries, Medium, str], None]
"""Called on the event loop when blocks become ready in a medium. The last argument is the tier's
name, empty for host memory. For DISK, entries are of the tier below; otherwise of host memory."""


def nobody(entries: Entries, medium: Medium, tier: str) -> None:
    """Ignores the event: an `OnReady` that does nothing."""


# Capabilities


Report = RequestReport[Words]
Ended = EndedRequest[Words]
SessionCall = Callable[[LiveSession, Any], Any]
"""Handles messages of one kind from a session's stream. Returns the answer's message, a task or
awaitable of it, or None if the message has no answer. A large answer may be in the stream's message
already, which saves a copy."""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service.

    name: full name, with the package.
    add: registers `servicer` with a server, as the code generated by grpcio does.
    is_admin: whether only operators may call it.
    """

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """A metric with labels.

    name: without the prefix `hotkv_`.
    kind: `counter`, `gauge` or `histogram`.
    samples: pairs of label values and value.
    """

    name: str
    kind: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]


class Capability:
    """An optional part of a server, which the node calls at events. Every method has a default; a
    capability overrides the methods that it needs."""

    # Life cycle

    def start(self, health: Health) -> None:
        """Called when the node starts. `health` watches the loops that the capability starts."""

    async def tick(self, now_s: float) -> None:
        """Called with each turn of the node's timer."""

    async def close(self) -> None:
        """Called when the node ends, after all sessions have closed."""

    def save(self) -> None:
        """Writes files for the next server. Blocks; called on a thread for files (`Clerk`)."""

    def release(self) -> None:
        """Closes resources outside the node. Called after the node has ended, or if the node never
        started. Blocks the calling thread."""

    # Events

    def key_space_added(
        self, number: int, key_space: KeySpace, model_names: Sequence[str] = ()
    ) -> None:
        """Called when a key space becomes known.

        model_names: names by which requests to the engine that brought it address the model; empty
            if no session brought it.
        """

    def model_named(self, number: int, name: str) -> None:
        """Called for each model name that another session of a known key space brings."""

    def key_space_forgotten(self, number: int) -> None:
        """Called when a key space without blocks is forgotten."""

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Called when a store has ended.

        results: BlockResult values, an array per run (consecutive blocks of a group).
        contents: token ids of each run, for events; empty if the engine sent none.
        """

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """Called when a tier has moved blocks. `entries`: the moved blocks' entries, of the tier
        below for the medium DISK, otherwise of host memory. `tier`: the tier's name; empty for host
        memory."""

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        """Called when blocks have been removed.

        notices: blocks removed from host memory.
        below: blocks removed from the tier below host memory.
        flushed_key_space_id: key space that a flush has emptied; 0 without a flush.
        """

    def key_space_flushed(self, number: int) -> None:
        """Called when a flush has ended. Blocks that were stored during the flush may remain."""

    def session_closed(self, session: LiveSession, *, is_last: bool) -> None:
        """Called when a session has closed. `is_last`: True if the session's engine has no other
        session open."""

    def request_scheduled(self, session: LiveSession, report: Report) -> None:
        """Called when an engine reports a request, before its blocks count as used."""

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        """Called when the blocks of a reported request count as used. May yield to other tasks."""

    def request_ended(self, session: LiveSession, ended: Ended) -> None:
        """Called when an engine reports the end of a request."""

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        """Called when the load of a reported request has ended."""

    def bytes_moved(self, session: LiveSession, loaded: int, stored: int) -> None:
        """Called when a transfer has ended, with the bytes that it has loaded and stored."""

    # Reports

    def topics(self) -> Mapping[str, Topic]:
        """Returns the topics that operators can ask about, by name."""
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Returns the fields that this capability adds to the status page. A field's value may be a
        function, which is called later, on another thread.

        has_names: False leaves out the names of tenants, models and engines.
        """
        return {}

    def tiers(self) -> Iterable[Figures]:
        """Returns a row for each tier except host memory, in lookup order. Fields: `name`,
        `capacity_byte_count`, and `activity` if the tier reports it."""
        return ()

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        """Returns columns for the list of sessions: counts by session number. A missing session
        counts 0."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Returns counters by metric name without `hotkv_`. Counters never fall."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Returns gauges by metric name without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        """Returns metrics with labels."""
        return ()

    # Offers to the rest of the server

    def services(self, edge: Any) -> Iterable[Service]:
        """Returns the gRPC services for a listener. `edge`: a `wire.edge.Edge`."""
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """Returns handlers of a session stream's messages by `hotkv.v1.ConnectRequest` field."""
        return {}

    def traced(self, calls: Any) -> Any:
        """Returns the calls of `wire.calls`, wrapped if this capability traces them."""
        return calls

    async def check_blocks(
        self, model: str, block_tokens: int, hashes: Sequence[int]
    ) -> BoolMask | None:
        """Returns which blocks of a prompt are cached, in any medium; None if this capability can't
        tell.

        model: the name that requests use.
        block_tokens: tokens in a block; 0: whatever the model's blocks have.
        hashes: 64-bit hashes of the blocks by Dynamo's router.
        """
        return None

    @property
    def tracer(self) -> Tracer | None:
        """Returns the maker of spans for work below a call; None without tracing."""
        return None

    @property
    def wants_token_ids(self) -> bool:
        """Returns whether engines must send token ids with their stores."""
        return False

    @property
    def engines_publish_events(self) -> bool:
        """Returns whether engines read this server's events to publish them as their own."""
        return False

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        """Returns the latest prompts of a user's session, which routers name in their hints (not a
        session of an engine with this server).

        Each item: tenant, key space id, hash words. `tenant`: empty asks for all tenants.
        """
        return ()
