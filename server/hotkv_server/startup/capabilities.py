"""The capabilities of a server: a folder each, and its lines here. Without them a server starts and
serves as before, but for what that capability promises."""

from collections.abc import Callable
from typing import Protocol

from hotkv_server.cache.core import CacheCore
from hotkv_server.dataplane.plan import Region
from hotkv_server.events import capability as events
from hotkv_server.hints import capability as hints
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.ledger import capability as ledger
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.capability import BlocksBelow, Capability
from hotkv_server.node.node import Node
from hotkv_server.residency import capability as residency
from hotkv_server.settings import Settings
from hotkv_server.sparse import capability as sparse
from hotkv_server.tiers import capability as tiers
from hotkv_server.tracing import capability as tracing
from hotkv_server.warm_start import capability as warm_start


class OpenedBelow(Protocol):
    """What keeps blocks below host memory, as a start goes on: opened, known to the cache, filled,
    driven."""

    def add_books(self, core: CacheCore) -> None:
        """Gives the core the books of what lies below it."""

    def take_over(self, core: CacheCore) -> bool:
        """Fills them with what an earlier server has left. Returns whether the core may know more
        key spaces now. Blocks. Raises StartError."""

    def drive(self, core: CacheCore, verifier: Verifier, memory: NodeMemory) -> BlocksBelow:
        """What the node drives. Raises StartError."""

    def close(self) -> None:
        """Lets another server have its places. Called after the node has ended."""

    def discard(self) -> None:
        """Called when no block stays in the arena: drops what was noted beside them. Blocks."""


class Attaches(Protocol):
    """The module `capability` of a capability's folder. It may have two functions more:

    - `check(settings)` raises StartError for settings that this machine can't serve.
    - `open_below(settings, arena, reset=)` returns an OpenedBelow, or None if the settings ask for
      nothing below host memory. One capability has it at most. Blocks. Raises StartError.
    """

    def attach(self, settings: Settings, node: Node) -> Capability:
        """Returns the capability, for this node. Raises StartError."""


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


def open_below(settings: Settings, arena: Region, *, reset: bool) -> OpenedBelow | None:
    """Opens what lies below host memory, if anything does. `reset`: drops what an earlier server
    has left there. Blocks. Raises StartError."""
    for module in CAPABILITIES:
        opens = getattr(module, "open_below", None)
        if opens is not None and (below := opens(settings, arena, reset=reset)) is not None:
            opened: OpenedBelow = below
            return opened
    return None


def checks_of_capabilities() -> list[Callable[[Settings], None]]:
    """Each raises StartError if its capability can't be had as the settings ask for it."""
    checks = [getattr(module, "check", None) for module in CAPABILITIES]
    return [check for check in checks if check is not None]
