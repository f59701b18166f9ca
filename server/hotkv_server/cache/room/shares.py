"""`FairBound` divides units among owners, `TenantBook` counts how much of the arena each tenant
uses, `PinBudget` how much is pinned for long."""

import enum
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import invalid
from hotkv_server.cache.values import KEY_SPACE_ROWS, BoolMask, Int64s, TenantShare

# `FairBound`. An owner is a tenant, or an engine without tenants. It may hold the floor while
# units are free. To acquire more, it must leave as many free as it then holds: one owner gets at
# most half, each of n greedy owners 1/(n + 1), and the rest is free for another.


FLOOR_SHARE = 64
"""The floor is 1/64 of the capacity."""


class FairBound:
    """capacity: units that all owners together may hold.
    floor: units that an owner may hold while units are free.

    `kind`: of what the units are held for, where one bound serves several kinds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self._least = capacity
        self.floor = max(1, capacity // FLOOR_SHARE)
        self.total = 0
        # By owner and kind.
        self._held: dict[str, dict[str, int]] = {}

    def __repr__(self) -> str:
        return f"FairBound({self.total}/{self.capacity} held by {len(self._held)} owners)"

    def held(self, owner: str) -> int:
        return sum(self._held.get(owner, {}).values())

    def room(self, owner: str) -> int:
        """Units that the owner may acquire in one call."""
        held, free = sum(self._held.get(owner, {}).values()), self.capacity - self.total
        return max(0, min(self.floor - held, free), (free - held) // 2)

    def take(self, owner: str, count: int, kind: str = "") -> None:
        """The caller has checked `room`."""
        held = self._held.setdefault(owner, {})
        held[kind] = held.get(kind, 0) + count
        self.total += count

    def resize(self, capacity: int) -> None:
        """What is held beyond it stays until it is given back."""
        self._least = capacity
        self._fit()

    def _fit(self) -> None:
        self.capacity = max(self._least, self.total)
        self.floor = max(1, self.capacity // FLOOR_SHARE)

    def give(self, owner: str, count: int, kind: str = "") -> None:
        held = self._held.get(owner, {})
        left = held.get(kind, 0) - count
        assert left >= 0, "more was given back than was held"
        self.total -= count
        held[kind] = left
        if not left:
            del held[kind]
        if not held:
            self._held.pop(owner, None)
        if self.capacity > self._least:
            self._fit()

    def refusal(self, owner: str, units: str, kind: str = "") -> str:
        """`units`, `kind`: in the plural."""
        of_kind = self._held.get(owner, {}).get(kind, 0)
        return (
            f"{f'{of_kind} {units} of {kind}, and all together ' if kind else ''}"
            f"{self.held(owner)} {units} are held by this client and {self.capacity - self.total} "
            f"of {self.capacity} are free; nobody may hold more than is left for others"
        )

    def check(self, held: Mapping[str, int], kind: str = "") -> None:
        assert held == {
            owner: kinds[kind] for owner, kinds in self._held.items() if kind in kinds
        }, "what owners hold is miscounted"
        assert self.total == sum(map(self.held, self._held)) <= self.capacity, "a bound is exceeded"


# `TenantBook` counts slots in any state, and decides whose blocks go for a tenant's.
#
# A tenant may have a burst bound (the most it may use) and a guarantee. Always true: no tenant
# grows beyond its bound, even one lowered below its use. A block of A goes for B only while A is
# above its guarantee. For a tenant below its guarantee, blocks of tenants above theirs go first.
#
# Exception: if every slab has a block within its tenant's guarantee, slabs are emptied all the
# same for a size that lacks them. A tenant that loses blocks so can claim the room back.
# While only a part of the arena has memory, guarantees are the same part of their settings.


class Payers(enum.Enum):
    """OTHERS: blocks of other tenants, each down to its guarantee.
    ALL: also the tenant's own.
    ANYBODY: of any tenant, without regard to guarantees.
    """

    OTHERS = enum.auto()
    ALL = enum.auto()
    ANYBODY = enum.auto()


_NO_BOUND = np.iinfo(np.int64).max // 2
NOBODY = -1
"""A taker not known yet: has no blocks and no guarantee, so all tenants keep theirs."""


class TenantBook:
    """Methods take a tenant's number, its position in the arrays.

    is_used: False without shares: the whole arena is one tenant's.
    capacity_bytes: of the arena that has memory.
    used: by tenant.
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
        """Guarantees and burst bounds. Raises INVALID_FIELD if these are negative, contradict
        each other or exceed the arena."""
        listed = list(shares)
        guaranteed = np.array([share.guaranteed_bytes for share in listed], np.int64)
        burst = np.array([share.burst_bytes or _NO_BOUND for share in listed], np.int64)
        if np.any(guaranteed < 0) or np.any(burst < guaranteed):
            raise invalid(
                "tenants: guaranteed_bytes must be from 0 to burst_bytes, where that is given"
            )
        # As Python ints: the sum may not fit into 64 bits.
        if (total := sum(guaranteed.tolist())) > self.arena_bytes:
            raise invalid(
                f"tenants: their guaranteed_bytes are {total} together; the arena has "
                f"{self.arena_bytes}"
            )
        return guaranteed, burst

    def grow(self, capacity_bytes: int) -> None:
        """Records how much of the arena has memory; more than it had bytes after a resize."""
        self.capacity_bytes = capacity_bytes
        self.arena_bytes = max(self.arena_bytes, capacity_bytes)
        part = capacity_bytes / self.arena_bytes
        self._guaranteed = (part * self._set_guaranteed).astype(np.int64)

    def shrink(self, arena_bytes: int) -> None:
        """Raises INVALID_FIELD, with nothing changed, if the guarantees do not fit."""
        self.check_size(arena_bytes)
        capacity_bytes, self.arena_bytes = min(self.capacity_bytes, arena_bytes), arena_bytes
        self.grow(capacity_bytes)

    def check_size(self, arena_bytes: int) -> None:
        total = sum(self._set_guaranteed.tolist())
        if total > arena_bytes:
            raise invalid(
                f"arena.bytes: tenants' guaranteed_bytes are {total} together, the arena would "
                f"have {arena_bytes}: lower them first"
            )

    def check_shares(self, shares: Mapping[str, TenantShare]) -> None:
        """Raises INVALID_FIELD for shares that `share_out` refuses: contradictory ones, and the
        first or last, which need a restart."""
        if bool(shares) != self.is_used:
            raise invalid("tenants: the first and the last one need a restart")
        self._checked(shares.values())

    def share_out(self, shares: Mapping[str, TenantShare]) -> None:
        """Replaces all shares; an unlisted tenant has none. Raises as `check_shares`, with
        nothing changed."""
        self.check_shares(shares)
        # A dict, because there may be tens of thousands of tenants.
        names = [*dict.fromkeys([*self._names, *shares])]
        guaranteed, burst = self._checked(shares.get(name, TenantShare()) for name in names)
        self.used = np.append(self.used, np.zeros(len(names) - len(self._names), np.int64))
        self._names, self._set_guaranteed, self._set_burst = names, guaranteed, burst
        self._burst = np.maximum(burst, self.used)
        self.grow(self.capacity_bytes)

    def add_key_space(self, number: int, tenant: str) -> None:
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
        """0 without shares."""
        return int(self._of_key_space[key_space_id % KEY_SPACE_ROWS]) if self.is_used else 0

    def of(self, key_spaces: NDArray[np.uint32]) -> Int64s:
        return self._of_key_space[key_spaces % KEY_SPACE_ROWS]

    def count(self, key_space_id: int, num_bytes: int) -> None:
        """`num_bytes` may be negative."""
        self._bytes[key_space_id] = self._bytes.get(key_space_id, 0) + num_bytes
        if not self._bytes[key_space_id]:
            del self._bytes[key_space_id]
        if self.is_used:
            tenant = self.number(key_space_id)
            self.used[tenant] += num_bytes
            if self._burst[tenant] > self._set_burst[tenant]:
                self._burst[tenant] = max(self._set_burst[tenant], self.used[tenant])

    def bytes_of(self, key_space_id: int) -> int:
        return self._bytes.get(key_space_id, 0)

    def burst_bytes(self, tenant: int) -> int:
        """While the tenant exceeds a lowered bound, what it uses."""
        return int(self._burst[tenant]) if self.is_used else self.arena_bytes

    def room_bytes(self, tenant: int) -> int:
        """To the burst bound."""
        return max(0, int(self._burst[tenant] - self.used[tenant]))

    def sure_bytes(self, tenant: int) -> int:
        """What the tenant could use if all others used their guarantees; limits its pins."""
        if not self.is_used:
            return self.capacity_bytes
        others = int(self._guaranteed.sum() - self._guaranteed[tenant])
        return max(0, int(min(self._burst[tenant], self.capacity_bytes - others)))

    def kept_for_others(
        self, tenant: int, share: float, taken: Mapping[int, int], capacity_bytes: int
    ) -> int:
        """What must stay available for residencies of other tenants: of each the larger of what
        they use (`taken`) and `share` of its guarantee. `capacity_bytes`: of the arena that has
        memory."""
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
        """Mask of the entries that may go for `taker`, each judged alone: its own, and those
        that leave their tenant its guarantee. `sizes`: bytes that each frees."""
        allowed: BoolMask = (owners == taker) | (
            self.used[owners] - sizes >= self._guaranteed[owners]
        )
        return allowed

    def spare_bytes(self, tenant: int) -> int:
        """Above the guarantee; negative below."""
        return int(self.used[tenant] - self._guaranteed[tenant])

    def within(self, owners: Int64s, sizes: Int64s, taker: int) -> BoolMask:
        """As `may_give`, for entries that all go, in this order."""
        allowed: BoolMask = owners == taker
        for owner in np.unique(owners[~allowed]).tolist():
            here = owners == owner
            allowed[here] = np.cumsum(sizes[here]) <= self.spare_bytes(owner)
        return allowed

    def may_claim(self, taker: int, more_bytes: int) -> bool:
        """True if the taker stays within its guarantee, so that others' blocks go first."""
        if not self.is_used or taker == NOBODY:
            return False
        return bool(self.used[taker] + more_bytes <= self._guaranteed[taker])

    def portions(self, taker: int, slot_bytes: int, count: int) -> tuple[int, ...]:
        """Steps in which `Room.make` makes room, as numbers of slots that have room after each.
        Those within the taker's guarantee come first, because others' blocks go for them."""
        if not self.is_used or taker == NOBODY:
            return (count,)
        claimed = int(self._guaranteed[taker] - self.used[taker]) // slot_bytes
        return (claimed, count) if 0 < claimed < count else (count,)

    def over_bound(self) -> list[int]:
        """Numbers of tenants above their bound, after a restart with other settings or a change
        of shares."""
        found: list[int] = np.flatnonzero(self.used > self._set_burst).tolist()
        return found

    def excess_bytes(self, tenant: int) -> int:
        """Above the burst bound; negative below."""
        return int(self.used[tenant] - self._set_burst[tenant])

    def check(self, used_by_key_space: Mapping[int, int]) -> None:
        assert self._bytes == used_by_key_space, "bytes of key spaces miscounted"
        if not self.is_used:
            return
        counted = np.zeros(len(self.used), np.int64)
        for number, num_bytes in used_by_key_space.items():
            counted[self.number(number)] += num_bytes
        assert np.array_equal(counted, self.used), "bytes of tenants miscounted"
        assert np.all(self.used <= self._burst), "a tenant is beyond its burst bound"


