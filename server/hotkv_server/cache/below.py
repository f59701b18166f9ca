"""The seam below host memory: whoever keeps blocks in a tier tells the core where they lie.

The core asks each in turn and knows no tier. Without one it asks nobody. Always true: a block that
is flushed is found by nobody afterwards, also if it lies below or is on its way.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import BoolMask, Entries, HashList, Int64s, KeySpaceRecord


class Below(Protocol):
    """See the module. `space`: places below host memory in which the core chooses; None for tiers
    that place by themselves."""

    @property
    def space(self) -> Space | None: ...

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
