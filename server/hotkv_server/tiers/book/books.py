"""The tiers' side of the core: which blocks are on the disk, and which moves are under way."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import BoolMask, Entries, HashList, Int64s, KeySpaceRecord
from hotkv_server.tiers.book.arrivals import Arrivals
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.lower import LowerTier
from hotkv_server.tiers.book.moves import Moves
from hotkv_server.tiers.book.place_sizes import EncodedBytes


class TierBooks:
    """Implements `cache.seams.Below`, which describes the methods. Registers itself in the core,
    which must not have key spaces yet.

    `lower`, `space`: None without a disk.
    `copies`: one per shared tier.
    `write_bytes_per_day`: None: no limit.
    `encoded_bytes`: None: nothing is encoded.
    """

    def __init__(
        self,
        core: CacheCore,
        space: Space | None = None,
        write_bytes_per_day: int | None = None,
        encoded_bytes: EncodedBytes | None = None,
    ) -> None:
        self.space = space
        self.moves = Moves(core.space)
        self.arrivals = Arrivals(self.moves)
        self.copies: list[Copies] = []
        self.lower = (
            None
            if space is None
            else LowerTier(self.moves, self.arrivals, space, write_bytes_per_day, encoded_bytes)
        )
        core.below.append(self)

    def __repr__(self) -> str:
        return f"TierBooks({self.moves!r}, {self.lower!r})"

    @property
    def is_moving(self) -> bool:
        return bool(len(self.moves))

    def add_key_space(self, record: KeySpaceRecord) -> None:
        if self.lower is not None:
            self.lower.add_key_space(record)

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        if self.lower is not None:
            self.lower.forget_key_space(record)

    def has_blocks(self, key_space_id: int) -> bool:
        return self.lower is not None and self.lower.has_blocks(key_space_id)

    def offer_stored(self, entries: Entries) -> None:
        for one in self.copies:
            one.add_stored(entries)
        self.offer_used(entries)

    def offer_used(self, entries: Entries) -> None:
        if self.lower is not None:
            self.lower.down.waiting.add(entries)

    def offer_demoted(self, entries: Entries) -> BoolMask:
        if self.lower is None:
            return np.zeros(len(entries), np.bool_)
        lacks = self.lower.down.lacks(entries)
        self.lower.down.waiting.add(entries[lacks])
        lies_below: BoolMask = ~lacks
        return lies_below

    def find(self, key_space_id: int, listed: HashList) -> BoolMask:
        if self.lower is None:
            return np.zeros(len(listed.hashes), np.bool_)
        found: BoolMask = self.lower.up.find(key_space_id, listed) != 0
        return found

    def stopped(self, key_space_id: int) -> AbstractContextManager[None]:
        for move in self.moves:
            if move.is_up and move.key_space_id == key_space_id:
                # The tier may still write to its slots: new stores get others.
                self.arrivals.forsake(move)
        return self.moves.stopped(key_space_id)

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        if self.lower is not None:
            yield from self.lower.flush(key_space_id, portion)

    def reserved(self) -> Entries:
        return self.moves.reserved()

    def pins(self) -> Int64s:
        return self.moves.pins()

    def check_invariants(self) -> None:
        if self.lower is not None:
            self.lower.check_invariants()
        self.moves.check_invariants()


def books_of(core: CacheCore) -> TierBooks:
    """Raises LookupError if the core has no tiers."""
    for one in core.below:
        if isinstance(one, TierBooks):
            return one
    raise LookupError("the core has no books of tiers")
