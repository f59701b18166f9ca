"""Pins entries (blocks, and their representations for sparse attention) for residencies, and marks
entries that clients may read directly in the arena.

Always true: an entry has one pin for each position at which a residency has it. An entry is marked
if it is pinned here, or if it is kept for readers of the previous server (`cache.readers.Grace`);
no other entry is marked. The mark is set before any client learns the entry's offset. If two
residencies pin the same entry, the promise of each shrinks by a slot, but the pinned bytes count
the entry once.
"""

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.readers import Grace, Marks
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries, Int64s
from hotkv_server.residency.book.bound import ResidencyBound, slots_of
from hotkv_server.residency.book.register import Residency


class ResidencyPins:
    """Pins entries for residencies (see the module).

    counts: number of pins by residencies, uint32, by entry number.
    """

    def __init__(self, space: Space, bound: ResidencyBound, grace: Grace, marks: Marks) -> None:
        # The operating system allocates a page of this array at the first pin in that page.
        self.counts = np.zeros(space.index.capacity + 1, np.uint32)
        self._space = space
        self._bound = bound
        self._grace = grace
        self._marks = marks
        self._held: list[Entries] = []

    def __repr__(self) -> str:
        return f"ResidencyPins({self._bound.pinned_bytes} B)"

    def representation_offsets(
        self, residency: Residency, group_index: int, first_position: int, block_count: int
    ) -> Int64s:
        """Returns the slot offset of the representation (compact form of a block's keys, for sparse
        attention) that the residency pins for each of `block_count` positions from `first_position`
        on; -1 if the residency pins no representation there.

        A representation that a restart has restored counts as missing until its bytes have been
        compared with its check value.
        """
        group, index = residency.groups[group_index], self._space.index
        linked = group.linked_at(first_position + np.arange(block_count, dtype=np.int64))
        is_known = (linked != 0) & ~index.unverified[linked]
        offsets: Int64s = np.where(is_known, index.offsets(linked), -1)
        return offsets

    def pin(
        self, residency: Residency, group_index: int, positions: Int64s, entries: Entries
    ) -> None:
        """Pins ready, verified blocks [n] at increasing positions [n], in this order until the
        group has its most blocks.

        A position that already has a block keeps that block. Does nothing if the residency is
        closing or lacks the group.
        """
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not len(positions):
            return
        _, known = group.rows(positions)
        room = group.most - len(group.positions)
        positions, entries = positions[~known][:room], entries[~known][:room]
        group.add(positions, entries)
        self._pin(residency, entries, group.block_bytes)

    def pin_linked(self, residency: Residency, group_index: int, positions: Int64s) -> None:
        """Pins the representation (compact form of keys, for sparse attention) of each pinned,
        ready block at `positions`, if the representation's kind is one of the group's `kinds`. A
        position has at most one pinned representation."""
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not group.kinds:
            return
        index, records = self._space.index, self._space.index.table.records
        rows, known = group.rows(positions)
        rows = rows[known]
        rows = rows[(group.linked[rows] == 0) & index.is_ready(group.entries[rows])]
        linked = self._space.representations.of(group.entries[rows])
        kinds = records[linked, table.W_GROUP_STATE] & np.uint32(0xFFFF)
        wanted = (linked != 0) & np.isin(kinds, list(group.kinds))
        rows, linked = rows[wanted], linked[wanted]
        group.link(rows, linked)
        self._pin(residency, linked, group.kind_bytes)

    def _pin(self, residency: Residency, entries: Entries, slot_bytes: int) -> None:
        """Pins entries whose slots have this size, and reduces the residency's promise (the slots
        that it may still pin) by the same number of slots."""
        fresh = entries[self.counts[entries] == 0]
        # Mark before any client learns the offsets: a killed server then leaves them marked.
        self._marks[entries] = 1
        np.add.at(self.counts, entries, np.uint32(1))
        if np.any(self.counts[fresh] > 1):
            fresh = np.unique(fresh)
        self._space.index.pin(entries, 1)
        self._bound.promise(residency.tenant, {slot_bytes: len(entries)}, -1)
        self._bound.pin(residency.tenant, np.full(len(fresh), slot_bytes))

    def unpin(self, tenant: int, entries: Entries) -> None:
        """Removes one pin from each of these entries, which a residency of `tenant` pinned. Frees
        entries that were flushed while they were pinned."""
        index, distinct = self._space.index, np.unique(entries)
        np.subtract.at(self.counts, entries, np.uint32(1))
        last = distinct[self.counts[distinct] == 0]
        self._bound.pin(tenant, index.slot_bytes(last), -1)
        self._marks[last[~self._grace.among(last)]] = 0
        index.pin(entries, -1)
        self._space.removal.reap(distinct)

    def hold(self, entries: Entries) -> Entries:
        """Pins each entry once, while entries are compared with their check values. Returns
        `entries`; the caller must pass the same array to `let_go`."""
        if len(entries):
            self._space.index.pin(entries, 1)
            self._held.append(entries)
        return entries

    def let_go(self, entries: Entries) -> None:
        """Releases the pins of a `hold`. `entries`: the array that `hold` returned."""
        self._held = [held for held in self._held if held is not entries]
        self._space.index.pin(entries, -1)
        self._space.removal.reap(entries)

    def all(self) -> Int64s:
        """Returns how often each entry is pinned here [capacity + 1]. Takes time linear in
        capacity."""
        pins = self.counts.astype(np.int64)
        for entries in self._held:
            np.add.at(pins, entries, 1)
        return pins

    def check(self, counts: Int64s) -> tuple[dict[int, int], dict[int, int]]:
        """Raises AssertionError unless the pins equal `counts` (by entry number), and exactly the
        pinned and the retained entries are marked as read in the arena.

        Returns the pinned bytes of the arena by tenant, and the pinned slots by size.
        """
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
    """Pins the blocks of a store for the residency that the store names; implements
    `StorePins`."""

    def __init__(self, residency: Residency, pins: ResidencyPins) -> None:
        self._residency, self._pins = residency, pins

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        self._pins.pin(self._residency, group_index, positions, entries)

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        self._pins.pin_linked(self._residency, group_index, positions)
