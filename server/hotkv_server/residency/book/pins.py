"""Pins entries (blocks, and their sketches for sparse attention) for residencies. Also marks
entries that clients may be reading directly in the arena.

Always true: an entry has one pin for each position at which a residency contains it, and one for
each running comparison with its checksum (`hold`). An entry is marked if and only if a residency
pins it, or it is kept for readers of the previous server (`cache.readers.Grace`). The mark is set
before any client learns the entry's offset. If two residencies pin the same entry, the promise
(reserved slots) of each shrinks by a slot, but the pinned bytes count the entry once.
"""

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.readers import Grace, Marks
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries, Int64s
from hotkv_server.residency.book.bound import ResidencyBound, slots_of
from hotkv_server.residency.book.register import Residency


class ResidencyPins:
    """Pins entries (blocks, and their sketches for sparse attention) for residencies. A
    residency keeps the blocks of a running request in host memory. Marks the pinned entries, so
    that the next server keeps them.

    counts: by entry number, how many times residencies pin the entry, uint32.
    """

    def __init__(self, space: Space, bound: ResidencyBound, grace: Grace, marks: Marks) -> None:
        # The operating system allocates a page of this array only when the page is first written.
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
        """Returns the slot offsets of the sketches (compact forms of keys, for sparse
        attention) that the residency pins. The result has an offset for each of `block_count`
        positions from `first_position` on; -1 if the residency pins no sketch at the
        position.

        A sketch that a restart has restored counts as not pinned until its bytes have been
        compared with its checksum.
        """
        group, index = residency.groups[group_index], self._space.index
        linked = group.linked_at(first_position + np.arange(block_count, dtype=np.int64))
        is_known = (linked != 0) & ~index.unverified[linked]
        offsets: Int64s = np.where(is_known, index.offsets(linked), -1)
        return offsets

    def pin(
        self, residency: Residency, group_index: int, positions: Int64s, entries: Entries
    ) -> None:
        """Pins blocks, in order, until the group has as many blocks as it may have.

        Skips a position that already has a block. Does nothing if the residency is closing or lacks
        the group.

        positions: positions of the blocks in the request, increasing.
        entries: the entries (records in the block table) of the blocks, which are ready and
            verified.
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
        """Pins the sketches (compact forms of keys, for sparse attention) of the blocks at
        `positions`.

        A sketch is pinned if its block is pinned and ready, and if its kind is one of the
        group's `kinds`. A position has at most one pinned sketch.
        """
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
        """Pins entries (records in the block table) and reduces the residency's promise (reserved
        slots) by the same number of slots (places in the arena).

        slot_bytes: slot size of all these entries.
        """
        fresh = entries[self.counts[entries] == 0]
        # Mark the entries (as entries that clients may read) before any client learns their
        # offsets. So if the server is killed, the next server finds the marks.
        self._marks[entries] = 1
        np.add.at(self.counts, entries, np.uint32(1))
        if np.any(self.counts[fresh] > 1):
            fresh = np.unique(fresh)
        self._space.index.pin(entries, 1)
        self._bound.promise(residency.tenant, {slot_bytes: len(entries)}, -1)
        self._bound.pin(residency.tenant, np.full(len(fresh), slot_bytes))

    def unpin(self, tenant: int, entries: Entries) -> None:
        """Removes one pin from each of these entries (blocks or sketches), which a residency
        (a request whose KV stays in host memory) of `tenant` has pinned. An entry that was flushed
        (deleted with its whole key space) while it was pinned becomes free with its last pin."""
        index, distinct = self._space.index, np.unique(entries)
        np.subtract.at(self.counts, entries, np.uint32(1))
        last = distinct[self.counts[distinct] == 0]
        self._bound.pin(tenant, index.slot_bytes(last), -1)
        self._marks[last[~self._grace.among(last)]] = 0
        index.pin(entries, -1)
        self._space.removal.reap(distinct)

    def hold(self, entries: Entries) -> Entries:
        """Pins each entry once, while the entries are compared with their checksums.
        Returns `entries`; the caller must later pass this same array to `unpin`, which unpins the
        entries."""
        if len(entries):
            self._space.index.pin(entries, 1)
            self._held.append(entries)
        return entries

    def release_held(self, entries: Entries) -> None:
        """Unpins the entries (records in the block table) that a call of `hold` has pinned.
        entries: the same array that `hold` returned.
        """
        self._held = [held for held in self._held if held is not entries]
        self._space.index.pin(entries, -1)
        self._space.removal.reap(entries)

    def all(self) -> Int64s:
        """Returns how many times this object pins each block or sketch (compact form of
        keys), by entry number. Takes time linear in the capacity."""
        pins = self.counts.astype(np.int64)
        for entries in self._held:
            np.add.at(pins, entries, 1)
        return pins

    def check(self, counts: Int64s) -> tuple[dict[int, int], dict[int, int]]:
        """Raises AssertionError if the pins differ from `counts` (number of pins by entry number).
        Also raises it unless the marked entries (which clients may read) are exactly the pinned
        entries and the entries of `Grace`.

        Returns the pinned bytes of the arena by tenant, and the number of pinned slots by size.
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
    """Pins the blocks of a store for the residency that the store names. (A residency keeps the
    blocks of a running request in host memory.) Implements `StorePins`."""

    def __init__(self, residency: Residency, pins: ResidencyPins) -> None:
        self._residency, self._pins = residency, pins

    def left_bytes(self) -> int:
        left = self._residency.left()
        return sum(count * aligned(size) for size, count in left.items())

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        self._pins.pin(self._residency, group_index, positions, entries)

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        self._pins.pin_linked(self._residency, group_index, positions)
