"""Interfaces through which the core calls capabilities: `Pinner` pins entries, `Below` stores
blocks in the tiers below.

The core calls each registered object in turn and depends only on these interfaces.
"""

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


# Pinners: objects that pin entries in the arena for reasons other than leases, retentions and
# moves.
#
# Always true: a pinned entry keeps its slot and is not evicted until its last pin is released. A
# pinner reports its pins in `pins`, so that the core can verify the sum of all pins.


class StorePins(Protocol):
    """Pins the blocks of one store as they become ready. Positions rise in each call. Blocks that
    the pinner does not want are skipped."""

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        """Pins blocks that are ready and verified. `positions` [n] count from the start of the
        chain."""

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        """Pins the representations (compact forms of keys, for sparse attention) of the group's
        blocks at these positions, as far as the blocks have any. `positions` [n] count from the
        start of the chain."""


class Pinner(Protocol):
    """Pins entries in the arena, for example for residencies."""

    def of_store(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        """Returns an object that pins the blocks of a store of this session; None if the store
        needs no pins. Raises HotKVError if the session may not use this id."""

    def end(self, session: SessionRecord) -> Iterator[None]:
        """Releases, in parts, all pins of a session that is about to be closed. The session starts
        no new work."""

    def condemned(self, entries: Entries) -> None:
        """Receives blocks that contradict their check values and are about to be dropped."""

    def is_read(self, entries: Entries) -> BoolMask:
        """Returns which of the entries [n] a client may read directly in the arena because this
        pinner pins them. These entries stay marked for the next server."""

    def pins(self) -> Int64s:
        """Returns for each entry the number of pins that this object holds on it [capacity + 1].
        Takes time linear in the capacity."""

    def check_invariants(self, live_sessions: Collection[int]) -> None:
        """Raises AssertionError if the books of this object disagree. Takes time linear in the
        capacity."""


# Tiers below host memory. A tier reports to the core where its blocks lie.
#
# Always true: a flushed block can't be found afterwards, even if it lies in a tier below or is
# being moved.


class Below(Protocol):
    """Stores blocks in tiers below host memory. `space`: the places of the tier whose places the
    core assigns (the disk); None if every tier assigns its places itself."""

    @property
    def space(self) -> "Space | None": ...

    @property
    def is_moving(self) -> bool:
        """Whether a block is being moved, so that a tier may read or write its slot."""

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Registers a key space."""

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets a key space that has no blocks in any tier."""

    def has_blocks(self, key_space_id: int) -> bool:
        """Returns True if a block of the key space lies below or is being moved."""

    def offer_stored(self, entries: Entries) -> None:
        """Offers blocks that were stored, in chain order."""

    def offer_used(self, entries: Entries) -> None:
        """Offers blocks that were used, in chain order. The tier may accept a block that it refused
        earlier."""

    def offer_demoted(self, entries: Entries) -> BoolMask:
        """Offers ready blocks for demotion. Returns which of them [n] already lie in a tier below
        host memory."""

    def find(self, key_space_id: int, listed: HashList) -> BoolMask:
        """Returns which blocks of a list are ready in `space`."""

    def stopped(self, key_space_id: int) -> AbstractContextManager[None]:
        """Stops moves of the key space while the context is open: no move begins, and a move
        already in flight makes no block ready."""

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Drops the blocks of a key space from `space`. Moves of the key space must be stopped.
        Works in parts of `portion` entry numbers and yields the number of blocks dropped in
        each."""

    def reserved(self) -> Entries:
        """Returns the host entries that are reserved for blocks being promoted."""

    def pins(self) -> Int64s:
        """Returns for each host entry the number of pins that this object holds on it [capacity +
        1]."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the books of this object disagree. Takes time linear in the
        capacity."""
