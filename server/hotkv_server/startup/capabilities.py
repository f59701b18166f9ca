"""The capabilities of a server: a folder each, and its lines here. Without them a server starts and
serves as before, but for what that capability promises."""

from typing import Protocol

from hotkv_server.events import capability as events
from hotkv_server.hints import capability as hints
from hotkv_server.ledger import capability as ledger
from hotkv_server.node.capability import Capability
from hotkv_server.node.node import Node
from hotkv_server.residency import capability as residency
from hotkv_server.settings import Settings
from hotkv_server.sparse import capability as sparse
from hotkv_server.tiers import capability as tiers
from hotkv_server.tracing import capability as tracing
from hotkv_server.warm_start import capability as warm_start


class Attaches(Protocol):
    """The module `capability` of a capability's folder; it may have a `check`, too, which raises
    StartError for settings that this machine can't serve."""

    def attach(self, settings: Settings, node: Node) -> Capability:
        """The capability, for this node. Raises StartError."""


CAPABILITIES: tuple[Attaches, ...] = (
    events,
    ledger,
    residency,
    sparse,
    hints,
    tiers,
    tracing,
    warm_start,
)
"""In the order in which they are told of what happens."""


def attach_all(settings: Settings, node: Node) -> None:
    """Adds them to the node, which owns them from then on. Raises StartError."""
    for module in CAPABILITIES:
        node.capabilities.append(module.attach(settings, node))


def check_all(settings: Settings) -> None:
    """Raises StartError if a capability can't be had as the settings ask for it."""
    for module in CAPABILITIES:
        if (check := getattr(module, "check", None)) is not None:
            check(settings)
