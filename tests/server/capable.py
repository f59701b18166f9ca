"""Adds the server's capabilities (optional parts, such as KV events and hints) to a node that a
test builds itself. The ledger (counts of hits and saved time) stays in memory; the event publisher
and tracing are off."""

from typing import TypeVar

from hotkv_server.events.capability import EventsCapability
from hotkv_server.hints.capability import HintsCapability
from hotkv_server.ledger.capability import LedgerCapability
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.node.capability import Capability
from hotkv_server.node.node import Node
from hotkv_server.residency.capability import ResidencyCapability
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.sparse.capability import SparseCapability

C = TypeVar("C", bound=Capability)


def capable(node: Node) -> Node:
    """Adds the capabilities events, ledger, residency, sparse decode and hints to the node. Returns
    the node."""
    node.capabilities += [
        EventsCapability(node, EventSettings()),
        LedgerCapability(node, LiveLedger(node.core)),
        ResidencyCapability(node),
        SparseCapability(node),
        HintsCapability(node),
    ]
    return node


def capability_of(node: Node, kind: type[C]) -> C:
    """Returns the node's capability that is an instance of `kind`."""
    return next(one for one in node.capabilities if isinstance(one, kind))
