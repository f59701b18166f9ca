"""What the core asks of others: who pins entries, and who keeps blocks in a tier below.

The core asks each in turn and knows no more of them.
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


# Pinners: who keeps entries in the arena for a reason of its own, besides leases, retentions and
# moves.
#
# Always true: an entry that is pinned keeps its slot, and is not evicted, until its last pin is
# gone; who pins says so in `pins`, so that the core can check that nobody's is lost.


class StorePins(Protocol):
    """What is pinned of one store, as it becomes ready. Positions rise; those that are not wanted
    are passed over."""

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        """These blocks are ready and verified; positions [n] count from the start of the chain."""

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        """The blocks of a group at these positions have their representations by now."""


class Pinner(Protocol):
    """Keeps entries in the arena for a reason of its own."""

    def of_store(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        """What a store of this session is to be pinned for; None for nothing. Raises HotKVError
        for an id that the session may not name."""

    def end(self, session: SessionRecord) -> Iterator[None]:
        """The session is about to be closed and begins nothing any more: gives back what it has
        pinned, in parts."""

    def condemned(self, entries: Entries) -> None:
        """These blocks do not agree with their check values and are about to be dropped."""

    def is_read(self, entries: Entries) -> BoolMask:
        """Which of the entries [n] it lets somebody read in the arena: they stay marked."""

    def pins(self) -> Int64s:
        """Its pins of each entry [capacity + 1]. Linear in capacity."""

    def check_invariants(self, live_sessions: Collection[int]) -> None:
        """Raises AssertionError if its books disagree. Linear in capacity."""


# Tiers below host memory: whoever keeps blocks in a tier tells the core where they lie.
#
# Always true: a block that is flushed is found by nobody afterwards, also if it lies below or is
# on its way.


class Below(Protocol):
    """Keeps blocks in tiers below host memory. `space`: places below host memory in which the core
    chooses; None for tiers that place by themselves."""

    @property
    def space(self) -> "Space | None": ...

    @property
    def is_moving(self) -> bool:
        """Whether a block is on its way, so that a tier may read or write its slot."""

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Declares a key space."""

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets a key space that has no blocks anywhere."""

    def has_blocks(self, key_space_id: int) -> bool:
        """Returns whether a block of the key space lies below or moves."""

    def offer_stored(self, entries: Entries) -> None:
        """Offers blocks that were stored, in chain order."""

    def offer_used(self, entries: Entries) -> None:
        """Offers blocks that were used, in chain order: what was refused may be taken now."""

    def offer_demoted(self, entries: Entries) -> BoolMask:
        """Offers ready blocks that are given up; returns which [n] lie below already."""

    def find(self, key_space_id: int, listed: HashList) -> BoolMask:
        """Returns which blocks of a list are ready in `space`."""

    def stopped(self, key_space_id: int) -> AbstractContextManager[None]:
        """Lets no block of the key space begin to move while the context is open, and what moves as
        it opens becomes ready nowhere."""

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Forgets what lies in `space` of a key space whose moves are stopped, in parts of
        `portion` entry numbers; yields the number of blocks of each."""

    def reserved(self) -> Entries:
        """Returns entries of host memory that blocks on their way up have reserved."""

    def pins(self) -> Int64s:
        """Returns its pins of each entry of host memory [capacity + 1]."""

    def check_invariants(self) -> None:
        """Raises AssertionError if its books disagree. Linear in capacity."""
