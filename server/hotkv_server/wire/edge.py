"""What the services of a listener share, and the calls as capabilities serve them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hotkv_proto.v1 import cache_pb2
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.security.identity import AccessControl, Peer
from hotkv_server.wire import calls
from hotkv_server.wire.guard.guests import Guests
from hotkv_server.wire.guard.throttle import Pace

MAX_SELECT_STREAMS = 64
"""Streams of selections on one listener; they count in the bound of all calls."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One listener. `identify`: what the peer of a call has proven, given its message, which may
    have a ticket, and its context; raises HotKVError for a proof that is of no use."""

    node: Node
    access: AccessControl
    identify: Callable[[Any, Any], Peer]
    pace: Pace
    guests: Guests
    has_descriptor_socket: bool


def full_name(module: Any, service: str) -> str:
    """The name of a service of a generated module, with its package."""
    return str(module.DESCRIPTOR.services_by_name[service].full_name)


class Calls(Protocol):
    """The calls that a capability may serve in its own way, such as with spans around them: the
    module `calls` has them."""

    def lookup(
        self, node: Node, session: LiveSession | None, request: cache_pb2.LookupRequest
    ) -> "cache_pb2.LookupResponse | asyncio.Task[cache_pb2.LookupResponse]": ...
    def acquire(
        self, node: Node, session: LiveSession, request: cache_pb2.AcquireLeaseRequest
    ) -> "cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]": ...
    def load(
        self, node: Node, session: LiveSession, request: cache_pb2.LoadRequest
    ) -> "asyncio.Future[TransferEnd]": ...
    async def store(
        self, node: Node, session: LiveSession, request: cache_pb2.StoreRequest
    ) -> "asyncio.Future[TransferEnd]": ...


def calls_of(node: Node) -> Calls:
    """The calls as this node serves them."""
    served: Calls = calls
    for one in node.capabilities:
        served = one.traced(served)
    return served
