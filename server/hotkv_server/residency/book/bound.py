"""Bounds what residencies take of the arena: promised slots (reserved, not yet pinned) and pinned
ones.

Always true:

- A tenant's residencies take at most `residency.share` of what the tenant may hold; an entry that
  several pin counts once.
- They also take at most `residency.share` of the arena minus a part for each other tenant:
  `residency.share` of its `guaranteed_bytes`, or what its residencies take, whichever is larger.
- For each slot size enough slabs are reserved (`SlabPool.floors`) to serve every promise by
  evicting unpinned blocks.
- A slot's bytes include its share of the unused end of its slab.

A promise must also fit `PinBudget`, of the arena and of the tenant, which also counts leases
before their first load and blocks that requests asked to pin.
"""

import functools
from collections.abc import Mapping

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.room.shares import PinBudget, TenantBook, most_pinned
from hotkv_server.cache.room.slabs import MAX_SIZES, SlabPool, shortest_run
from hotkv_server.cache.values import Int64s, aligned

MOST_NAMED_BYTES = 1 << 60
"""Largest arena that a refusal recommends, for a `residency.share` with which none suffices."""


@functools.lru_cache(maxsize=MAX_SIZES)
def slot_cost(slot_bytes: int, slab_bytes: int) -> int:
    """Bytes of the arena per slot: a small one's share of its slab, or all slabs that a large
    one spans. Assumes the shortest possible run of slabs, as `SlabPool.floors` reserves."""
    size = aligned(slot_bytes)
    return -(-shortest_run(size, slab_bytes) * slab_bytes // max(1, slab_bytes // size))


def slots_of(sizes: Int64s) -> dict[int, int]:
    """Slots by size."""
    if not len(sizes):
        return {}
    if (sizes == sizes[0]).all():
        return {int(sizes[0]): len(sizes)}
    found, counts = np.unique(sizes, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


class ResidencyBound:
    """Counts bytes by tenant and checks them.

    share: the setting `residency.share`.
    """

    def __init__(
        self, tenants: TenantBook, budget: PinBudget, share: float, pool: SlabPool
    ) -> None:
        self.promised_bytes = 0
        self.pinned_bytes = 0
        self._tenants = tenants
        self._budget = budget
        self._share = share
        self._slab_bytes = pool.slab_bytes
        self._floors = pool.floors
        self._taken: dict[int, int] = {}

    def __repr__(self) -> str:
        return (
            f"ResidencyBound({self.promised_bytes} B promised, {self.pinned_bytes} pinned of "
            f"{self.bound_bytes})"
        )

    @property
    def bound_bytes(self) -> int:
        """Of all residencies. While the arena is being prefaulted, only its prefaulted part
        counts."""
        return self._bound(self._tenants.capacity_bytes)

    def _bound(self, capacity_bytes: int) -> int:
        return min(int(self._share * capacity_bytes), most_pinned(capacity_bytes))

    def cost(self, slot_bytes: int) -> int:
        return slot_cost(slot_bytes, self._slab_bytes)

    def costs(self, slots: Mapping[int, int]) -> int:
        """`slots`: number by size."""
        return sum(count * self.cost(size) for size, count in slots.items())

    def promise(self, tenant: int, slots: Mapping[int, int], sign: int = 1) -> None:
        """`slots`: number by size; `sign` -1 subtracts."""
        more = sign * self.costs(slots)
        self.promised_bytes += more
        self._change(tenant, more, slots, sign)

    def pin(self, tenant: int, sizes: Int64s, sign: int = 1) -> None:
        """`sizes`: bytes of each slot; `sign` -1 subtracts."""
        slots = slots_of(sizes)
        more = sign * self.costs(slots)
        self.pinned_bytes += more
        self._change(tenant, more, slots, sign)

    def _change(self, tenant: int, more: int, slots: Mapping[int, int], sign: int) -> None:
        for size, count in slots.items():
            self._floors.add(size, sign * count)
        self._budget.count(tenant, resident=more)
        self._taken[tenant] = self._taken.get(tenant, 0) + more
        if not self._taken[tenant]:
            del self._taken[tenant]

    def taken_bytes(self, tenant: int) -> int:
        """Pinned and promised."""
        return self._taken.get(tenant, 0)

    def room_bytes(self, tenant: int) -> int:
        """What can be promised now."""
        room = self._most(tenant, self._tenants.capacity_bytes, self._taken)
        return max(0, min(room - self.taken_bytes(tenant), self._budget.for_residencies(tenant)))

    def most_bytes(self, tenant: int) -> int:
        """What could be promised in an empty, prefaulted arena."""
        return max(0, self._most(tenant, self._tenants.arena_bytes, {}))

    def _most(self, tenant: int, capacity_bytes: int, taken: dict[int, int]) -> int:
        others = self._tenants.kept_for_others(tenant, self._share, taken, capacity_bytes)
        bound = self._bound(capacity_bytes) - others
        return min(bound, int(self._share * self._tenants.burst_bytes(tenant)))

    def check_ever(self, tenant: int, asked_bytes: int) -> None:
        """Raises RESIDENCY_TOO_LARGE if this can never be promised."""
        most = self.most_bytes(tenant)
        if asked_bytes > most:
            needed = int(min(asked_bytes / self._share, MOST_NAMED_BYTES)) + 1
            raise HotKVError(
                Reason.RESIDENCY_TOO_LARGE,
                f"groups.block_count: this takes {asked_bytes} bytes of the arena, and at most "
                f"{most} of its {self._tenants.arena_bytes} may ever be reserved for "
                f"{'this tenant' if self._tenants.is_used else 'residencies'} "
                f"(residency.share {self._share:g}): raise arena.bytes"
                f"{' or the share of the tenant' if self._tenants.is_used else ''}, to "
                f"{needed} bytes at least, or lower the longest request",
            )

    def check_room(self, tenant: int, slots: Mapping[int, int]) -> None:
        """Raises NO_ROOM_FOR_RESIDENCY unless these slots can be promised now."""
        room, asked_bytes = self.room_bytes(tenant), self.costs(slots)
        if asked_bytes <= room and not self._floors.would_fit(slots):
            raise HotKVError(
                Reason.NO_ROOM_FOR_RESIDENCY,
                f"groups.block_count: this takes {asked_bytes} bytes of the arena, and {room} "
                "could be reserved now, but what others pin lies in too many slabs of other slot "
                "sizes; wait until some have ended",
            )
        if asked_bytes > room:
            raise HotKVError(Reason.NO_ROOM_FOR_RESIDENCY, self._why(tenant, asked_bytes, room))

    def _why(self, tenant: int, asked_bytes: int, room_bytes: int) -> str:
        mine, budget = self.taken_bytes(tenant), self._budget
        everybody = self.promised_bytes + self.pinned_bytes
        whose = (
            f"this tenant's residencies hold {mine}, all together {everybody}"
            if self._tenants.is_used
            else f"residencies hold {everybody}"
        )
        return (
            f"groups.block_count: this takes {asked_bytes} bytes of the arena, and {room_bytes} "
            f"can be reserved now: {whose} of {self.bound_bytes} (residency.share), other requests "
            f"pin {budget.held_bytes + budget.unadmitted_bytes}; wait until some have ended"
        )

    def check(
        self, promised: Mapping[int, int], pinned: Mapping[int, int], slots: Mapping[int, int]
    ) -> None:
        """Raises AssertionError unless these are the counts (`promised`, `pinned`: bytes by
        tenant; `slots`: both, by size) and within bounds."""
        self._floors.check(slots)
        taken = {
            tenant: promised.get(tenant, 0) + pinned.get(tenant, 0)
            for tenant in {*promised, *pinned}
        }
        assert self._taken == {t: count for t, count in taken.items() if count}, (
            "bytes of residencies miscounted"
        )
        assert (self.promised_bytes, self.pinned_bytes) == (
            sum(promised.values()),
            sum(pinned.values()),
        ), "promised and pinned bytes mixed up"
        assert self._budget.resident_bytes == sum(taken.values()) <= self.bound_bytes, (
            "more is promised than there may be"
        )
        for tenant, count in taken.items():
            most = self._most(tenant, self._tenants.capacity_bytes, self._taken)
            assert count <= most, "a tenant is promised more than it may have"
