"""The hot set of a sequence's layer and shard: blocks in hot slots, to which a step attends. It
decides what to copy; the caller copies. One owner, one thread; steps and prefetches are kernels
(`hotset_kernels`) on its tables.

Always true (`check_invariants`):
- A slot is free; mapped (the step attends to its block); loading (a prefetch writes it); ready
  (written, not yet mapped by `adopt`); or cancelled (still being written, block not needed).
- A block has at most one slot that is mapped, loading or ready. The map names exactly the mapped
  blocks and never grows beyond the capacity; after `resize` it shrinks as soon as blocks may be
  evicted.
- A returned map never changes; `version` grows with every change.
- A mapped block is never evicted if it is always kept (before `span.first` or from `span.last`
  on), or without a copy in host memory. Of the others the least recently selected goes first, of
  equals the lowest position.
- A prefetch uses only free slots; `adopt` maps its blocks between two steps. A load within a
  step may take the slot of a block that it evicts, as the engine itself writes it before it
  attends.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import CACHE_POLICIES, USUAL_SETS
from hotkv_sparse.selection import CandidateSpan, Selection

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
NO_SLOT = -1
NO_BLOCKS = np.empty(0, np.int32)
_FIRST_BLOCKS = 64
MAX_SETS = 4.0
_DECAY = 0.98
_PRESSURE_RATE = 0.1


# ------------------------------------------------------------------------------------------ answers


class SlotState(IntEnum):
    """See the module."""

    FREE = 0
    MAPPED = 1
    LOADING = 2
    READY = 3
    CANCELLED = 4


# As plain integers, which numpy compares several times faster than enum members.
FREE, MAPPED, LOADING, READY, CANCELLED = (int(state) for state in SlotState)


@dataclass(frozen=True, slots=True)
class HotMap:
    """The blocks to which a step may attend. Read-only.

    version: grows with every change.
    blocks: int32, ascending positions in the context.
    slots: int32, of each block.
    """

    version: int
    blocks: I32
    slots: I32


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """All int32.

    blocks: get a slot; the method that returns this says whether to copy them.
    slots: of these blocks.
    victims: have lost their slot.
    """

    blocks: I32
    slots: I32
    victims: I32


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a step.

    map: to attend to, after the copies of `load`.
    load: to copy from host memory before attention.
    prefetch: int32, selected blocks that found no room in `load`, heaviest first, for
        `begin_prefetch`.
    num_selected: candidates.
    num_resident: of these, already in the map.
    """

    map: HotMap
    load: SlotMoves
    prefetch: I32
    num_selected: int
    num_resident: int


@dataclass(frozen=True, slots=True)
class HotSetGrowth:
    """Result of `HotSet.extend`.

    new: slots of the context's new blocks, where the engine writes their KV.
    swap_out: int32, complete blocks without a copy in host memory. The caller copies them, then
        calls `swapped_out`.
    """

    new: SlotMoves
    swap_out: I32


# ------------------------------------------------------------------------------------------ the set


