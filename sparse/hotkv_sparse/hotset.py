"""The hot set: the blocks of a sequence that are on the device, in hot slots (places for a block).
Each hot set belongs to a layer and a shard (the heads of a tensor-parallel rank). A step attends
only to these blocks.

Always true (`check_invariants`):
- A slot has one of five states:
  free;
  mapped: the step attends to its block;
  loading: a prefetch is writing it;
  ready: a prefetch has written it, but `adopt` has not mapped it yet;
  cancelled: a prefetch is still writing it, but its block is not needed any more.
- A block has at most one slot that is mapped, loading or ready. The map (`HotMap`) names exactly
  the mapped blocks, and never grows beyond `capacity_blocks`. If `resize` lowers the capacity below
  the size of the map, the map shrinks as soon as blocks may be evicted.
- A map that was returned never changes. `version` grows with every change of the current map.
- A mapped block is never evicted if it is always kept (sinks, recent window, the partial block), or
  if host memory has no copy of it. Of all other mapped blocks, the least recently selected block is
  evicted first. If several blocks were last selected in the same step, the block with the lowest
  position is evicted first.
- A prefetch uses only free slots. `adopt`, between two steps, adds a prefetched block to a new map.
  A load within a step may use the slot of a block that it evicts, because the engine itself writes
  the slot before it attends.

The hot set decides which blocks to copy; the caller copies them. A `HotSet` has one owner and is
used by one thread. Steps and prefetches are compiled kernels (`hotset_kernels`) that change the
tables of `HotSet`.
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
    """The state of a hot slot (place on the device for a block); the module's docstring explains
    the states."""

    FREE = 0
    MAPPED = 1
    LOADING = 2
    READY = 3
    CANCELLED = 4


# The states as plain integers, because numpy compares arrays several times faster with integers
# than with enum members.
FREE, MAPPED, LOADING, READY, CANCELLED = (int(state) for state in SlotState)


@dataclass(frozen=True, slots=True)
class HotMap:
    """The map of a hot set: the blocks on the device to which a step may attend, and the hot slot
    (place on the device) of each. Read-only.

    version: grows with every change of the map.
    blocks: int32, positions of the blocks in the context, ascending.
    slots: int32, hot slot of each block.
    """

    version: int
    blocks: I32
    slots: I32


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Blocks that get or lose hot slots (places on the device). All arrays are int32.

    blocks: blocks (positions in the context) that get a slot. The method that returns this value
        says whether the caller must copy them.
    slots: the slot of each of these blocks.
    victims: blocks that have lost their slot.
    """

    blocks: I32
    slots: I32
    victims: I32


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step of the hot set (the blocks of a layer that are on the device). A
    candidate is a block that is not always kept, so that the step may select it or not.

    map: the blocks to which the caller must attend, after it has made the copies of `load`.
    load: blocks that the caller must copy from host memory into their slots before it attends.
    prefetch: int32, selected blocks that are not on the device and for which `load` had no room,
        heaviest first. The caller passes these blocks to `begin_prefetch`.
    num_selected: number of selected candidates.
    num_resident: number of selected candidates that were already in the map.
    """

    map: HotMap
    load: SlotMoves
    prefetch: I32
    num_selected: int
    num_resident: int


@dataclass(frozen=True, slots=True)
class HotSetGrowth:
    """The result of a change of the context's length, for a hot set (the blocks of a layer that are
    on the device).

    new: hot slots (places on the device) for the blocks that the context gained; the engine writes
        their KV there.
    swap_out: int32, complete blocks that have no copy in host memory. The caller copies these
        blocks to host memory, and calls `swapped_out` when the copies have ended.
    """

    new: SlotMoves
    swap_out: I32


# ------------------------------------------------------------------------------------------ the set


class HotSet:
    """The hot set of a sequence and layer: the blocks on the device, to which a step attends. A
    call that raises leaves the hot set unchanged.

    Methods raise INVALID_FIELD for invalid arguments.

    capacity_blocks: largest number of blocks that the map (the blocks to which a step attends) may
        have.
    spare_slots: number of slots beyond the capacity. Prefetches use them.
    policy: `lru` evicts the least recently selected block. `none` evicts all blocks that the
        current selection does not contain.
    clock: number of steps so far.
    span: the context's blocks, and which of them are candidates (blocks that are not always kept).

    The tables, which only this object writes:
    - By slot: `state` int8, `block_of` int32, `used_at` int64 (the last step that selected the
      block).
    - By block (position in the context; the arrays may be longer than the context): `slot_of`
      int32, `has_copy` bool (whether host memory has a copy), `swapping` bool (whether a copy to
      host memory is in progress).
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
        """Returns the total number of hot slots. Slots are numbered from 0."""
        return len(self.state)

    def map(self) -> HotMap:
        """Returns the current map: the blocks to which a step may attend, with their slots."""
        if self._map.version != self.version:
            blocks = np.sort(self.block_of[self.state == MAPPED])
            self._set_map(np.stack([blocks, self.slot_of[blocks]]))
        return self._map

    # -------------------------------------------------------------------------------------- changes

    def extend(self, where: CandidateSpan, num_complete: int, num_host: int = 0) -> HotSetGrowth:
        """Sets the length of the context to `where.count` blocks, of which the first `num_complete`
        are complete.

        Call this method whenever a block begins or becomes full. New blocks of the context get
        slots, except blocks at positions below `num_host`, which are already in host memory. Raises
        OVERLOADED if too few blocks can be evicted for the new blocks; then wait for copies to host
        memory, or call `resize`.

        The context may also become shorter (a rewind). Then the slots of the removed blocks become
        free. Before such a call all copies to host memory must have ended.
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
        """Reports the end of the copies of `blocks` to host memory.

        success: False: the copies failed, and the next `extend` returns the blocks in `swap_out`
            again.
        """
        self._check_blocks(blocks)
        if success:
            self.has_copy[blocks] |= self.swapping[blocks]
        self.swapping[blocks] = False

    def seed(self, blocks: I32) -> SlotMoves:
        """Adds `blocks` to the map (the blocks to which steps attend), in order, until there is no
        room. Engines pass the always kept blocks whenever the context has grown. Skips blocks that
        have a slot already. Evicts no blocks.

        The caller passes the most important blocks first. All blocks must have a copy in host
        memory. The caller copies the returned blocks into their slots before it attends.
        """
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
        """Makes a step: adds missing blocks of `selection` to the map (the blocks to which the step
        attends), and evicts other blocks for them.

        First adds all always kept blocks that are missing, such as blocks that `seed` has not
        added. For these blocks it may evict even selected blocks. Then adds the heaviest missing
        candidates (blocks that are not always kept), until `max_loads` blocks are added in total.
        The other missing blocks are returned in `Step.prefetch`, unless a prefetch of them is in
        progress.

        selection: this step's selection over the current `span`.
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
        """Assigns free slots to `blocks`, in order, until there are no free slots. Skips blocks
        that have a slot already, or no copy in host memory. Evicts no blocks.

        The caller copies the returned blocks into their slots, and reports each slot by
        `finish_prefetch`.
        """
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
        """Reports that the prefetches into `slots` have ended: the caller has written the slots'
        blocks to the device."""
        answer = self._kernels.hot_finish_prefetch(np.asarray(slots, np.int32), self.state)
        if answer == self._kernels.REFUSED:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"slots (0 to {len(self.state) - 1}) include some that no prefetch is writing; "
                "pass those of begin_prefetch, once",
            )

    def adopt(self) -> SlotMoves:
        """Adds prefetched blocks to the map (the blocks to which steps attend), and evicts other
        blocks for them. Call this method between two steps.

        Drops prefetched blocks for which there is no room. The returned blocks are already in their
        slots, so the caller need not copy them.
        """
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
        """Frees all slots of `blocks`, because the blocks have left the context or could not be
        loaded."""
        slots = self.slot_of[blocks]
        self._evict(blocks[(slots >= 0) & (self.state[slots] == MAPPED)])
        self._abandon(blocks)

    def resize(self, capacity_blocks: int) -> I32:
        """Sets the capacity (largest number of blocks to which steps attend) and returns the
        evicted blocks.

        A higher capacity adds slots. A lower capacity evicts as many blocks as may be evicted now;
        later steps evict the rest.
        """
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
        """Enlarges the tables that are indexed by block to at least `num_blocks` entries."""
        if num_blocks <= len(self.slot_of):
            return
        more = max(num_blocks, 2 * len(self.slot_of)) - len(self.slot_of)
        self.slot_of = np.concatenate([self.slot_of, np.full(more, NO_SLOT, np.int32)])
        self.has_copy = np.concatenate([self.has_copy, np.zeros(more, np.bool_)])
        self.swapping = np.concatenate([self.swapping, np.zeros(more, np.bool_)])

    def mapped_blocks(self) -> I32:
        """Returns the blocks of the current map (the blocks to which steps attend), int32. The
        array is writable, because numba's calls start faster with writable arrays, but kernels must
        not write to it."""
        return self._mapped if self._map.version == self.version else self.map().blocks

    def for_kernels(self) -> tuple[npt.NDArray[Any], ...]:
        """Returns the tables of slots and blocks that kernels change in place, in the order of the
        kernels' arguments: `state`, `block_of`, `used_at`, `slot_of`, `has_copy`."""
        return self.state, self.block_of, self.used_at, self.slot_of, self.has_copy

    def for_step(self) -> tuple[int, int, bool, int, int, int]:
        """Returns the numbers that a kernel needs for the next step, in the order of its arguments:
        `capacity`, `clock`, `keeps_unselected`, and `first`, `last`, `count` of the span."""
        where = self.span
        return (
            self.capacity_blocks, self.clock + 1, self._keeps_unselected, where.first, where.last,
            where.count,
        )  # fmt: skip

    def stepped(self, map_2M: I32 | None) -> HotMap:
        """Completes a step that a kernel has made in the tables of `for_kernels`. Returns the map
        (the blocks to which the step attends) after the step.

        map_2M: the kernel's new map, int32 [2, blocks of the map]: the blocks in ascending order,
            and their slots. None if the map has not changed.
        """
        self.clock += 1
        return self._map if map_2M is None else self._publish(map_2M)

    def _publish(self, map_2M: I32) -> HotMap:
        """Makes `map_2M` the current map, with the next version, and returns it.

        map_2M: int32 [2, blocks of the map], blocks in ascending order, and their slots.
        """
        self.version += 1
        self._set_map(map_2M)
        return self._map

    def _set_map(self, map_2M: I32) -> None:
        self._mapped = map_2M[0]
        map_2M.setflags(write=False)
        self._map = HotMap(self.version, map_2M[0], map_2M[1])

    @property
    def _num_mapped(self) -> int:
        """Returns the number of blocks in the map."""
        return len(self.map().blocks)

    def _is_pinned(self, blocks: I32) -> Mask:
        """Returns a mask of those `blocks` that must not be evicted, because they are always kept
        or have no copy in host memory."""
        return (blocks < self.span.first) | (blocks >= self.span.last) | ~self.has_copy[blocks]

    def _put(self, blocks: I32, slots: I32, state: int) -> None:
        """Assigns the free hot slots `slots` to `blocks`, in the given state (see `SlotState`). The
        current step counts as the last use of these blocks."""
        if len(blocks):
            self.slot_of[blocks] = slots
            self.block_of[slots] = blocks
            self.state[slots] = state
            self.used_at[slots] = self.clock
            self.version += state == MAPPED

    def _evict(self, blocks: I32) -> None:
        """Frees the slots of `blocks`, which are mapped."""
        if len(blocks):
            slots = self.slot_of[blocks]
            self.slot_of[blocks] = NO_SLOT
            self.block_of[slots] = NO_SLOT
            self.state[slots] = FREE
            self.version += 1

    def _abandon(self, blocks: I32) -> None:
        """Drops the prefetches of `blocks`.

        Slots that are already written become free at once. Slots that a prefetch still writes are
        cancelled, and become free when `finish_prefetch` reports them.
        """
        slots = self.slot_of[blocks]
        slots = slots[slots >= 0]
        self.slot_of[self.block_of[slots]] = NO_SLOT
        self.block_of[slots] = NO_SLOT
        self.state[slots] = np.where(self.state[slots] == LOADING, CANCELLED, FREE)

    # ------------------------------------------------------------------------------- who is evicted

    def _room(self, count: int) -> tuple[I32, I32]:
        """Finds hot slots for up to `count` blocks. Returns the slots, and the blocks to evict
        before these slots are used. Changes no table.

        Uses free slots as long as the map is below its capacity, then the slots of evicted blocks.
        If too few blocks may be evicted, evicts none, and returns only the free slots. If the
        capacity was lowered below the size of the map, further blocks are evicted, so that the map
        shrinks to its capacity; their slots are not returned.
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
        """Returns up to `count` mapped blocks to evict, the least recently used first."""
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
        """Raises INVALID_FIELD if any of `blocks` is outside the context."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.span.count:
            raise self._outside()

    def _outside(self) -> HotKVError:
        """Returns the error for a block outside the context."""
        return HotKVError(Reason.INVALID_FIELD, f"blocks must be from 0 to {self.span.count - 1}")

    def check_invariants(self) -> None:
        """Asserts the invariants in the module's docstring."""
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
    """Computes the capacity of a hot set (largest number of blocks of a layer on the device) from
    the sizes of recent selections. Used with the setting `adaptive_p`, with which a selection is
    only as large as the attention mass requires, up to the budget.

    The capacity is usually twice the size of recent selections. It grows at once and shrinks
    slowly. If many steps miss more blocks than they may load, the capacity rises, to at most
    `MAX_SETS` times that size. It is never above the budget (but never below the number of always
    kept blocks).

    budget_blocks: the most blocks to which a step may attend.
    always_blocks: number of always kept blocks.
    needed_blocks: largest size of recent selections; decays by 2 % per step.
    pressure_ratio: share of recent steps that missed more blocks than they could load, 0 to 1.
    sets: capacity divided by `needed_blocks`; grows while `pressure_ratio` is high.
    """

    budget_blocks: int
    always_blocks: int
    needed_blocks: float = 0.0
    pressure_ratio: float = 0.0
    sets: float = USUAL_SETS

    def observe(self, selected_blocks: int, left_blocks: int) -> int:
        """Adapts the capacity to the step that has just ended, and returns the new capacity.

        selected_blocks: number of blocks that the step selected.
        left_blocks: number of missing blocks that the step could not load (the length of
            `Step.prefetch`).
        """
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
        """Returns the number of blocks that the hot set (the blocks on the device) should have;
        before the first step, the budget."""
        needed = self.needed_blocks or float(self.budget_blocks)
        wanted = round(max(self.sets * needed, USUAL_SETS * self.always_blocks))
        return max(min(wanted, self.budget_blocks), self.always_blocks, 1)
