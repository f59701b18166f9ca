"""Pins entries of blocks and sketches for residencies, and marks what clients may be reading.

Always true: an entry has a pin per position at which a residency contains it, and one per
running comparison (`hold`). Marked are exactly entries that a residency pins or
`cache.readers.Grace` keeps, before any client learns their offset. If two residencies pin an
entry, each promise shrinks by a slot, but pinned bytes count it once.
"""

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.readers import Grace, Marks
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries, Int64s, aligned
from hotkv_server.residency.book.bound import ResidencyBound, slots_of
from hotkv_server.residency.book.register import Residency


class ResidencyPins:
    """counts: pins of residencies by entry number, uint32."""

    def __init__(self, space: Space, bound: ResidencyBound, grace: Grace, marks: Marks) -> None:
        # Its pages take memory only once written.
        self.counts = np.zeros(space.index.capacity + 1, np.uint32)
        self._space = space
        self._bound = bound
        self._grace = grace
        self._marks = marks
        self._held: list[Entries] = []

    def __repr__(self) -> str:
        return f"ResidencyPins({self._bound.pinned_bytes} B)"

    def sketch_offsets(
        self, residency: Residency, group_index: int, first_position: int, block_count: int
    ) -> Int64s:
        """Slot offsets of pinned sketches, by position; -1 if none, or if it is not verified yet
        after a restart."""
        group, index = residency.groups[group_index], self._space.index
        linked = group.linked_at(first_position + np.arange(block_count, dtype=np.int64))
        is_known = (linked != 0) & ~index.unverified[linked]
        offsets: Int64s = np.where(is_known, index.offsets(linked), -1)
        return offsets

    def pin(
        self, residency: Residency, group_index: int, positions: Int64s, entries: Entries
    ) -> None:
        """Pins ready, verified blocks in order until the group is full; `positions` increase.
        Skips positions that have a block. Does nothing if the residency is closing or lacks the
        group."""
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not len(positions):
            return
        _, known = group.rows(positions)
        room = group.most - len(group.positions)
        positions, entries = positions[~known][:room], entries[~known][:room]
        group.add(positions, entries)
        self._pin(residency, entries, group.block_bytes)

    def pin_linked(self, residency: Residency, group_index: int, positions: Int64s) -> None:
        """Pins sketches of the group's `kinds` whose blocks are pinned and ready, one per
        position."""
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not group.kinds:
            return
        index, records = self._space.index, self._space.index.table.records
        rows, known = group.rows(positions)
        rows = rows[known]
        rows = rows[(group.linked[rows] == 0) & index.is_ready(group.entries[rows])]
        linked = self._space.sketches.of(group.entries[rows])
        kinds = records[linked, table.W_GROUP_STATE] & np.uint32(0xFFFF)
        wanted = (linked != 0) & np.isin(kinds, list(group.kinds))
        rows, linked = rows[wanted], linked[wanted]
        group.link(rows, linked)
        self._pin(residency, linked, group.kind_bytes)

    def _pin(self, residency: Residency, entries: Entries, slot_bytes: int) -> None:
        """Turns promised slots into pinned ones. `slot_bytes`: of each."""
        fresh = entries[self.counts[entries] == 0]
        # Before any client learns their offsets, so that after a kill the next server finds the
        # marks.
        self._marks[entries] = 1
        np.add.at(self.counts, entries, np.uint32(1))
        if np.any(self.counts[fresh] > 1):
            fresh = np.unique(fresh)
        self._space.index.pin(entries, 1)
        self._bound.promise(residency.tenant, {slot_bytes: len(entries)}, -1)
        self._bound.pin(residency.tenant, np.full(len(fresh), slot_bytes))

    def unpin(self, tenant: int, entries: Entries) -> None:
        """Removes a pin from each of these entries. A flushed one becomes free with its last
        pin."""
        index, distinct = self._space.index, np.unique(entries)
        np.subtract.at(self.counts, entries, np.uint32(1))
        last = distinct[self.counts[distinct] == 0]
        self._bound.pin(tenant, index.slot_bytes(last), -1)
        self._marks[last[~self._grace.among(last)]] = 0
        index.pin(entries, -1)
        self._space.removal.reap(distinct)

    def hold(self, entries: Entries) -> Entries:
        """Pins the entries while they are verified. Pass this same array to `release_held`."""
        if len(entries):
            self._space.index.pin(entries, 1)
            self._held.append(entries)
        return entries

    def release_held(self, entries: Entries) -> None:
        """`entries`: the same array that `hold` returned."""
        self._held = [held for held in self._held if held is not entries]
        self._space.index.pin(entries, -1)
        self._space.removal.reap(entries)

    def all(self) -> Int64s:
        """Pins by entry number. Takes time linear in the capacity."""
        pins = self.counts.astype(np.int64)
        for entries in self._held:
            np.add.at(pins, entries, 1)
        return pins

    def check(self, counts: Int64s) -> tuple[dict[int, int], dict[int, int]]:
        """Raises AssertionError if pins differ from `counts` (by entry number), or marks are not
        those of pinned entries and `Grace`. Returns pinned bytes by tenant and pinned slots by
        size."""
        index = self._space.index
        assert np.array_equal(counts, self.counts), "pins of residencies miscounted"
        pinned = np.flatnonzero(counts).astype(np.uint32)
        assert np.all(index.can_be_read(pinned)), "pins something that has no bytes"
        marked = np.flatnonzero(self._marks).astype(np.uint32)
        assert np.array_equal(marked, np.union1d(pinned, self._grace.entries)), (
            "marks and pins of readers disagree"
        )
        owners = self._space.tenants.of(index.key_spaces(pinned))
        sizes = index.slot_bytes(pinned)
        by_tenant = {
            int(tenant): self._bound.costs(slots_of(sizes[owners == tenant]))
            for tenant in np.unique(owners)
        }
        return by_tenant, slots_of(sizes)


class ResidencyStore:
    """Pins a store's blocks for its residency. Implements `StorePins`."""

    def __init__(self, residency: Residency, pins: ResidencyPins) -> None:
        self._residency, self._pins = residency, pins

    def left_bytes(self) -> int:
        left = self._residency.left()
        return sum(count * aligned(size) for size, count in left.items())

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        self._pins.pin(self._residency, group_index, positions, entries)

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        self._pins.pin_linked(self._residency, group_index, positions)
