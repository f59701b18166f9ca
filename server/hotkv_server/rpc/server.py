"""Puts the gRPC server together: our services, health, reflection and channelz, on a Unix socket and, when asked, on TCP."""

import os
from pathlib import Path

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hotkv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    sparse_pb2,
    sparse_pb2_grpc,
)
from hotkv_server.rpc.admin_service import AdminService
from hotkv_server.rpc.cache_service import CacheService
from hotkv_server.rpc.event_service import EventService
from hotkv_server.rpc.interceptor import MalformedInterceptor
from hotkv_server.rpc.session_service import SessionService
from hotkv_server.rpc.sparse_service import SparseService
from hotkv_server.runtime.node import Node

MAX_MESSAGE_BYTES = 64 << 20
CHANNELZ_NAME = "grpc.channelz.v1.Channelz"
SERVICE_NAMES = tuple(
    service.full_name
    for service in (
        session_pb2.DESCRIPTOR.services_by_name["SessionService"],
        cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
        sparse_pb2.DESCRIPTOR.services_by_name["SparseService"],
        events_pb2.DESCRIPTOR.services_by_name["EventService"],
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    )
)


class RpcServer:
    """The gRPC side of a node. Not serving until `start`."""

    def __init__(self, node: Node, socket_path: Path, socket_mode: int, tcp_address: str, *, has_descriptor_socket: bool) -> None:
        self._server = grpc.aio.server(
            interceptors=[MalformedInterceptor()],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        session_pb2_grpc.add_SessionServiceServicer_to_server(
            SessionService(node, has_descriptor_socket=has_descriptor_socket), self._server
        )
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(node), self._server)
        sparse_pb2_grpc.add_SparseServiceServicer_to_server(SparseService(node), self._server)
        events_pb2_grpc.add_EventServiceServicer_to_server(EventService(node), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(node), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        names = (*SERVICE_NAMES, health.SERVICE_NAME, CHANNELZ_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._socket_path = socket_path
        self._socket_mode = socket_mode
        socket_path.unlink(missing_ok=True)
        if self._server.add_insecure_port(f"unix:{socket_path}") == 0:
            raise OSError(f"runtime_dir: can't listen on {socket_path}; is the path too long or not writable?")
        self.tcp_port = self._server.add_insecure_port(tcp_address) if tcp_address else 0

    async def start(self) -> None:
        """Serves; health says SERVING from here on."""
        await self._server.start()
        os.chmod(self._socket_path, self._socket_mode)
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """What health answers, for the server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Stops taking calls, and ends those in flight after `grace_s`."""
        await self._server.stop(grace_s)
        self._socket_path.unlink(missing_ok=True)
