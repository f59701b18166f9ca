"""Builds the gRPC servers, one for each listener, and adds the services:

- `grpc.sock`: sessions, cache, and the capabilities' services for users; health, reflection.
- `lane.sock`: sessions of engines, without gRPC (`wire.lane`).
- `admin.sock`: admin, and the capabilities' services for operators; health, reflection, channelz.
- TCP, if set: the users' services, and health. If set, also reflection, and the operators' services
  for peers that prove to be admins.

Always true: connections, calls and message sizes are bounded on each listener, and so is the
memory for incomplete messages (MAX_INCOMPLETE_BYTES).
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health as health_names
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.lane import SOCKET_NAME as LANE_SOCKET
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.node.capability import Service
from hotkv_server.node.node import Node
from hotkv_server.node.sessions import MAX_SESSIONS
from hotkv_server.security.identity import AccessControl, Peer, Tickets
from hotkv_server.wire.admin_service import AdminService
from hotkv_server.wire.cache_service import CacheService
from hotkv_server.wire.edge import MAX_SELECT_STREAMS, Edge, full_name
from hotkv_server.wire.guard import peers
from hotkv_server.wire.guard.audit import AuditLog, Who
from hotkv_server.wire.guard.interceptor import MAX_ANSWERED, EdgeInterceptor, Guard
from hotkv_server.wire.guard.limits import Pace, SessionlessCalls
from hotkv_server.wire.guard.tls import Certificates, TlsFiles
from hotkv_server.wire.health import HealthService
from hotkv_server.wire.lane import LaneServer
from hotkv_server.wire.session_stream import SessionOpener, SessionService

MAX_CONNECTIONS = MAX_SESSIONS + 512
MAX_GUESTS = 256
GUESTS_TURN_S = 1.0
MAX_CALLS = MAX_SESSIONS + MAX_SELECT_STREAMS + MAX_GUESTS + MAX_ANSWERED
"""Concurrent calls on a listener; a further call gets RESOURCE_EXHAUSTED. Each kind of long call
has its own, lower bound, so that calls that are answered at once always find a place."""
WINDOW_BYTES = 64 << 10
"""Of a call's message that gRPC receives before the server reads from the call."""
NUM_LISTENERS = 3
MAX_INCOMPLETE_BYTES = (
    MAX_SESSIONS + 2 * MAX_SELECT_STREAMS + MAX_GUESTS
) * MAX_MESSAGE_BYTES + NUM_LISTENERS * MAX_CALLS * WINDOW_BYTES
"""gRPC buffers a message until it is complete, for each call from which the server reads. A
prefix that declares more than MAX_MESSAGE_BYTES ends the call. Two listeners serve SelectBlocks."""
MAX_CALLS_OF_CONNECTION = 256
HANDSHAKE_TIMEOUT_S = 10
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit (sun_path)."""
IDLE_CONNECTION_S = 600
"""A connection without a call for this time is closed. Clients connect again."""
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000),
    ("grpc.max_connection_idle_ms", IDLE_CONNECTION_S * 1000),
    # gRPC answers CANCELLED if more calls wait for the event loop. The default, 1,000, would
    # cancel calls of a burst that the listener can serve.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
LIVENESS = "live"
"""Health name that asks whether the process is alive: if not, a restart would help. All other
names say whether the server answers calls."""
CHANNELZ_NAME = "grpc.channelz.v1.Channelz"


TICKET_KEY = "hotkv-ticket-bin"
"""Metadata key of a ticket with which an admin call on a Unix socket proves its user to the
audit log."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """tcp_address: empty: no TCP.
    tls: None: TCP without TLS.
    malformed_per_s: malformed messages answered per second; further answers wait.
    audit: `off`, `changes` or `all`.
    audit_file: None: the server's log.
    """

    socket: Path
    socket_mode: int
    admin_socket: Path
    admin_socket_mode: int
    tcp_address: str = ""
    tls: TlsFiles | None = None
    tcp_reflection: bool = False
    admin_on_tcp: bool = False
    malformed_per_s: float = 50.0
    audit: str = "changes"
    audit_file: Path | None = None


class RpcServer:
    """The gRPC servers of a node, which serve from `start` on. The constructor raises OSError,
    UnsafeError or ValueError if they can't listen.

    tickets: prove the users of peers on Unix sockets.
    """

    def __init__(
        self, node: Node, access: AccessControl, tickets: Tickets, endpoints: Endpoints
    ) -> None:
        self._node = node
        self._access = access
        self._tickets = tickets
        self._endpoints = endpoints
        self._health = HealthService()
        self._guests = SessionlessCalls(MAX_GUESTS)
        self._ending: asyncio.Task[None] | None = None
        self.pace = Pace(endpoints.malformed_per_s)
        self.audit = AuditLog(endpoints.audit, endpoints.audit_file)
        self.certificates: Certificates | None = None
        self._names, self._admin_names = set[str](), set[str]()
        self._modes = {
            endpoints.socket: endpoints.socket_mode,
            endpoints.admin_socket: endpoints.admin_socket_mode,
        }
        # In this order: operators can connect before users can.
        self._servers = [self._admins(), self._users()]
        self._lane = self._open_lane()
        self.tcp_port = 0
        if endpoints.tcp_address:
            self._servers.append(self._tcp())

    def _server(self, who: Who, guard: Guard | None = None) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[
                EdgeInterceptor(
                    self._node, self.pace, self._guests, self.audit, who, self._admin_names, guard
                )
            ],
            options=OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _services(
        self,
        identify: Callable[[Any, Any], Peer],
        *,
        has_descriptor_socket: bool = False,
        is_admin: bool = False,
    ) -> list[Service]:
        node = self._node
        edge = Edge(node, self._access, identify, self.pace, self._guests, has_descriptor_socket)
        found = [
            Service(
                full_name(session_pb2, "SessionService"),
                session_pb2_grpc.add_SessionServiceServicer_to_server,
                SessionService(SessionOpener(edge)),
            ),
            Service(
                full_name(cache_pb2, "CacheService"),
                cache_pb2_grpc.add_CacheServiceServicer_to_server,
                CacheService(node),
            ),
            Service(
                full_name(admin_pb2, "AdminService"),
                admin_pb2_grpc.add_AdminServiceServicer_to_server,
                AdminService(node),
                is_admin=True,
            ),
            *(service for one in node.capabilities for service in one.services(edge)),
        ]
        return [service for service in found if service.is_admin == is_admin]

    def _add(self, services: Iterable[Service], server: grpc.aio.Server) -> list[str]:
        names = []
        for service in services:
            service.add(service.servicer, server)
            names.append(service.name)
            (self._admin_names if service.is_admin else self._names).add(service.name)
        return names

    def _users(self) -> grpc.aio.Server:
        server = self._server(self._admin_of_ticket)
        services = self._services(self._peer_of_ticket, has_descriptor_socket=True)
        reflection.enable_server_reflection(
            (*self._add(services, server), health_names.SERVICE_NAME, reflection.SERVICE_NAME),
            server,
        )
        _listen(server, self._endpoints.socket)
        return server

    def _open_lane(self) -> LaneServer:
        edge = Edge(
            self._node,
            self._access,
            lambda _, stream: stream.peer,
            self.pace,
            self._guests,
            has_descriptor_socket=True,
        )
        path = self._endpoints.socket.with_name(LANE_SOCKET)
        return LaneServer(
            self._node, SessionOpener(edge), path, self._endpoints.socket_mode, MAX_CONNECTIONS
        )

    def _admins(self) -> grpc.aio.Server:
        server = self._server(self._admin_of_ticket)
        names = self._add(self._services(self._peer_of_ticket, is_admin=True), server)
        channelz.add_channelz_servicer(server)
        reflection.enable_server_reflection(
            (*names, health_names.SERVICE_NAME, CHANNELZ_NAME, reflection.SERVICE_NAME), server
        )
        _listen(server, self._endpoints.admin_socket)
        return server

    def _tcp(self) -> grpc.aio.Server:
        endpoints = self._endpoints
        server = self._server(
            peers.of_call, lambda context: self._access.admit_admin(peers.of_call(context))
        )
        names = [*self._add(self._services(_peer_of_call), server), health_names.SERVICE_NAME]
        if endpoints.admin_on_tcp:
            names += self._add(self._services(_peer_of_call, is_admin=True), server)
        if endpoints.tcp_reflection:
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        if endpoints.tls is not None:
            self.certificates = Certificates(endpoints.tls)
        try:
            if self.certificates is None:
                self.tcp_port = server.add_insecure_port(endpoints.tcp_address)
            else:
                self.tcp_port = server.add_secure_port(
                    endpoints.tcp_address, self.certificates.credentials
                )
        except RuntimeError as error:
            raise OSError(
                f"tcp_address: can't listen on {endpoints.tcp_address}: it is in use, or no "
                "address of this machine; choose another with --tcp-address"
            ) from error
        return server

    def _peer_of_ticket(self, opening: Any, context: Any) -> Peer:
        """A peer without identity if there is no ticket. Raises UNAUTHENTICATED if it is not
        valid, unless access is open to all."""
        if not opening.ticket:
            return Peer("unix socket, no ticket")
        peer = self._tickets.redeem(opening.ticket, time.monotonic())
        if peer is None and not self._access.is_open:
            raise HotKVError(
                Reason.UNAUTHENTICATED,
                "ticket was used before, is too old or never given out; fetch one for each session",
            )
        return peer or Peer("unix socket, a ticket of no use")

    def _admin_of_ticket(self, context: Any) -> Peer:
        """For the audit log: every process that may open the admin socket is an admin."""
        ticket = dict(context.invocation_metadata() or ()).get(TICKET_KEY, b"")
        peer = self._tickets.redeem(ticket, time.monotonic()) if ticket else None
        return peer or Peer("unix socket, no ticket")

    async def start(self) -> None:
        for server in self._servers:
            await server.start()
        await self._lane.start()
        for path, mode in self._modes.items():
            os.chmod(path, mode)
        self._ending = asyncio.create_task(self._end_late())
        self.set_health(is_ready=True, is_alive=True)

    async def _end_late(self) -> None:
        async for _ in self._node.health.turns("the end of guests", GUESTS_TURN_S):
            self._guests.end_late(time.monotonic())

    def set_health(self, *, is_ready: bool, is_alive: bool) -> None:
        """is_ready: of the server and each service.
        is_alive: under the name LIVENESS.
        """
        self._health.set(
            {
                "": is_ready,
                LIVENESS: is_alive,
                **dict.fromkeys(self._names | self._admin_names, is_ready),
            }
        )

    async def stop(self, grace_s: float) -> None:
        """Refuses calls, and ends those that still run after `grace_s`."""
        await asyncio.gather(
            self._lane.stop(grace_s), *(server.stop(grace_s) for server in self._servers)
        )
        if self._ending is not None:
            self._ending.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.audit.close)
        for path in self._modes:
            path.unlink(missing_ok=True)


def _peer_of_call(opening: Any, context: Any) -> Peer:
    return peers.of_call(context)


def _listen(server: grpc.aio.Server, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        why = (
            f"longer than {MAX_SOCKET_PATH_BYTES} bytes"
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES
            else "not writable, or full"
        )
        raise OSError(
            f"runtime_dir: can't listen on {path}: it is {why}; choose another directory with "
            "--runtime-dir"
        ) from error
