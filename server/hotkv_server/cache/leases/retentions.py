"""`RetentionPins` has the retentions, called holds here.

Always true: an entry has at most one hold, which is one pin and lasts until the latest time that
a request asked for. Held bytes never exceed the budget, nor a tenant's its part; an entry that
would exceed one is not held. A hold outlives the session that asked for it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.arrays import distinct, each_once
from hotkv_server.cache.room.shares import PinBudget, TenantBook
from hotkv_server.cache.room.slabs import SlabFloors
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Int64s

PART_ENTRIES = 1 << 18
"""Entry numbers that each step of `expire` examines, in a millisecond or two."""


class RetentionPins:
    """_until_s: by entry number, float64 on the clock of `now_s`; 0 without a hold.
    _next_end_s: no hold ends before.

    `share`: of the arena, 0 to 1, that may be held. `budget` bounds all long pins; None: only
        `share` does. `floors`: slots promised to residencies, for which holds must leave room.
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
        # Little memory at first: the kernel allocates a page when an entry on it is first held.
        self._until_s = np.zeros(index.capacity + 1, np.float64)
        self._num_held = 0
        self._bytes_of: dict[int, int] = {}
        self._next_end_s = np.inf
        # No hold that began since `expire` was called ends before; `expire` needs it for
        # `_next_end_s`.
        self._next_new_end_s = np.inf

    @property
    def held_bytes(self) -> int:
        return self._budget.held_bytes

    @property
    def budget_bytes(self) -> int:
        """A share of the arena that has memory; when that shrinks, `shed` must follow."""
        return int(self._share * self._tenants.capacity_bytes)

    def __len__(self) -> int:
        return self._num_held

    def __repr__(self) -> str:
        return f"RetentionPins({len(self)} entries, {self.held_bytes}/{self.budget_bytes} B)"

    def hold(self, entries: Entries, until_s: float) -> int:
        """Holds ready blocks of one tenant; if the budget is too small, only the first of those
        not yet held. Returns how many of `entries` are held now."""
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
        """For each slot size, the first entries: as many as leave the promised slots free
        (`SlabFloors.holdable`)."""
        sizes, stays = self._index.slot_bytes(entries), np.ones(len(entries), np.bool_)
        for size in distinct(sizes).tolist():
            stays[np.flatnonzero(sizes == size)[self._floors.holdable(size) :]] = False
        return entries[stays]

    def _count(self, tenant: int, sizes: Int64s, sign: int) -> None:
        """Counts slots of `sizes` as held; `sign` -1 subtracts them."""
        num_bytes = sign * int(sizes.sum())
        self._num_held += sign * len(sizes)
        self._budget.count(tenant, held=num_bytes)
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        for size in distinct(sizes).tolist():
            self._floors.hold(size, sign * int(np.count_nonzero(sizes == size)))

    def _tenants_of(self, entries: Entries) -> Int64s:
        return self._tenants.of(self._index.key_spaces(entries))

    def _room_bytes(self, tenant: int) -> int:
        """0 or less if nothing more may be held for the tenant."""
        bound = int(self._share * self._tenants.sure_bytes(tenant))
        return min(
            self.budget_bytes - self.held_bytes,
            self._budget.for_others(tenant),
            bound - self._bytes_of.get(tenant, 0),
        )

    def expire(self, now_s: float) -> Iterator[None]:
        """Yields after each step; other methods may be called in between."""
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

    def ends_s(self, entries: Entries) -> NDArray[np.float64]:
        """When the holds end; 0 without one."""
        ends: NDArray[np.float64] = self._until_s[entries]
        return ends

    def unpin(self, entries: Entries) -> None:
        """Ends these holds at once; skips entries that are not held."""
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

    def shed(self) -> None:
        """Ends holds beyond the budget: those that would end first."""
        held = self.entries()
        order = held[np.argsort(self._until_s[held], kind="stable")]
        freed = np.cumsum(self._index.slot_bytes(order))
        count = np.searchsorted(freed, self.held_bytes - self.budget_bytes)
        if self.held_bytes > self.budget_bytes:
            self._end(order[: int(count) + 1])

    def entries(self) -> Entries:
        """Held entries, rising. Linear in the capacity."""
        return np.flatnonzero(self._until_s).astype(np.uint32)

    def check_invariants(self) -> None:
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
