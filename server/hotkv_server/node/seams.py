"""Seams between capabilities: what one asks of another without knowing it. The node joins them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask, Entries, HashList, Medium

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


class BlocksBelow(Protocol):
    """Blocks below host memory, for those who name them."""

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Brings in what lies below of these lists, as far as there is room, and waits for it until
        then."""

    def lies_elsewhere(
        self, key_space_id: int, groups: list[HashList], ready: Sequence[BoolMask]
    ) -> list[BoolMask]:
        """Returns which blocks are known to lie below or on their way up, one mask a list. `ready`:
        which are in host memory."""


class Tracer(Protocol):
    """Spans of what is done for a call."""

    def child(self, name: str) -> "Span | None":
        """Begins a span below that of the call that is served; None if it is not traced."""

    def begin_writes(self, hashes: Words, tier: str) -> "list[Span]":
        """Begins a span for each traced store that brought some of these blocks, which are about to
        be written to a tier."""


OnReady = Callable[[Entries, Medium, str], None]
"""Called on the event loop with blocks that are ready in a medium, and the tier's name, empty for
host memory. Entries are of the tier below for DISK, else of host memory."""


def nobody(entries: Entries, medium: Medium, tier: str) -> None:
    """Tells nobody."""
