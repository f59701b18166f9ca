"""Bounds the room that residencies take in the arena. A residency pins the blocks of a running
request. Its room consists of promised slots (reserved, not yet pinned) and pinned slots.

Always true:

- A tenant's residencies take at most `residency.share` (setting, 0 to 1) of the most bytes that the
  tenant may hold in the arena. Their bytes are the promised and the pinned bytes; an entry that
  several residencies pin counts once.
- A tenant's residencies also take at most `residency.share` of the arena, minus a part for each
  other tenant. This part is the larger of two numbers: `residency.share` of the other tenant's
  guarantee (its setting `guaranteed_bytes`), and the bytes that the other tenant's residencies
  take.
- For the promises of each slot size, enough slabs (pieces of the arena) are reserved
  (`SlabPool.floors`). So the server can make room for every promise by evicting unpinned blocks.
- The bytes of a slot include its share of the unused end of its slab.

A promise must also fit `PinBudget`: the budget of the whole arena, and the budget of the tenant.
These budgets also count two other kinds of pinned bytes: those of read leases under which no load
has begun, and those of blocks that requests asked to pin.
"""

import functools
from collections.abc import Mapping

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.room.shares import PinBudget, TenantBook, most_pinned
from hotkv_server.cache.room.slabs import MAX_SIZES, SlabPool, aligned, shortest_run
from hotkv_server.cache.values import Int64s

MOST_NAMED_BYTES = 1 << 60
"""Largest arena size that a refusal recommends, in case `residency.share` is so small that no size
suffices."""


@functools.lru_cache(maxsize=MAX_SIZES)
def slot_cost(slot_bytes: int, slab_bytes: int) -> int:
    """Returns how many bytes of the arena a slot of this size costs. A slab (one of the equal
    pieces of the arena) has several small slots; a large slot spans several slabs. A small slot
    costs its share of the slab; a large slot costs all slabs that it spans.

    Assumes that the slot lies in the shortest possible run (range of adjacent slabs with slots of
    one size), because `SlabPool.floors` reserves runs of this length.
    """
    size = aligned(slot_bytes)
    return -(-shortest_run(size, slab_bytes) * slab_bytes // max(1, slab_bytes // size))


def slots_of(sizes: Int64s) -> dict[int, int]:
    """Counts slots (places in the arena) by their size.

    sizes: size of each slot in bytes.
    """
    if not len(sizes):
        return {}
    if (sizes == sizes[0]).all():
        return {int(sizes[0]): len(sizes)}
    found, counts = np.unique(sizes, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


class ResidencyBound:
    """Counts the bytes of the arena that residencies take, by tenant, and checks that they stay
    within the bounds. A residency pins the blocks of a running request. It takes promised bytes
    (reserved, not yet pinned) and pinned bytes.

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
        """Returns the most bytes that all residencies (requests whose KV stays in host memory)
        together may pin or be promised (reserved, not yet pinned). While the arena is being
        prefaulted, counts only its prefaulted part."""
        return self._bound(self._tenants.capacity_bytes)

    def _bound(self, capacity_bytes: int) -> int:
        return min(int(self._share * capacity_bytes), most_pinned(capacity_bytes))

    def cost(self, slot_bytes: int) -> int:
        """Returns how many bytes of this arena a slot of this size costs, including the slot's
        share of the unused end of a slab (piece of the arena)."""
        return slot_cost(slot_bytes, self._slab_bytes)

    def costs(self, slots: Mapping[int, int]) -> int:
        """Returns how many bytes of the arena these slots cost together, including the slots'
        shares of the unused ends of slabs (pieces of the arena).

        slots: number of slots, by size.
        """
        return sum(count * self.cost(size) for size, count in slots.items())

    def promise(self, tenant: int, slots: Mapping[int, int], sign: int = 1) -> None:
        """Counts slots (places in the arena) as promised (reserved, not yet pinned) to a tenant.

        slots: number of slots, by size.
        sign: -1 subtracts the slots instead.
        """
        more = sign * self.costs(slots)
        self.promised_bytes += more
        self._change(tenant, more, slots, sign)

    def pin(self, tenant: int, sizes: Int64s, sign: int = 1) -> None:
        """Counts slots (places in the arena) as pinned for a tenant.

        sizes: size of each slot in bytes.
        sign: -1 subtracts the slots instead.
        """
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
        """Returns how many bytes the tenant's residencies (requests whose KV stays in host memory)
        take: pinned bytes plus promised bytes (reserved, not yet pinned)."""
        return self._taken.get(tenant, 0)

    def room_bytes(self, tenant: int) -> int:
        """Returns how many more bytes can be promised to (reserved for) the tenant's residencies
        now."""
        room = self._most(tenant, self._tenants.capacity_bytes, self._taken)
        return max(0, min(room - self.taken_bytes(tenant), self._budget.for_residencies(tenant)))

    def most_bytes(self, tenant: int) -> int:
        """Returns the most bytes that could ever be promised to (reserved for) the tenant: the room
        in an empty arena that is prefaulted completely."""
        return max(0, self._most(tenant, self._tenants.arena_bytes, {}))

    def _most(self, tenant: int, capacity_bytes: int, taken: dict[int, int]) -> int:
        others = self._tenants.kept_for_others(tenant, self._share, taken, capacity_bytes)
        bound = self._bound(capacity_bytes) - others
        return min(bound, int(self._share * self._tenants.burst_bytes(tenant)))

    def check_ever(self, tenant: int, asked_bytes: int) -> None:
        """Raises RESIDENCY_TOO_LARGE if `asked_bytes` can never be promised to (reserved for) the
        tenant."""
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
        """Raises NO_ROOM_FOR_RESIDENCY unless slots (places in the arena) can be promised to
        (reserved for) the tenant now.

        slots: number of slots, by size.
        """
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
        """Raises AssertionError if the counted bytes and slots (places in the arena) of residencies
        (requests whose KV stays in host memory) differ from the given numbers, or exceed a bound.

        promised, pinned: bytes by tenant.
        slots: number of promised and pinned slots, by size.
        """
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
