"""A tier as the runtime reads it, whoever chooses the places of its blocks."""

from typing import Protocol

from hotkv_server.cache.values import BoolMask, HashList, Int64s
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.breaker import Breaker
from hotkv_server.tiers.drive.reads import TierReads
from hotkv_server.tiers.protocol import Blocks, Codes, Seals, Tier


class TierSource(Protocol):
    """A tier as blocks come from it. Groups are lists of blocks in chain order; what is in host
    memory already does not come."""

    breaker: Breaker
    reads: TierReads
    name: str

    @property
    def tier(self) -> Tier:
        """What moves the bytes."""

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Finds out by then what lies there, if the core does not know."""

    def has_some(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Whether a block may lie there and not in host memory."""

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of blocks, one array a list, that are known to lie there only."""

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Which blocks are known to lie there, one mask a list."""

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Reserves slots for what is wanted, as far as there is room; None for nothing."""

    def blocks(self, move: Move) -> Blocks:
        """The rows of a move as the tier takes them."""

    def end_up(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """The tier has read; returns how many blocks it has lost."""