class HotSet:
    """The blocks of a layer that lie on the device. A call that raises (INVALID_FIELD for wrong
    arguments) changes nothing.

    capacity_blocks: most blocks of the map.
    spare_slots: beyond the capacity, for prefetches.
    policy: `lru`, or `none`: evicts all that the current selection lacks.
    clock: steps so far.

    Tables, which only this object writes:
    - By slot: `state` int8, `block_of` int32, `used_at` int64 (last step that selected the block).
    - By block, perhaps beyond the context: `slot_of` int32, `has_copy` bool (in host memory),
      `swapping` bool (copy to host memory in progress).
    """

    def __init__(self, capacity_blocks: int, spare_slots: int = 8, policy: str = "lru") -> None:
        if capacity_blocks < 1 or spare_slots < 0:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"a hot set of {capacity_blocks} blocks and {spare_slots} spare slots; use 1 and 0 "
                "or more",
            )
        if policy not in CACHE_POLICIES:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"cache_policy is {policy!r}; use one of {', '.join(CACHE_POLICIES)}",
            )
        self.capacity_blocks, self.spare_slots, self.policy = capacity_blocks, spare_slots, policy
        self.span = CandidateSpan(0, 0, 0)
        self.version, self.clock = 0, 0
        self._mapped = NO_BLOCKS
        self._map = HotMap(0, NO_BLOCKS, NO_BLOCKS)
        num_slots = capacity_blocks + spare_slots
        self.state = np.full(num_slots, FREE, np.int8)
        self.block_of = np.full(num_slots, NO_SLOT, np.int32)
        self.used_at = np.zeros(num_slots, np.int64)
        self.slot_of = np.full(_FIRST_BLOCKS, NO_SLOT, np.int32)
        self.has_copy = np.zeros(_FIRST_BLOCKS, np.bool_)
        self.swapping = np.zeros(_FIRST_BLOCKS, np.bool_)
        self._keeps_unselected = policy != "none"
        self._kernels: Any = native.require("hotkv_sparse.all_kernels")

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{state.name.lower()} {int((self.state == state).sum())}" for state in SlotState
        )
        return (
            f"HotSet({self.policy}, capacity {self.capacity_blocks}, blocks "
            f"{self.span.count}, {counts})"
        )

    @property
    def num_slots(self) -> int:
        return len(self.state)

    def map(self) -> HotMap:
        if self._map.version != self.version:
            blocks = np.sort(self.block_of[self.state == MAPPED])
            self._set_map(np.stack([blocks, self.slot_of[blocks]]))
        return self._map

    # -------------------------------------------------------------------------------------- changes

    def extend(self, where: CandidateSpan, num_complete: int, num_host: int = 0) -> HotSetGrowth:
        """Sets the context to `where.count` blocks, the first `num_complete` complete. Call it
        whenever a block begins or becomes full.

        New blocks get slots, but not those below `num_host`, which are in host memory already.
        Raises OVERLOADED if too few blocks can be evicted: wait for copies to host memory, or
        `resize`. A shorter context frees slots; all copies to host memory must have ended
        before.
        """
        if not 0 <= num_complete <= where.count or num_host > num_complete:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"{num_complete} blocks complete, {num_host} in host memory; the context has "
                f"{where.count}",
            )
        old = self.span
        fresh = np.arange(max(old.count, num_host), where.count, dtype=np.int32)
        self._add_blocks(where.count)
        # Blocks of a shorter context may still be victims.
        self.span = CandidateSpan(where.first, where.last, max(where.count, old.count))
        slots, victims = self._room(len(fresh))
        if len(slots) < len(fresh):
            self.span = old
            raise HotKVError(
                Reason.OVERLOADED,
                f"{len(fresh)} new blocks don't fit in {self!r}; wait until blocks are stored, or "
                "raise the capacity",
            )
        self._evict(victims)
        if where.count < old.count:
            self.forget(np.arange(where.count, old.count, dtype=np.int32))
        self.span = where
        self.has_copy[old.count : num_host] = True
        self.has_copy[where.count :] = False
        self.swapping[num_complete:] = False
        self._put(fresh, slots, MAPPED)
        mapped = np.zeros(self.span.count, np.bool_)
        mapped[self.map().blocks] = True
        self.has_copy[num_complete : where.count] &= ~mapped[num_complete:]
        swap_out = np.flatnonzero(
            mapped[:num_complete] & ~self.has_copy[:num_complete] & ~self.swapping[:num_complete]
        ).astype(np.int32)
        self.swapping[swap_out] = True
        return HotSetGrowth(SlotMoves(fresh, slots, victims), swap_out)

    def swapped_out(self, blocks: I32, success: bool) -> None:
        """The copies of `blocks` to host memory have ended. After a failure the next `extend`
        names them again."""
        self._check_blocks(blocks)
        if success:
            self.has_copy[blocks] |= self.swapping[blocks]
        self.swapping[blocks] = False

    def seed(self, blocks: I32) -> SlotMoves:
        """Maps `blocks` in order while there is room; evicts none, skips blocks with a slot.
        Pass the most important first, such as always kept blocks whenever the context has grown.
        All must have a copy in host memory; the caller copies the returned ones before it
        attends."""
        self._check_blocks(blocks)
        _, order = np.unique(blocks, return_index=True)
        blocks = blocks[np.sort(order)]
        blocks = blocks[self.slot_of[blocks] == NO_SLOT]
        free = np.flatnonzero(self.state == FREE).astype(np.int32)
        count = min(len(blocks), len(free), self.capacity_blocks - self._num_mapped)
        blocks, slots = blocks[: max(count, 0)], free[: max(count, 0)]
        self.has_copy[blocks] = True
        self._put(blocks, slots, MAPPED)
        return SlotMoves(blocks, slots, NO_BLOCKS)

    def step(self, selection: Selection, max_loads: int) -> Step:
        """Maps missing blocks of `selection` (over the current `span`), evicting others.

        First all missing always kept blocks, even at the cost of selected ones; then the
        heaviest candidates, up to `max_loads` in total. The rest goes to `Step.prefetch`, unless
        it is being prefetched.
        """
        blocks, weights = (
            np.asarray(selection.blocks, np.int32),
            np.asarray(selection.weights, np.float32),
        )
        num_slots = len(self.state)
        maps, moves = (
            np.empty((2, num_slots), np.int32),
            np.empty((4, max(len(blocks), num_slots)), np.int32),
        )
        (
            num_mapped, num_loads, num_out, num_rest, num_always, num_resident, num_kept,
        ) = self._kernels.hot_step(
            blocks, weights, max_loads, self.mapped_blocks(), maps, moves, *self.for_kernels(),
            *self.for_step(),
        )  # fmt: skip
        if num_mapped == self._kernels.REFUSED:
            raise self._outside()
        present = self.stepped(maps[:, :num_mapped] if num_loads or num_out else None)
        loads = SlotMoves(moves[0, :num_loads], moves[1, :num_loads], moves[2, :num_out])
        return Step(
            present, loads, moves[3, :num_rest], len(blocks) - num_always, num_resident - num_kept
        )

    def begin_prefetch(self, blocks: I32) -> SlotMoves:
        """Assigns free slots in order; evicts none, skips blocks with a slot or without a copy.
        The caller copies the returned blocks and reports each slot by `finish_prefetch`."""
        if not len(blocks):
            return SlotMoves(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)
        moves = np.empty((2, min(len(blocks), self.num_slots)), np.int32)
        num = self._kernels.hot_begin_prefetch(
            np.asarray(blocks, np.int32), moves, *self.for_kernels(), self.clock,
            self.span.count,
        )  # fmt: skip
        if num == self._kernels.REFUSED:
            raise self._outside()
        return SlotMoves(moves[0, :num], moves[1, :num], NO_BLOCKS)

    def finish_prefetch(self, slots: I32) -> None:
        """The caller has written the blocks of these slots."""
        answer = self._kernels.hot_finish_prefetch(np.asarray(slots, np.int32), self.state)
        if answer == self._kernels.REFUSED:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"slots (0 to {len(self.state) - 1}) include some that no prefetch is writing; "
                "pass those of begin_prefetch, once",
            )

    def adopt(self) -> SlotMoves:
        """Maps prefetched blocks between two steps, evicting others; drops those without room.
        They need no copy."""
        maps, moves = (
            np.empty((2, self.num_slots), np.int32),
            np.empty((3, self.num_slots), np.int32),
        )
        num_mapped, num, num_out = self._kernels.hot_adopt(
            self.map().blocks, maps, moves, *self.for_kernels(),
            self.capacity_blocks, self.clock, self.span.first, self.span.last,
        )  # fmt: skip
        if num or num_out:
            self._publish(maps[:, :num_mapped])
        return SlotMoves(moves[0, :num], moves[1, :num], moves[2, :num_out])

    def forget(self, blocks: I32) -> None:
        """Frees all slots of blocks that left the context or could not be loaded."""
        slots = self.slot_of[blocks]
        self._evict(blocks[(slots >= 0) & (self.state[slots] == MAPPED)])
        self._abandon(blocks)

    def resize(self, capacity_blocks: int) -> I32:
        """Sets the capacity and returns the evicted blocks. A lower one evicts what it may now,
        later steps the rest."""
        if capacity_blocks < 1:
            raise HotKVError(
                Reason.INVALID_FIELD, f"capacity is {capacity_blocks} blocks; use 1 or more"
            )
        more = capacity_blocks + self.spare_slots - self.num_slots
        if more > 0:
            self.state = np.concatenate([self.state, np.full(more, FREE, np.int8)])
            self.block_of = np.concatenate([self.block_of, np.full(more, NO_SLOT, np.int32)])
            self.used_at = np.concatenate([self.used_at, np.zeros(more, np.int64)])
        self.capacity_blocks = capacity_blocks
        victims = self._victims(self._num_mapped - capacity_blocks)
        self._evict(victims)
        return victims

    # --------------------------------------------------------------------------------------- tables

    def _add_blocks(self, num_blocks: int) -> None:
        if num_blocks <= len(self.slot_of):
            return
        more = max(num_blocks, 2 * len(self.slot_of)) - len(self.slot_of)
        self.slot_of = np.concatenate([self.slot_of, np.full(more, NO_SLOT, np.int32)])
        self.has_copy = np.concatenate([self.has_copy, np.zeros(more, np.bool_)])
        self.swapping = np.concatenate([self.swapping, np.zeros(more, np.bool_)])

    def mapped_blocks(self) -> I32:
        """Blocks of the map, int32. Writable, as numba's calls then start faster, but kernels
        must not write it."""
        return self._mapped if self._map.version == self.version else self.map().blocks

    def for_kernels(self) -> tuple[npt.NDArray[Any], ...]:
        """Tables in the order of the kernels' arguments."""
        return self.state, self.block_of, self.used_at, self.slot_of, self.has_copy

    def for_step(self) -> tuple[int, int, bool, int, int, int]:
        """Numbers of the next step in the order of the kernels' arguments."""
        where = self.span
        return (
            self.capacity_blocks, self.clock + 1, self._keeps_unselected, where.first, where.last,
            where.count,
        )  # fmt: skip

    def stepped(self, map_2M: I32 | None) -> HotMap:
        """Completes a step that a kernel made in the tables. `map_2M`: the new map, int32 [2,
        M], ascending blocks and their slots; None: unchanged."""
        self.clock += 1
        return self._map if map_2M is None else self._publish(map_2M)

    def _publish(self, map_2M: I32) -> HotMap:
        """`map_2M`: as in `stepped`."""
        self.version += 1
        self._set_map(map_2M)
        return self._map

    def _set_map(self, map_2M: I32) -> None:
        self._mapped = map_2M[0]
        map_2M.setflags(write=False)
        self._map = HotMap(self.version, map_2M[0], map_2M[1])

    @property
    def _num_mapped(self) -> int:
        return len(self.map().blocks)

    def _is_pinned(self, blocks: I32) -> Mask:
        """Blocks that must not be evicted."""
        return (blocks < self.span.first) | (blocks >= self.span.last) | ~self.has_copy[blocks]

    def _put(self, blocks: I32, slots: I32, state: int) -> None:
        """Assigns free slots; counts as a use in this step."""
        if len(blocks):
            self.slot_of[blocks] = slots
            self.block_of[slots] = blocks
            self.state[slots] = state
            self.used_at[slots] = self.clock
            self.version += state == MAPPED

    def _evict(self, blocks: I32) -> None:
        """`blocks` must be mapped."""
        if len(blocks):
            slots = self.slot_of[blocks]
            self.slot_of[blocks] = NO_SLOT
            self.block_of[slots] = NO_SLOT
            self.state[slots] = FREE
            self.version += 1

    def _abandon(self, blocks: I32) -> None:
        """Drops prefetches: written slots become free, others are cancelled until
        `finish_prefetch`."""
        slots = self.slot_of[blocks]
        slots = slots[slots >= 0]
        self.slot_of[self.block_of[slots]] = NO_SLOT
        self.block_of[slots] = NO_SLOT
        self.state[slots] = np.where(self.state[slots] == LOADING, CANCELLED, FREE)

    # ------------------------------------------------------------------------------- who is evicted

    def _room(self, count: int) -> tuple[I32, I32]:
        """Slots for up to `count` blocks, and the blocks to evict before their use; changes no
        table.

        Free slots first while the map is below its capacity. If too few blocks may be evicted,
        none are, and only free slots are returned. Over a lowered capacity more are evicted,
        whose slots are not returned.
        """
        growth = self.capacity_blocks - self._num_mapped
        free = NO_BLOCKS
        if growth > 0:
            free = np.flatnonzero(self.state == FREE)[: max(min(count, growth), 0)].astype(np.int32)
        excess = count - len(free) + max(-growth, 0)
        evicted = self._victims(excess)
        if len(evicted) < excess:
            evicted = NO_BLOCKS
        return np.concatenate([free, self.slot_of[evicted]])[:count], evicted

    def _victims(self, count: int) -> I32:
        """Least recently used first."""
        if count <= 0:
            return NO_BLOCKS
        slots = np.flatnonzero(self.state == MAPPED)
        slots = slots[~self._is_pinned(self.block_of[slots])]
        order = (self.used_at[slots] << 32) | self.block_of[slots]
        if count < len(order):
            order = np.partition(order, count - 1)[:count]
        return (np.sort(order) & 0xFFFFFFFF).astype(np.int32)

    # --------------------------------------------------------------------------------------- checks

    def _check_blocks(self, blocks: I32) -> None:
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.span.count:
            raise self._outside()

    def _outside(self) -> HotKVError:
        return HotKVError(Reason.INVALID_FIELD, f"blocks must be from 0 to {self.span.count - 1}")

    def check_invariants(self) -> None:
        held = np.isin(self.state, (MAPPED, LOADING, READY))
        assert (self.block_of[held] >= 0).all() and (self.block_of[~held] == NO_SLOT).all()
        blocks = self.block_of[held]
        assert len(np.unique(blocks)) == len(blocks) and (blocks < self.span.count).all()
        assert (self.slot_of[blocks] == np.flatnonzero(held)).all()
        assert int((self.slot_of >= 0).sum()) == len(blocks)
        assert self._num_mapped <= len(self.state) - self.spare_slots
        assert not self.has_copy[self.span.count :].any()
        assert not (self.has_copy & self.swapping).any()
        present = self.map()
        assert (present.blocks == np.sort(self.block_of[self.state == MAPPED])).all()
        assert (present.slots == self.slot_of[present.blocks]).all()
        assert (np.diff(present.blocks) > 0).all()


