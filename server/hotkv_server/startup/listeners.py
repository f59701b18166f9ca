"""Everything that listens or publishes: gRPC, the descriptor socket, HTTP, ZMQ.

Always true: a listener that cannot have its address keeps the server from starting, with the
setting to change.
"""

import contextlib
import importlib
import socket
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from hotkv_proto.keys import KeySpace
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl
from hotkv_server.security.path_checks import UnsafeError
from hotkv_server.security.tickets import Tickets
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.startup import StartError
from hotkv_server.startup.access import (
    linking_users,
    make_access_control,
    make_endpoints,
    make_page_access,
)
from hotkv_server.told.http_endpoint import HttpServer
from hotkv_server.wire.descriptors import DescriptorServer
from hotkv_server.wire.server import Endpoints, RpcServer

if TYPE_CHECKING:
    from hotkv_server.events.publisher import ZmqPublisher


@dataclass(frozen=True, slots=True)
class Listeners:
    """All of them; `http` is None if it is switched off."""

    rpc: RpcServer
    descriptors: DescriptorServer
    http: HttpServer | None
    access: AccessControl

    @staticmethod
    async def open(settings: Settings, node: Node) -> "Listeners":
        """Binds all of them and starts gRPC. Raises StartError."""
        access, tickets = make_access_control(settings.security), Tickets()
        endpoints = make_endpoints(settings)
        uids = linking_users(settings.security)
        # A socket that was made has its path until somebody removes it.
        paths = (settings.grpc_socket, settings.admin_socket, settings.descriptor_socket)
        with contextlib.ExitStack() as undo:
            for path in paths:
                undo.callback(path.unlink, missing_ok=True)
            listeners = Listeners._open(settings, node, access, tickets, endpoints, uids, undo)
            await listeners.rpc.start()
            undo.pop_all()
        return listeners

    @staticmethod
    def _open(
        settings: Settings,
        node: Node,
        access: AccessControl,
        tickets: Tickets,
        endpoints: Endpoints,
        uids: frozenset[int],
        undo: contextlib.ExitStack,
    ) -> "Listeners":
        try:
            rpc = RpcServer(node, access, tickets, endpoints)
            descriptors = DescriptorServer(
                node,
                settings.descriptor_socket,
                endpoints.socket_mode,
                uids,
                access,
                tickets,
                frozenset(settings.security.arena_writers),
            )
        except (OSError, RuntimeError, ValueError, UnsafeError) as error:
            raise StartError(f"can't listen: {error}") from error
        undo.callback(descriptors.close)
        return Listeners(rpc, descriptors, _listen_http(settings, node, access), access)


def _listen_http(settings: Settings, node: Node, access: AccessControl) -> HttpServer | None:
    http = settings.http
    if http.port < 0:
        return None
    try:
        return HttpServer(http.host, http.port, node, make_page_access(settings, access))
    except OSError as error:
        raise StartError(
            f"http.port: can't listen on {http.host}:{http.port} ({error.strerror}); choose "
            "another with --http.port (0 for any free one, -1 for none), and an address of this "
            "machine for http.host"
        ) from error


def check_publisher(settings: Settings) -> None:
    """Raises StartError if events are wanted and can't be published."""
    if settings.events.endpoint:
        _zmq()


def _zmq() -> ModuleType:
    try:
        import hotkv_server.events.publisher  # noqa: F401 - needs more than zmq

        return importlib.import_module("zmq")
    except ImportError as missing:
        raise StartError(
            f"events.endpoint is set, but {missing.name} is not installed: pip install "
            "'hotkv[events]'"
        ) from missing


def make_publisher(settings: EventSettings) -> "ZmqPublisher | None":
    """The publisher of events; None if the settings name no endpoint. Raises StartError."""
    if not settings.endpoint:
        return None
    zmq = _zmq()
    from hotkv_server.events.publisher import ZmqPublisher

    host = socket.gethostname()

    def topic_of(number: int, key_space: KeySpace) -> str:
        return settings.topic.format(
            host=host, model=key_space.model, tenant=key_space.tenant, key_space=number
        )

    try:
        return ZmqPublisher(
            settings.endpoint,
            settings.replay_endpoint,
            topic_of,
            buffer_steps=settings.buffer_steps,
            buffer_bytes=settings.buffer_bytes,
            int_hashes=settings.int_hashes,
        )
    except zmq.ZMQError as error:
        raise StartError(
            f"events: {error}; is {settings.endpoint} or "
            f"{settings.replay_endpoint or '(no replay_endpoint)'} in use?"
        ) from error
