"""The interface between the node and its capabilities: optional parts of the server, such as hints
or residencies (requests whose KV stays in host memory).

The node holds the capabilities of its server. It calls each capability at events, for example when
blocks were stored, and asks each for its figures and for the gRPC calls that it serves.
Capabilities do not know each other: if a capability needs another, a protocol in this module
describes the need and the node connects the two. Every method of `Capability` has a default that
does nothing. All methods run on the event loop. They wait neither for files nor for other machines,
unless their docstring says otherwise.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import Flushed, RunContent
from hotkv_proto.errors import invalid
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import EndedRequest, LoadEnd, RequestReport
from hotkv_proto.table import Words
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.values import BoolMask, Entries, EvictionNotice, HashList, Medium, Run
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


# A topic is a report that the server makes about one of its subjects, for example its key spaces.
# Operators request it by name, with the command `hotkv`, on the status page or over HTTP.
#
# The field names of a report are the names that `hotkv --json` shows. Numbers are plain, hashes are
# hexadecimal, states are words. A topic is computed on the event loop and its size is bounded.


Figures = dict[str, Any]
"""Figures of a report, by name. All values can be written as JSON."""
MAX_KEY_SPACE_ID = (1 << 31) - 1


class Filters:
    """The filters with which an operator requests a topic (a report of the server), as texts by
    name. They select what the report covers. Each method parses one filter, and raises
    INVALID_FIELD if its value is not valid."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"Filters({dict(self._given)!r})"

    def text(self, name: str) -> str:
        """Returns the value of the filter `name` as text; empty if it is not given."""
        return self._given.get(name, "")

    def whole(self, name: str, most: int) -> int:
        """Returns the value of the filter `name` as a whole number from 0 to `most`; 0 if it is not
        given."""
        text = self.text(name) or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise invalid(f"{name} is {text[:40]!r}; give a whole number, 0 to {most}")
        return int(text)

    def page_size(self, default: int, most: int) -> int:
        """Returns the number of rows to report, from the filter `page_size`; `default` if that is 0
        or not given."""
        return self.whole("page_size", most) or default

    def seconds(self, name: str) -> float:
        """Returns the value of the filter `name` in seconds; 0 if it is not given."""
        text = self.text(name) or "0"
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found >= 0):
            raise invalid(f"{name} is {text[:40]!r}; give seconds, 0 for all")
        return found


@dataclass(frozen=True, slots=True)
class Topic:
    """A report of the server about one of its subjects, which operators request by name.

    tell: function that computes the report, given the filters of the request.
    filters: names of the filters that `tell` uses.
    """

    tell: Callable[[Filters], "Figures | Awaitable[Figures]"]
    filters: tuple[str, ...] = ()


async def tell(topics: Mapping[str, Topic], name: str, given: Mapping[str, str]) -> Figures:
    """Computes the report of the topic `name`. If `name` is empty, returns the names of all topics
    with their filters. `given`: the filters of the request.

    Raises INVALID_FIELD for an unknown topic or filter, and the errors of the topic's `tell`.
    """
    if not name:
        return {"topics": {name: list(topic.filters) for name, topic in topics.items()}}
    topic = topics.get(name)
    if topic is None:
        raise invalid(f"topic is {name[:40]!r}; this server tells of {', '.join(topics)}")
    for known in given:
        if known not in topic.filters:
            raise invalid(
                f"filters has {known[:40]!r}; {name} heeds {', '.join(topic.filters) or 'none'}"
            )
    told = topic.tell(Filters(given))
    return told if isinstance(told, dict) else await told


# Protocols: each describes an object that a capability (optional part of the server) or the node
# needs from another capability, or a value that the two exchange.


@dataclass(frozen=True, slots=True)
class TierHolding:
    """The blocks of a lookup that one tier has: the tier's part of the answer of `Lookups.find`.

    name: name of the tier.
    masks: for each list of blocks in the lookup, a mask of the blocks that the tier has.
    is_up: True if the tier can be read at the moment.
    bytes_per_s: rate of the tier's last reads; 0 if no read has found a block.
    """

    name: str
    masks: list[BoolMask]
    is_up: bool
    bytes_per_s: float


