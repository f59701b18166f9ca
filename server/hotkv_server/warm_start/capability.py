"""Warm start as a capability: a node fetches the blocks that another uses most."""

from collections.abc import Iterable

from hotkv_proto.v1 import warm_pb2, warm_pb2_grpc
from hotkv_server.node.capability import Capability, Service
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.warm_start.service import WarmStartService
from hotkv_server.wire.edge import Edge, full_name


def attach(settings: Settings, node: Node) -> "WarmStartCapability":
    return WarmStartCapability(node)


class WarmStartCapability(Capability):
    def __init__(self, node: Node) -> None:
        self._node = node

    def services(self, edge: Edge) -> Iterable[Service]:
        return [
            Service(
                full_name(warm_pb2, "WarmStartService"),
                warm_pb2_grpc.add_WarmStartServiceServicer_to_server,
                WarmStartService(self._node),
                is_admin=True,
            )
        ]
