"""`Reserve` counts the free slots to keep for the next stores, so that these need not evict.

Always true: they are at most as many as stores have taken within about WINDOW_S, at most
1/ARENA_PART of what the tenant may use, and together at most 1/ARENA_PART of the arena and
MAX_BYTES.
"""

from collections import Counter, deque

from hotkv_server.cache.room.shares import TenantBook
from hotkv_server.cache.room.slabs import SlabPool

WINDOW_S = 1.0
ARENA_PART = 512
"""The cache is so much smaller. With 256, a trace of sessions lost .0012 of its hits."""
PARTS_PER_WINDOW = 4
MAX_BYTES = 256 << 20

Slots = Counter[tuple[int, int]]
"""By tenant number and slot size."""


class Reserve:
    """wanted: free slots to keep, as of the last turn."""

    def __init__(self, pool: SlabPool, tenants: TenantBook) -> None:
        self.wanted = Slots()
        self._pool = pool
        self._tenants = tenants
        # Slots taken since the last turn; those of earlier parts of the window, by their times.
        self._taken = Slots()
        self._parts: deque[tuple[float, Slots]] = deque()
        # Free bytes when they were counted last, and those that stores took since; 0 if not yet.
        self._free_bytes = self._taken_bytes = self._wanted_bytes = 0

    def __repr__(self) -> str:
        return f"Reserve({self.free_bytes()} of {self.wanted_bytes} B)"

    @property
    def wanted_bytes(self) -> int:
        return sum(count * size for (_, size), count in self.wanted.items())

    @property
    def is_low(self) -> bool:
        """Slots were taken since the last turn, and at most half of the wanted ones are free."""
        if not self._taken or 2 * (self._free_bytes - self._taken_bytes) > self._wanted_bytes:
            return False
        self._free_bytes, self._taken_bytes = self.free_bytes(), 0
        return 2 * self._free_bytes <= self._wanted_bytes

    def free_bytes(self) -> int:
        """Of wanted slots that are free."""
        by_size = Counter[int]()
        for (_, size), count in self.wanted.items():
            by_size[size] += count
        return sum(
            size * min(count, self._pool.available_slots(size)) for size, count in by_size.items()
        )

    def count(self, tenant: int, slot_bytes: int, num_slots: int) -> None:
        """A store has taken slots."""
        if num_slots:
            self._taken[tenant, slot_bytes] += num_slots
            self._taken_bytes += num_slots * slot_bytes

    def turn(self, now_s: float) -> None:
        """What was counted since the last turn is wanted from now on, for about WINDOW_S."""
        while self._parts and self._parts[0][0] <= now_s - WINDOW_S:
            self._parts.popleft()
        if self._parts and self._parts[-1][0] > now_s - WINDOW_S / PARTS_PER_WINDOW:
            self._parts[-1][1].update(self._taken)
        elif self._taken:
            self._parts.append((now_s, self._taken))
        self._taken = Slots()
        self.rebound()
        self._free_bytes = self._taken_bytes = 0

    def rebound(self) -> None:
        """To be called when the arena has become smaller."""
        self.wanted = self._bounded(sum((slots for _, slots in self._parts), Slots()))
        self._wanted_bytes = self.wanted_bytes

    def _bounded(self, lately: Slots) -> Slots:
        stored = Counter[int]()
        for (tenant, size), count in lately.items():
            stored[tenant] += count * size
        most = {
            tenant: min(num_bytes, self._tenants.burst_bytes(tenant) // ARENA_PART)
            for tenant, num_bytes in stored.items()
        }
        total = sum(most.values())
        if not total:
            return Slots()
        kept = min(total, self._tenants.capacity_bytes // ARENA_PART, MAX_BYTES)
        return Slots(
            {
                (tenant, size): count * most[tenant] * kept // (stored[tenant] * total)
                for (tenant, size), count in lately.items()
            }
        )

    def check_invariants(self) -> None:
        most_bytes = min(self._tenants.capacity_bytes // ARENA_PART, MAX_BYTES)
        assert self.free_bytes() <= self.wanted_bytes <= most_bytes, "the reserve is too large"
        assert len(self._parts) <= PARTS_PER_WINDOW + 1, "parts of the window pile up"
