"""Shares of bounded resources. `FairBound` divides a number of units among owners, `TenantBook`
counts how much of the arena each tenant uses, and `PinBudget` how much of it is pinned for long."""

import enum
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import invalid
from hotkv_server.cache.values import KEY_SPACE_ROWS, BoolMask, Int64s, TenantShare

# A `FairBound` limits a shared resource so that no single owner can use it up.
#
# Always true: all owners together hold no more units than the capacity. An owner may hold a few
# units (the floor, `FLOOR_SHARE`) as long as units are free. To acquire more, it must leave at
# least as many units free as it then holds. So a single owner gets at most half of the capacity. If
# n owners acquire as much as they can, each gets 1/(n + 1) of it, and the rest is free for another
# owner. An owner is a tenant, or an engine if no tenants are configured.


FLOOR_SHARE = 64
"""An owner of a `FairBound` may hold up to 1/64 of its units (the floor) as long as units are free,
even if other owners hold nearly all units."""


class FairBound:
    """Counts the units of a bounded resource that each owner (tenant or engine) has acquired, for
    example leases or bytes. `room` returns how many more units an owner may acquire.

    capacity: number of units that all owners together may hold.
    floor: number of units that an owner may always hold as long as units are free.
    total: number of units that owners hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.floor = max(1, capacity // FLOOR_SHARE)
        self.total = 0
        self._held: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"FairBound({self.total}/{self.capacity} held by {len(self._held)} owners)"

    def held(self, owner: str) -> int:
        """Returns how many units (for example leases or bytes) the owner (a tenant or engine) has
        acquired."""
        return self._held.get(owner, 0)

    def room(self, owner: str) -> int:
        """Returns how many more units (for example leases or bytes) the owner (a tenant or engine)
        may acquire in one call."""
        held, free = self._held.get(owner, 0), self.capacity - self.total
        return max(0, min(self.floor - held, free), (free - held) // 2)

    def take(self, owner: str, count: int) -> None:
        """Acquires `count` units (for example leases or bytes), at least one, for the owner (a
        tenant or engine). The caller has checked `room` before."""
        self._held[owner] = self._held.get(owner, 0) + count
        self.total += count

    def give(self, owner: str, count: int) -> None:
        """Releases `count` of the units (such as leases or bytes) that the owner has acquired."""
        left = self._held.get(owner, 0) - count
        assert left >= 0, "more was given back than was held"
        self.total -= count
        self._held[owner] = left
        if not left:
            del self._held[owner]

    def refusal(self, owner: str, what: str) -> str:
        """Returns the text of an error message that says why the owner (a tenant or engine) may not
        acquire more units (for example leases).
        `what`: the name of the units, in the plural."""
        return (
            f"{self.held(owner)} {what} are held by this client and {self.capacity - self.total} "
            f"of {self.capacity} are free; nobody may hold more than is left for others"
        )

    def check(self, held: dict[str, int]) -> None:
        """Raises AssertionError unless each owner has acquired exactly the units (for example
        leases or bytes) in `held`."""
        assert self._held == held and self.total == sum(held.values()) <= self.capacity, (
            "what owners hold is miscounted"
        )


class BoundShare(FairBound):
    """Limits the number of objects of one kind, for example leases. Objects of several kinds share
    one limit, a `FairBound`: for example on the bytes of memory that all of them use. Each object
    uses `unit` units of the shared bound."""

    def __init__(self, bound: FairBound, unit: int = 1) -> None:
        super().__init__(bound.capacity // unit)
        self._bound = bound
        self._unit = unit

    def __repr__(self) -> str:
        return f"BoundShare({self.total} of {self._unit} in {self._bound!r})"

    def room(self, owner: str) -> int:
        """Returns how many more objects of this kind (for example leases) the owner may acquire in
        one call."""
        return self._bound.room(owner) // self._unit

    def take(self, owner: str, count: int) -> None:
        """Acquires `count` objects (for example leases) for the owner (a tenant or engine): counts
        them here, and their units in the shared bound."""
        self._bound.take(owner, count * self._unit)
        super().take(owner, count)

    def give(self, owner: str, count: int) -> None:
        """Releases `count` of the owner's objects (for example leases) here, and their units in the
        shared bound."""
        super().give(owner, count)
        self._bound.give(owner, count * self._unit)

    def refusal(self, owner: str, what: str) -> str:
        """Returns the text of an error message that says why the owner (a tenant or engine) may not
        acquire more objects (for example leases). `what`: the name of the objects, in the plural.
        """
        return f"{self.held(owner)} {what}, and all together {self._bound.refusal(owner, 'bytes')}"


# `TenantBook` counts how many bytes of the arena each tenant uses, and decides whose blocks may be
# evicted for a tenant. It counts the slots of blocks and sketches in any state (reserved,
# ready, or detached: flushed while pinned).
#
# A tenant may have a burst bound, the most bytes that it may use, and a guarantee. Always true: a
# tenant never gets more bytes than its burst bound. If the bound was lowered while the tenant used
# more, the excess only shrinks. A block of tenant A is evicted for a block of tenant B only while A
# uses more than its guarantee, with one exception (below).
#
# A tenant that uses less than its guarantee can claim room: for its new blocks, blocks of tenants
# that use more than their guarantees are evicted first. The exception: if a slot size can't get a
# slab (a piece of the arena), because every slab has a block that is within the guarantee of its
# tenant, slabs are emptied all the same. A tenant that loses blocks this way then uses less than
# its guarantee, so it can claim the room back later.
#
# While only a part of the arena has memory, every guarantee is the same part of its setting.


class Payers(enum.Enum):
    """Names the blocks that may be evicted to make room for a tenant's new blocks. A tenant's
    guarantee is the number of bytes that it is assured of.

    OTHERS: blocks of other tenants, until each is down to its guarantee.
    ALL: also the tenant's own blocks.
    ANYBODY: blocks of any tenant, without regard to guarantees.
    """

    OTHERS = enum.auto()
    ALL = enum.auto()
    ANYBODY = enum.auto()


_NO_BOUND = np.iinfo(np.int64).max // 2


class TenantBook:
    """Counts the bytes of slots that each tenant and each key space (a model in a
    configuration) uses, and knows the tenants' shares: a guarantee, and a burst bound, which is the
    most bytes that the tenant may use. Methods take a tenant's number, which is its position in
    this object's arrays.

    is_used: False if no shares are configured; then the whole arena counts as one tenant's.
    capacity_bytes: bytes of the arena that have memory.
    arena_bytes: bytes of the whole arena.
    used: bytes that each tenant uses, by tenant number.
    """

    def __init__(self, shares: Mapping[str, TenantShare], arena_bytes: int) -> None:
        self.is_used = bool(shares)
        self.capacity_bytes = self.arena_bytes = arena_bytes
        self._names = [*shares]
        self._set_guaranteed, self._set_burst = self._checked(shares.values())
        self._guaranteed = self._set_guaranteed.copy()
        self._burst = self._set_burst.copy()
        self.used = np.zeros(len(shares), np.int64)
        self._of_key_space = np.zeros(KEY_SPACE_ROWS, np.int64)
        self._bytes: dict[int, int] = {}

    def __repr__(self) -> str:
        uses = zip(self._names, self.used.tolist(), strict=True)
        return f"TenantBook({', '.join(f'{name}: {used}' for name, used in uses)})"

    def _checked(self, shares: Iterable[TenantShare]) -> tuple[Int64s, Int64s]:
        """Returns, for each share, its guarantee and its burst bound (the most bytes that the
        tenant may use), in bytes. Raises INVALID_FIELD if a number is negative, a bound is below
        its guarantee, or the guarantees together exceed the arena."""
        listed = list(shares)
        guaranteed = np.array([share.guaranteed_bytes for share in listed], np.int64)
        burst = np.array([share.burst_bytes or _NO_BOUND for share in listed], np.int64)
        if np.any(guaranteed < 0) or np.any(burst < guaranteed):
            raise invalid(
                "tenants: guaranteed_bytes must be from 0 to burst_bytes, where that is given"
            )
        # Add the guarantees as Python ints, because their sum may not fit into 64 bits.
        if (total := sum(guaranteed.tolist())) > self.arena_bytes:
            raise invalid(
                f"tenants: their guaranteed_bytes are {total} together; the arena has "
                f"{self.arena_bytes}"
            )
        return guaranteed, burst

    def grow(self, capacity_bytes: int) -> None:
        """Records how many bytes of the arena have memory (the arena is prefaulted in the
        background after the start). While only a part has memory, every guarantee is the same part
        of its setting."""
        self.capacity_bytes = capacity_bytes
        part = capacity_bytes / self.arena_bytes
        self._guaranteed = (part * self._set_guaranteed).astype(np.int64)

    def check_shares(self, shares: Mapping[str, TenantShare]) -> None:
        """Raises INVALID_FIELD if `share_out` would refuse these shares. It refuses guarantees
        (bytes that tenants are assured of) that exceed the arena, and a bound below its guarantee.
        It also refuses to add the first share or to remove the last, because both need a restart.
        Changes nothing."""
        if bool(shares) != self.is_used:
            raise invalid("tenants: the first and the last one need a restart")
        self._checked(shares.values())

    def share_out(self, shares: Mapping[str, TenantShare]) -> None:
        """Replaces the shares of all tenants. A tenant that is not listed has no guarantee (bytes
        that it is assured of) and no bound. `over_bound` then returns the tenants that exceed their
        new bounds. Raises INVALID_FIELD, and changes nothing, if `check_shares` would raise."""
        self.check_shares(shares)
        # A dict, because there may be tens of thousands of tenants.
        names = [*dict.fromkeys([*self._names, *shares])]
        guaranteed, burst = self._checked(shares.get(name, TenantShare()) for name in names)
        self.used = np.append(self.used, np.zeros(len(names) - len(self._names), np.int64))
        self._names, self._set_guaranteed, self._set_burst = names, guaranteed, burst
        self._burst = np.maximum(burst, self.used)
        self.grow(self.capacity_bytes)

    def add_key_space(self, number: int, tenant: str) -> None:
        """Records to which tenant a key space (a model in a configuration) belongs. A tenant
        without a configured share has no guarantee (bytes that it is assured of) and no bound."""
        if not self.is_used:
            return
        if tenant not in self._names:
            self._names.append(tenant)
            self._guaranteed = np.append(self._guaranteed, 0)
            self._set_guaranteed = np.append(self._set_guaranteed, 0)
            self._burst = np.append(self._burst, _NO_BOUND)
            self._set_burst = np.append(self._set_burst, _NO_BOUND)
            self.used = np.append(self.used, 0)
        self._of_key_space[number % KEY_SPACE_ROWS] = self._names.index(tenant)

    def number(self, key_space_id: int) -> int:
        """Returns the number of the tenant to which a key space (a model in a configuration)
        belongs; 0 if no shares are configured."""
        return int(self._of_key_space[key_space_id % KEY_SPACE_ROWS]) if self.is_used else 0

    def of(self, key_spaces: NDArray[np.uint32]) -> Int64s:
        """Returns the tenant number of each key space id."""
        return self._of_key_space[key_spaces % KEY_SPACE_ROWS]

    def count(self, key_space_id: int, num_bytes: int) -> None:
        """Adds `num_bytes` to the used bytes of a key space (a model in a configuration) and of
        its tenant; subtracts if negative."""
        self._bytes[key_space_id] = self._bytes.get(key_space_id, 0) + num_bytes
        if not self._bytes[key_space_id]:
            del self._bytes[key_space_id]
        if self.is_used:
            tenant = self.number(key_space_id)
            self.used[tenant] += num_bytes
            if self._burst[tenant] > self._set_burst[tenant]:
                self._burst[tenant] = max(self._set_burst[tenant], self.used[tenant])

    def bytes_of(self, key_space_id: int) -> int:
        """Returns the bytes of slots (places for blocks) that a key space (a model in a
        configuration) uses."""
        return self._bytes.get(key_space_id, 0)

    def burst_bytes(self, tenant: int) -> int:
        """Returns the most bytes that the tenant may use at the moment: its burst bound. If the
        bound was lowered and the tenant still uses more, returns the bytes that it uses."""
        return int(self._burst[tenant]) if self.is_used else self.arena_bytes

    def room_bytes(self, tenant: int) -> int:
        """Returns how many more bytes the tenant may use until it reaches its burst bound (the most
        bytes that it may use)."""
        return max(0, int(self._burst[tenant] - self.used[tenant]))

    def surely_bytes(self, tenant: int) -> int:
        """Returns how many bytes the tenant could use even if all other tenants used their
        guarantees (the bytes that they are assured of) in full. The limits on the tenant's pins are
        shares of this number of bytes."""
        if not self.is_used:
            return self.capacity_bytes
        others = int(self._guaranteed.sum() - self._guaranteed[tenant])
        return max(0, int(min(self._burst[tenant], self.capacity_bytes - others)))

    def kept_for_others(
        self, tenant: int, share: float, taken: Mapping[int, int], capacity_bytes: int
    ) -> int:
        """Returns how many bytes must stay available for the residencies (requests whose KV stays
        in host memory) of all tenants but `tenant`. For each of these tenants, counts the larger of
        two numbers: the bytes that its residencies use already, and `share` of its guarantee.

        share: largest share of a tenant's guarantee that residencies may use, 0 to 1.
        taken: bytes that a tenant's residencies use, by tenant number.
        capacity_bytes: bytes of the arena that have memory. Guarantees are for the whole arena, so
            they are reduced in proportion if only a part of it has memory.
        """
        share *= capacity_bytes / self.arena_bytes
        others = {*range(len(self._set_guaranteed)), *taken} - {tenant}
        return sum(
            max(
                taken.get(other, 0),
                int(share * self._set_guaranteed[other])
                if other < len(self._set_guaranteed)
                else 0,
            )
            for other in others
        )

    def may_give(self, owners: Int64s, sizes: Int64s, taker: int) -> BoolMask:
        """Judges each entry (record in the block table) alone, as if no other entry were evicted.
        Returns a mask of the entries that may be evicted for the tenant `taker`: entries of this
        tenant, and entries whose tenant would stay at or above its guarantee (the bytes that it is
        assured of).

        owners: tenant number of each entry.
        sizes: bytes that the eviction of each entry frees.
        """
        allowed: BoolMask = (owners == taker) | (
            self.used[owners] - sizes >= self._guaranteed[owners]
        )
        return allowed

    def spare_bytes(self, tenant: int) -> int:
        """Returns how many bytes the tenant uses above its guarantee (down to which other tenants
        may evict its blocks); negative if it uses less."""
        return int(self.used[tenant] - self._guaranteed[tenant])

    def within(self, owners: Int64s, sizes: Int64s, taker: int) -> BoolMask:
        """Chooses entries (records in the block table) that may all be evicted for the tenant
        `taker`: together they leave every other tenant its guarantee (the bytes that it is assured
        of). Considers the entries in the given order. Returns a mask of the chosen entries.

        owners: tenant number of each entry.
        sizes: bytes that the eviction of each entry frees.
        """
        allowed: BoolMask = owners == taker
        for owner in np.unique(owners[~allowed]).tolist():
            here = owners == owner
            allowed[here] = np.cumsum(sizes[here]) <= self.spare_bytes(owner)
        return allowed

    def may_claim(self, taker: int, more_bytes: int) -> bool:
        """Returns True if the tenant `taker` would stay within its guarantee (the bytes that it is
        assured of) if it used `more_bytes` more. To make room for these bytes, blocks of other
        tenants are then evicted first."""
        return self.is_used and bool(self.used[taker] + more_bytes <= self._guaranteed[taker])

    def portions(self, taker: int, slot_bytes: int, count: int) -> tuple[int, ...]:
        """Returns the steps in which `Room.make` makes room for `count` slots (places for blocks)
        of a tenant, each as the number of slots that have room after the step. For slots within the
        tenant's guarantee (the bytes that it is assured of), blocks of other tenants are evicted
        first. So if only some of the slots lie within the guarantee, there are two steps: the
        number of these slots, then `count`. Otherwise there is one step: `count`."""
        claimed = (
            int(self._guaranteed[taker] - self.used[taker]) // slot_bytes if self.is_used else 0
        )
        return (claimed, count) if 0 < claimed < count else (count,)

    def over_bound(self) -> list[int]:
        """Returns the tenants that use more than their burst bound (the most bytes that they may
        use). A tenant can exceed its bound only after a restart with other settings, or after a
        change of the shares."""
        found: list[int] = np.flatnonzero(self.used > self._set_burst).tolist()
        return found

    def excess_bytes(self, tenant: int) -> int:
        """Returns how many bytes the tenant uses above its burst bound (the most bytes that it may
        use); negative if it uses less."""
        return int(self.used[tenant] - self._set_burst[tenant])

    def check(self, used_by_key_space: Mapping[int, int]) -> None:
        """Raises AssertionError if used bytes are miscounted or a tenant uses more than its burst
        bound. `used_by_key_space`: the used bytes of each key space (a model in a
        configuration)."""
        assert self._bytes == used_by_key_space, "bytes of key spaces miscounted"
        if not self.is_used:
            return
        counted = np.zeros(len(self.used), np.int64)
        for number, num_bytes in used_by_key_space.items():
            counted[self.number(number)] += num_bytes
        assert np.array_equal(counted, self.used), "bytes of tenants miscounted"
        assert np.all(self.used <= self._burst), "a tenant is beyond its burst bound"


# The pin budget: how many bytes three kinds of long pins may hold together. The kinds are
# residencies, holds (pins that requests asked for) and read leases without a load.
#
# Always true: while residencies have reserved or pinned bytes, the three kinds together leave a
# part of the arena (`STORE_SHARE`) to stores. New pins of a tenant also stay within the bytes that
# the tenant could have if all others used their guarantees (`TenantBook.surely_bytes`). While no
# residency has reserved or pinned bytes, `PinBudget` sets no limit. Holds (pins that requests asked
# for) and leases are then limited only by their own shares (`held_share`, `unadmitted_share`).


STORE_SHARE = 16
"""While residencies (requests whose KV stays in host memory) exist, 1/16 of the arena is neither
reserved for them nor pinned for long, so that stores find room."""


def most_pinned(capacity_bytes: int) -> int:
    """Returns how many bytes of an arena of `capacity_bytes` may be pinned for long (`PinBudget`).
    Three kinds of pins count together: pins of residencies (requests whose KV stays in host
    memory), holds (pins for which requests asked), and pins of read leases without a load."""
    return capacity_bytes - capacity_bytes // STORE_SHARE


class PinBudget:
    """Counts, by kind of pin, the bytes that are pinned for long or reserved for that, and says how
    many more bytes may be pinned. The class that makes the pins of a kind updates its count.

    resident_bytes: reserved for or pinned by residencies (requests whose KV stays in host memory).
    held_bytes: pinned by holds (pins that requests asked for).
    unadmitted_bytes: pinned by read leases under which no load has begun.
    """

    def __init__(self, tenants: TenantBook) -> None:
        self.resident_bytes = 0
        self.held_bytes = 0
        self.unadmitted_bytes = 0
        # For each tenant: the bytes of its pins of all three kinds together.
        self._of_tenant: dict[int, int] = {}
        self._tenants = tenants

    def __repr__(self) -> str:
        return (
            f"PinBudget({self.resident_bytes} resident, {self.held_bytes} held, "
            f"{self.unadmitted_bytes} unadmitted of {self._tenants.capacity_bytes} B)"
        )

    def count(self, tenant: int, *, resident: int = 0, held: int = 0, unadmitted: int = 0) -> None:
        """Adds bytes to the counts of a tenant's pins; subtracts if negative. `resident`: pins of
        residencies. `held`: pins that requests asked for. `unadmitted`: pins of read leases under
        which no load has begun."""
        self.resident_bytes += resident
        self.held_bytes += held
        self.unadmitted_bytes += unadmitted
        more = resident + held + unadmitted
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + more

    def for_residencies(self, tenant: int) -> int:
        """Returns how many more bytes the tenant's residencies (requests whose KV stays in host
        memory) may reserve or pin."""
        used = self.resident_bytes + self.held_bytes + self.unadmitted_bytes
        of_tenant = self._tenants.surely_bytes(tenant) - self._of_tenant.get(tenant, 0)
        return max(0, min(most_pinned(self._tenants.capacity_bytes) - used, of_tenant))

    def for_others(self, tenant: int) -> int:
        """Returns how many more bytes the tenant's read leases and holds (pins that requests asked
        for) may pin. While no residency (a request whose KV stays in host memory) has reserved or
        pinned room, returns the size of the arena: then there is no limit."""
        return self.for_residencies(tenant) if self.resident_bytes else self._tenants.capacity_bytes

    def check_invariants(self) -> None:
        """Raises AssertionError unless the pinned bytes of all tenants add up to the pinned bytes
        of all three kinds of pins."""
        used = self.resident_bytes + self.held_bytes + self.unadmitted_bytes
        assert sum(self._of_tenant.values()) == used, "pinned bytes of tenants miscounted"
