"""What a capability is to the node: a part that adds something and that the node can do without.

The node holds a tuple of capabilities, tells each what happens, and asks each what it has to tell
and which calls it serves. It knows no more of them, and they know nothing of each other. Every
method has a default that adds nothing. All run on the event loop; none may wait for a file or for
another machine, unless it says so.
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
"""Serves one kind of message of a session's stream: returns the answer's message, a task or an
awaitable of it, or None for no answer."""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service. `add`: registers `servicer` with a server, as grpcio's generated code does.
    `name`: with its package. `is_admin`: it is for operators."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """A metric with labels, by its name without `hotkv_`: labels and the value of each sample.
    `kind`: `counter`, `gauge` or `histogram`."""

    name: str
    kind: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]


class Capability:
    """See the module."""

    # Its life

    def start(self, health: Health) -> None:
        """The node has started; `health` watches what it starts."""

    async def tick(self, now_s: float) -> None:
        """One turn of the node's timer."""

    async def close(self) -> None:
        """The node ends; sessions have closed, the core is still there."""

    def save(self) -> None:
        """Writes down for the next server. Blocks; on a clerk's thread."""

    def release(self) -> None:
        """Gives back what it holds beside the node, after the node's end or if it never started.
        Blocks."""

    # What happens

    def key_space_added(self, number: int, key_space: KeySpace) -> None:
        """A key space is known from now on."""

    def key_space_forgotten(self, number: int) -> None:
        """A key space, which has no blocks, is not known any more."""

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        """A store has ended: BlockResult values by run. `contents`: one a run, or none."""

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """Blocks are ready in another medium than they were stored in; as `seams.OnReady`."""

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        """Blocks are gone from host memory, and from the tier `below`. `flushed_key_space_id`: of
        this key space nothing is left; 0 for none."""

    def session_closed(self, session: LiveSession, *, is_last: bool) -> None:
        """A session has given everything back. `is_last`: its engine has no other."""

    def request_scheduled(self, session: LiveSession, report: Report) -> None:
        """An engine has reported a request, whose blocks are about to count as used."""

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        """The blocks of a reported request count as used. May serve others meanwhile."""

    def request_ended(self, session: LiveSession, ended: Ended) -> None:
        """A request has ended."""

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        """A load whose request was reported has ended."""

    def bytes_moved(self, session: LiveSession, loaded: int, stored: int) -> None:
        """A transfer has ended, with so many bytes."""

    # What it tells

    def topics(self) -> Mapping[str, Topic]:
        """What operators can ask it, by name."""
        return {}

    def status(self, *, has_names: bool) -> Figures:
        """Its part of the status page. `has_names`: False leaves out what names tenants, models or
        engines. A value that is a function is called later, on another thread, and gives the
        value."""
        return {}

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        """Counts by name and number of a session; sessions without one may be left out."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Counters by their metric names, without `hotkv_`; they never fall."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Gauges by their metric names, without `hotkv_`."""
        return {}

    def samples(self) -> Iterable[Samples]:
        """Metrics with labels."""
        return ()

    # What it does for others

    def services(self, edge: Any) -> Iterable[Service]:
        """The gRPC services that it adds to a listener, whose `wire.edge.Edge` is given."""
        return ()

    def session_calls(self) -> Mapping[str, SessionCall]:
        """The messages of a session's stream that it serves, by their field in
        `hotkv.v1.ConnectRequest`."""
        return {}

    def traced(self, calls: Any) -> Any:
        """The calls of `wire.calls` as they are to be served."""
        return calls

    @property
    def tracer(self) -> Tracer | None:
        """For spans of what is done for a call."""
        return None

    @property
    def wants_token_ids(self) -> bool:
        """Whether engines are to send the token ids of what they store."""
        return False

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        """The latest prompts of a session that a router has named: tenant, key space and hash
        words of each. `tenant`: empty for all."""
        return ()
