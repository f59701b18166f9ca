"""The elastic pool: an arena cut into slabs, each lent to one slot size.

Owns which byte of the arena belongs to which slot. Always true: a slot is either free or used. A
slab whose last slot is freed returns to the pool at once and may be lent to any other size. A slot
larger than a slab spans contiguous slabs. Only slabs that have memory are lent (`back`). The pool
never moves or evicts anything: an allocation that does not fit is granted short. `SlabFloors` says
which slabs are reserved for a size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.arrays import distinct
from hotkv_server.cache.values import BoolMask, Int64s

CHUNK_SLOTS = 1 << 14
"""Freed slots are appended to the last chunk up to this size; otherwise they start a new chunk."""
FREE, ABSENT = -1, -2
"""Values that replace a slot size in the table of owners. FREE: the slab is lent to no size.
ABSENT: the slab has no memory yet."""


class FreeSlots:
    """Free slots of one size, by offset.

    Always true: the slot that was added last is handed out first. Offsets are stored in chunks: a
    single array of millions would be copied at every change.
    """

    __slots__ = ("_chunks", "_num")

    def __init__(self) -> None:
        self._chunks: list[Int64s] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"FreeSlots({self._num})"

    def add(self, offsets: Int64s) -> None:
        """Adds slots; they are handed out before all others."""
        if self._chunks and len(self._chunks[-1]) + len(offsets) <= CHUNK_SLOTS:
            self._chunks[-1] = np.concatenate((self._chunks[-1], offsets))
        elif len(offsets):
            self._chunks.append(offsets)
        self._num += len(offsets)

    def add_below(self, offsets: Int64s) -> None:
        """Adds slots; they are handed out after all others."""
        if len(offsets):
            self._chunks.insert(0, offsets)
        self._num += len(offsets)

    def take(self, count: int) -> Int64s:
        """Removes and returns the last `count` slots, or all if fewer, the last slot first."""
        taken: list[Int64s] = []
        missing = min(count, self._num)
        self._num -= missing
        while missing:
            chunk = self._chunks[-1]
            taken.append(chunk[max(0, len(chunk) - missing) :][::-1])
            if len(chunk) > missing:
                self._chunks[-1] = chunk[: len(chunk) - missing]
            else:
                self._chunks.pop()
            missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def keep(self, is_kept: Callable[[Int64s], BoolMask]) -> None:
        """Drops the slots for which `is_kept` is False. The order stays the same."""
        kept = []
        for chunk in self._chunks:
            mask = is_kept(chunk)
            kept.append(chunk if mask.all() else chunk[mask])
        self._chunks = [chunk for chunk in kept if len(chunk)]
        self._num = sum(map(len, self._chunks))

    def all(self) -> Int64s:
        """Returns the free slots; the next to be handed out comes last."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)


class SlabFloors:
    """Number of slots of each size that were promised, so that enough slabs stay available for
    them.

    lent: returns the number of slabs that a size has.
    num_free: returns the number of free slabs.

    A promise in bytes alone is weak: a pinned slot blocks its slab for every other slot size.
    Always true between two calls of the core: as many slabs are free as the sizes with a floor are
    short of. A size gets free slabs only if enough stay free for other floors. It gives slabs to
    another size only down to its own floor. So a size has room for all promised slots, once its
    evictable blocks are evicted.
    """

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
        """Promises `num_slots` more slots of an aligned size; fewer if negative."""
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
        """Returns the number of slabs that the size is short of."""
        return max(0, self._needed(slot_bytes) - self._lent(slot_bytes))

    def surplus(self, slot_bytes: int) -> int:
        """Returns the number of slabs that the size may give to other sizes."""
        return max(0, self._lent(slot_bytes) - self._needed(slot_bytes))

    def sizes(self) -> list[int]:
        """Returns the sizes with a floor."""
        return list(self._slots)

    def kept_for_others(self, slot_bytes: int) -> int:
        """Returns the number of free slabs that this size may not use."""
        return sum(self.missing(size) for size in self._slots if size != slot_bytes)

    @property
    def shortfall(self) -> int:
        """Number of slabs that must become free before all floors hold."""
        return max(0, sum(map(self.missing, self._slots)) - self._num_free())

    def would_fit(self, more: Mapping[int, int]) -> bool:
        """Returns True if all floors would hold with these additional slots by size."""
        for size, count in more.items():
            self.add(size, count)
        fits = not self.shortfall
        for size, count in more.items():
            self.add(size, -count)
        return fits

    def check(self, slots: Mapping[int, int]) -> None:
        """Raises AssertionError unless the floors are exactly `slots` by size and hold."""
        expected = {size: count for size, count in slots.items() if count}
        assert self._slots == expected, "slots of floors miscounted"
        assert not self.shortfall, "a floor does not hold"


