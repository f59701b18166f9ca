"""The list of a server's capabilities. Without the lines about one, the server serves without
it."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hotkv_server.cache.core import CacheCore
from hotkv_server.dataplane.plan import Region
from hotkv_server.events import capability as events
from hotkv_server.hints import capability as hints
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.ledger import capability as ledger
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.capability import BlocksBelow, Capability
from hotkv_server.node.node import Node
from hotkv_server.proof import capability as proof
from hotkv_server.settings import Settings
from hotkv_server.slow import capability as slow
from hotkv_server.tiers import capability as tiers
from hotkv_server.tracing import capability as tracing
from hotkv_server.warm_start import capability as warm_start


class OpenedBelow(Protocol):
    """The opened tiers below host memory. A start calls `add_books`, `take_over` and `drive`, in
    this order."""

    def add_books(self, core: CacheCore) -> None:
        """Registers with the core the object that records which blocks lie in these tiers."""

    def take_over(self, core: CacheCore) -> bool:
        """Restores the records of an earlier server's blocks. True if key spaces may have been
        registered. Blocks. Raises StartError."""

    def drive(self, core: CacheCore, verifier: Verifier, memory: NodeMemory) -> BlocksBelow:
        """Raises StartError."""

    def close(self) -> None:
        """Releases the tiers' folders for another server, after the node has ended."""

    def discard(self) -> None:
        """Removes the records of flushes, unless a tier still needs them, when a server removes
        its arena. Blocks."""


class Attaches(Protocol):
    """The module `capability` in each capability's folder. It may also define:

    - `check(settings)` raises StartError for settings that this machine can't serve.
    - `check_addresses(settings)` raises StartError for addresses that can't be bound. Not called
      while a server with these settings runs.
    - `open_below(settings, arena, reset=)` opens the tiers below host memory; None without
      tiers. `reset` drops the blocks of an earlier server. At most one capability defines it.
      Blocks, and raises StartError.
    """

    def attach(self, settings: Settings, node: Node) -> Capability:
        """Raises StartError."""


def _of_sparse_decode() -> Iterator[Attaches]:
    """None if `sparse/` is not installed."""
    for name in ("residency", "select"):
        try:
            found: Any = importlib.import_module(f"hotkv_sparse.server.{name}.capability")
        except ModuleNotFoundError as error:
            if error.name != "hotkv_sparse":
                raise
            return
        yield found


CAPABILITIES: tuple[Attaches, ...] = (
    events,
    ledger,
    *_of_sparse_decode(),
    hints,
    tiers,
    tracing,
    warm_start,
    slow,
    proof,
)
"""In the order in which the node notifies them."""


def attach_all(settings: Settings, node: Node) -> None:
    """Raises StartError."""
    for module in CAPABILITIES:
        node.capabilities.append(module.attach(settings, node))


def open_below(settings: Settings, arena: Region, *, reset: bool) -> OpenedBelow | None:
    """None without tiers. Blocks. Raises StartError.

    reset: drops the blocks of an earlier server.
    """
    for module in CAPABILITIES:
        opens = getattr(module, "open_below", None)
        if opens is not None and (below := opens(settings, arena, reset=reset)) is not None:
            opened: OpenedBelow = below
            return opened
    return None


def checks_of_capabilities(name: str = "check") -> list[Callable[[Settings], None]]:
    """`name`: `check` or `check_addresses`, as in `Attaches`."""
    checks = [getattr(module, name, None) for module in CAPABILITIES]
    return [check for check in checks if check is not None]
