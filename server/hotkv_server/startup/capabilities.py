"""The list of a server's capabilities: optional parts, each in a folder. If the lines about a
capability are removed from this module, the server starts and serves without the capability."""

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
    """The opened tiers below host memory (disk, shared stores). The server's start calls
    `add_books`, `take_over` and `drive`, in this order."""

    def add_books(self, core: CacheCore) -> None:
        """Makes the object that records which blocks lie in these tiers, and registers it with the
        core."""

    def take_over(self, core: CacheCore) -> bool:
        """Restores the records of the blocks that an earlier server left in these tiers. Returns
        True if this call may have registered key spaces in the core. Blocks the calling thread.
        Raises StartError if a tier can't be used."""

    def drive(self, core: CacheCore, verifier: Verifier, memory: NodeMemory) -> BlocksBelow:
        """Makes the object through which the node moves blocks between host memory and the tiers.
        Raises StartError if a tier can't be opened."""

    def close(self) -> None:
        """Releases the tiers' folders for another server. Called after the node has ended."""

    def discard(self) -> None:
        """Removes the files that record flushes (deletions of all blocks of a key space), unless a
        tier still needs them. Called at the end of a server that removes its arena. Blocks the
        calling thread."""


class Attaches(Protocol):
    """The interface of the module `capability` in the folder of each capability (an optional part
    of the server, such as `tiers`). Besides `attach`, the module may define three functions:

    - `check(settings)` raises StartError for settings that this machine can't serve.
    - `check_addresses(settings)` raises StartError for addresses that can't be bound. Not called
      while a server with these settings runs.
    - `open_below(settings, arena, reset=)` opens the tiers below host memory and returns an
      OpenedBelow; None if the settings ask for no tiers. `reset` drops the blocks that an earlier
      server left in the tiers. At most one capability defines this function. It blocks the calling
      thread and raises StartError.
    """

    def attach(self, settings: Settings, node: Node) -> Capability:
        """Creates the capability (optional part of the server) for this node and returns it. Raises
        StartError."""


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
"""All capabilities (optional parts of the server), in the order in which the node notifies them of
events."""


def attach_all(settings: Settings, node: Node) -> None:
    """Makes all capabilities and adds them to the node, which then owns them. Raises StartError if
    a capability can't start."""
    for module in CAPABILITIES:
        node.capabilities.append(module.attach(settings, node))


def open_below(settings: Settings, arena: Region, *, reset: bool) -> OpenedBelow | None:
    """Opens the tiers below host memory. Returns None without tiers. Blocks the calling thread.
    Raises StartError if a tier can't be opened.

    reset: True drops the blocks that an earlier server left in the tiers.
    """
    for module in CAPABILITIES:
        opens = getattr(module, "open_below", None)
        if opens is not None and (below := opens(settings, arena, reset=reset)) is not None:
            opened: OpenedBelow = below
            return opened
    return None


def checks_of_capabilities(name: str = "check") -> list[Callable[[Settings], None]]:
    """Returns a check for each capability (optional part of the server). A check raises StartError
    if the machine can't serve the capability's settings.

    name: `check` or `check_addresses`, as in `Attaches`.
    """
    checks = [getattr(module, name, None) for module in CAPABILITIES]
    return [check for check in checks if check is not None]