# ----------------------------------------------------------------------------------------- its size


@dataclass(slots=True)
class AdaptiveCapacity:
    """Capacity of a hot set with `adaptive_p`, from the sizes of recent selections: usually twice
    these. Grows at once, shrinks slowly. If many steps miss more than they may load, it rises to
    `MAX_SETS` times; never above the budget, never below the always kept blocks.

    needed_blocks: largest recent selection; decays by 2 % per step.
    pressure_ratio: share of recent steps that missed more blocks than they could load.
    sets: capacity / `needed_blocks`; grows while `pressure_ratio` is high.
    """

    budget_blocks: int
    always_blocks: int
    needed_blocks: float = 0.0
    pressure_ratio: float = 0.0
    sets: float = USUAL_SETS

    def observe(self, selected_blocks: int, left_blocks: int) -> int:
        """New capacity after a step. `left_blocks`: missing ones that it could not load
        (`Step.prefetch`)."""
        self.needed_blocks = max(
            float(min(selected_blocks, self.budget_blocks)), self.needed_blocks * _DECAY
        )
        self.pressure_ratio += _PRESSURE_RATE * (float(left_blocks > 0) - self.pressure_ratio)
        if self.pressure_ratio > 0.5:
            self.sets = min(self.sets * 1.05, MAX_SETS)
        elif self.pressure_ratio < 0.1:
            self.sets = max(self.sets * 0.99, USUAL_SETS)
        return self.capacity_blocks

    @property
    def capacity_blocks(self) -> int:
        """Before the first step, the budget."""
        needed = self.needed_blocks or float(self.budget_blocks)
        wanted = round(max(self.sets * needed, USUAL_SETS * self.always_blocks))
        return max(min(wanted, self.budget_blocks), self.always_blocks, 1)