class Flushes(Protocol):
    """Flushes key spaces, in this node and in tiers that nodes share. A flush deletes all blocks of
    a key space (a model in a configuration). Each shared tier has a generation for each key space:
    a number that each flush of the key space raises."""

    def may_serve(self, key_space_id: int) -> bool:
        """Returns True if the blocks of the key space (a model in a configuration) in host
        memory may be used. They may be used if it is certain that all of them were stored after the
        last flush of the key space. Flushes that were requested on other nodes count too."""

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits, for a bounded time, until `may_serve` returns True for the key space (a model in
        a configuration). Returns False if that takes longer, or if the server forgets the key
        space meanwhile."""

    async def confirm_new(self, key_space_id: int) -> None:
        """Asks shared tiers for the generation (number that each flush raises) of a new session's
        key space, and waits for the answers for a bounded time. Until a tier has answered, the
        server treats the blocks that are stored as possibly older than the last flush."""

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space: deletes all blocks of a model in a configuration, in this node
        and in all tiers. Returns the number of deleted blocks, and the names of the tiers that have
        not answered."""


class Lookups(Protocol):
    """Looks up blocks in the tiers below host memory, and decides whether a client's lookup waits
    for them."""

    def must_ask(self, session: LiveSession | None, groups: list[HashList]) -> bool:
        """Returns True if a lookup of these blocks must wait for the answer of a shared tier
        (`ask`). It must wait in two cases: a shared tier may have blocks that host memory lacks; or
        a shared tier must first confirm the key space's generation (number that each flush raises).
        Returns False if `session` is None."""

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Asks shared tiers which of the blocks they have, and waits for the answers for a bounded
        time. Stores the answers for the lookups that follow."""

    def lies_elsewhere(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Returns, for each list of `groups`, a mask of the blocks that lie in a tier below host
        memory, or are being promoted from a tier.

        ready: for each list, a mask of the blocks that are in host memory.
        tokens_per_s: prefill speed of the engine. Blocks that would arrive later than the engine
            computes them are left out; 0 leaves out no block.
        """

    async def find(
        self, key_space_id: int, groups: list[HashList], wait_s: float = ...
    ) -> list[TierHolding]:
        """Asks every tier which of the blocks it has, for operators and routers. Waits for shared
        tiers at most `wait_s` seconds."""


class FlushHere(Protocol):
    """Flushes a key space (deletes all blocks of a model in a configuration) on this node only, and
    returns the number of removed blocks."""

    def __call__(self, key_space_id: int, *, elsewhere: bool) -> Awaitable[int]:
        """Flushes the key space. `elsewhere`: True if another node has requested the flush."""


