"""Pins of residencies: the entries that they pin, and the marks of entries that clients may read.

Always true: an entry has one pin for each position of a residency that names it. An entry that is
pinned here or kept by the grace is marked before any client learns its offset; no other entry is
marked. If a residency pins an entry that another residency has pinned, its own promise still
shrinks, and the entry counts once.
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

    counts: pins from residencies, uint32 by entry number.
    """

    def __init__(self, space: Space, bound: ResidencyBound, grace: Grace, marks: Marks) -> None:
        # The kernel allocates memory at the first pin of an entry nearby.
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
        """Returns the slot offsets of the representations that a residency pins with its blocks,
        from `first_position` on; -1 without a representation.

        Representations of an earlier server count as missing until they have been compared with
        their check values.
        """
        group, index = residency.groups[group_index], self._space.index
        linked = group.linked_at(first_position + np.arange(block_count, dtype=np.int64))
        is_known = (linked != 0) & ~index.unverified[linked]
        offsets: Int64s = np.where(is_known, index.offsets(linked), -1)
        return offsets

    def pin(
        self, residency: Residency, group_index: int, positions: Int64s, entries: Entries
    ) -> None:
        """Pins ready, verified blocks at rising positions, as many as the residency has left.

        Positions that already have a block keep it.
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
        """Pins the representation of each block at `positions` whose kind the session declared; at
        most one per position."""
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
        """Pins entries in slots of this size, and reduces the promise by as many slots."""
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
        """Removes a pin from each entry of a tenant's residency, and frees entries that were
        flushed while pinned."""
        index, distinct = self._space.index, np.unique(entries)
        np.subtract.at(self.counts, entries, np.uint32(1))
        last = distinct[self.counts[distinct] == 0]
        self._bound.pin(tenant, index.slot_bytes(last), -1)
        self._marks[last[~self._grace.among(last)]] = 0
        index.pin(entries, -1)
        self._space.removal.reap(distinct)

    def hold(self, entries: Entries) -> Entries:
        """Pins entries, once each, while they are compared with their check values. Returns
        them; pass them to `let_go`."""
        if len(entries):
            self._space.index.pin(entries, 1)
            self._held.append(entries)
        return entries

    def let_go(self, entries: Entries) -> None:
        """Releases the pins of a `hold`."""
        self._held = [held for held in self._held if held is not entries]
        self._space.index.pin(entries, -1)
        self._space.removal.reap(entries)

    def all(self) -> Int64s:
        """Returns the pins of each entry [capacity + 1]. Linear in capacity."""
        pins = self.counts.astype(np.int64)
        for entries in self._held:
            np.add.at(pins, entries, 1)
        return pins

    def check(self, counts: Int64s) -> tuple[dict[int, int], dict[int, int]]:
        """Raises AssertionError unless the pins equal `counts` (by entry number) and the marks
        agree.

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
    """Pins a store's blocks for its residency; implements `StorePins`."""

    def __init__(self, residency: Residency, pins: ResidencyPins) -> None:
        self._residency, self._pins = residency, pins

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        self._pins.pin(self._residency, group_index, positions, entries)

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        self._pins.pin_linked(self._residency, group_index, positions)
