"""`SlabPool` allocates the slots of an arena. `SlabFloors` reserves slabs for slot sizes.

A *run* is a range of adjacent slabs, *lent* to one slot size together. Slots lie side by side from
its start, so only bytes at its end are lost. A *gap* is a range of adjacent free slabs. If none is
long enough for a new run, slabs of a gap lengthen the run before it or become a shorter run.

The arena may have *parts*, on a NUMA node each. An allocation prefers one, and takes from others
what that lacks. A slot lies in one place: its shards are not spread over parts.

Always true: when a run's last used slot is freed, its slabs become free at once. Only slabs that
have memory (`SlabPool.back`) are lent. Nothing is moved or evicted for an allocation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.values import BoolMask, Int64s, aligned

MAX_SIZES = 256
"""When a pool knows so many slot sizes, which clients choose, it forgets those without slabs."""
CHUNK_SLOTS = 1 << 14
"""Most slots of a chunk of `FreeSlots` after freed slots have joined it."""
NO_BOUND = 1 << 62
ANY_PART = -1
"""In place of a part of the arena: all parts in turn."""
SPARE_RUNS = 4
"""A part is preferred only while slots for so many runs more are available: at a border between
parts a gap may have fewer slots than if it is used as a whole."""
FREE, ABSENT = -1, -2
"""In `SlabPool.slab_owner`: not lent / without memory."""


class FreeSlots:
    """`num` free slots of one size: a stack of offsets, in several arrays (chunks), because one of
    millions would be copied at every change."""

    __slots__ = ("_chunks", "num")

    def __init__(self) -> None:
        self._chunks: list[Int64s] = []
        self.num = 0

    def __repr__(self) -> str:
        return f"FreeSlots({self.num})"

    def add(self, offsets: Int64s) -> None:
        """On top of the stack."""
        if self._chunks and len(self._chunks[-1]) + len(offsets) <= CHUNK_SLOTS:
            self._chunks[-1] = np.concatenate((self._chunks[-1], offsets))
        elif len(offsets):
            self._chunks.append(offsets)
        self.num += len(offsets)

    def add_below(self, offsets: Int64s) -> None:
        """Under all others; at least one."""
        self._chunks.insert(0, offsets)
        self.num += len(offsets)

    def take(self, count: int, part: int = 0) -> Int64s:
        """The top of the stack first; fewer only if fewer are free. `part`: of `PartedSlots`."""
        taken: list[Int64s] = []
        missing = min(count, self.num)
        self.num -= missing
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
        """Drops slots; the order of the others stays."""
        kept = []
        for chunk in self._chunks:
            mask = is_kept(chunk)
            kept.append(chunk if mask.all() else chunk[mask])
        self._chunks = [chunk for chunk in kept if len(chunk)]
        self.num = sum(map(len, self._chunks))

    def all(self) -> Int64s:
        """The top of the stack last."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)


class PartedSlots:
    """As `FreeSlots`, for an arena with parts. `starts`: first byte of each."""

    __slots__ = ("_of_part", "_starts")

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts
        self._of_part = [FreeSlots() for _ in starts]

    @property
    def num(self) -> int:
        return sum(slots.num for slots in self._of_part)

    def __repr__(self) -> str:
        return f"PartedSlots({self._of_part})"

    def in_part(self, part: int) -> int:
        return self._of_part[part].num

    def add(self, offsets: Int64s) -> None:
        for slots, mine in self._split(offsets):
            slots.add(mine)

    def add_below(self, offsets: Int64s) -> None:
        for slots, mine in self._split(offsets):
            slots.add_below(mine)

    def take(self, count: int, part: int = 0) -> Int64s:
        """From this part first."""
        taken = [self._of_part[part].take(count)]
        for slots in self._of_part:
            if slots.num and (missing := count - sum(map(len, taken))):
                taken.append(slots.take(missing))
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def keep(self, is_kept: Callable[[Int64s], BoolMask]) -> None:
        for slots in self._of_part:
            slots.keep(is_kept)

    def all(self) -> Int64s:
        return np.concatenate([slots.all() for slots in self._of_part])

    def _split(self, offsets: Int64s) -> "list[tuple[FreeSlots, Int64s]]":
        parts = np.searchsorted(self._starts, offsets, side="right") - 1
        return [(self._of_part[part], offsets[parts == part]) for part in np.unique(parts).tolist()]


