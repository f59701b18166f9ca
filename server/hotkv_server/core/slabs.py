"""The elastic pool: an arena cut into slabs, each lent to one slot size.

Owns which byte of the arena belongs to which slot. Always true: a slot is free or used, never both;
a slab whose last slot is freed goes back at once and may be lent to any other size; a slot larger
than a slab spans contiguous slabs; only slabs that have memory are lent (`back`). It never moves or
evicts anything: an allocation that does not fit is granted short.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotkv import native
from hotkv.table import SLOT_ALIGN
from hotkv_server.core import reference
from hotkv_server.core.values import BoolMask, Int64s

_FREE, ABSENT = -1, -2
"""Instead of a slot size in the table of owners: the slab is lent to none; it has no memory yet."""
CHUNK_SLOTS = 1 << 14
"""What is freed joins the chunk before it as long as that has no more slots."""


def aligned(num_bytes: int) -> int:
    """Bytes rounded up to whole units of SLOT_ALIGN."""
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN


@dataclass(frozen=True, slots=True)
class SlabClassStats:
    """One slot size: slabs lent to it, slots in them, slots in use."""

    slot_bytes: int
    num_slabs: int
    num_slots: int
    num_used: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How well the arena is divided, as far as it has memory.

    `lent_bytes`: slabs lent to some slot size. `idle_bytes`: free slots in them. `tail_bytes`: what
    in them no slot covers, because slot sizes don't divide slabs. `stranded_bytes`: free slabs that
    don't lie together as the widest slot size known needs them; 0 where no slot spans slabs.
    `shares`: (slot size, its slabs / slabs with memory, its used bytes / all used bytes) of each
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
        """(idle + tail) / lent: lent memory that holds nothing. 0 where nothing is lent."""
        return (self.idle_bytes + self.tail_bytes) / self.lent_bytes if self.lent_bytes else 0.0

    @property
    def imbalance_ratio(self) -> float:
        """½ Σ |share of lent slabs - share of used bytes| over slot sizes: lent memory that lies
        with other sizes than those that use it.

        0 where every size has slabs in proportion to its bytes; below 1.
        """
        lent_share = sum(of_arena for _, of_arena, _ in self.shares)
        return sum(abs(of_arena / lent_share - of_used) for _, of_arena, of_used in self.shares) / 2


class FreeSlots:
    """Offsets of free slots: the last that came is handed out first. In chunks: one array of
    millions would be copied at every change."""

    __slots__ = ("_chunks", "_num")

    def __init__(self) -> None:
        self._chunks: list[Int64s] = []
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"FreeSlots({self._num})"

    def add(self, offsets: Int64s) -> None:
        """These come last."""
        if self._chunks and len(self._chunks[-1]) + len(offsets) <= CHUNK_SLOTS:
            self._chunks[-1] = np.concatenate((self._chunks[-1], offsets))
        elif len(offsets):
            self._chunks.append(offsets)
        self._num += len(offsets)

    def add_below(self, offsets: Int64s) -> None:
        """These come before all others."""
        if len(offsets):
            self._chunks.insert(0, offsets)
        self._num += len(offsets)

    def take(self, count: int) -> Int64s:
        """The last `count`, or all that there are, the last one first."""
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
        """Drops all that are not kept; the rest stays in order."""
        kept = []
        for chunk in self._chunks:
            mask = is_kept(chunk)
            kept.append(chunk if mask.all() else chunk[mask])
        self._chunks = [chunk for chunk in kept if len(chunk)]
        self._num = sum(map(len, self._chunks))

    def all(self) -> Int64s:
        """All of them, the last one last."""
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int64)


class _SlabClass:
    """Slots of one size."""

    __slots__ = (
        "free",
        "keeps_emptied",
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
        # Whether slabs that were emptied for reuse are here still.
        self.keeps_emptied = False


class SlabPool:
    """Slots of any size out of one arena. All offsets are bytes from its start, multiples of
    SLOT_ALIGN.

    `num_slabs`: of the whole arena. `num_backed`: those that have memory, `num_free_slabs` of them
    lent to nobody.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int, *, is_backed: bool = True) -> None:
        """`is_backed`: all of it has memory. Otherwise none of it has, until `back` and `claim` say
        so."""
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
        # Per slab: the slot size it is lent to, _FREE or ABSENT, and its used slots. A spanning
        # slot counts in its first slab.
        self._owner = np.full(self.num_slabs, _FREE if is_backed else ABSENT, np.int64)
        self._used = np.zeros(self.num_slabs, np.int64)
        self._kernels = native.load("hotkv_server.core.kernels") or reference

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
        """Of slabs that have memory."""
        return self.num_backed * self.slab_bytes

    def back(self, num_bytes: int) -> None:
        """The first `num_bytes` bytes of the arena have memory: what of its slabs lies in them
        whole may be lent from now on."""
        reached = self._owner[: num_bytes // self.slab_bytes]
        fresh = np.flatnonzero(reached == ABSENT)
        reached[fresh] = _FREE
        self.num_backed += len(fresh)
        self.num_free_slabs += len(fresh)

    def stats(self) -> list[SlabClassStats]:
        """One row a slot size that has slabs."""
        return [self._stats(c) for _, c in sorted(self._classes.items()) if c.num_slabs]

    def _stats(self, c: _SlabClass) -> SlabClassStats:
        slots = c.num_slabs // c.slabs_per_slot * c.slots_per_slab
        return SlabClassStats(c.slot_bytes, c.num_slabs, slots, slots - len(c.free))

    def figures(self) -> PoolFigures:
        """How well the arena is divided, over all slot sizes."""
        rows = self.stats()
        used = sum(row.num_used * row.slot_bytes for row in rows)
        idle = sum((row.num_slots - row.num_used) * row.slot_bytes for row in rows)
        lent = sum(row.num_slabs for row in rows) * self.slab_bytes
        widest = max((c.slabs_per_slot for c in self._classes.values()), default=1)
        return PoolFigures(
            self.capacity_bytes,
            lent,
            idle,
            lent - idle - used,
            int((self._free_runs() % widest).sum()) * self.slab_bytes,
            tuple(
                (
                    r.slot_bytes,
                    r.num_slabs / self.num_backed,
                    r.num_used * r.slot_bytes / max(1, used),
                )
                for r in rows
            ),
        )

    def _free_runs(self) -> Int64s:
        """Lengths of the runs of free slabs, and some 0."""
        lent = np.flatnonzero(np.concatenate(([True], self._owner != _FREE, [True])))
        return np.diff(lent) - 1

    def capacity_slots(self, slot_bytes: int) -> int:
        """Slots of this size that the whole arena could hold, also where it has no memory yet."""
        c = self._class(slot_bytes)
        return self.num_slabs // c.slabs_per_slot * c.slots_per_slab

    def is_shared(self, slot_bytes: int) -> bool:
        """Whether slabs are lent to another size than this."""
        return any(c.num_slabs and c.slot_bytes != slot_bytes for c in self._classes.values())

    def slab_of(self, offsets: Int64s) -> Int64s:
        """Number of the (first) slab of each slot."""
        return offsets // self.slab_bytes

    def slab_owner(self) -> Int64s:
        """Slot size each slab is lent to, -1 where free, ABSENT where it has no memory yet; a view,
        not to be changed."""
        return self._owner

    def available_slots(self, slot_bytes: int) -> int:
        """Slots of this size that `allocate` would grant now."""
        c = self._class(slot_bytes)
        if c.slabs_per_slot == 1:
            return len(c.free) + self.num_free_slabs * c.slots_per_slab
        return len(c.free) + int((self._free_runs() // c.slabs_per_slot).sum())

    def allocate(self, slot_bytes: int, num_slots: int) -> Int64s:
        """Takes up to `num_slots` slots; fewer where free slots and free slabs run out."""
        c = self._class(slot_bytes)
        while len(c.free) < num_slots and self._lend(c, num_slots - len(c.free)):
            pass
        taken = c.free.take(num_slots)
        self._count(c, taken, 1)
        if c.keeps_emptied:
            c.keeps_emptied = False
            emptied = (self._owner == c.slot_bytes) & (self._used == 0)
            if c.slabs_per_slot > 1:
                # The further slabs of a slot count no use.
                emptied &= np.isin(np.arange(self.num_slabs), self.slab_of(c.free.all()))
            self._give_back(c, np.flatnonzero(emptied))
        return taken

    def free(self, slot_bytes: int, offsets: Int64s, *, for_reuse: bool = False) -> None:
        """Gives slots back. They must be in use and of this size.

        `for_reuse`: the caller allocates slots of this size next, so emptied slabs stay with it
        until then.
        """
        if not len(offsets):
            return
        c = self._class(slot_bytes)
        emptied = self._count(c, offsets, -1)
        c.free.add(offsets)
        c.keeps_emptied |= bool(len(emptied)) and for_reuse
        if len(emptied) and not for_reuse:
            self._give_back(c, emptied)

    def _count(self, c: _SlabClass, offsets: Int64s, change: int) -> Int64s:
        """Adds `change` (1 or -1) to the used slots of each offset's slab; returns the slabs that
        have none any more."""
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
        """Gives back slabs without a used slot; where slots span slabs, the first of each slot is
        named."""
        is_kept = np.ones(self.num_slabs, np.bool_)
        is_kept[emptied] = False

        def stays(free: Int64s) -> BoolMask:
            out = np.empty(len(free), np.bool_)
            self._kernels.lie_in(free, self.slab_bytes, is_kept, out)
            return out

        c.free.keep(stays)
        spans = self._spans(c, emptied)
        self._owner[spans] = _FREE
        c.num_slabs -= len(spans)
        self.num_free_slabs += len(spans)

    def claim(self, slot_bytes: int, offsets: Int64s) -> None:
        """Marks given slots used in a pool that is otherwise untouched: rebuilding after a restart.
        Raises ValueError on overlap.

        Their slabs count as having memory from now on; the caller sees to it.
        """
        c = self._class(slot_bytes)
        first = np.unique(self.slab_of(offsets))
        spans = self._spans(c, first)
        in_slab = offsets - self.slab_of(offsets) * self.slab_bytes
        if len(offsets) and (
            int(offsets.min()) < 0
            or int(spans.max()) >= self.num_slabs
            or np.any(self._owner[spans] >= 0)
        ):
            raise ValueError("slots overlap slabs of another size or lie outside the arena")
        if len(np.unique(spans)) != len(spans):
            raise ValueError("slots overlap slabs of another size or lie outside the arena")
        if (
            np.any(in_slab % c.slot_bytes)
            or np.any(in_slab // c.slot_bytes >= c.slots_per_slab)
            or len(np.unique(offsets)) != len(offsets)
        ):
            raise ValueError("slots are misaligned or claimed twice")
        num_free = int((self._owner[spans] == _FREE).sum())
        self._owner[spans] = c.slot_bytes
        c.num_slabs += len(spans)
        self.num_free_slabs -= num_free
        self.num_backed += len(spans) - num_free
        everything = self._slots_of(c, first)
        c.free.add(np.setdiff1d(everything, offsets))
        np.add.at(self._used, self.slab_of(offsets), 1)

    def _class(self, slot_bytes: int) -> _SlabClass:
        size = aligned(slot_bytes)
        if size not in self._classes:
            self._classes[size] = _SlabClass(size, self.slab_bytes)
        return self._classes[size]

    def _slots_of(self, c: _SlabClass, first_slabs: Int64s) -> Int64s:
        within = np.arange(c.slots_per_slab, dtype=np.int64) * c.slot_bytes
        return (first_slabs[:, None] * self.slab_bytes + within[None, :]).reshape(-1)

    def _spans(self, c: _SlabClass, first_slabs: Int64s) -> Int64s:
        """All slabs that begin with one of these; the further ones only where slots span slabs."""
        if c.slabs_per_slot == 1:
            return first_slabs
        return (first_slabs[:, None] + np.arange(c.slabs_per_slot)[None, :]).reshape(-1)

    def _lend(self, c: _SlabClass, want_slots: int) -> bool:
        """Lends enough free slabs for `want_slots`, or as many as there are; False where there was
        none."""
        free = np.flatnonzero(self._owner == _FREE)
        if c.slabs_per_slot == 1:
            first = free[: -(-want_slots // c.slots_per_slab)]
        else:
            # Starts of runs of contiguous free slabs long enough for one slot.
            ends = free[c.slabs_per_slot - 1 :]
            starts = free[: len(ends)]
            fits = starts[ends - starts == c.slabs_per_slot - 1]
            first = fits[:1]
        if not len(first):
            return False
        spans = self._spans(c, first)
        self._owner[spans] = c.slot_bytes
        c.num_slabs += len(spans)
        self.num_free_slabs -= len(spans)
        c.free.add_below(self._slots_of(c, first)[::-1])
        return True

    def check_invariants(self) -> None:
        """Raises AssertionError where counts, owners and free lists disagree."""
        assert self.num_free_slabs == int((self._owner == _FREE).sum()), "free slabs miscounted"
        assert self.num_backed == int((self._owner != ABSENT).sum()), "slabs with memory miscounted"
        for c in self._classes.values():
            mine = np.flatnonzero(self._owner == c.slot_bytes)
            assert len(mine) == c.num_slabs, "lent slabs miscounted"
            free = c.free.all()
            assert len(np.unique(free)) == len(free) == len(c.free), "slot twice in the free list"
            assert np.all(self._owner[self.slab_of(free)] == c.slot_bytes), (
                "free slot in a slab of another size"
            )
            slots = c.num_slabs // c.slabs_per_slot * c.slots_per_slab
            assert int(self._used[mine].sum()) == slots - len(c.free), "used slots miscounted"
            if c.slabs_per_slot == 1 and not c.keeps_emptied:
                assert np.all(self._used[mine] > 0), "an empty slab was not given back"
        assert np.all(self._used[self._owner < 0] == 0), "a slab that is not lent has used slots"