@dataclass(frozen=True, slots=True)
class SlabClassStats:
    """Figures of a slot size: slabs lent to it, slots in them, and slots in use."""

    slot_bytes: int
    num_slabs: int
    num_slots: int
    num_used: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How the arena is divided among slot sizes, as far as it has memory. Lent bytes are used, idle
    or tail.

    lent_bytes: slabs that are lent to some slot size.
    idle_bytes: free slots in lent slabs.
    tail_bytes: bytes of lent slabs that no slot covers, because slot sizes don't divide slabs.
    stranded_bytes: free slabs that are not contiguous enough for the widest known slot size; 0 if
        no slot spans slabs.
    shares: (slot size, its slabs / slabs with memory, its used bytes / all used bytes) for each
        size that has slabs.
    """

    arena_bytes: int
    lent_bytes: int
    idle_bytes: int
    tail_bytes: int
    stranded_bytes: int
    shares: tuple[tuple[int, float, float], ...]

    @property
    def fragmentation_ratio(self) -> float:
        """Share of lent memory that holds no data: (idle + tail) / lent. 0 if no slab is lent."""
        return (self.idle_bytes + self.tail_bytes) / self.lent_bytes if self.lent_bytes else 0.0

    @property
    def imbalance_ratio(self) -> float:
        """Share of lent memory that lies with the wrong slot sizes: ½ Σ |share of lent slabs -
        share of used bytes| over slot sizes.

        0 if every size has slabs in proportion to its used bytes; always below 1.
        """
        lent_share = sum(of_arena for _, of_arena, _ in self.shares)
        return sum(abs(of_arena / lent_share - of_used) for _, of_arena, of_used in self.shares) / 2


def figures_of(
    rows: Sequence[SlabClassStats], num_backed: int, num_stranded: int, slab_bytes: int
) -> PoolFigures:
    """Returns the figures of a pool whose slot sizes have these `rows`. `num_backed`,
    `num_stranded`: in slabs."""
    used = sum(row.num_used * row.slot_bytes for row in rows)
    idle = sum((row.num_slots - row.num_used) * row.slot_bytes for row in rows)
    lent = sum(row.num_slabs for row in rows) * slab_bytes
    shares = tuple(
        (row.slot_bytes, row.num_slabs / num_backed, row.num_used * row.slot_bytes / max(1, used))
        for row in rows
    )
    return PoolFigures(
        num_backed * slab_bytes, lent, idle, lent - idle - used, num_stranded * slab_bytes, shares
    )


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of SLOT_ALIGN."""
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN


class _SlabClass:
    """Slots of the same size."""

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
        self._slab_bytes = slab_bytes

    def num_slots(self) -> int:
        """Returns the number of slots in all its slabs, free or used."""
        return self.num_slabs // self.slabs_per_slot * self.slots_per_slab

    def stats(self) -> SlabClassStats:
        """Returns the figures of this slot size."""
        slots = self.num_slots()
        return SlabClassStats(self.slot_bytes, self.num_slabs, slots, slots - len(self.free))

    def slots_of(self, first_slabs: Int64s) -> Int64s:
        """Returns the offsets of the slots that begin in these slabs, in slab order."""
        within = np.arange(self.slots_per_slab, dtype=np.int64) * self.slot_bytes
        return (first_slabs[:, None] * self._slab_bytes + within[None, :]).reshape(-1)

    def spans(self, first_slabs: Int64s) -> Int64s:
        """Returns all slabs of the slots that begin in `first_slabs`; more than `first_slabs` only
        if slots span slabs."""
        if self.slabs_per_slot == 1:
            return first_slabs
        return (first_slabs[:, None] + np.arange(self.slabs_per_slot)[None, :]).reshape(-1)


