"""Opens all listeners: gRPC, the descriptor socket, HTTP. If one can't bind its address, the
server does not start; the error names the setting to change."""

import contextlib
from dataclasses import dataclass

from hotkv_server.monitoring.http_endpoint import HttpServer
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl, Tickets
from hotkv_server.security.path_checks import UnsafeError
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError
from hotkv_server.startup.access import (
    linking_users,
    make_access_control,
    make_endpoints,
    make_page_access,
)
from hotkv_server.wire.descriptors import DescriptorServer
from hotkv_server.wire.server import Endpoints, RpcServer


@dataclass(frozen=True, slots=True)
class Listeners:
    """`http`: None if it is switched off."""

    rpc: RpcServer
    descriptors: DescriptorServer
    http: HttpServer | None
    access: AccessControl

    @staticmethod
    async def open(settings: Settings, node: Node) -> "Listeners":
        """Binds all and starts gRPC. Raises StartError."""
        access, tickets = make_access_control(settings.security), Tickets()
        endpoints = make_endpoints(settings)
        uids = linking_users(settings.security)
        # A socket's path stays when it is closed, so a failed start removes it.
        paths = (settings.admin_socket, *settings.engine_sockets)
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
                endpoints.malformed_per_s,
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
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartError(
            f"http.port: can't listen on {http.host}:{http.port} ({why}); choose another "
            "with --http.port (0 for any free one, -1 for none), and an address of this "
            "machine for http.host"
        ) from error
