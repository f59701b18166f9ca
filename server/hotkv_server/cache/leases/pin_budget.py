"""What residencies, holds and leases without a load may pin together.

Always true: once residencies have promised or pinned anything, a part of the arena
(`STORE_SHARE`) stays for stores, however the shares of the three are set. Without residencies
each has its own share, as ever.
"""

from hotkv_server.cache.room.tenants import TenantBook

STORE_SHARE = 16
"""1/16 of the arena is neither promised nor pinned for long."""


def most_pinned(capacity_bytes: int) -> int:
    """Most bytes that all three may take together of so many."""
    return capacity_bytes - capacity_bytes // STORE_SHARE


class PinBudget:
    """Bytes by kind: `resident_bytes` promised to or pinned by residencies, `held_bytes` by
    requests' holds, `unadmitted_bytes` by leases without a load. Each kind counts its own."""

    def __init__(self, tenants: TenantBook) -> None:
        self.resident_bytes = 0
        self.held_bytes = 0
        self.unadmitted_bytes = 0
        self._tenants = tenants

    def __repr__(self) -> str:
        return (
            f"PinBudget({self.resident_bytes} resident, {self.held_bytes} held, "
            f"{self.unadmitted_bytes} unadmitted of {self._tenants.capacity_bytes} B)"
        )

    @property
    def for_residencies(self) -> int:
        """Bytes that residencies may still take."""
        used = self.resident_bytes + self.held_bytes + self.unadmitted_bytes
        return max(0, most_pinned(self._tenants.capacity_bytes) - used)

    @property
    def for_others(self) -> int:
        """Bytes that holds and leases may still take."""
        return self.for_residencies if self.resident_bytes else self._tenants.capacity_bytes
