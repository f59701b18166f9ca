"""The interface between the node and its capabilities.

Capabilities do not know each other: a protocol here describes what one needs of another, and the
node connects the two. Methods run on the event loop and wait neither for files nor for other
machines, unless they say otherwise.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol

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


# A topic is a report for operators: of the command `hotkv`, the status page or HTTP. Its fields
# are those of `hotkv --json`. Computed on the event loop; its size is bounded.


Figures = dict[str, Any]
"""All values can be written as JSON; hashes are hexadecimal, states are words."""
MAX_KEY_SPACE_ID = (1 << 31) - 1


class Filters:
    """A request's filters for a topic, as texts by name. Methods raise INVALID_FIELD for a bad
    value."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"Filters({dict(self._given)!r})"

    def text(self, name: str) -> str:
        """Empty if not given."""
        return self._given.get(name, "")

    def whole(self, name: str, most: int) -> int:
        """From 0 to `most`; 0 if not given."""
        text = self.text(name) or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise invalid(f"{name} is {text[:40]!r}; give a whole number, 0 to {most}")
        return int(text)

    def page_size(self, default: int, most: int) -> int:
        """`default` if the filter is 0 or not given."""
        return self.whole("page_size", most) or default

    def seconds(self, name: str) -> float:
        """0 if not given."""
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
    """`filters`: those that `tell` uses."""

    tell: Callable[[Filters], "Figures | Awaitable[Figures]"]
    filters: tuple[str, ...] = ()


async def tell(topics: Mapping[str, Topic], name: str, given: Mapping[str, str]) -> Figures:
    """Computes the report `name`; if that is empty, lists all topics. Raises INVALID_FIELD for
    an unknown topic or filter, and the errors of the topic."""
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


# Protocols: what a capability or the node needs from another capability.


@dataclass(frozen=True, slots=True)
class TierHolding:
    """The blocks of a lookup that one tier has.

    masks: one for each list of blocks in the lookup.
    bytes_per_s: of the tier's last reads; 0 if no read has found a block.
    """

    name: str
    masks: list[BoolMask]
    is_up: bool
    bytes_per_s: float