class SlabFloors:
    """The *floor* of a slot size is the number of its promised slots, for example of residencies.
    Promised bytes would not do: a slab with a pinned slot can't be lent to another size.

    Always true between two calls of the core: enough slabs are free for all promised slots that
    have none. So once its evictable blocks are gone, a size has room for them. A floor counts in
    shortest runs, which fit wherever slabs are free, and covers *held* slots too: those that
    retentions pin.
    """

    def __init__(
        self, slab_bytes: int, lent: Callable[[int], int], num_free: Callable[[], int]
    ) -> None:
        self._slab_bytes = slab_bytes
        self._lent = lent
        self._num_free = num_free
        self._slots: dict[int, int] = {}
        self.held_slots: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"SlabFloors({self._slots}, {self.shortfall} slabs short)"

    def add(self, slot_bytes: int, num_slots: int) -> None:
        """Raises the floor of a multiple of SLOT_ALIGN; lowers it if negative."""
        if not num_slots:
            return
        assert slot_bytes % SLOT_ALIGN == 0, "floors are of aligned sizes"
        self._slots[slot_bytes] = self._slots.get(slot_bytes, 0) + num_slots
        assert self._slots[slot_bytes] >= 0, "more slots were given back than promised"
        if not self._slots[slot_bytes]:
            del self._slots[slot_bytes]

    def hold(self, slot_bytes: int, num_slots: int) -> None:
        """More held slots, or fewer if negative. The caller has checked `holdable`."""
        self.held_slots[slot_bytes] = self.held_slots.get(slot_bytes, 0) + num_slots
        if not self.held_slots[slot_bytes]:
            del self.held_slots[slot_bytes]

    def holdable(self, slot_bytes: int) -> int:
        """How many more slots may be held beside the promised ones."""
        promised = self._slots.get(slot_bytes, 0)
        if not promised:
            return NO_BOUND
        slabs = self._lent(slot_bytes) + self._num_free() - self.kept_for_others(slot_bytes)
        num_shortest = slabs // shortest_run(slot_bytes, self._slab_bytes)
        most = num_shortest * max(1, self._slab_bytes // slot_bytes)
        return max(0, most - promised - self.held_slots.get(slot_bytes, 0))

    def needed(self, slot_bytes: int) -> int:
        promised = self._slots.get(slot_bytes, 0)
        if not promised:
            return 0
        slots_per_slab = max(1, self._slab_bytes // slot_bytes)
        num_shortest = -(-(promised + self.held_slots.get(slot_bytes, 0)) // slots_per_slab)
        return num_shortest * shortest_run(slot_bytes, self._slab_bytes)

    def missing(self, slot_bytes: int) -> int:
        """Slabs that this size lacks for its floor."""
        return max(0, self.needed(slot_bytes) - self._lent(slot_bytes))

    def surplus(self, slot_bytes: int) -> int:
        """Slabs beyond this size's floor."""
        return max(0, self._lent(slot_bytes) - self.needed(slot_bytes))

    def sizes(self) -> list[int]:
        return list(self._slots)

    def kept_for_others(self, slot_bytes: int) -> int:
        """Free slabs that floors of other sizes need."""
        return sum(self.missing(size) for size in self._slots if size != slot_bytes)

    @property
    def shortfall(self) -> int:
        """Slabs that must become free for all floors; 0 between two calls of the core."""
        return max(0, sum(map(self.missing, self._slots)) - self._num_free())

    def would_fit(self, more: Mapping[int, int]) -> bool:
        """Changes nothing. `more`: promised slots by size."""
        for size, count in more.items():
            self.add(size, count)
        fits = not self.shortfall
        for size, count in more.items():
            self.add(size, -count)
        return fits

    def check(self, slots: Mapping[int, int]) -> None:
        expected = {size: count for size, count in slots.items() if count}
        assert self._slots == expected, "slots of floors miscounted"
        assert not self.shortfall, "a floor does not hold"


@dataclass(frozen=True, slots=True)
class SlabClassStats:
    slot_bytes: int
    num_slabs: int
    num_slots: int
    num_used: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Bytes of the arena that has memory. Each byte of a lent slab is used, idle or tail.

    idle_bytes: free slots in lent slabs.
    tail_bytes: ends of runs, too short for a slot.
    stranded_bytes: slabs that would stay free if slots of the largest known size filled every gap.
    shares: for each slot size that has slabs: the size, its share of the slabs with memory, and
        of all used bytes.
    """

    arena_bytes: int
    lent_bytes: int
    idle_bytes: int
    tail_bytes: int
    stranded_bytes: int
    shares: tuple[tuple[int, float, float], ...]

    @property
    def fragmentation_ratio(self) -> float:
        return (self.idle_bytes + self.tail_bytes) / self.lent_bytes if self.lent_bytes else 0.0

    @property
    def imbalance_ratio(self) -> float:
        """Share of the lent memory that has the wrong slot size: ½ Σ |share of lent slabs -
        share of used bytes|. 0 to below 1."""
        lent_share = sum(of_arena for _, of_arena, _ in self.shares)
        return sum(abs(of_arena / lent_share - of_used) for _, of_arena, of_used in self.shares) / 2


def figures_of(
    rows: Sequence[SlabClassStats], num_backed: int, num_stranded: int, slab_bytes: int
) -> PoolFigures:
    """`rows`: of sizes that have slabs, and so slots in use."""
    used = sum(row.num_used * row.slot_bytes for row in rows)
    idle = sum((row.num_slots - row.num_used) * row.slot_bytes for row in rows)
    lent = sum(row.num_slabs for row in rows) * slab_bytes
    shares = tuple(
        (row.slot_bytes, row.num_slabs / num_backed, row.num_used * row.slot_bytes / used)
        for row in rows
    )
    return PoolFigures(
        num_backed * slab_bytes, lent, idle, lent - idle - used, num_stranded * slab_bytes, shares
    )


MOST_LOST = 0.01
"""Share of a run's bytes that may be lost behind its last slot."""
LONGEST_END = 100
"""Most slabs of a run beyond those of one slot: within it, some run of at least 100 slabs has
its last slot end in its last slab, and so loses at most 1 %."""
RUNS_PER_ARENA = (16, 32)
"""Least and most runs that fit into an arena, which bound their length.

With fewer than 16, the first block of a size could take most of a small arena; so short runs may
lose more than MOST_LOST. At most 32, so that gaps are small compared with runs; not for runs of
AMPLE_RUN_BYTES, nor in arenas below FEW_SLABS.
"""
AMPLE_RUN_BYTES = 64 << 20
FEW_SLABS = 256
"""In a smaller arena, runs are as short as MOST_LOST allows: a hot block then keeps fewer slabs."""


def shortest_run(slot_bytes: int, slab_bytes: int) -> int:
    """Slabs that one slot needs."""
    return -(-slot_bytes // slab_bytes)


def run_slabs(slot_bytes: int, slab_bytes: int, num_slabs: int) -> int:
    """The shortest length within the bounds that loses at most MOST_LOST; else the one that
    loses least."""
    fewest, most = RUNS_PER_ARENA
    one = shortest_run(slot_bytes, slab_bytes)
    last = max(one, min(num_slabs // fewest, one + LONGEST_END))
    ample = min(num_slabs // most, AMPLE_RUN_BYTES // slab_bytes) if num_slabs >= FEW_SLABS else 0
    first = min(last, max(one, ample))

    def lost(length: int) -> float:
        return length * slab_bytes % slot_bytes / (length * slab_bytes)

    lengths = range(first, last + 1)
    good = (length for length in lengths if lost(length) <= MOST_LOST)
    return next(good, min(lengths, key=lost))


class _SlabClass:
    """run_slabs, slots_per_run: of a run of full length.
    num_slabs, num_slots: of all runs.
    barred: free slots that are not given out (`SlabPool.bar`).
    """

    __slots__ = (
        "_slab_bytes",
        "barred",
        "free",
        "num_slabs",
        "num_slots",
        "room",
        "run_slabs",
        "slot_bytes",
        "slots_per_run",
    )

    def __init__(
        self, slot_bytes: int, slab_bytes: int, num_slabs: int, part_starts: Int64s
    ) -> None:
        self.slot_bytes = slot_bytes
        self._slab_bytes = slab_bytes
        self.free = PartedSlots(part_starts) if len(part_starts) > 1 else FreeSlots()
        self.barred = FreeSlots()
        self.num_slabs = self.num_slots = 0
        self.resize(num_slabs)

    def resize(self, num_slabs: int) -> None:
        """`num_slabs`: of the arena."""
        self.run_slabs = run_slabs(self.slot_bytes, self._slab_bytes, num_slabs)
        self.slots_per_run = self.run_slabs * self._slab_bytes // self.slot_bytes
        # Cached: slots that free slabs could give, and the state of the pool for which this
        # holds.
        self.room = (0, (-1, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - self.free.num - self.barred.num

    def counts_of(self, lengths: Int64s) -> Int64s:
        counts: Int64s = lengths * self._slab_bytes // self.slot_bytes
        return counts

    def slots_of(self, heads: Int64s, lengths: Int64s) -> Int64s:
        """Offsets, run by run."""
        runs, nth = spread(self.counts_of(lengths))
        offsets: Int64s = heads[runs] * self._slab_bytes + nth * self.slot_bytes
        return offsets


def spread(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Place i has `counts[i]` items. For each item: its place, and its number there. Counts (2,
    1) give places (0, 0, 1) and numbers (0, 1, 0)."""
    places = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, nth


class SlabPool:
    """The arena's slabs, lent in spans. Offsets are multiples of SLOT_ALIGN. `num_backed`: slabs
    that have memory;
    `num_free_slabs`: of these, not lent. `bar_start`: first slab that is being given up (`bar`);
    `num_slabs` if none is.
    """

    def __init__(
        self,
        arena_bytes: int,
        slab_bytes: int,
        *,
        is_backed: bool = True,
        part_starts: Sequence[int] = (0,),
    ) -> None:
        """`is_backed` False: slabs get memory through `back` and `claim`. `part_starts`: first byte
        of each part, multiples of `slab_bytes` from 0 on."""
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
        # By slab. _owner: slot size, FREE or ABSENT. _head: first slab of its run, else itself.
        # _length, _used: slabs and used slots of the run, at its head; else 0.
        self._owner = np.full(self.num_slabs, FREE if is_backed else ABSENT, np.int64)
        self._head = np.arange(self.num_slabs)
        self._length = np.zeros(self.num_slabs, np.int64)
        self._used = np.zeros(self.num_slabs, np.int64)
        self.bar_start = self.num_slabs
        # Changes when a slab is lent or freed.
        self._revision = 0
        self._part_starts = np.array(part_starts, np.int64)
        self._part_turn = 0
        self._kernels = native.require("hotkv_server.cache.table.table_kernels")
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
        return self.num_backed * self.slab_bytes

    def back(self, num_bytes: int) -> None:
        """Slabs that lie wholly in the first `num_bytes` may be lent, but for barred ones: news of
        memory may come late."""
        reached = self._owner[: min(num_bytes // self.slab_bytes, self.bar_start)]
        fresh = np.flatnonzero(reached == ABSENT)
        reached[fresh] = FREE
        self.num_backed += len(fresh)
        self.num_free_slabs += len(fresh)
        self._revision += 1

    def resize(self, num_slabs: int) -> None:
        """New slabs have no memory yet; those that go must have none. Ends `bar`."""
        more = np.arange(self.num_slabs, num_slabs)
        assert np.all(self._owner[num_slabs:] == ABSENT), "a slab in use was given up"
        self._owner = np.append(self._owner[:num_slabs], np.full(len(more), ABSENT))
        self._head = np.append(self._head[:num_slabs], more)
        self._length = np.append(self._length[:num_slabs], np.zeros(len(more), np.int64))
        self._used = np.append(self._used[:num_slabs], np.zeros(len(more), np.int64))
        self.num_slabs = self.bar_start = num_slabs
        self._revision += 1
        for c in self._classes.values():
            c.free.add(c.barred.all())
            c.barred = FreeSlots()
            c.resize(num_slabs)

    def bar(self, num_slabs: int) -> None:
        """Slabs from `num_slabs` on are to be given up: neither they nor slots of runs that reach
        them are given out, and they lose their memory as their runs become free."""
        self.bar_start = num_slabs
        self._withdraw()
        for c in self._classes.values():
            free = c.free.all()
            c.barred.add(free[self.is_barred(free)])
            c.free.keep(lambda offsets: ~self.is_barred(offsets))

    def unbar(self) -> None:
        """Gives `bar` up. Slabs that have lost their memory stay without."""
        self.bar_start = self.num_slabs
        for c in self._classes.values():
            c.free.add(c.barred.all())
            c.barred = FreeSlots()

    def _withdraw(self) -> None:
        barred = self._owner[self.bar_start :]
        num = int((barred == FREE).sum())
        barred[barred == FREE] = ABSENT
        self.num_backed -= num
        self.num_free_slabs -= num
        self._revision += 1

    def is_barred(self, offsets: Int64s) -> BoolMask:
        """Slots whose run reaches a barred slab."""
        heads = self._head[self.slab_of(offsets)]
        mask: BoolMask = heads + self._length[heads] > self.bar_start
        return mask

    @property
    def num_reached(self) -> int:
        """Up to the last slab that is lent; no fewer than `bar_start`."""
        lent = np.flatnonzero(self._owner[self.bar_start :] >= 0)
        return self.bar_start + (int(lent[-1]) + 1 if len(lent) else 0)

    def floors_missing_below(self, num_slabs: int) -> int:
        """Slabs that floors would lack with only the first `num_slabs`."""
        heads = self._head[:num_slabs]
        is_below = heads + self._length[heads] <= num_slabs
        owner = np.where(is_below, self._owner[:num_slabs], ABSENT)
        num_free = int((self._owner[:num_slabs] < 0).sum())
        missing = sum(
            max(0, self.floors.needed(size) - int((owner == size).sum()))
            for size in self.floors.sizes()
        )
        return max(0, missing - num_free)

    def stats(self) -> list[SlabClassStats]:
        return [
            SlabClassStats(size, c.num_slabs, c.num_slots, c.num_used)
            for size, c in sorted(self._classes.items())
            if c.num_slabs
        ]

    def figures(self) -> PoolFigures:
        widest = max((shortest_run(size, self.slab_bytes) for size in self._classes), default=1)
        lent = np.flatnonzero(np.concatenate(([True], self._owner != FREE, [True])))
        # Length of each gap, and 0 between adjacent slabs that are not free.
        num_stranded = int(((np.diff(lent) - 1) % widest).sum())
        return figures_of(self.stats(), self.num_backed, num_stranded, self.slab_bytes)

    def run_of(self, slot_bytes: int) -> tuple[int, int]:
        """Slabs and slots of a run of full length."""
        c = self._class(slot_bytes)
        return c.run_slabs, c.slots_per_run

    def is_shared(self, slot_bytes: int) -> bool:
        """True if slots of other sizes exist too."""
        return any(c.num_slabs and c.slot_bytes != slot_bytes for c in self._classes.values())

    def slab_of(self, offsets: Int64s) -> Int64s:
        return offsets // self.slab_bytes

    def slab_owner(self) -> Int64s:
        """Slot size of each slab, FREE or ABSENT. A view: do not change it."""
        return self._owner

    def slab_head(self) -> Int64s:
        """First slab of each slab's run, else itself. A view: do not change it."""
        return self._head

    def available_slots(self, slot_bytes: int) -> int:
        """What `allocate` could return now."""
        c = self._class(slot_bytes)
        usable = self._usable(c)
        if c.run_slabs == 1:
            return c.free.num + usable * c.slots_per_run
        state = (self._revision, usable)
        if c.room[1] != state:
            everything = self.num_slabs * self.slab_bytes
            c.room = (self._plan_runs(c, usable, everything, np.empty((0, 3), np.int64))[1], state)
        return c.free.num + c.room[0]

    def _usable(self, c: _SlabClass) -> int:
        """Free slabs that floors leave to this size."""
        return max(0, self.num_free_slabs - self.floors.kept_for_others(c.slot_bytes))

    def lent_slabs(self, slot_bytes: int) -> int:
        """Without barred ones."""
        c = self._classes.get(aligned(slot_bytes))
        if c is None or self.bar_start == self.num_slabs:
            return 0 if c is None else c.num_slabs
        heads = np.flatnonzero(self._length)
        heads = heads[heads + self._length[heads] <= self.bar_start]
        return int(self._length[heads[self._owner[heads] == c.slot_bytes]].sum())

    def free_slots(self, slot_bytes: int) -> int:
        """Without those that free slabs could give."""
        return self._class(slot_bytes).free.num

    def allocate(self, slot_bytes: int, num_slots: int, part: int = ANY_PART) -> Int64s:
        """Fewer if free slots and slabs run out. `part`: where the slots should lie."""
        c, num_parts = self._class(slot_bytes), len(self._part_starts)
        if (
            num_parts > 1
            and self.available_slots(slot_bytes) - num_slots >= SPARE_RUNS * c.slots_per_run
        ):
            if part == ANY_PART:
                self._part_turn += 1
                return np.concatenate(
                    [
                        self._allocate_in(
                            c, (num_slots + (at + self._part_turn) % num_parts) // num_parts, at
                        )
                        for at in range(num_parts)
                    ]
                )
            return self._allocate_in(c, num_slots, part)
        if c.free.num < num_slots:
            self._lend(c, num_slots - c.free.num)
        taken = c.free.take(num_slots, max(part, 0))
        self._count(c, taken, 1)
        return taken

    def _allocate_in(self, c: _SlabClass, num_slots: int, part: int) -> Int64s:
        assert isinstance(c.free, PartedSlots), "an arena with parts has free slots by part"
        if (missing := num_slots - c.free.in_part(part)) > 0:
            self._lend(c, missing, part)
        if (missing := num_slots - c.free.num) > 0:
            self._lend(c, missing)
        taken = c.free.take(num_slots, part)
        self._count(c, taken, 1)
        return taken

    def free(self, slot_bytes: int, offsets: Int64s) -> None:
        if not len(offsets):
            return
        c = self._class(slot_bytes)
        if self.bar_start < self.num_slabs:
            is_barred = self.is_barred(offsets)
            emptied = self._count(c, offsets, -1)
            c.barred.add(offsets[is_barred])
            c.free.add(offsets[~is_barred])
        else:
            emptied = self._count(c, offsets, -1)
            c.free.add(offsets)
        if len(emptied):
            self._give_back(c, emptied)

    def _count(self, c: _SlabClass, offsets: Int64s, change: int) -> Int64s:
        """Adds `change` to the used slots of the slots' runs; returns the heads of runs that
        reached 0."""
        emptied = np.empty(len(offsets), np.int64)
        count = int(
            self._kernels.count_slots(
                self._used, self._owner, self._head, offsets,
                self.slab_bytes, c.slot_bytes, change, emptied,
            )
        )  # fmt: skip
        assert count != -1, "slot freed with another size than it has"
        assert count != -2, "slot freed twice"
        return emptied[:count]

    def _give_back(self, c: _SlabClass, heads: Int64s) -> None:
        """Frees the slabs of runs without a used slot."""
        lengths = self._length[heads]
        runs, nth = spread(lengths)
        slabs = heads[runs] + nth
        is_kept = np.ones(self.num_slabs, np.bool_)
        is_kept[slabs] = False

        def stays(free: Int64s) -> BoolMask:
            out = np.empty(len(free), np.bool_)
            self._kernels.lie_in(free, self.slab_bytes, is_kept, out)
            return out

        c.free.keep(stays)
        c.barred.keep(stays)
        self._owner[slabs], self._head[slabs] = FREE, slabs
        self._length[heads] = 0
        c.num_slots -= int(c.counts_of(lengths).sum())
        self._count_lent(c, -len(slabs))
        if self.bar_start < self.num_slabs:
            self._withdraw()

    def heads_of(self, slot_bytes: int, offsets: Int64s) -> Int64s:
        """Head of the run in which a slot at each offset could lie; -1 if none. Of several, all
        with the same slots, the nearest."""
        size = aligned(slot_bytes)
        slabs = self.slab_of(offsets)
        heads = np.full(len(offsets), -1, np.int64)
        fits_arena = (offsets >= 0) & (offsets + size <= self.num_slabs * self.slab_bytes)
        unknown = np.flatnonzero(fits_arena)
        for before in range(shortest_run(size, self.slab_bytes) + LONGEST_END + 1):
            start = slabs[unknown] - before
            fits = (start >= 0) & ((offsets[unknown] - start * self.slab_bytes) % size == 0)
            heads[unknown[fits]] = start[fits]
            unknown = unknown[~fits]
            if not len(unknown):
                break
        return heads

    def claim(self, slot_bytes: int, offsets: Int64s) -> None:
        """Rebuilds the runs of used slots, at least one, after a restart. Raises ValueError if
        slots overlap, are misaligned or outside the arena. The caller prefaults these slabs."""
        c, offsets = self._class(slot_bytes), np.sort(offsets)
        heads = self.heads_of(slot_bytes, offsets)
        if heads.min() < 0 or not offsets[1:].size == np.count_nonzero(np.diff(offsets)):
            raise ValueError("slots are misaligned, claimed twice or lie outside the arena")
        firsts = np.flatnonzero(np.diff(heads, prepend=-1))
        lasts = self.slab_of(np.append(offsets[firsts[1:] - 1], offsets[-1]) + c.slot_bytes - 1)
        of_run, heads = np.cumsum(np.diff(heads, prepend=-1) != 0) - 1, heads[firsts]
        lengths = lasts - heads + 1
        runs, nth = spread(lengths)
        slabs = heads[runs] + nth
        if np.any(heads[1:] <= lasts[:-1]) or np.any(self._owner[slabs] >= 0):
            raise ValueError("slots overlap, or overlap slabs of another size")
        counts = c.counts_of(lengths)
        numbers = (offsets - heads[of_run] * self.slab_bytes) // c.slot_bytes
        is_free = np.ones(int(counts.sum()), np.bool_)
        is_free[(np.cumsum(counts) - counts)[of_run] + numbers] = False
        num_free = int((self._owner[slabs] == FREE).sum())
        self._owner[slabs], self._head[slabs] = c.slot_bytes, heads[runs]
        self._length[heads] = lengths
        # Also slabs that had no memory.
        self.num_backed += len(slabs) - num_free
        self.num_free_slabs += len(slabs) - num_free
        self._count_lent(c, len(slabs))
        c.num_slots += len(is_free)
        c.free.add(c.slots_of(heads, lengths)[is_free])
        self._used[heads] = np.bincount(of_run)

    def _class(self, slot_bytes: int) -> _SlabClass:
        known = self._classes.get(slot_bytes) or self._classes.get(aligned(slot_bytes))
        return known or self._new_class(aligned(slot_bytes))

    def _new_class(self, size: int) -> _SlabClass:
        if len(self._classes) >= MAX_SIZES:
            self._classes = {one: c for one, c in self._classes.items() if c.num_slabs}
        new = _SlabClass(size, self.slab_bytes, self.num_slabs, self._part_starts)
        self._classes[size] = new
        return new

    def _lend(self, c: _SlabClass, want_slots: int, part: int = ANY_PART) -> None:
        """Lends free slabs for `want_slots` more slots, or fewer; first in gaps that fit a run
        of full length."""
        usable, owner = self._usable(c), self._owner
        if part != ANY_PART:
            ends = np.append(self._part_starts[1:] // self.slab_bytes, self.num_slabs)
            owner = np.where(owner == FREE, ABSENT, owner)
            mine = slice(int(self._part_starts[part]) // self.slab_bytes, int(ends[part]))
            owner[mine] = self._owner[mine]
        plan = np.empty((min(usable, want_slots), 3), np.int64)
        num_pieces, _ = self._plan_runs(c, usable, want_slots, plan, owner)
        if not num_pieces:
            return
        heads, firsts, lengths = np.ascontiguousarray(plan[:num_pieces].T)
        pieces, nth = spread(lengths)
        self._owner[firsts[pieces] + nth] = c.slot_bytes
        self._head[firsts[pieces] + nth] = heads[pieces]
        # Pieces of one run are in rising order: `before` and `after` are its lengths around
        # each.
        before, after = firsts - heads, firsts - heads + lengths
        np.maximum.at(self._length, heads, after)
        self._count_lent(c, int(lengths.sum()))
        old, new = c.counts_of(before), c.counts_of(after)
        pieces, nth = spread(new - old)
        offsets = heads[pieces] * self.slab_bytes + (old[pieces] + nth) * c.slot_bytes
        c.num_slots += len(offsets)
        c.free.add_below(offsets[::-1])

    def _count_lent(self, c: _SlabClass, change: int) -> None:
        c.num_slabs += change
        self.num_free_slabs -= change
        self._revision += 1

    def _plan_runs(
        self,
        c: _SlabClass,
        usable: int,
        want_slots: int,
        plan: Int64s,
        owner: Int64s | None = None,
    ) -> tuple[int, int]:
        num_pieces, num_slots = self._kernels.plan_runs(
            self._owner if owner is None else owner, self._head, self._length, c.run_slabs,
            shortest_run(c.slot_bytes, self.slab_bytes) + LONGEST_END,
            c.slot_bytes, self.slab_bytes, usable, want_slots, plan,
        )  # fmt: skip
        return int(num_pieces), int(num_slots)

    def check_invariants(self) -> None:
        assert self.num_free_slabs == int((self._owner == FREE).sum()), "free slabs miscounted"
        assert self.num_backed == int((self._owner != ABSENT).sum()), "slabs with memory miscounted"
        slabs = np.arange(self.num_slabs)
        assert np.array_equal(self._head[self._owner < 0], slabs[self._owner < 0]), (
            "a slab that is not lent belongs to a run"
        )
        heads = np.flatnonzero(self._length)
        runs, nth = spread(self._length[heads])
        assert np.array_equal(heads[runs] + nth, slabs[self._owner >= 0]), "runs and slabs differ"
        assert np.array_equal(heads[runs], self._head[self._owner >= 0]), "runs and heads differ"
        assert np.array_equal(self._owner[heads][runs], self._owner[self._owner >= 0]), (
            "a run of two sizes"
        )
        assert np.all(self._used[heads] > 0), "an empty run was not given back"
        for c in self._classes.values():
            mine = heads[self._owner[heads] == c.slot_bytes]
            assert int(self._length[mine].sum()) == c.num_slabs, "lent slabs miscounted"
            slots = c.slots_of(mine, self._length[mine])
            assert len(slots) == c.num_slots, "slots of runs miscounted"
            free = np.append(c.free.all(), c.barred.all())
            assert len(np.unique(free)) == len(free) == c.num_slots - c.num_used, (
                "slot twice in the free list"
            )
            assert np.isin(free, slots).all(), "free slot in no run of its size"
            assert not self.is_barred(c.free.all()).any(), "a barred slot could be given out"
            assert self.is_barred(c.barred.all()).all(), "a slot is barred for no reason"
            assert int(self._used[mine].sum()) == c.num_used, "used slots miscounted"
        is_head = np.zeros(self.num_slabs, np.bool_)
        is_head[heads] = True
        assert np.all(self._used[~is_head] == 0), "a slab without a run has used slots"
