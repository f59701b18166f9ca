"""Adds capabilities to a node that a test builds itself. The ledger stays in memory; publisher
and tracing are off."""

from typing import TypeVar

from hotkv_server.events.capability import EventsCapability
from hotkv_server.hints.capability import HintsCapability
from hotkv_server.ledger.capability import LedgerCapability
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.node.capability import Capability
from hotkv_server.node.node import Node
from hotkv_server.settings.outlets import EventSettings
from hotkv_sparse.server.residency.capability import ResidencyCapability
from hotkv_sparse.server.select.capability import SparseCapability

C = TypeVar("C", bound=Capability)


def capable(node: Node) -> Node:
    node.capabilities += [
        EventsCapability(node, EventSettings()),
        LedgerCapability(node, LiveLedger(node.core)),
        ResidencyCapability(node),
        SparseCapability(node),
        HintsCapability(node),
    ]
    return node


def capability_of(node: Node, kind: type[C]) -> C:
    return next(one for one in node.capabilities if isinstance(one, kind))