class Flushes(Protocol):
    def may_serve(self, key_space_id: int) -> bool:
        """True if all blocks of the key space in host memory are certainly younger than its last
        flush on any node."""

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Bounded. False if `may_serve` stays False, or the server forgets the key space
        meanwhile."""

    async def confirm_new(self, key_space_id: int) -> None:
        """Asks shared stores for a new session's generation; the wait is bounded. Until a store
        has answered, blocks count as possibly older than the last flush."""

    async def flush(self, key_space_id: int) -> Flushed:
        """The result names the tiers that have not answered."""


class Lookups(Protocol):
    def must_ask(self, session: LiveSession | None, groups: list[HashList]) -> bool:
        """True if a lookup must first `ask`: a shared store may have blocks that host memory
        lacks, or must confirm the generation."""

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Asks shared stores, with a bounded wait, and keeps the answers for later lookups."""

    def in_lower_tiers(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Masks of the blocks that lie in a tier below host memory, or are being promoted.

        ready: masks of the blocks in host memory.
        tokens_per_s: leaves out what an engine with this prefill speed computes sooner; 0:
            nothing.
        """

    async def find(
        self, key_space_id: int, groups: list[HashList], wait_s: float = ...
    ) -> list[TierHolding]:
        """For operators and routers: asks every tier, shared stores for at most `wait_s`."""


class LocalFlush(Protocol):
    """Flushes on this node only. Returns the number of removed blocks."""

    def __call__(self, key_space_id: int, *, elsewhere: bool) -> Awaitable[int]:
        """`elsewhere`: another node has requested it."""


class BlocksBelow(Protocol):
    """The tiers below host memory."""

    @property
    def generations(self) -> Flushes: ...

    @property
    def lookups(self) -> Lookups: ...

    @property
    def names(self) -> list[str]:
        """`Space.origins` stores positions in this list, counted from 1."""

    def start(
        self,
        health: Health,
        tell: Callable[[], None],
        flush: LocalFlush,
        on_ready: "OnReady",
        on_flushed: Callable[[int], None],
    ) -> None:
        """tell: called when blocks may have been evicted or condemned.
        on_flushed: called with a key space that another node has flushed, without blocks here.
        """

    def trace(self, tracing: "Tracer") -> None: ...

    async def close(self) -> None:
        """Begins no further move; the wait for running ones is bounded."""

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """For the disk, in 24 hours; None: no limit."""

    def fetch_ahead(
        self,
        session: LiveSession,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to promote a hit's blocks right after the lookup, before a lease is asked for.

        ready, elsewhere: masks of the blocks in host memory, and in a tier below.
        """

    def must_promote(self, session: LiveSession, groups: list[HashList]) -> bool:
        """True if a lease must first `promote`: a tier may have blocks that host memory lacks."""

    async def promote(self, session: LiveSession, groups: list[HashList]) -> Any:
        """Promotes blocks and pins them; the wait is bounded. The result goes to `unpin`."""

    def unpin(self, held: Any) -> None: ...

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Promotes blocks as far as there is room, at most until `until_s` of the monotonic
        clock."""


class Tracer(Protocol):
    def child(self, name: str) -> "Span | None":
        """None if the current call is not traced."""

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """For blocks about to be written to a tier: one for each traced store of some of them,
        up to a limit."""


OnReady = Callable[[Entries, Medium, str], None]
"""Called on the event loop when blocks become ready. Entries are of the disk's block table for
the medium DISK, else of host memory's. The tier is empty for host memory."""


def nobody(entries: Entries, medium: Medium, tier: str) -> None: ...


# Capabilities


Report = RequestReport[Words]
Ended = EndedRequest[Words]
SessionCall = Callable[[LiveSession, Any], Any]
"""Handles messages of one kind from a session's stream. Returns one of these:

- the answer's message, or None without an answer;
- a task or awaitable with the answer's message, or an awaitable with such a task;
- a whole message of the stream with the answer, which saves copying a large one.
"""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service of a capability.

    name: full, with the package.
    add: registers `servicer` with a server, as grpcio's generated code does.
    is_admin: only operators may call it.
    """

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """A metric with labels.

    name: without `hotkv_`.
    kind: `counter`, `gauge` or `histogram`.
    samples: label values, in the order of `monitoring.metric_help`, and the value.
    """

    name: str
    kind: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]


# Events and offers. A capability subscribes when it is made, before the node starts.


P = ParamSpec("P")


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    """Runs all even if one raises, and then raises the first error."""
    failure: BaseException | None = None
    for one in calls:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 Raised below.
            failure = failure or error
    if failure is not None:
        raise failure


class Signal(Generic[P]):
    """Calls its subscribers in the order of their subscription, as `run_all`."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[P, object]] = []

    def __repr__(self) -> str:
        return f"Signal({len(self._subscribers)} subscribers)"

    def add(self, subscriber: Callable[P, object]) -> None:
        self._subscribers.append(subscriber)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        failure: BaseException | None = None
        for one in self._subscribers:
            try:
                one(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 Raised below.
                failure = failure or error
        if failure is not None:
            raise failure


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """How long the stages of a transfer took, in seconds.

    outcome: `done`, `failed`, `cancelled`.
    num_bytes: that it was to copy.
    room_s: until the core had begun it; of a store with making room.
    ready_s: checks of blocks and memory, and the wait for the engine's mark; all the rest if
        nothing was copied.
    queue_s: for a copy thread, or in a device's queue.
    """

    is_load: bool
    outcome: str
    num_bytes: int
    room_s: float
    ready_s: float
    queue_s: float
    copy_s: float

    @property
    def took_s(self) -> float:
        return self.room_s + self.ready_s + self.queue_s + self.copy_s


class NodeEvents:
    """Of each the arguments:

    key_space_added: number, key space, and the names by which requests address the model (empty
        without a session). Also at the start, for each restored one.
    model_named: key space id and name, once for each new name of a known key space's model.
    key_space_forgotten: number.
    key_space_flushed: number; True if another node has requested it. Blocks stored during the
        flush may remain.
    blocks_stored: session, runs, token ids of each run (may be empty), and `BlockResult` values, an
        array for each run; after a store, with all blocks that it named.
    transfer_ended: session and times, of every load and store.
    blocks_moved: as of `OnReady`: blocks are ready in another medium.
    blocks_removed: notices of host memory, notices of the disk, and the key space that a flush has
        begun to empty, whose blocks follow later (0: none).
    session_closed: session; True if it was its engine's last.
    request_scheduled: session and report, before the node records a use of the blocks.
    request_noted: likewise after it, and awaited.
    request_ended, load_ended: session and end.
    saving: files for the next server are to be written, after `Capability.release`, on a thread
        that may be blocked.
    """

    def __init__(self) -> None:
        self.key_space_added = Signal[[int, KeySpace, Sequence[str]]]()
        self.model_named = Signal[[int, str]]()
        self.key_space_forgotten = Signal[[int]]()
        self.key_space_flushed = Signal[[int, bool]]()
        self.blocks_stored = Signal[
            [LiveSession, Sequence[Run], Sequence[RunContent], Sequence[NDArray[np.uint8]]]
        ]()
        self.transfer_ended = Signal[[LiveSession, TransferTimes]]()
        self.blocks_moved = Signal[[Entries, Medium, str]]()
        self.blocks_removed = Signal[[Sequence[EvictionNotice], Sequence[EvictionNotice], int]]()
        self.session_closed = Signal[[LiveSession, bool]]()
        self.request_scheduled = Signal[[LiveSession, Report]]()
        self.request_noted: list[Callable[[LiveSession, Report], Awaitable[None]]] = []
        self.request_ended = Signal[[LiveSession, Ended]]()
        self.load_ended = Signal[[LiveSession, LoadEnd]]()
        self.saving = Signal[[]]()


class CheckBlocks(Protocol):
    async def __call__(
        self, model: str, block_tokens: int, hashes: Sequence[int]
    ) -> BoolMask | None:
        """For Dynamo's KV router: which blocks are cached in any medium; None if unknown here.

        model: the name by which requests address it.
        block_tokens: 0: as the model's blocks have.
        hashes: 64 bits, as Dynamo's router computes them.
        """


@dataclass(slots=True)
class Offers:
    """What at most one capability does for the rest of the server.

    traced: wraps each function of `wire.calls` in a span.
    tier_rows: a row for each tier below host memory, in lookup order: `name`,
        `capacity_byte_count`, `activity`.
    session_figures: columns for the list of sessions, by session number.
    session_prompts: latest prompts of a user's conversation, given a router's name for it and a
        tenant (empty for all): tenant, key space id and hash words.
    wants_token_ids: engines must send token ids with their stores.
    engines_publish_events: engines publish this server's events as their own.
    """

    tracer: Tracer | None = None
    traced: Callable[[Any], Any] | None = None
    check_blocks: CheckBlocks | None = None
    tier_rows: Callable[[], Iterable[Figures]] = lambda: ()
    session_figures: Callable[[], Mapping[str, Mapping[int, int]]] = dict
    session_prompts: Callable[[str, str], Sequence[tuple[str, int, Words]]] = lambda *_: ()
    wants_token_ids: bool = False
    engines_publish_events: bool = False


class Capability:
    """A part of the server that can be left out. Methods do nothing by default; a capability
    overrides those it needs."""

    # Life cycle

    def start(self, health: Health) -> None: ...

    async def tick(self, now_s: float) -> None: ...

    async def close(self) -> None:
        """After all sessions have closed."""

    def release(self) -> None:
        """Closes threads and connections after the node's end, or if it never started. Blocks."""

    # Reports

    def topics(self) -> Mapping[str, Topic]:
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Fields for the server's status. A value may be a function, called later on another
        thread.

        `has_names`: if False, without names of tenants, models and engines.
        """
        return {}

    def counters(self) -> Mapping[str, float]:
        """By metric name, without `hotkv_`."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """By metric name, without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        return ()

    # Calls

    def services(self, edge: Any) -> Iterable[Service]:
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """By field name of `hotkv.v1.ConnectRequest`."""
        return {}
