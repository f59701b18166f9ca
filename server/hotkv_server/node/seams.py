"""Seams between capabilities: what one asks of another without knowing it. The node joins them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotkv_proto.blocks import Flushed
from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask, Entries, HashList, Medium

if TYPE_CHECKING:
    from hotkv_proto.traces import Span
    from hotkv_server.node.health import Health
    from hotkv_server.node.session import LiveSession


@dataclass(frozen=True, slots=True)
class Lying:
    """Where blocks of some lists lie in one tier: a mask a list. `is_up`: the tier can be read.
    `bytes_per_s`: rate of its last reads, 0 if none has found any."""

    name: str
    masks: list[BoolMask]
    is_up: bool
    bytes_per_s: float


class Epochs(Protocol):
    """Flushes, here and in tiers that nodes share."""

    def may_serve(self, key_space_id: int) -> bool:
        """Returns whether blocks in host memory are surely of after all flushes."""

    async def wait_to_serve(self, key_space_id: int) -> bool:
        """Waits until that is known, for a bounded time; returns whether it is so."""

    async def meet(self, key_space_id: int) -> None:
        """Asks shared tiers for the epoch of a key space that has become known."""

    async def flush(self, key_space_id: int) -> Flushed:
        """Flushes a key space here and in all tiers."""


class Lookups(Protocol):
    """Questions for blocks below host memory."""

    def must_ask(self, session: "LiveSession | None", groups: list[HashList]) -> bool:
        """Returns whether a lookup must wait for a tier's answer."""

    async def ask(self, session: "LiveSession", key_space_id: int, groups: list[HashList]) -> None:
        """Waits until tiers have answered, for a bounded time."""

    def lies_elsewhere(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Returns which blocks are known to lie below, or to be on their way up, one mask a list.
        `ready`: which are in host memory. `tokens_per_s`: prefill speed of the engine; blocks that
        would come later than it computes them are left out, but for 0."""

    async def find(self, key_space_id: int, groups: list[HashList]) -> list[Lying]:
        """Asks every tier, for operators."""


class BlocksBelow(Protocol):
    """Blocks below host memory."""

    @property
    def epochs(self) -> Epochs: ...

    @property
    def lookups(self) -> Lookups: ...

    @property
    def names(self) -> list[str]:
        """The tiers by their numbers in `Space.origins`, the first of which is 1."""

    def start(
        self,
        health: "Health",
        tell: Callable[[], None],
        flush: Callable[[int], Awaitable[int]],
        on_ready: "OnReady",
    ) -> None:
        """Starts moving blocks. `tell` is called when blocks may have been evicted or condemned;
        `flush` flushes a key space in this node alone."""

    def trace(self, tracing: "Tracer") -> None:
        """From now on reads and writes of traced calls have spans."""

    async def close(self) -> None:
        """Begins no move any more and ends those under way, for a bounded time."""

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """Changes how much may be written to the tier below in 24 hours; None for no limit."""

    def fetch_ahead(
        self,
        session: "LiveSession",
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to bring in what a hit lacks in host memory: its lease follows."""

    def has_some(self, session: "LiveSession", groups: list[HashList]) -> bool:
        """Returns whether a lease of these blocks must wait for a tier."""

    async def bring_up(self, session: "LiveSession", groups: list[HashList]) -> Any:
        """Brings blocks up and pins them, for a bounded time; `let_go` takes the result."""

    def let_go(self, held: Any) -> None:
        """Gives back the pins of `bring_up`."""

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Brings in what lies below of these lists, as far as there is room, and waits for it until
        then."""


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
