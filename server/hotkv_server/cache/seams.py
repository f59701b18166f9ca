"""Interfaces through which `CacheCore` calls capabilities. A `Pinner` pins entries; a `Below`
stores blocks in the tiers below host memory."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from hotkv_server.cache.values import (
    BoolMask,
    Entries,
    HashList,
    Int64s,
    KeySpaceRecord,
    SessionRecord,
)

if TYPE_CHECKING:
    from hotkv_server.cache.room.space import Space


# Pinners. Leases, retentions and moves pin too, but without one. A pinner reports its pins in
# `pins`, so that the core can verify the sum.


class StorePins(Protocol):
    """Pins the blocks of one store: those that are ready when it begins, then those that it
    makes ready. Skips what need not be pinned. `positions` are depths, rising."""

    def left_bytes(self) -> int:
        """What may still be pinned through this object."""

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        """Ready, verified blocks."""

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        """The sketches of these blocks, where they have one."""


class Pinner(Protocol):
    def of_store(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        """None if the session's key space has no such residency here."""

    def end(self, session: SessionRecord) -> Iterator[None]:
        """Releases all pins of a session about to be closed, in parts."""

    def condemned(self, entries: Entries) -> None:
        """Called before the core drops blocks whose bytes contradict their checksums."""

    def is_read(self, entries: Entries) -> BoolMask:
        """Entries that a client may read in the arena for these pins; they stay marked for the
        next server."""

    def pins(self) -> Int64s:
        """By entry number."""

    def check_invariants(self, live_sessions: Collection[int]) -> None: ...


# Tiers below host memory. A flushed block can't be found there either, nor while it is being
# moved.


class Below(Protocol):
    """The tiers manage their blocks themselves, except the disk: the core manages its entries
    and places in `space`, which is None without a disk."""

    @property
    def space(self) -> "Space | None": ...

    @property
    def is_moving(self) -> bool:
        """A tier may read or write the slot of a block."""

    def add_key_space(self, record: KeySpaceRecord) -> None: ...

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """`has_blocks` must be False."""

    def has_blocks(self, key_space_id: int) -> bool:
        """On the disk or in a move. Shared stores are not asked."""

    def offer_stored(self, entries: Entries) -> None:
        """Just stored, in prompt order; the tiers decide which to copy."""

    def offer_used(self, entries: Entries) -> None:
        """Just used, in prompt order; a tier may accept what it refused before."""

    def offer_demoted(self, entries: Entries) -> BoolMask:
        """Ready blocks. True for what lies in `space` or is on its way there."""

    def find(self, key_space_id: int, listed: HashList) -> BoolMask:
        """Blocks that are ready in `space`."""

    def stopped(self, key_space_id: int) -> AbstractContextManager[None]:
        """While open, no move of the key space begins, and none in flight makes a block ready."""

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Drops the key space from `space`, `portion` entry numbers a part, and yields the
        blocks dropped. The caller holds `stopped`."""

    def reserved(self) -> Entries:
        """Entries in host memory that are reserved for promotions."""

    def pins(self) -> Int64s:
        """By entry number, in host memory."""

    def check_invariants(self) -> None: ...