# The pin budget, of residencies, holds (retentions) and read leases without a load.
#
# Always true: while there are residencies, all three leave 1/STORE_SHARE of the arena to stores,
# and a tenant's new pins stay within `TenantBook.sure_bytes`. Else only `held_share` and
# `unadmitted_share` limit holds and leases.


STORE_SHARE = 16
"""1/16 stays free of long pins."""


def most_pinned(capacity_bytes: int) -> int:
    return capacity_bytes - capacity_bytes // STORE_SHARE


class PinBudget:
    """Who makes the pins of a kind counts them. `unadmitted_bytes`: of read leases without a
    load."""

    def __init__(self, tenants: TenantBook) -> None:
        self.resident_bytes = 0
        self.held_bytes = 0
        self.unadmitted_bytes = 0
        # By tenant, of all three kinds.
        self._of_tenant: dict[int, int] = {}
        self._tenants = tenants

    def __repr__(self) -> str:
        return (
            f"PinBudget({self.resident_bytes} resident, {self.held_bytes} held, "
            f"{self.unadmitted_bytes} unadmitted of {self._tenants.capacity_bytes} B)"
        )

    def count(self, tenant: int, *, resident: int = 0, held: int = 0, unadmitted: int = 0) -> None:
        """Arguments may be negative."""
        self.resident_bytes += resident
        self.held_bytes += held
        self.unadmitted_bytes += unadmitted
        more = resident + held + unadmitted
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + more

    def for_residencies(self, tenant: int) -> int:
        """What the tenant's residencies may still reserve or pin."""
        used = self.resident_bytes + self.held_bytes + self.unadmitted_bytes
        of_tenant = self._tenants.sure_bytes(tenant) - self._of_tenant.get(tenant, 0)
        return max(0, min(most_pinned(self._tenants.capacity_bytes) - used, of_tenant))

    def for_others(self, tenant: int) -> int:
        """What the tenant's read leases and retentions may still pin; without residencies, the
        whole arena."""
        return self.for_residencies(tenant) if self.resident_bytes else self._tenants.capacity_bytes

    def check_invariants(self) -> None:
        used = self.resident_bytes + self.held_bytes + self.unadmitted_bytes
        assert sum(self._of_tenant.values()) == used, "pinned bytes of tenants miscounted"
