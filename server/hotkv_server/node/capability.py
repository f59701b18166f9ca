"""The interface between the node and its capabilities.

Capabilities do not know each other: a protocol here describes what one needs of another, and the
node connects the two. Methods run on the event loop and wait neither for files nor for other
machines, unless they say otherwise.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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


class Capability:
    """A part of the server that can be left out. Methods do nothing by default; a capability
    overrides those it needs."""

    # Life cycle

    def start(self, health: Health) -> None: ...

    async def tick(self, now_s: float) -> None: ...

    async def close(self) -> None:
        """After all sessions have closed."""

    def save(self) -> None:
        """Writes files for the next server, after `release`, on a thread that it may block."""

    def release(self) -> None:
        """Closes threads and connections after the node's end, or if it never started. Blocks."""

    # Events

    def key_space_added(
        self, number: int, key_space: KeySpace, model_names: Sequence[str] = ()
    ) -> None:
        """Also at the start, for each restored one. `model_names`: by which requests address the
        model; empty without a session."""

    def model_named(self, number: int, name: str) -> None:
        """Once for each new name of a known key space's model."""

    def key_space_forgotten(self, number: int) -> None: ...

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        """After a store, with all blocks that it named.

        contents: token ids of each run; may be empty.
        results: `BlockResult` values, an array for each run.
        """

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """Blocks are ready in another medium; arguments as for `OnReady`."""

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        """notices: from host memory.
        below: from the disk.
        flushed_key_space_id: a flush has begun to empty this; its blocks follow in later calls.
            0: none.
        """

    def key_space_flushed(self, number: int, *, elsewhere: bool = False) -> None:
        """Blocks stored during the flush may remain. `elsewhere`: another node has requested it."""

    def session_closed(self, session: LiveSession, *, is_last: bool) -> None:
        """`is_last`: of its engine."""

    def request_scheduled(self, session: LiveSession, report: Report) -> None:
        """Before the node records a use of the blocks."""

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        """After the node has recorded a use of the blocks."""

    def request_ended(self, session: LiveSession, ended: Ended) -> None: ...

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None: ...

    def bytes_moved(self, session: LiveSession, loaded: int, stored: int) -> None:
        """After a transfer; one of the two is 0."""

    # Reports

    def topics(self) -> Mapping[str, Topic]:
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Fields for the server's status. A value may be a function, called later on another
        thread.

        `has_names`: if False, without names of tenants, models and engines.
        """
        return {}

    def tiers(self) -> Iterable[Figures]:
        """A row for each tier below host memory, in lookup order: `name`, `capacity_byte_count`,
        `activity`."""
        return ()

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        """Columns for the list of sessions, by session number."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """By metric name, without `hotkv_`."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """By metric name, without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        return ()

    # Offers to the rest of the server

    def services(self, edge: Any) -> Iterable[Service]:
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """By field name of `hotkv.v1.ConnectRequest`."""
        return {}

    def traced(self, calls: Any) -> Any:
        """Each function of `wire.calls`, wrapped in a span."""
        return calls

    async def check_blocks(
        self, model: str, block_tokens: int, hashes: Sequence[int]
    ) -> BoolMask | None:
        """For Dynamo's KV router: which blocks are cached in any medium; None if unknown here.

        model: the name by which requests address it.
        block_tokens: 0: as the model's blocks have.
        hashes: 64 bits, as Dynamo's router computes them.
        """
        return None

    @property
    def tracer(self) -> Tracer | None:
        return None

    @property
    def wants_token_ids(self) -> bool:
        """True if engines must send token ids with their stores."""
        return False

    @property
    def engines_publish_events(self) -> bool:
        """True if engines publish this server's events as their own."""
        return False

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        """Latest prompts of a user's conversation: tenant, key space id and hash words.

        session_id: a router's name for the conversation, not a session of this server.
        tenant: empty for all.
        """
        return ()


def tell_all(capabilities: Sequence[Capability], tell: Callable[[Capability], None]) -> None:
    """Calls `tell` with each capability in order, with all even if one raises, and then raises
    its error."""
    failure: BaseException | None = None
    for one in capabilities:
        try:
            tell(one)
        except BaseException as error:  # noqa: BLE001 Raised below.
            failure = failure or error
    if failure is not None:
        raise failure
