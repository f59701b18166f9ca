"""`Resizing` grows and shrinks a running node's arena.

Growth adds slabs, which are lent once they have memory (`Space.grow`). A shrink gives up the slabs
at the arena's end. Blocks there move to free slots before them; for these the coldest blocks of
their slot size go, wherever they lie. So what stays is what the policy would have kept.

Always true: a pinned or reserved block neither moves nor goes; the slabs of its run stay until its
pins have ended. A block is moved within one call of the event loop, in which nobody can pin it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hotkv_proto.errors import invalid
from hotkv_server.cache.arrays import distinct
from hotkv_server.cache.leases.books import CacheBooks
from hotkv_server.cache.leases.leases import ReadLease
from hotkv_server.cache.room.removal import EVICTED_PER_PART, Parts
from hotkv_server.cache.room.shares import NOBODY, most_pinned
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import Entries, Int64s

MOVED_BYTES = 4 << 20
"""Of a part: copied in about a millisecond."""
Copy = Callable[[Int64s, Int64s, int], None]
"""Copies slots within the arena: from these offsets, to those, bytes of each."""


class Resizing:
    """moved_blocks, evicted_blocks: by shrinks so far."""

    def __init__(self, books: CacheBooks) -> None:
        self.moved_blocks = self.evicted_blocks = 0
        self._books, self._space = books, books.space
        self._index, self._pool = books.space.index, books.space.pool

    def __repr__(self) -> str:
        return f"Resizing({self.arena_bytes} B)"

    @property
    def arena_bytes(self) -> int:
        """While a shrink is in progress, what it shrinks to."""
        return self._books.config.arena_bytes

    def check(self, arena_bytes: int) -> None:
        """Raises INVALID_FIELD for a size that the arena can't have."""
        slab_bytes = self._pool.slab_bytes
        least = max(slab_bytes, int(self._books.config.part_starts[-1]) + slab_bytes)
        if arena_bytes < least:
            raise invalid(f"arena.bytes is {arena_bytes}, and must be at least {least}")
        for record in self._books.catalog.records.values():
            largest = max(group.slot_bytes for group in record.key_space.groups)
            if largest > arena_bytes:
                raise invalid(
                    f"arena.bytes is {arena_bytes}, and a block of key space {record.number} has "
                    f"{largest}"
                )
        self._space.tenants.check_size(arena_bytes // slab_bytes * slab_bytes)

    def _set(self, num_slabs: int) -> None:
        arena_bytes, books = num_slabs * self._pool.slab_bytes, self._books
        books.config = replace(books.config, arena_bytes=arena_bytes)
        books.leases.unwritten.resize(int(2 * books.config.unwritten_share * arena_bytes))

    def grow(self, arena_bytes: int) -> None:
        """The caller has checked the size, and reports memory by `Space.grow`."""
        num_slabs = arena_bytes // self._pool.slab_bytes
        self._pool.resize(num_slabs)
        self._set(num_slabs)

    # ---------------------------------------------------------------------------------- shrinking

    def why_not_yet(self, arena_bytes: int) -> str:
        """Why a shrink can't begin: what is promised would not fit; empty if it can."""
        books, num_slabs = self._books, arena_bytes // self._pool.slab_bytes
        fitting = most_pinned(num_slabs * self._pool.slab_bytes)
        fitting = min(fitting, int(books.config.residency_share * arena_bytes))
        held = books.pin_budget.resident_bytes
        if held > fitting or self._pool.floors_missing_below(num_slabs):
            return f"residencies hold {held} bytes, of which {fitting} would fit"
        return ""

    def begin_shrink(self, arena_bytes: int) -> None:
        """No more slots are given out beyond `arena_bytes`. `why_not_yet` is empty."""
        num_slabs = arena_bytes // self._pool.slab_bytes
        self._space.tenants.shrink(num_slabs * self._pool.slab_bytes)
        self._pool.bar(num_slabs)
        self._set(num_slabs)
        self._space.reserve.rebound()
        self._books.retention_pins.shed()

    def shrink(self, copy: Copy, now_s: float) -> Parts[None]:
        """Empties the slabs to be given up, but for blocks that are pinned or reserved: to be
        repeated until `is_empty`."""
        found = [np.empty(0, np.uint32)]
        for live in self._space.books.walk():
            found.append(live[self._pool.is_barred(self._index.offsets(live))])
            yield
        entries = np.concatenate(found)
        held = self._lift_holds(entries)
        going = entries[self._index.evictable(entries)]
        sizes = self._index.slot_bytes(going)
        for size in distinct(sizes).tolist():
            mine = going[sizes == size]
            yield from self._make_place(size, mine)
            yield from self._move(size, mine, copy)
        for end_s, ended, keys in held:
            # A number may stand for another block by now.
            same = ended[self._index.is_ready(ended)]
            same = same[np.isin(self._index.mixed(same), keys)]
            if end_s > now_s:
                self._books.retention_pins.hold(same, end_s)

    def _lift_holds(self, entries: Entries) -> list[tuple[float, Entries, Keys]]:
        """Ends the holds of those that nothing else pins. Returns ends, entries and keys."""
        holds = self._books.retention_pins
        ends_s = holds.ends_s(entries)
        alone = (ends_s > 0) & (self._index.pins[entries] == 1)
        alone &= self._index.is_ready(entries)
        lifted = [
            (end_s, mine := entries[alone & (ends_s == end_s)], self._index.mixed(mine))
            for end_s in np.unique(ends_s[alone]).tolist()
        ]
        holds.unpin(entries[alone])
        return lifted

    def _make_place(self, size: int, moving: Entries) -> Parts[None]:
        """Evicts the coldest blocks of this slot size, those to be moved among them, until the rest
        fits. Blocks within their tenant's guarantee go last."""
        missing = len(moving) - self._pool.available_slots(size)
        if missing <= 0:
            return
        books, found, ranks = self._space.books, [], []
        for live in books.walk():
            mine = live[self._index.evictable(live, size)]
            mine = mine[~self._space.sketches.linked(mine)]
            guarded = np.zeros(len(mine), np.bool_)
            if books.tenants.is_used:
                owners, freed = books.owners(mine), self._space.sketches.bytes_with(mine)
                guarded = ~books.tenants.may_give(owners, freed, NOBODY)
            found.append(mine)
            ranks.append(np.stack((guarded.astype(np.float64), books.heat(mine))))
            yield
        entries, (guarded, heat) = np.concatenate(found), np.concatenate(ranks, axis=1)
        coldest = entries[np.lexsort((heat, guarded))[:missing]]
        for start in range(0, len(coldest), EVICTED_PER_PART):
            part = coldest[start : start + EVICTED_PER_PART]
            self._evict(part[self._index.evictable(part, size)])
            yield

    def _evict(self, entries: Entries) -> None:
        self.evicted_blocks += self._space.removal.evict(entries)

    def _move(self, size: int, entries: Entries, copy: Copy) -> Parts[None]:
        """The hottest first, while slots are free; the others go."""
        entries = entries[np.argsort(-self._space.books.heat(entries), kind="stable")]
        per_part = max(1, MOVED_BYTES // size)
        for start in range(0, len(entries), per_part):
            part = entries[start : start + per_part]
            part = part[self._index.evictable(part, size)]
            part = part[self._pool.is_barred(self._index.offsets(part))]
            new = self._pool.allocate(size, len(part))
            moving, rest = part[: len(new)], part[len(new) :]
            old = self._index.offsets(moving)
            copy(old, new, size)
            self._index.relocate(moving, new)
            self._pool.free(size, old)
            self.moved_blocks += len(moving)
            self._evict(rest)
            yield

    @property
    def is_empty(self) -> bool:
        """No block lies in slabs to be given up."""
        return self._pool.num_reached == self._pool.bar_start

    def end_shrink(self) -> int:
        """Returns the arena's bytes: as wanted, or as far as blocks still lie."""
        num_slabs = self._pool.num_reached
        self._pool.resize(num_slabs)
        self._set(num_slabs)
        self._space.grow(self.arena_bytes, 0)
        return self.arena_bytes

    def holders(self) -> dict[str, int]:
        """Who pins blocks in slabs to be given up: numbers of blocks, by a name for people."""
        live = np.concatenate([np.empty(0, np.uint32), *self._space.books.walk()])
        there = live[self._pool.is_barred(self._index.offsets(live))]
        found: Counter[str] = Counter()
        found["stores or promotions in progress"] = int((~self._index.can_be_read(there)).sum())
        for lease in self._books.leases.all():
            if isinstance(lease, ReadLease):
                of_lease = np.isin(lease.entries(), there)
                found[f"read leases of {lease.engine_id}"] += int(of_lease.sum())
        for pinner in self._books.pinners:
            found["residencies"] += int((pinner.pins()[there] > 0).sum())
        for one in self._books.below:
            found["copies to tiers"] += int((one.pins()[there] > 0).sum())
        found["retentions"] += int((self._books.retention_pins.ends_s(there) > 0).sum())
        found["readers of an earlier server"] += int(self._books.grace.among(there).sum())
        return {name: count for name, count in found.items() if count}
