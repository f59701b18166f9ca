"""A bound on a shared resource that no owner can use up alone.

Always true: all owners together hold no more than the capacity. After an owner has taken more, it
holds no more than the floor, or no more than is left for others. So one owner alone gets half, n
owners that want everything get 1/(n + 1) each, and there is always room for another one. An owner
is a tenant, or an engine if no tenants are configured.
"""

FLOOR_SHARE = 64
"""1/64 of the capacity is the floor: so much may be had as long as there is any."""


class FairBound:
    """Counts what each owner holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.floor = max(1, capacity // FLOOR_SHARE)
        self.total = 0
        self._held: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"FairBound({self.total}/{self.capacity} held by {len(self._held)} owners)"

    def held(self, owner: str) -> int:
        """How many an owner holds."""
        return self._held.get(owner, 0)

    def room(self, owner: str) -> int:
        """How many more an owner may take at once."""
        held, free = self.held(owner), self.capacity - self.total
        return max(0, min(self.floor - held, free), (free - held) // 2)

    def take(self, owner: str, count: int) -> None:
        """Counts so many more for the owner; `room` has said that it may."""
        if count:
            self._held[owner] = self.held(owner) + count
            self.total += count

    def give(self, owner: str, count: int) -> None:
        """Counts so many less for the owner."""
        left = self.held(owner) - count
        assert left >= 0, "more was given back than was held"
        self.total -= count
        self._held[owner] = left
        if not left:
            del self._held[owner]

    def refusal(self, owner: str, what: str) -> str:
        """Says why the owner gets no more, for people to read."""
        return (
            f"{self.held(owner)} {what} are held by this client and {self.capacity - self.total} "
            f"of {self.capacity} are free; "
            "nobody may hold more than is left for others"
        )

    def check(self, held: dict[str, int]) -> None:
        """Raises AssertionError if the owners hold something else."""
        assert self._held == held and self.total == sum(held.values()) <= self.capacity, (
            "what owners hold is miscounted"
        )


class Account(FairBound):
    """One kind of things among several that share a bound; each takes `unit` of it."""

    def __init__(self, bound: FairBound, unit: int = 1) -> None:
        super().__init__(bound.capacity // unit)
        self._bound = bound
        self._unit = unit

    def __repr__(self) -> str:
        return f"Account({self.total} of {self._unit} in {self._bound!r})"

    def room(self, owner: str) -> int:
        """How many more an owner may take at once."""
        return self._bound.room(owner) // self._unit

    def take(self, owner: str, count: int) -> None:
        """As FairBound.take."""
        self._bound.take(owner, count * self._unit)
        super().take(owner, count)

    def give(self, owner: str, count: int) -> None:
        """As FairBound.give."""
        super().give(owner, count)
        self._bound.give(owner, count * self._unit)

    def refusal(self, owner: str, what: str) -> str:
        """As FairBound.refusal."""
        return f"{self.held(owner)} {what}, and all together {self._bound.refusal(owner, 'bytes')}"