class BlocksBelow(Protocol):
    """Manages the tiers below host memory (disk and shared stores), and moves blocks between them
    and host memory."""

    @property
    def generations(self) -> Flushes: ...

    @property
    def lookups(self) -> Lookups: ...

    @property
    def names(self) -> list[str]:
        """The tiers' names. `Space.origins`, the core's record of the tier from which each block
        was promoted, stores a tier's position in this list, counted from 1."""

    def start(
        self,
        health: Health,
        tell: Callable[[], None],
        flush: FlushHere,
        on_ready: "OnReady",
        on_flushed: Callable[[int], None],
    ) -> None:
        """Starts moving blocks between tiers.

        health: watches the loops and threads of the tiers.
        tell: function to call when blocks may have been evicted, or condemned (dropped because
            they are damaged).
        flush: flushes a key space in this node only.
        on_ready: function to call when blocks become ready in a medium (host memory, the disk or a
            shared store).
        on_flushed: function to call, with the key space's id, if another node has flushed a key
            space of which this node has no block.
        """

    def trace(self, tracing: "Tracer") -> None:
        """Starts tracing: from now on, the reads and writes of tiers for traced calls get spans
        (timed parts of a trace)."""

    async def close(self) -> None:
        """Stops moving blocks between tiers: begins no further move, and waits, for a bounded time,
        until the running moves end."""

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """Sets how many bytes may be written to the disk in 24 hours; None: no limit."""

    def fetch_ahead(
        self,
        session: LiveSession,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to promote the blocks of a hit right after the lookup, before the engine asks for
        a lease.

        groups: the blocks of the prompt, a list for each group.
        ready, elsewhere: for each list, masks of the blocks that are in host memory, and of the
            blocks that lie in a tier below.
        """

    def has_some(self, session: LiveSession, groups: list[HashList]) -> bool:
        """Returns True if a call for a lease on these blocks must first wait for `promote`, which
        promotes blocks from tiers. It must wait if host memory lacks some of the blocks, and a tier
        may have these blocks or they are already being read from a tier."""

    async def promote(self, session: LiveSession, groups: list[HashList]) -> Any:
        """Promotes blocks of `groups` from tiers into host memory, and pins the blocks there. Waits
        for the promotions for a bounded time. The caller must pass the result to `unpin`, which
        unpins the blocks."""

    def unpin(self, held: Any) -> None:
        """Unpins the blocks that a call of `promote` has pinned. `held`: the result of that
        call."""

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Promotes blocks of `groups` from tiers into host memory, as far as there is room. Returns
        when the blocks are promoted, or at the time `until_s` of the monotonic clock."""


class Tracer(Protocol):
    """Makes spans (timed parts of a trace) for the work of a call."""

    def child(self, name: str) -> "Span | None":
        """Begins a span whose parent is the span of the current call; None if the call is not
        traced."""

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """Begins spans for blocks that are about to be written to a tier: one span for each traced
        store call that stored some of the blocks, up to a limit of spans."""


OnReady = Callable[[Entries, Medium, str], None]
"""Function that is called on the event loop when blocks become ready in a medium (host memory, the
disk or a shared store). Its arguments are the blocks' entries, the medium and the tier's name
(empty for host memory). The entries are numbers of records: in the disk's block table if the medium
is DISK, otherwise in the block table of host memory."""


def nobody(entries: Entries, medium: Medium, tier: str) -> None:
    """Does nothing when blocks become ready (an `OnReady` function)."""


# Capabilities


Report = RequestReport[Words]
Ended = EndedRequest[Words]
SessionCall = Callable[[LiveSession, Any], Any]
"""Function that handles the messages of one kind from a session's stream. Its arguments are the
session and the message. Returns one of these:

- the answer's message, or None if the message has no answer;
- a task or awaitable that returns the answer's message later, or an awaitable that returns such a
  task;
- a complete message of the stream that contains the answer, which saves copying a large answer.
"""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service that a capability adds to the server.

    name: full name, with the package.
    add: function that registers `servicer` with a server, as the code generated by grpcio does.
    is_admin: True if only operators may call the service.
    """

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """A metric whose values have labels.

    name: without the prefix `hotkv_`.
    kind: `counter`, `gauge` or `histogram`.
    samples: a pair for each combination of label values: the label values, in the order of the
        metric's labels (`monitoring.metric_help`), and the value.
    """

    name: str
    kind: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]


class Capability:
    """An optional part of a server, such as hints or residencies (requests whose KV stays in host
    memory). The node calls its methods when something happens. Every method has a default that does
    nothing; a capability overrides the methods that it needs."""

    # Life cycle

    def start(self, health: Health) -> None:
        """Called when the node starts. `health` watches the loops that the capability starts."""

    async def tick(self, now_s: float) -> None:
        """Called at each turn of the node's timer, several times a second."""

    async def close(self) -> None:
        """Called when the node ends, after all sessions have closed."""

    def save(self) -> None:
        """Writes files for the next server. Called after `release`, on the thread that writes files
        (`Clerk`). May block that thread."""

    def release(self) -> None:
        """Closes resources outside the node, such as threads and connections. Called after the node
        has ended, or if the node never started. Blocks the calling thread."""

    # Events

    def key_space_added(
        self, number: int, key_space: KeySpace, model_names: Sequence[str] = ()
    ) -> None:
        """Called when a key space (a model in a configuration) is registered, and at the start
        for each restored key space.

        model_names: names by which requests address the model, as reported by the session with
            which the key space was registered; empty if it was registered without a session.
        """

    def model_named(self, number: int, name: str) -> None:
        """Called when a later session of a known key space (a model in a configuration) reports
        a new name by which requests address the model. Called once for each name."""

    def key_space_forgotten(self, number: int) -> None:
        """Called when a key space (a model in a configuration) without blocks is forgotten: the
        server no longer has it registered."""

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Called when a store has ended.

        runs: the blocks that the store named, as runs (consecutive blocks of a group).
        contents: token ids of each run, for events; empty if the engine sent none.
        results: what became of the blocks (`BlockResult` values), an array for each run.
        """

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """Called when blocks became ready in another medium (host memory, the disk or a shared
        store), because they were moved or copied between tiers.

        entries: the blocks' entry numbers. For the medium DISK these are numbers in the disk's
            block table, otherwise in the block table of host memory.
        tier: the tier's name; empty for host memory.
        """

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        """Called when blocks have been removed.

        notices: blocks removed from host memory.
        below: blocks removed from the disk.
        flushed_key_space_id: the key space of which a flush has begun to remove all blocks; 0 if no
            flush has begun. The blocks that the flush removes are named in later calls.
        """

    def key_space_flushed(self, number: int, *, elsewhere: bool = False) -> None:
        """Called when a flush (deletion of all blocks of a key space) has ended. Blocks that were
        stored during the flush may remain.

        elsewhere: True if another node has requested the flush.
        """

    def session_closed(self, session: LiveSession, *, is_last: bool) -> None:
        """Called when a session has closed. `is_last`: True if the session's engine has no other
        session open."""

    def request_scheduled(self, session: LiveSession, report: Report) -> None:
        """Called when an engine reports that it has scheduled a request, before the node records a
        use of the request's blocks."""

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        """Called after `request_scheduled`, when the node has recorded a use of the blocks of the
        reported request. While this call waits, other tasks may run."""

    def request_ended(self, session: LiveSession, ended: Ended) -> None:
        """Called when an engine reports the end of a request."""

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        """Called when an engine reports that the load of a reported request has ended."""

    def bytes_moved(self, session: LiveSession, loaded: int, stored: int) -> None:
        """Called when a transfer has ended. `loaded`, `stored`: the bytes that it has copied; one
        of them is 0."""

    # Reports

    def topics(self) -> Mapping[str, Topic]:
        """Returns the topics (reports) of this capability that operators can request, by name."""
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Returns the fields that this capability adds to the server's status. A field's value may
        be a function, which is called later, on another thread.

        has_names: if False, leaves out the names of tenants, models and engines.
        """
        return {}

    def tiers(self) -> Iterable[Figures]:
        """Returns a row for each tier except host memory, in lookup order. Fields: `name`,
        `capacity_byte_count`, and `activity` if the tier reports it."""
        return ()

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        """Returns additional columns for the list of sessions: for each column name, counts by
        session number. A missing session counts 0."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Returns counters by metric name without `hotkv_`. Counters never fall."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Returns gauges by metric name without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        """Returns metrics whose values have labels."""
        return ()

    # Offers to the rest of the server

    def services(self, edge: Any) -> Iterable[Service]:
        """Returns the gRPC services that this capability adds to a listener. `edge`: a
        `wire.edge.Edge`, which connects the services with the node."""
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """Returns functions that handle messages of a session's stream. The keys are names of
        fields of `hotkv.v1.ConnectRequest`: a function handles the messages with that field."""
        return {}

    def traced(self, calls: Any) -> Any:
        """Returns the functions in `calls` (of the module `wire.calls`). If this capability traces
        calls, returns each function wrapped so that it makes a span."""
        return calls

    async def check_blocks(
        self, model: str, block_tokens: int, hashes: Sequence[int]
    ) -> BoolMask | None:
        """Returns which blocks of a prompt are cached, in any medium; None if this capability does
        not know. The KV router of Dynamo asks for this.

        model: the name by which requests address the model.
        block_tokens: tokens in a block; 0: as many as the model's blocks have.
        hashes: 64-bit hashes of the blocks, as Dynamo's router computes them.
        """
        return None

    @property
    def tracer(self) -> Tracer | None:
        """The tracer that makes spans for the parts of a traced call; None if this capability does
        not trace calls."""
        return None

    @property
    def wants_token_ids(self) -> bool:
        """True if engines must send token ids with their stores."""
        return False

    @property
    def engines_publish_events(self) -> bool:
        """True if engines read this server's events and publish them as their own."""
        return False

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        """Returns the latest prompts of a user's conversation. `session_id` is the id by which
        hints of routers name the conversation, not the id of an engine's session with this server.

        Each item of the result has a tenant, a key space id and hash words. `tenant`: returns only
        prompts of this tenant; an empty text means all tenants.
        """
        return ()


def tell_all(capabilities: Sequence[Capability], tell: Callable[[Capability], None]) -> None:
    """Calls `tell` with each capability (optional part of the server), in order. If a call raises
    an error, still makes the remaining calls, and then raises the error."""
    with ExitStack() as telling:
        for one in reversed(capabilities):
            telling.callback(tell, one)
