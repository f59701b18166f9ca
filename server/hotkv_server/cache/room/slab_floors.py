"""Floors: how many slots of a size somebody was promised, so that its slabs stay within reach.

Bytes alone promise little: one pinned slot keeps its slab from every other slot size. Always true
between two calls of the core: as many slabs are free as the sizes with a floor are short of. A size
takes free slabs only if enough stay for the floors of others, and gives up slabs to another size
only down to its own floor. So within its slabs, lent and to come, a size has room for all that it
was promised, once what may be evicted of that size is.
"""

from collections.abc import Callable, Mapping

from hotkv_proto.table import SLOT_ALIGN


class SlabFloors:
    """Slots by slot size. `lent`: how many slabs a size has; `num_free`: how many nobody has."""

    def __init__(
        self, slab_bytes: int, lent: Callable[[int], int], num_free: Callable[[], int]
    ) -> None:
        self._slab_bytes = slab_bytes
        self._lent = lent
        self._num_free = num_free
        self._slots: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"SlabFloors({self._slots}, {self.shortfall} slabs short)"

    def add(self, slot_bytes: int, num_slots: int) -> None:
        """Promises so many slots more of an aligned size; fewer, if negative."""
        if not num_slots:
            return
        assert slot_bytes % SLOT_ALIGN == 0, "floors are of aligned sizes"
        self._slots[slot_bytes] = self._slots.get(slot_bytes, 0) + num_slots
        assert self._slots[slot_bytes] >= 0, "more slots were given back than promised"
        if not self._slots[slot_bytes]:
            del self._slots[slot_bytes]

    def _needed(self, slot_bytes: int) -> int:
        slots_per_slab = max(1, self._slab_bytes // slot_bytes)
        slabs_per_slot = -(-slot_bytes // self._slab_bytes)
        return -(-self._slots.get(slot_bytes, 0) // slots_per_slab) * slabs_per_slot

    def missing(self, slot_bytes: int) -> int:
        """Slabs that the size is short of."""
        return max(0, self._needed(slot_bytes) - self._lent(slot_bytes))

    def surplus(self, slot_bytes: int) -> int:
        """Slabs that the size may give to others."""
        return max(0, self._lent(slot_bytes) - self._needed(slot_bytes))

    def sizes(self) -> list[int]:
        """Sizes with a floor."""
        return list(self._slots)

    def kept_for_others(self, slot_bytes: int) -> int:
        """Free slabs that this size may not take."""
        return sum(self.missing(size) for size in self._slots if size != slot_bytes)

    @property
    def shortfall(self) -> int:
        """Slabs that must become free before all floors hold."""
        return max(0, sum(map(self.missing, self._slots)) - self._num_free())

    def would_fit(self, more: Mapping[int, int]) -> bool:
        """True if all floors hold with so many slots more by size."""
        for size, count in more.items():
            self.add(size, count)
        fits = not self.shortfall
        for size, count in more.items():
            self.add(size, -count)
        return fits

    def check(self, slots: Mapping[int, int]) -> None:
        """Raises AssertionError if floors are others than these, or do not hold."""
        expected = {size: count for size, count in slots.items() if count}
        assert self._slots == expected, "slots of floors miscounted"
        assert not self.shortfall, "a floor does not hold"
