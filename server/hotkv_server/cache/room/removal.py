"""Removing entries: eviction, flush and drop, with the notices that they cause.

Owns the notices that nobody has taken yet, and the keys of what was removed last. Always true: an
entry that is pinned or reserved is never evicted; every block that is evicted or flushed has its
notice, and a block that is dropped has none; a pinned block that is flushed cannot be found any
more and keeps its slot until it is reaped.
"""

from collections.abc import Sequence

import numpy as np

from hotkv_proto import table
from hotkv_proto.table import Words
from hotkv_server.cache.histogram import AGES_S, Histogram
from hotkv_server.cache.room.books import EVICTED_PER_PART, Books
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import BoolMask, Entries, EvictionNotice

GHOST_KEYS = 1 << 16
"""Removed keys that are remembered, to say why a block is not there."""
MAX_FRESH = 1 << 12
"""Keys that are removed before all are sorted anew."""


class Removal:
    """Removes entries of one tier. `effects`: notices since `take_effects`. `now_s`: as it was
    when a session was opened or leases expired last; 0 before. `ages_s`: of blocks that were
    evicted, seconds since their last use; none is counted before the time is known."""

    def __init__(self, books: Books) -> None:
        self.evicted_blocks = 0
        self.effects: list[EvictionNotice] = []
        self.now_s = 0.0
        self.ages_s = Histogram(AGES_S)
        self._books = books
        self.index = books.index
        self._representations = books.representations
        # A ring: `_next_ghost` is the place of the oldest.
        self._ghosts = np.zeros(GHOST_KEYS, np.uint64)
        self._next_ghost = 0
        # As they were `_num_fresh` removals ago. Each report of a request asks, and sorting all
        # takes milliseconds.
        self._sorted_ghosts = np.sort(self._ghosts)
        self._num_fresh = 0

    def __repr__(self) -> str:
        return f"Removal({self.evicted_blocks} evicted, {len(self.effects)} notices not taken)"

    def take_effects(self) -> list[EvictionNotice]:
        """Returns the notices since the last call."""
        effects, self.effects = self.effects, []
        return effects

    def evict(self, entries: Entries) -> int:
        """Evicts those entries that are ready and not pinned; returns how many.

        Blocks go with a notice, representations without.
        """
        going = entries[self.index.evictable(entries)]
        alone = self._representations.among(going)
        count = self.evict_blocks(going[~alone])
        # Some of the representations went with their blocks.
        rest = going[alone]
        rest = rest[self.index.evictable(rest)]
        self._representations.drop(rest)
        return count + len(rest)

    def evict_blocks(self, entries: Entries) -> int:
        """Evicts blocks that the caller knows to be evictable; returns how many."""
        if len(entries):
            keys = self.index.mixed(entries)
            if self.now_s:
                used_s = self._books.policy.last_used_s(entries)
                self.ages_s.add_all(np.maximum(self.now_s - used_s, 0.0))
            self._books.policy.forget(entries, keys, evicted=True)
            parts = self.index.remove(entries, keys)
            self._give_notice(parts, keys)
            self._books.free_slots(parts)
            self._representations.follow(parts)
            self.evicted_blocks += len(entries)
        return len(entries)

    def flush(self, entries: Entries) -> None:
        """Removes ready blocks, with a notice. Pinned ones keep their slots until they are
        reaped."""
        keys = self.index.mixed(entries)
        parts = self.index.parts(self.index.table.records[entries])
        self._give_notice(parts, keys)
        self._books.policy.forget(entries, keys, evicted=False)
        is_pinned = self.index.pins[entries] > 0
        self._books.free_slots(self.index.remove(entries[~is_pinned], keys[~is_pinned]))
        self.index.detach(entries[is_pinned])
        self._representations.follow(parts)

    def drop(self, entries: Entries) -> None:
        """Removes entries without a notice: reserved ones that will not be written."""
        keys = self.index.mixed(entries)
        self._books.policy.forget(entries, keys, evicted=False)
        self._books.free_slots(self.index.remove(entries, keys))

    def forsake(self, entries: Entries) -> None:
        """Takes reserved entries that are pinned out of the table, without a notice. They keep
        their slots until they are reaped."""
        self._books.policy.forget(entries, self.index.mixed(entries), evicted=False)
        self.index.detach(entries)

    def reap(self, entries: Entries) -> None:
        """Frees the slots of those entries that are detached and not pinned any more."""
        if not len(entries):
            return
        detached = (
            self.index.table.records[entries, table.W_GROUP_STATE] >> 16 == table.STATE_DETACHED
        )
        if detached.any():
            gone = np.unique(entries[detached & (self.index.pins[entries] == 0)])
            # Copies of few records stay in the processor's cache.
            for start in range(0, len(gone), EVICTED_PER_PART):
                part = gone[start : start + EVICTED_PER_PART]
                rows = self.index.table.records[part]
                self.index.remove_detached(part)
                self._books.free_slots(self.index.parts(rows))

    def was_evicted(self, key_space_id: int, group_index: int, hashes: Words) -> BoolMask:
        """Which keys [n] are among the last GHOST_KEYS removed, or up to MAX_FRESH before."""
        keys = self.index.mixed_hashes(key_space_id, group_index, hashes)
        if self._num_fresh > MAX_FRESH:
            self._sorted_ghosts, self._num_fresh = np.sort(self._ghosts), 0
        evicted = _are_among(keys, self._sorted_ghosts)
        if self._num_fresh:
            last = np.arange(self._next_ghost - self._num_fresh, self._next_ghost)
            evicted |= _are_among(keys, np.sort(self._ghosts[last % GHOST_KEYS]))
        return evicted

    def _give_notice(self, parts: Sequence[Words], keys: Keys) -> None:
        """Adds a notice for each part, records of one key space and group, and remembers the
        keys."""
        for rows in parts:
            key_space_id = int(rows[0, table.W_KEY_SPACE])
            group_index = int(rows[0, table.W_GROUP_STATE]) & 0xFFFF
            self.effects.append(
                EvictionNotice(key_space_id, group_index, np.ascontiguousarray(rows[:, :8]))
            )
        last = keys[-GHOST_KEYS:]
        at = self._next_ghost
        self._next_ghost = (at + len(last)) % GHOST_KEYS
        self._num_fresh = min(self._num_fresh + len(last), GHOST_KEYS)
        fitting = min(len(last), GHOST_KEYS - at)
        self._ghosts[at : at + fitting] = last[:fitting]
        self._ghosts[: len(last) - fitting] = last[fitting:]


def _are_among(keys: Keys, ordered: Keys) -> BoolMask:
    """Which keys [n] are among some in rising order, which are not none."""
    places = np.minimum(np.searchsorted(ordered, keys), len(ordered) - 1)
    found: BoolMask = ordered[places] == keys
    return found
