"""Retention pins: pin entries (records in the block table) until a given time, because requests
asked to retain their blocks. Such a pin is called a hold here.

Always true: an entry has at most one hold, which lasts until the latest time that a request asked
for. A hold is exactly one pin. All held bytes together never exceed the budget, and a tenant's held
bytes never exceed the tenant's part of the budget. An entry that would exceed a budget is not held.
A hold does not belong to a session: it continues when the session that asked for it ends.
"""

from collections.abc import Iterator

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.arrays import distinct, each_once
from hotkv_server.cache.room.shares import PinBudget, TenantBook
from hotkv_server.cache.room.slabs import SlabFloors
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Int64s

PART_ENTRIES = 1 << 18
"""Number of entry numbers (row numbers of the block table) that each step of `expire` examines. A
step takes a millisecond or two."""


class RetentionPins:
    """Holds blocks (pins them until a given time, because requests asked for it), within a budget.
    An entry is a block's record in the block table.

    _until_s: by entry number, the end of the entry's hold, float64 seconds on the clock of `now_s`;
        0 without a hold.
    _next_end_s: no hold ends before this time.

    Arguments of the constructor: `share` is the largest share of the arena that may be held, 0 to
    1. `budget` bounds the bytes of all pins that last long: holds, leases, and residencies
    (requests whose KV stays in host memory). None: only `share` limits the holds. `floors` has the
    numbers of slots that were promised to residencies; holds must leave room for these slots.
    """

    def __init__(
        self, index: BlockIndex, tenants: TenantBook, share: float,
        budget: PinBudget | None = None, floors: SlabFloors | None = None,
    ) -> None:  # fmt: skip
        self._budget = budget or PinBudget(tenants)
        self._floors = floors or SlabFloors(SLOT_ALIGN, lambda size: 0, lambda: 0)
        self._index = index
        self._tenants = tenants
        self._share = share
        # This array uses little memory at first: the kernel allocates a page of it when an entry on
        # this page is first held (pinned because a request asked for it).
        self._until_s = np.zeros(index.capacity + 1, np.float64)
        self._num_held = 0
        self._bytes_of: dict[int, int] = {}
        self._next_end_s = np.inf
        # None of the holds that began since the current call of `expire` ends before this time.
        # `expire` uses it at its end to compute `_next_end_s`.
        self._next_new_end_s = np.inf

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that are held (pinned because requests asked for it)."""
        return self._budget.held_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes that may be held (pinned because requests asked for it): a share of the
        arena's bytes whose memory is allocated. The server allocates the arena step by step and
        never shrinks it, so the budget never falls."""
        return int(self._share * self._tenants.capacity_bytes)

    def __len__(self) -> int:
        return self._num_held

    def __repr__(self) -> str:
        return f"RetentionPins({len(self)} entries, {self.held_bytes}/{self.budget_bytes} B)"

    def hold(self, entries: Entries, until_s: float) -> int:
        """Holds (pins) ready blocks, all of one tenant, until `until_s`. `entries`: the blocks'
        entry numbers. If the budget is too small, holds only the first of the entries that were not
        held before. Returns how many of the entries are held now, including entries that were held
        before."""
        entries = each_once(entries)
        is_known = self._until_s[entries] > 0
        known, fresh = entries[is_known], entries[~is_known]
        self._until_s[known] = np.maximum(self._until_s[known], until_s)
        if not len(fresh):
            return len(known)
        tenant, sizes = int(self._tenants_of(fresh)[0]), np.cumsum(self._index.slot_bytes(fresh))
        fitting = fresh[: int(np.searchsorted(sizes, self._room_bytes(tenant), side="right"))]
        fitting = self._beside_floors(fitting)
        if len(fitting):
            self._index.pin(fitting, 1)
            self._until_s[fitting] = until_s
            self._next_end_s, self._next_new_end_s = (
                min(self._next_end_s, until_s),
                min(self._next_new_end_s, until_s),
            )
            self._count(tenant, self._index.slot_bytes(fitting), 1)
        return len(known) + len(fitting)

    def _beside_floors(self, entries: Entries) -> Entries:
        """Returns, for each slot size, the first of the entries: as many as may be held (pinned
        because a request asked to retain its blocks). Slots that were promised to residencies
        (requests whose KV stays in host memory) must not be used up by held blocks;
        `SlabFloors.holdable` knows how many slots are left."""
        sizes, stays = self._index.slot_bytes(entries), np.ones(len(entries), np.bool_)
        for size in distinct(sizes).tolist():
            stays[np.flatnonzero(sizes == size)[self._floors.holdable(size) :]] = False
        return entries[stays]

    def _count(self, tenant: int, sizes: Int64s, sign: int) -> None:
        """Counts entries (records in the block table) of a tenant as held (pinned because a request
        asked to retain their blocks). With `sign` -1, subtracts them again. `sizes`: slot size of
        each entry."""
        num_bytes = sign * int(sizes.sum())
        self._num_held += sign * len(sizes)
        self._budget.count(tenant, held=num_bytes)
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        for size in distinct(sizes).tolist():
            self._floors.hold(size, sign * int(np.count_nonzero(sizes == size)))

    def _tenants_of(self, entries: Entries) -> Int64s:
        """Returns the tenant number of each block, given by its entry."""
        return self._tenants.of(self._index.key_spaces(entries))

    def _room_bytes(self, tenant: int) -> int:
        """Returns how many more bytes may be held (pinned because requests asked for it) for a
        tenant; 0 or less if no more may be held."""
        bound = int(self._share * self._tenants.surely_bytes(tenant))
        return min(
            self.budget_bytes - self.held_bytes,
            self._budget.for_others(tenant),
            bound - self._bytes_of.get(tenant, 0),
        )

    def expire(self, now_s: float) -> Iterator[None]:
        """Ends the holds (retention pins) that have expired. Each step of the iterator examines
        PART_ENTRIES entry numbers. Any other method may be called between two steps."""
        if now_s < self._next_end_s:
            return
        soonest_s, self._next_new_end_s = np.inf, np.inf
        for start in range(0, self._index.num_numbers, PART_ENTRIES):
            part = self._until_s[start : min(start + PART_ENTRIES, self._index.num_numbers)]
            held = start + np.flatnonzero(part)
            self._end(held[self._until_s[held] <= now_s].astype(np.uint32))
            soonest_s = min(soonest_s, float(part.min(where=part > 0, initial=np.inf)))
            yield
        self._next_end_s = min(soonest_s, self._next_new_end_s)

    def unpin(self, entries: Entries) -> None:
        """Ends the holds (retention pins) of these entries (records in the block table) at once.
        Skips entries that are not held."""
        if self._num_held:
            self._end(each_once(entries[self._until_s[entries] > 0]))

    def _end(self, entries: Entries) -> None:
        if not len(entries):
            return
        self._index.pin(entries, -1)
        self._until_s[entries] = 0.0
        sizes = self._index.slot_bytes(entries)
        owners = self._tenants_of(entries)
        for tenant in np.unique(owners).tolist():
            self._count(tenant, sizes[owners == tenant], -1)

    def entries(self) -> Entries:
        """Returns all held entries (pinned because requests asked for it) in rising order. Takes
        time linear in the capacity."""
        return np.flatnonzero(self._until_s).astype(np.uint32)

    def check_invariants(self) -> None:
        """Raises AssertionError if held entries (records in the block table), bytes and pins
        disagree. Takes time linear in the capacity."""
        held = self.entries()
        assert len(held) == self._num_held, "held entries miscounted"
        assert self.held_bytes == int(self._index.slot_bytes(held).sum()) <= self.budget_bytes, (
            "held bytes miscounted"
        )
        assert sum(self._bytes_of.values()) == self.held_bytes, "held bytes of tenants miscounted"
        sizes, counts = np.unique(self._index.slot_bytes(held), return_counts=True)
        assert self._floors.held_slots == dict(zip(sizes.tolist(), counts.tolist(), strict=True)), (
            "held slots miscounted"
        )
        assert np.all(self._index.pins[held] > 0), "a held entry is not pinned"
        assert np.all(self._until_s[held] >= self._next_end_s), "a hold ends unseen"
