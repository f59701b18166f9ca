"""Pinners: who keeps entries in the arena for a reason of its own, besides leases, retentions and
moves.

The core asks each in turn and knows no more of them. Always true: an entry that is pinned keeps its
slot, and is not evicted, until its last pin is gone; who pins says so in `pins`, so that the core
can check that nobody's is lost.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from hotkv_server.cache.values import BoolMask, Entries, Int64s, SessionRecord


class StorePins(Protocol):
    """What is pinned of one store, as it becomes ready. Positions rise; those that are not wanted
    are passed over."""

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        """These blocks are ready and verified; positions [n] count from the start of the chain."""

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        """The blocks of a group at these positions have their representations by now."""


class Pinner(Protocol):
    """See the module."""

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