class SlabPool:
    """Slots of any size in an arena. Offsets are in bytes from its start, multiples of SLOT_ALIGN.

    num_slabs: slabs of the whole arena.
    num_backed: slabs that have memory.
    num_free_slabs: slabs with memory that are not lent.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int, *, is_backed: bool = True) -> None:
        """Makes a pool. `is_backed`: whether all slabs have memory; otherwise they get memory
        through `back` and `claim`."""
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
        # By slab: the slot size it is lent to, FREE or ABSENT; and its used slots. A spanning slot
        # counts in its first slab.
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
        """Marks the first `num_bytes` of the arena as having memory. Slabs that lie wholly in them
        may be lent from here on."""
        reached = self._owner[: num_bytes // self.slab_bytes]
        fresh = np.flatnonzero(reached == ABSENT)
        reached[fresh] = FREE
        self.num_backed += len(fresh)
        self.num_free_slabs += len(fresh)

    def stats(self) -> list[SlabClassStats]:
        """Returns a row for each slot size that has slabs."""
        return [c.stats() for _, c in sorted(self._classes.items()) if c.num_slabs]

    def figures(self) -> PoolFigures:
        """Returns how the arena is divided among all slot sizes."""
        widest = max((c.slabs_per_slot for c in self._classes.values()), default=1)
        num_stranded = int((self._free_runs() % widest).sum())
        return figures_of(self.stats(), self.num_backed, num_stranded, self.slab_bytes)

    def _free_runs(self) -> Int64s:
        """Returns the lengths of the runs of free slabs, with some zeros in between."""
        lent = np.flatnonzero(np.concatenate(([True], self._owner != FREE, [True])))
        return np.diff(lent) - 1

    def capacity_slots(self, slot_bytes: int) -> int:
        """Returns how many slots of this size the whole arena could hold, once all of it has
        memory."""
        c = self._class(slot_bytes)
        return self.num_slabs // c.slabs_per_slot * c.slots_per_slab

    def is_shared(self, slot_bytes: int) -> bool:
        """Returns True if slabs are lent to a size other than this."""
        return any(c.num_slabs and c.slot_bytes != slot_bytes for c in self._classes.values())

    def slab_of(self, offsets: Int64s) -> Int64s:
        """Returns the number of each slot's first slab."""
        return offsets // self.slab_bytes

    def slab_owner(self) -> Int64s:
        """Returns the slot size that each slab is lent to; FREE, or ABSENT if it has no memory. A
        view: do not change it."""
        return self._owner

    def available_slots(self, slot_bytes: int) -> int:
        """Returns how many slots of this size `allocate` would grant."""
        c = self._class(slot_bytes)
        usable = max(0, self.num_free_slabs - self.floors.kept_for_others(c.slot_bytes))
        if c.slabs_per_slot == 1:
            return len(c.free) + usable * c.slots_per_slab
        fitting = int((self._free_runs() // c.slabs_per_slot).sum())
        return len(c.free) + min(fitting, usable // c.slabs_per_slot)

    def lent_slabs(self, slot_bytes: int) -> int:
        """Returns the number of slabs lent to a slot size."""
        return self._class(slot_bytes).num_slabs

    def free_slots(self, slot_bytes: int) -> int:
        """Returns the number of free slots in slabs lent to this size."""
        return len(self._class(slot_bytes).free)

    def allocate(self, slot_bytes: int, num_slots: int) -> Int64s:
        """Allocates up to `num_slots` slots; fewer if free slots and free slabs run out. Returns
        their offsets."""
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
        """Adds `change` (1 or -1) to the used slots of each offset's slab. Returns the slabs whose
        count reached 0."""
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
        """Returns slabs without a used slot to the pool. If slots span slabs, `emptied` has the
        first slab of each slot."""
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

        Their slabs count as having memory from here on; the caller prefaults them.
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
        # Start of each slab's slots among the slots of all claimed slabs.
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
        """Lends enough free slabs for `want_slots`, or as many as the floors of other sizes allow.
        Returns False if it lends no slab."""
        free = np.flatnonzero(self._owner == FREE)
        usable = max(0, len(free) - self.floors.kept_for_others(c.slot_bytes))
        if usable < c.slabs_per_slot:
            return False
        if c.slabs_per_slot == 1:
            first = free[: min(usable, -(-want_slots // c.slots_per_slab))]
        else:
            # Starts of contiguous runs of free slabs that are long enough for a slot.
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
