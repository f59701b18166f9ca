"""The elastic pool: an arena cut into slabs, each lent to one slot size.

Owns which byte of the arena belongs to which slot. Always true: a slot is free or used, never both;
a slab whose last slot is freed goes back at once and may be lent to any other size; a slot larger
than a slab spans contiguous slabs; only slabs that have memory are lent (`back`). It never moves or
evicts anything: an allocation that does not fit is granted short. `floors` says which slabs are
kept for a size.
"""

import numpy as np

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.arrays import distinct
from hotkv_server.cache.room.free_slots import FreeSlots
from hotkv_server.cache.room.pool_figures import PoolFigures, SlabClassStats, figures_of
from hotkv_server.cache.room.slab_floors import SlabFloors
from hotkv_server.cache.values import BoolMask, Int64s

FREE, ABSENT = -1, -2
"""In place of a slot size in the table of owners: the slab is lent to no size; it has no memory
yet."""


def aligned(num_bytes: int) -> int:
    """Bytes rounded up to whole units of SLOT_ALIGN."""
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN


class _SlabClass:
    """Slots of one size."""

    __slots__ = (
        "_slab_bytes",
        "free",
        "num_slabs",
        "slabs_per_slot",
        "slot_bytes",
        "slots_per_slab",
    )

    def __init__(self, slot_bytes: int, slab_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_slab = max(1, slab_bytes // slot_bytes)
        self.slabs_per_slot = -(-slot_bytes // slab_bytes)
        self.free = FreeSlots()
        self.num_slabs = 0
        # True while slabs that were emptied for reuse are still here.
        self._slab_bytes = slab_bytes

    def num_slots(self) -> int:
        """Slots in all its slabs, free or used."""
        return self.num_slabs // self.slabs_per_slot * self.slots_per_slab

    def stats(self) -> SlabClassStats:
        """Its row among those of all sizes."""
        slots = self.num_slots()
        return SlabClassStats(self.slot_bytes, self.num_slabs, slots, slots - len(self.free))

    def slots_of(self, first_slabs: Int64s) -> Int64s:
        """Offsets of the slots that begin in these slabs, in their order."""
        within = np.arange(self.slots_per_slab, dtype=np.int64) * self.slot_bytes
        return (first_slabs[:, None] * self._slab_bytes + within[None, :]).reshape(-1)

    def spans(self, first_slabs: Int64s) -> Int64s:
        """All slabs of the slots that begin in these; more than these only if slots span slabs."""
        if self.slabs_per_slot == 1:
            return first_slabs
        return (first_slabs[:, None] + np.arange(self.slabs_per_slot)[None, :]).reshape(-1)


class SlabPool:
    """Slots of any size out of one arena. All offsets are bytes from its start, multiples of
    SLOT_ALIGN.

    `num_slabs`: of the whole arena. `num_backed`: those that have memory, `num_free_slabs` of them
    lent to nobody.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int, *, is_backed: bool = True) -> None:
        """`is_backed`: all slabs have memory; if False, none until `back` or `claim` says so."""
        if slab_bytes <= 0 or slab_bytes % SLOT_ALIGN:
            raise ValueError(
                f"slab_bytes is {slab_bytes}; it must be a positive multiple of {SLOT_ALIGN}"
            )
        if arena_bytes < slab_bytes:
            raise ValueError(f"arena_bytes is {arena_bytes}, smaller than one slab of {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.num_slabs = arena_bytes // slab_bytes
        self.num_backed = self.num_free_slabs = self.num_slabs if is_backed else 0
        self._classes: dict[int, _SlabClass] = {}
        # Per slab: the slot size it is lent to, FREE or ABSENT, and its used slots. A spanning
        # slot counts in its first slab.
        self._owner = np.full(self.num_slabs, FREE if is_backed else ABSENT, np.int64)
        self._used = np.zeros(self.num_slabs, np.int64)
        self._kernels = native.require("hotkv_server.cache.table.kernels")
        self.floors = SlabFloors(slab_bytes, self.lent_slabs, lambda: self.num_free_slabs)

    def __repr__(self) -> str:
        lent = ", ".join(f"{s.slot_bytes}B: {s.num_used}/{s.num_slots}" for s in self.stats())
        coming = (
            f" ({self.num_slabs} with those that have no memory)"
            if self.num_backed < self.num_slabs
            else ""
        )
        return (
            f"SlabPool({self.num_free_slabs}/{self.num_backed}{coming} slabs of "
            f"{self.slab_bytes} B free; {lent})"
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes of slabs that have memory."""
        return self.num_backed * self.slab_bytes

    def back(self, num_bytes: int) -> None:
        """The first `num_bytes` of the arena have memory: slabs that lie wholly in them may be lent
        from now on."""
        reached = self._owner[: num_bytes // self.slab_bytes]
        fresh = np.flatnonzero(reached == ABSENT)
        reached[fresh] = FREE
        self.num_backed += len(fresh)
        self.num_free_slabs += len(fresh)

    def stats(self) -> list[SlabClassStats]:
        """One row per slot size that has slabs."""
        return [c.stats() for _, c in sorted(self._classes.items()) if c.num_slabs]

    def figures(self) -> PoolFigures:
        """How well the arena is divided, over all slot sizes."""
        widest = max((c.slabs_per_slot for c in self._classes.values()), default=1)
        num_stranded = int((self._free_runs() % widest).sum())
        return figures_of(self.stats(), self.num_backed, num_stranded, self.slab_bytes)

    def _free_runs(self) -> Int64s:
        """Lengths of the runs of free slabs, and some zeros."""
        lent = np.flatnonzero(np.concatenate(([True], self._owner != FREE, [True])))
        return np.diff(lent) - 1

    def capacity_slots(self, slot_bytes: int) -> int:
        """Slots of this size that the whole arena could hold, once all of it has memory."""
        c = self._class(slot_bytes)
        return self.num_slabs // c.slabs_per_slot * c.slots_per_slab

    def is_shared(self, slot_bytes: int) -> bool:
        """Returns True if slabs are lent to another size than this."""
        return any(c.num_slabs and c.slot_bytes != slot_bytes for c in self._classes.values())

    def slab_of(self, offsets: Int64s) -> Int64s:
        """Number of the (first) slab of each slot."""
        return offsets // self.slab_bytes

    def slab_owner(self) -> Int64s:
        """The slot size that each slab is lent to, -1 if free, ABSENT if it has no memory yet. A
        view: not to be changed."""
        return self._owner

    def available_slots(self, slot_bytes: int) -> int:
        """Slots of this size that `allocate` would grant now."""
        c = self._class(slot_bytes)
        usable = max(0, self.num_free_slabs - self.floors.kept_for_others(c.slot_bytes))
        if c.slabs_per_slot == 1:
            return len(c.free) + usable * c.slots_per_slab
        fitting = int((self._free_runs() // c.slabs_per_slot).sum())
        return len(c.free) + min(fitting, usable // c.slabs_per_slot)

    def lent_slabs(self, slot_bytes: int) -> int:
        """Slabs that are lent to a slot size."""
        return self._class(slot_bytes).num_slabs

    def free_slots(self, slot_bytes: int) -> int:
        """Free slots in slabs that are lent to this size."""
        return len(self._class(slot_bytes).free)

    def allocate(self, slot_bytes: int, num_slots: int) -> Int64s:
        """Takes up to `num_slots` slots; fewer if free slots and free slabs run out."""
        c = self._class(slot_bytes)
        while len(c.free) < num_slots and self._lend(c, num_slots - len(c.free)):
            pass
        taken = c.free.take(num_slots)
        self._count(c, taken, 1)
        return taken

    def free(self, slot_bytes: int, offsets: Int64s) -> None:
        """Frees slots, which must be in use and of this size."""
        if not len(offsets):
            return
        c = self._class(slot_bytes)
        emptied = self._count(c, offsets, -1)
        c.free.add(offsets)
        if len(emptied):
            self._give_back(c, emptied)

    def _count(self, c: _SlabClass, offsets: Int64s, change: int) -> Int64s:
        """Adds `change` (1 or -1) to the used slots of each offset's slab; returns the slabs that
        have none left."""
        emptied = np.empty(len(offsets), np.int64)
        count = int(
            self._kernels.count_slots(
                self._used, self._owner, offsets, self.slab_bytes, c.slot_bytes, change, emptied
            )
        )
        assert count != -1, "slot freed with another size than it has"
        assert count != -2, "slot freed twice"
        return emptied[:count]

    def _give_back(self, c: _SlabClass, emptied: Int64s) -> None:
        """Takes back slabs without a used slot; if slots span slabs, `emptied` has the first of
        each slot."""
        is_kept = np.ones(self.num_slabs, np.bool_)
        is_kept[emptied] = False

        def stays(free: Int64s) -> BoolMask:
            out = np.empty(len(free), np.bool_)
            self._kernels.lie_in(free, self.slab_bytes, is_kept, out)
            return out

        c.free.keep(stays)
        spans = c.spans(emptied)
        self._owner[spans] = FREE
        c.num_slabs -= len(spans)
        self.num_free_slabs += len(spans)

    def claim(self, slot_bytes: int, offsets: Int64s) -> None:
        """Marks slots as used while a pool is rebuilt after a restart. Raises ValueError if they
        overlap.

        Their slabs count as having memory from now on; the caller prefaults them.
        """
        c, slabs = self._class(slot_bytes), self.slab_of(offsets)
        outside = ValueError("slots overlap slabs of another size or lie outside the arena")
        if len(offsets) and (int(offsets.min()) < 0 or int(slabs.max()) >= self.num_slabs):
            raise outside
        num_claimed = np.bincount(slabs, minlength=self.num_slabs)
        first = np.flatnonzero(num_claimed)
        spans = c.spans(first)
        if len(spans) and (
            int(spans.max()) >= self.num_slabs
            or np.any(self._owner[spans] >= 0)
            or len(distinct(spans)) != len(spans)
        ):
            raise outside
        numbers, rests = np.divmod(offsets - slabs * self.slab_bytes, c.slot_bytes)
        misfits = ValueError("slots are misaligned or claimed twice")
        if rests.any() or np.any(numbers >= c.slots_per_slab):
            raise misfits
        # Where each slab's slots begin among those of all claimed slabs.
        places = (np.cumsum(num_claimed > 0) - 1) * c.slots_per_slab
        is_free = np.ones(len(first) * c.slots_per_slab, np.bool_)
        is_free[places[slabs] + numbers] = False
        if len(is_free) - int(is_free.sum()) != len(offsets):
            raise misfits
        num_free = int((self._owner[spans] == FREE).sum())
        self._owner[spans] = c.slot_bytes
        c.num_slabs += len(spans)
        self.num_free_slabs -= num_free
        self.num_backed += len(spans) - num_free
        c.free.add(c.slots_of(first)[is_free])
        self._used += num_claimed

    def _class(self, slot_bytes: int) -> _SlabClass:
        size = aligned(slot_bytes)
        if size not in self._classes:
            self._classes[size] = _SlabClass(size, self.slab_bytes)
        return self._classes[size]

    def _lend(self, c: _SlabClass, want_slots: int) -> bool:
        """Lends enough free slabs for `want_slots`, or as many as there are but for the floors of
        others; False if there is none."""
        free = np.flatnonzero(self._owner == FREE)
        usable = max(0, len(free) - self.floors.kept_for_others(c.slot_bytes))
        if usable < c.slabs_per_slot:
            return False
        if c.slabs_per_slot == 1:
            first = free[: min(usable, -(-want_slots // c.slots_per_slab))]
        else:
            # Starts of runs of contiguous free slabs long enough for one slot.
            ends = free[c.slabs_per_slot - 1 :]
            starts = free[: len(ends)]
            fits = starts[ends - starts == c.slabs_per_slot - 1]
            first = fits[:1]
        if not len(first):
            return False
        spans = c.spans(first)
        self._owner[spans] = c.slot_bytes
        c.num_slabs += len(spans)
        self.num_free_slabs -= len(spans)
        c.free.add_below(c.slots_of(first)[::-1])
        return True

    def check_invariants(self) -> None:
        """Raises AssertionError if counts, owners and free lists disagree."""
        assert self.num_free_slabs == int((self._owner == FREE).sum()), "free slabs miscounted"
        assert self.num_backed == int((self._owner != ABSENT).sum()), "slabs with memory miscounted"
        for c in self._classes.values():
            mine = np.flatnonzero(self._owner == c.slot_bytes)
            assert len(mine) == c.num_slabs, "lent slabs miscounted"
            free = c.free.all()
            assert len(np.unique(free)) == len(free) == len(c.free), "slot twice in the free list"
            assert np.all(self._owner[self.slab_of(free)] == c.slot_bytes), (
                "free slot in a slab of another size"
            )
            assert int(self._used[mine].sum()) == c.num_slots() - len(c.free), (
                "used slots miscounted"
            )
            if c.slabs_per_slot == 1:
                assert np.all(self._used[mine] > 0), "an empty slab was not given back"
        assert np.all(self._used[self._owner < 0] == 0), "a slab that is not lent has used slots"
