"""The pool of slots: an arena cut into slabs (pieces of equal size). Slabs are lent to slot sizes
in runs; a run is a range of adjacent slabs that are lent together.

The pool knows which bytes of the arena belong to which slot. Slots lie side by side from the start
of their run, so only bytes at the end of a run are lost: `run_slabs` chooses a length that loses
few. A gap is a range of adjacent free slabs. If no gap is long enough for a new run, the slabs of a
gap are added to the run before the gap, or become a shorter run.

Always true: a slot is either free or used. When the last used slot of a run is freed, the slabs of
the run become free at once and may be lent to any slot size. Only slabs that have memory are lent
(`SlabPool.back`). The pool never moves or evicts blocks: if too few slots are free, an allocation
returns fewer slots than requested. `SlabFloors` reserves slabs for slot sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.values import BoolMask, Int64s

MAX_SIZES = 256
"""If a `SlabPool` knows this many slot sizes, it forgets the sizes that have no slabs (pieces of
the arena) before it learns another. Clients choose the sizes, so there may be any number of them
over time."""
CHUNK_SLOTS = 1 << 14
"""`FreeSlots` appends freed slots to its last chunk (array of offsets) only if the chunk then has
at most this many slots; otherwise they become a new chunk."""
NO_BOUND = 1 << 62
FREE, ABSENT = -1, -2
"""Values in the array `SlabPool.slab_owner`, which has for each slab (piece of the arena) the size
of the slots into which it is divided. FREE: the slab has no slots. ABSENT: it has no memory yet."""


class FreeSlots:
    """The free slots of one size, as a stack of offsets.

    Always true: the slot (place for a block) that was added last is handed out first. Offsets are
    stored in several arrays (chunks), because a single array of millions would be copied at every
    change.
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
        """Adds slots (places for blocks) that are handed out before all slots added so far."""
        if self._chunks and len(self._chunks[-1]) + len(offsets) <= CHUNK_SLOTS:
            self._chunks[-1] = np.concatenate((self._chunks[-1], offsets))
        elif len(offsets):
            self._chunks.append(offsets)
        self._num += len(offsets)

    def add_below(self, offsets: Int64s) -> None:
        """Adds slots (places for blocks), at least one, that are handed out after all slots added
        so far."""
        self._chunks.insert(0, offsets)
        self._num += len(offsets)

    def take(self, count: int) -> Int64s:
        """Removes up to `count` slots (places for blocks) from the top of the stack and returns
        their offsets; fewer only if fewer are free. The top slot comes first."""
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
        """Drops the slots (places for blocks) for which `is_kept` returns False. The order of the
        others stays the same. `is_kept`: function that takes the offsets of some slots and returns
        a mask."""
        kept = []
        for chunk in self._chunks:
            mask = is_kept(chunk)
            kept.append(chunk if mask.all() else chunk[mask])
        self._chunks = [chunk for chunk in kept if len(chunk)]
        self._num = sum(map(len, self._chunks))

    def all(self) -> Int64s:
        """Returns the free slots (places for blocks); the next to be handed out comes last."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)


class SlabFloors:
    """Reserves slabs (pieces of the arena) for slots that were promised, for example to a residency
    (a request whose KV stays in host memory). The floor of a slot size is the number of promised
    slots of that size. Promising a number of bytes would not be enough: while a slab has a pinned
    slot of one size, it can't be divided into slots of another size.

    slab_bytes: size of a slab.
    lent: function that returns how many slabs are divided into slots of a size (in bytes).
    num_free: function that returns the number of free slabs.

    Always true between two calls of the core: enough slabs are free for all promised slots that
    have no slab yet. A size gets free slabs only if enough slabs stay free for the floors of all
    other sizes. A slab is taken from a size only if the size retains enough slabs for its own
    floor. So once the evictable blocks of a size are evicted, the size has room for all its
    promised slots.

    A range of adjacent slabs that get a slot size together is a run. The number of slabs that a
    floor needs is computed for runs of the shortest length (`shortest_run`), because these fit
    wherever slabs are free. The number also covers the held slots of the size: slots of blocks that
    requests asked to retain.
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
        """Raises the floor (number of promised slots) of a slot size by `num_slots` slots (places
        for blocks); lowers it if `num_slots` is negative. The slot size is a multiple of
        SLOT_ALIGN."""
        if not num_slots:
            return
        assert slot_bytes % SLOT_ALIGN == 0, "floors are of aligned sizes"
        self._slots[slot_bytes] = self._slots.get(slot_bytes, 0) + num_slots
        assert self._slots[slot_bytes] >= 0, "more slots were given back than promised"
        if not self._slots[slot_bytes]:
            del self._slots[slot_bytes]

    def hold(self, slot_bytes: int, num_slots: int) -> None:
        """Counts `num_slots` more slots (places for blocks) of this size as held (pinned because
        requests asked for it); fewer if `num_slots` is negative. The caller has checked `holdable`.
        """
        self.held_slots[slot_bytes] = self.held_slots.get(slot_bytes, 0) + num_slots
        if not self.held_slots[slot_bytes]:
            del self.held_slots[slot_bytes]

    def holdable(self, slot_bytes: int) -> int:
        """Returns how many more slots (places for blocks) of this size may be held (pinned because
        requests asked for it), so that all promised slots still have room."""
        promised = self._slots.get(slot_bytes, 0)
        if not promised:
            return NO_BOUND
        slabs = self._lent(slot_bytes) + self._num_free() - self.kept_for_others(slot_bytes)
        num_shortest = slabs // shortest_run(slot_bytes, self._slab_bytes)
        most = num_shortest * max(1, self._slab_bytes // slot_bytes)
        return max(0, most - promised - self.held_slots.get(slot_bytes, 0))

    def _needed(self, slot_bytes: int) -> int:
        promised = self._slots.get(slot_bytes, 0)
        if not promised:
            return 0
        slots_per_slab = max(1, self._slab_bytes // slot_bytes)
        num_shortest = -(-(promised + self.held_slots.get(slot_bytes, 0)) // slots_per_slab)
        return num_shortest * shortest_run(slot_bytes, self._slab_bytes)

    def missing(self, slot_bytes: int) -> int:
        """Returns how many more slabs (pieces of the arena) this slot size needs, so that its slabs
        have room for its floor (its promised slots)."""
        return max(0, self._needed(slot_bytes) - self._lent(slot_bytes))

    def surplus(self, slot_bytes: int) -> int:
        """Returns how many slabs (pieces of the arena) this slot size has beyond those that its
        floor (its promised slots) needs."""
        return max(0, self._lent(slot_bytes) - self._needed(slot_bytes))

    def sizes(self) -> list[int]:
        """Returns the slot sizes for which slots are promised (reserved, for example for a
        residency), in bytes."""
        return list(self._slots)

    def kept_for_others(self, slot_bytes: int) -> int:
        """Returns how many free slabs (pieces of the arena) this slot size may not get, because
        they are needed for the floors (promised slots) of other sizes."""
        return sum(self.missing(size) for size in self._slots if size != slot_bytes)

    @property
    def shortfall(self) -> int:
        """Number of slabs (pieces of the arena) that must become free, in addition to the free
        slabs, before the promised (reserved) slots of all sizes have room. 0 between two calls of
        `CacheCore`."""
        return max(0, sum(map(self.missing, self._slots)) - self._num_free())

    def would_fit(self, more: Mapping[int, int]) -> bool:
        """Returns True if all promised (reserved) slots (places for blocks) would have room even
        with `more` promised slots: numbers of additional slots by slot size. Changes nothing."""
        for size, count in more.items():
            self.add(size, count)
        fits = not self.shortfall
        for size, count in more.items():
            self.add(size, -count)
        return fits

    def check(self, slots: Mapping[int, int]) -> None:
        """Raises AssertionError unless exactly `slots` (numbers by slot size) are promised
        (reserved), and enough slabs (pieces of the arena) are free or lent for them."""
        expected = {size: count for size, count in slots.items() if count}
        assert self._slots == expected, "slots of floors miscounted"
        assert not self.shortfall, "a floor does not hold"


@dataclass(frozen=True, slots=True)
class SlabClassStats:
    """Figures of a slot size: slabs (pieces of the arena) that are divided into slots of this size,
    slots in them, and slots in use."""

    slot_bytes: int
    num_slabs: int
    num_slots: int
    num_used: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Counts how the arena is divided among slot sizes, as far as it has memory. Each byte of a
    lent slab (a piece of the arena that is divided into slots) is used, idle or tail.

    arena_bytes: bytes of slabs that have memory.
    lent_bytes: bytes of slabs that are lent to a slot size.
    idle_bytes: bytes of free slots in lent slabs.
    tail_bytes: bytes at the ends of runs that no slot covers, because they are too few for a slot.
        A run is a range of adjacent slabs that are lent together.
    stranded_bytes: bytes of free slabs that would stay free if every gap (range of adjacent free
        slabs) were filled with slots of the largest known size; 0 if no slot is larger than a slab.
    shares: for each slot size that has slabs, three numbers: the size, its share of the slabs with
        memory, and its share of all used bytes.
    """

    arena_bytes: int
    lent_bytes: int
    idle_bytes: int
    tail_bytes: int
    stranded_bytes: int
    shares: tuple[tuple[int, float, float], ...]

    @property
    def fragmentation_ratio(self) -> float:
        """Share of the lent memory (slabs that are divided into slots) that holds no data:
        (idle + tail) / lent. 0 if no slab is lent."""
        return (self.idle_bytes + self.tail_bytes) / self.lent_bytes if self.lent_bytes else 0.0

    @property
    def imbalance_ratio(self) -> float:
        """Share of the lent memory (slabs that are divided into slots) that has slots of the wrong
        sizes: ½ Σ |share of lent slabs - share of used bytes|, summed over slot sizes.

        0 if every size has slabs in proportion to its used bytes; always below 1.
        """
        lent_share = sum(of_arena for _, of_arena, _ in self.shares)
        return sum(abs(of_arena / lent_share - of_used) for _, of_arena, of_used in self.shares) / 2


def figures_of(
    rows: Sequence[SlabClassStats], num_backed: int, num_stranded: int, slab_bytes: int
) -> PoolFigures:
    """Returns the figures of a pool.

    rows: the figures of each slot size that has slabs (pieces of the arena); each has slots in use.
    num_backed: number of slabs that have memory.
    num_stranded: number of free slabs that slots of the largest size can't use.
    """
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


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of SLOT_ALIGN."""
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN


MOST_LOST = 0.01
"""Largest share of the bytes of a run (range of adjacent slabs of the arena) that may be lost: too
few bytes for a slot, behind the run's last slot."""
LONGEST_END = 100
"""Most slabs that a run (range of adjacent slabs of the arena) has in addition to the slabs that a
single slot needs. Longer runs are not necessary: within this bound, there is always a length of at
least 100 slabs at which the run's last slot ends in its last slab. Then less than one slab is lost,
at most 1 % of the run (MOST_LOST)."""
RUNS_PER_ARENA = (16, 32)
"""Bounds for the number of runs that fit into an arena. They bound the length of a run.

At least 16 runs: otherwise the first block of a slot size could take most of a small arena. Runs
may therefore be so short that they lose more than MOST_LOST.

At most 32 runs: the gaps between runs of different sizes are then small compared with the runs.
This bound does not apply to runs of AMPLE_RUN_BYTES or more, nor to arenas of less than FEW_SLABS
slabs.
"""
AMPLE_RUN_BYTES = 64 << 20
FEW_SLABS = 256
"""In an arena with fewer slabs than this, runs (ranges of adjacent slabs of the arena) are as short
as MOST_LOST allows: the shorter the run, the fewer slabs can't be emptied because of a single hot
block."""


def shortest_run(slot_bytes: int, slab_bytes: int) -> int:
    """Returns how many slabs one slot needs: the length of the shortest run (range of adjacent
    slabs of the arena)."""
    return -(-slot_bytes // slab_bytes)


def run_slabs(slot_bytes: int, slab_bytes: int, num_slabs: int) -> int:
    """Returns the length, in slabs, of runs (ranges of adjacent slabs of the arena) for a slot size
    in an arena of `num_slabs`. Bytes behind the last slot of a run are lost. Chooses the shortest
    length, within the bounds RUNS_PER_ARENA and LONGEST_END, that loses at most the share MOST_LOST
    of a run's bytes. If every length loses more, chooses the length that loses the smallest
    share."""
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
    """The pool's record of one slot size: its slabs and its free slots (places for blocks).

    run_slabs, slots_per_run: number of slabs and of slots in a run of full length (range of
        adjacent slabs, see the function `run_slabs`).
    num_slabs, num_slots: number of slabs and of slots in all runs of this size.
    """

    __slots__ = (
        "_slab_bytes",
        "free",
        "num_slabs",
        "num_slots",
        "room",
        "run_slabs",
        "slot_bytes",
        "slots_per_run",
    )

    def __init__(self, slot_bytes: int, slab_bytes: int, num_slabs: int) -> None:
        self.slot_bytes = slot_bytes
        self.run_slabs = run_slabs(slot_bytes, slab_bytes, num_slabs)
        self.slots_per_run = self.run_slabs * slab_bytes // slot_bytes
        self.free = FreeSlots()
        self.num_slabs = self.num_slots = 0
        # A computed result, for reuse: how many slots of this size the free slabs (pieces of the
        # arena) could provide, and the state of the pool for which this number is valid.
        self.room = (0, (-1, -1))
        self._slab_bytes = slab_bytes

    def counts_of(self, lengths: Int64s) -> Int64s:
        """Returns for each run (range of adjacent slabs of the arena) how many slots of this size
        it has. `lengths`: the lengths of the runs, in slabs."""
        counts: Int64s = lengths * self._slab_bytes // self.slot_bytes
        return counts

    def slots_of(self, heads: Int64s, lengths: Int64s) -> Int64s:
        """Returns the offsets of all slots in some runs (ranges of adjacent slabs of the arena),
        run by run in rising order.

        heads: first slab of each run.
        lengths: length of each run, in slabs.
        """
        runs, nth = spread(self.counts_of(lengths))
        offsets: Int64s = heads[runs] * self._slab_bytes + nth * self.slot_bytes
        return offsets


def spread(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Lists items that lie in several places: place i has `counts[i]` items. Returns two int64
    arrays with a value for each item: its place, and its number among the items of that place.
    Counts (2, 1) give places (0, 0, 1) and numbers (0, 1, 0)."""
    places = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places, nth


class SlabPool:
    """Allocates slots of any size in an arena. Offsets are in bytes from the arena's start,
    multiples of SLOT_ALIGN. Slabs are the pieces of equal size into which the arena is cut; a slab
    is lent to (divided into slots of) at most one size at a time.

    num_slabs: number of slabs of the whole arena.
    num_backed: number of slabs that have memory.
    num_free_slabs: number of slabs with memory that are not lent to a slot size.
    floors: reserves slabs for promised slots.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int, *, is_backed: bool = True) -> None:
        """Makes a pool without used slots. `is_backed`: True if all slabs (pieces of the arena)
        have memory; if False, slabs get memory through `back` and `claim`."""
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
        # Four arrays with a value for each slab. A slab with slots belongs to a run: adjacent slabs
        # that got their slot size together. _owner: size of the slab's slots; FREE or ABSENT
        # without slots. _head: the first slab of the slab's run; the slab itself if it has no
        # slots. _length and _used: for the first slab of a run, the number of slabs and of used
        # slots of the run; 0 for all other slabs.
        self._owner = np.full(self.num_slabs, FREE if is_backed else ABSENT, np.int64)
        self._head = np.arange(self.num_slabs)
        self._length = np.zeros(self.num_slabs, np.int64)
        self._used = np.zeros(self.num_slabs, np.int64)
        # A counter that changes whenever a slab (piece of the arena) is divided into slots or
        # becomes free. By it, a number that was computed from the free slabs is recognized as out
        # of date.
        self._revision = 0
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
        """Bytes of slabs (pieces of the arena) that have memory."""
        return self.num_backed * self.slab_bytes

    def back(self, num_bytes: int) -> None:
        """Marks the first `num_bytes` of the arena as having memory. Slabs (pieces of the arena)
        that lie wholly in these bytes may be divided into slots from here on."""
        reached = self._owner[: num_bytes // self.slab_bytes]
        fresh = np.flatnonzero(reached == ABSENT)
        reached[fresh] = FREE
        self.num_backed += len(fresh)
        self.num_free_slabs += len(fresh)
        self._revision += 1

    def stats(self) -> list[SlabClassStats]:
        """Returns the figures of each slot size that has slabs (pieces of the arena)."""
        return [
            SlabClassStats(size, c.num_slabs, c.num_slots, c.num_slots - len(c.free))
            for size, c in sorted(self._classes.items())
            if c.num_slabs
        ]

    def figures(self) -> PoolFigures:
        """Returns how the arena is divided among the slot sizes."""
        widest = max((shortest_run(size, self.slab_bytes) for size in self._classes), default=1)
        lent = np.flatnonzero(np.concatenate(([True], self._owner != FREE, [True])))
        # `np.diff(lent) - 1` has the length of each range of adjacent free slabs (pieces of the
        # arena), and a 0 for each pair of adjacent slabs that are not free.
        num_stranded = int(((np.diff(lent) - 1) % widest).sum())
        return figures_of(self.stats(), self.num_backed, num_stranded, self.slab_bytes)

    def run_of(self, slot_bytes: int) -> tuple[int, int]:
        """Returns how many slabs a run (range of adjacent slabs of the arena) of full length has
        for this slot size, and into how many slots it is divided."""
        c = self._class(slot_bytes)
        return c.run_slabs, c.slots_per_run

    def is_shared(self, slot_bytes: int) -> bool:
        """Returns True if the arena also has slots of other sizes than this."""
        return any(c.num_slabs and c.slot_bytes != slot_bytes for c in self._classes.values())

    def slab_of(self, offsets: Int64s) -> Int64s:
        """Returns the slab (piece of the arena) in which each offset lies."""
        return offsets // self.slab_bytes

    def slab_owner(self) -> Int64s:
        """Returns, for each slab (piece of the arena), the size of the slots into which it is
        divided; FREE if it has no slots, ABSENT if it has no memory. The array is a view: do not
        change it."""
        return self._owner

    def slab_head(self) -> Int64s:
        """Returns, for each slab, the first slab of its run (adjacent slabs that are divided into
        slots together); the slab itself if it has no slots. The array is a view: do not change it.
        """
        return self._head

    def available_slots(self, slot_bytes: int) -> int:
        """Returns how many slots (places for blocks) of this size `allocate` could return at
        present, from free slots and free slabs (pieces of the arena)."""
        c = self._class(slot_bytes)
        usable = self._usable(c)
        if c.run_slabs == 1:
            return len(c.free) + usable * c.slots_per_run
        state = (self._revision, usable)
        if c.room[1] != state:
            everything = self.num_slabs * self.slab_bytes
            c.room = (self._plan_runs(c, usable, everything, np.empty((0, 3), np.int64))[1], state)
        return len(c.free) + c.room[0]

    def _usable(self, c: _SlabClass) -> int:
        """Returns how many free slabs (pieces of the arena) may be divided into slots of a size:
        free slabs without those that are reserved for other sizes (`SlabFloors`)."""
        return max(0, self.num_free_slabs - self.floors.kept_for_others(c.slot_bytes))

    def lent_slabs(self, slot_bytes: int) -> int:
        """Returns the number of slabs (pieces of the arena) that are divided into slots of this
        size."""
        c = self._classes.get(aligned(slot_bytes))
        return 0 if c is None else c.num_slabs

    def free_slots(self, slot_bytes: int) -> int:
        """Returns the number of free slots of this size. Does not count the slots into which free
        slabs (pieces of the arena) could still be divided."""
        return len(self._class(slot_bytes).free)

    def allocate(self, slot_bytes: int, num_slots: int) -> Int64s:
        """Allocates up to `num_slots` slots and returns their offsets; fewer slots if no more free
        slots and free slabs (pieces of the arena) are left."""
        c = self._class(slot_bytes)
        if len(c.free) < num_slots:
            self._lend(c, num_slots - len(c.free))
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
        """Adds `change` (1 or -1) to the number of used slots of the run (range of adjacent slabs
        of the arena) in which each slot lies. Returns the first slab of each run whose count
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
        """Frees the slabs of runs (ranges of adjacent slabs of the arena) that have no used slot.
        `heads`: the first slab of each run."""
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
        self._owner[slabs], self._head[slabs] = FREE, slabs
        self._length[heads] = 0
        c.num_slots -= int(c.counts_of(lengths).sum())
        self._count_lent(c, -len(slabs))

    def heads_of(self, slot_bytes: int, offsets: Int64s) -> Int64s:
        """Finds, for each offset, the run (range of adjacent slabs of the arena) to which a slot of
        this size at the offset could belong. Used when a pool is rebuilt from the slots' offsets.
        Returns the first slab of each such run; -1 if no run could have a slot there.

        If the run could begin at several slabs, returns the slab nearest to the offset. The slots
        are the same for each of these slabs, because the distance between two of them is a multiple
        of the slot size.
        """
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
        """Marks slots as used, while a pool is rebuilt after a restart. Raises ValueError if slots
        overlap, are misaligned or lie outside the arena.

        Rebuilds the runs (ranges of adjacent slabs of the arena) in which the slots lie, each up to
        its last used slot. From here on, the slabs of these runs count as having memory; the caller
        prefaults them. `offsets`: at least one.
        """
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
        # From here on, all slabs of these runs count as having memory, also those that had none.
        self.num_backed += len(slabs) - num_free
        self.num_free_slabs += len(slabs) - num_free
        self._count_lent(c, len(slabs))
        c.num_slots += len(is_free)
        c.free.add(c.slots_of(heads, lengths)[is_free])
        self._used[heads] = np.bincount(of_run)

    def _class(self, slot_bytes: int) -> _SlabClass:
        size = aligned(slot_bytes)
        if size not in self._classes:
            if len(self._classes) >= MAX_SIZES:
                self._classes = {one: c for one, c in self._classes.items() if c.num_slabs}
            self._classes[size] = _SlabClass(size, self.slab_bytes, self.num_slabs)
        return self._classes[size]

    def _lend(self, c: _SlabClass, want_slots: int) -> None:
        """Divides free slabs (pieces of the arena) into `want_slots` more slots of a size; into
        fewer if free slabs run out or are reserved for other sizes (`SlabFloors`). Uses gaps that
        fit a run of full length (`run_slabs` adjacent slabs) first, then shorter gaps."""
        usable = self._usable(c)
        plan = np.empty((min(usable, want_slots), 3), np.int64)
        num_pieces, _ = self._plan_runs(c, usable, want_slots, plan)
        if not num_pieces:
            return
        heads, firsts, lengths = np.ascontiguousarray(plan[:num_pieces].T)
        pieces, nth = spread(lengths)
        self._owner[firsts[pieces] + nth] = c.slot_bytes
        self._head[firsts[pieces] + nth] = heads[pieces]
        # If the plan has several pieces (ranges of slabs) of a run, they are listed in rising
        # order. So `before` and `after` are the lengths of the run before and after each piece is
        # added.
        before, after = firsts - heads, firsts - heads + lengths
        np.maximum.at(self._length, heads, after)
        self._count_lent(c, int(lengths.sum()))
        old, new = c.counts_of(before), c.counts_of(after)
        pieces, nth = spread(new - old)
        offsets = heads[pieces] * self.slab_bytes + (old[pieces] + nth) * c.slot_bytes
        c.num_slots += len(offsets)
        c.free.add_below(offsets[::-1])

    def _count_lent(self, c: _SlabClass, change: int) -> None:
        """Counts `change` more slabs (pieces of the arena) as divided into slots of this size, or
        fewer if `change` is negative."""
        c.num_slabs += change
        self.num_free_slabs -= change
        self._revision += 1

    def _plan_runs(
        self, c: _SlabClass, usable: int, want_slots: int, plan: Int64s
    ) -> tuple[int, int]:
        num_pieces, num_slots = self._kernels.plan_runs(
            self._owner, self._head, self._length, c.run_slabs,
            shortest_run(c.slot_bytes, self.slab_bytes) + LONGEST_END,
            c.slot_bytes, self.slab_bytes, usable, want_slots, plan,
        )  # fmt: skip
        return int(num_pieces), int(num_slots)

    def check_invariants(self) -> None:
        """Raises AssertionError if counts, runs (ranges of adjacent slabs of the arena) and free
        slots disagree."""
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
            free = c.free.all()
            assert len(np.unique(free)) == len(free) == len(c.free), "slot twice in the free list"
            assert np.isin(free, slots).all(), "free slot in no run of its size"
            assert int(self._used[mine].sum()) == c.num_slots - len(c.free), "used slots miscounted"
        is_head = np.zeros(self.num_slabs, np.bool_)
        is_head[heads] = True
        assert np.all(self._used[~is_head] == 0), "a slab without a run has used slots"
