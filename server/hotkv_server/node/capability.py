"""The seam between the node and its capabilities: parts that the node can do without.

The node holds a tuple of capabilities. It calls each when something happens, and asks each for its
figures and for the calls that it serves. Capabilities do not know each other. Every method has a
default that adds nothing. All methods run on the event loop and wait for no file and for no other
machine, unless they say so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import RunContent
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import EndedRequest, LoadEnd, RequestReport
from hotkv_proto.table import Words
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.values import Entries, EvictionNotice, Medium, Run
from hotkv_server.node.health import Health
from hotkv_server.node.seams import Tracer
from hotkv_server.node.session import LiveSession
from hotkv_server.node.topics import Figures, Topic

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
        """Called when a tier has moved blocks; arguments as of `seams.OnReady`."""

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
