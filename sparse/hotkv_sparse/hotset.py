"""The hot set of one sequence, layer and set of heads: which blocks are resident in which hot
slots.

Always true (`check_invariants`):
- A slot is free, mapped, loading (a prefetch writes it), ready (written, not adopted yet) or
  cancelled (loading, but unwanted).
- A block has at most one slot that is mapped, loading or ready; the map names exactly the mapped
  ones, at most `capacity_blocks` of them.
- Mapped blocks that are always kept (sinks, recent window, the partial block) or have no copy in
  host memory are never evicted.
- Prefetch gets free slots only. What it wrote becomes visible in `adopt`, at a step boundary, in a
  new map; maps handed out never change. A correction may take the slot of the block it evicts, as
  the engine writes it itself before it attends.

Decides, and does nothing: copies are the caller's. One owner, one thread. Tables are arrays by slot
and by block; what happens in every step is a compiled kernel over them (`hotset_kernels`), with a
plain reference here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv import native
from hotkv.errors import HotKVError, Reason
from hotkv_sparse.config import CACHE_POLICIES
from hotkv_sparse.moves import Growth, HotMap, Moves, SlotState, Step
from hotkv_sparse.topk import Selection, Span

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class _Room:
    """Slots to use, and the blocks to evict first; there may be more victims than slots, never
    fewer where slots are theirs."""

    slots: I32
    victims: I32


_NONE = np.empty(0, np.int32)
# Plain integers: numpy compares arrays with them several times faster than with members of an enum.
_FREE, _MAPPED, _LOADING, _READY, _CANCELLED = (int(state) for state in SlotState)


class HotSet:
    """See the module. INVALID_FIELD for arguments that make no sense; whoever raises has changed
    nothing.

    `spare_slots`: slots beyond the capacity that prefetch may always use. `policy`: `lru` and
    `lru_prior` evict the block that was selected least recently, `clock` approximates that, `none`
    keeps nothing that the present selection leaves out.
    """

    def __init__(self, capacity_blocks: int, spare_slots: int = 8, policy: str = "lru") -> None:
        if capacity_blocks < 1 or spare_slots < 0:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"a hot set of {capacity_blocks} blocks and {spare_slots} spare slots; use 1 "
                    "and "
                    "0 or more"
                ),
            )
        if policy not in CACHE_POLICIES:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"cache_policy is {policy!r}; use one of {', '.join(CACHE_POLICIES)}",
            )
        self.capacity_blocks = capacity_blocks
        self.spare_slots = spare_slots
        self.policy = policy
        self.span = Span(0, 0, 0)
        self.version = 0
        self._clock = 0
        self._hand = 0
        self._policy = CACHE_POLICIES.index(policy)
        self._kernels: Any = native.load("hotkv_sparse.kernels")
        self._map = HotMap(0, _NONE, _NONE)
        self._mapped = _NONE
        num_slots = capacity_blocks + spare_slots
        self._state = np.full(num_slots, _FREE, np.int8)
        self._block_of = np.full(num_slots, NO_SLOT, np.int32)
        self._used_at = np.zeros(num_slots, np.int64)
        self._referenced = np.zeros(num_slots, np.bool_)
        self._slot_of = np.full(64, NO_SLOT, np.int32)
        self._has_copy = np.zeros(64, np.bool_)
        self._swapping = np.zeros(64, np.bool_)

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{state.name.lower()} {int((self._state == state).sum())}" for state in SlotState
        )
        return (
            f"HotSet({self.policy}, capacity {self.capacity_blocks}, blocks "
            f"{self.span.count}, {counts})"
        )

    # ---------------------------------------------------------------------------------------- state

    @property
    def num_slots(self) -> int:
        """Hot slots in all; the slot numbers are below it."""
        return len(self._state)

    def map(self) -> HotMap:
        """What may be attended at present."""
        if self._map.version != self.version:
            blocks = np.sort(self._block_of[self._state == _MAPPED])
            self._publish(np.stack([blocks, self._slot_of[blocks]]))
        return self._map

    def _publish(self, map_2M: I32) -> None:
        """The map of the present version, from its blocks and slots."""
        # Kernels are called sooner with arrays that may be written; they don't write this one.
        self._mapped = map_2M[0]
        map_2M.setflags(write=False)
        self._map = HotMap(self.version, map_2M[0], map_2M[1])

    def resident(self, first: int, last: int) -> Mask:
        """bool [last - first]: which of the blocks [first, last) may be attended."""
        return self._mapped_blocks()[first:last]

    def recency(self) -> I32:
        """Mapped blocks, most recently selected first: what the next sequence over the same prefix
        starts from (`seed`)."""
        slots = np.flatnonzero(self._state == _MAPPED)
        order = np.lexsort((self._block_of[slots], -self._used_at[slots]))
        blocks: I32 = self._block_of[slots[order]]
        return blocks

    def _num_mapped(self) -> int:
        return len(self.map().blocks)

    def _mapped_blocks(self) -> Mask:
        mapped = np.zeros(self.span.count, np.bool_)
        mapped[self.map().blocks] = True
        return mapped

    def _pinned(self, blocks: I32) -> Mask:
        """Which blocks are always kept or have no copy to come back from."""
        return (blocks < self.span.first) | (blocks >= self.span.last) | ~self._has_copy[blocks]

    # -------------------------------------------------------------------------------------- changes

    def extend(self, where: Span, num_complete: int, num_host: int = 0) -> Growth:
        """The context has `where.count` blocks, the first `num_complete` of them complete; call it
        whenever a block is begun, or fills.

        Blocks that the context gains get slots, but for those below `num_host`, which host memory
        has already. A smaller context (a rewind; settle swaps first) gives its slots back.
        OVERLOADED where too little may be evicted: then wait for swaps, or `resize`.
        """
        if not 0 <= num_complete <= where.count or num_host > num_complete:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"{num_complete} blocks complete, {num_host} in host memory; the context has "
                    f"{where.count}"
                ),
            )
        old = self.span
        fresh = np.arange(max(old.count, num_host), where.count, dtype=np.int32)
        self._reach(where.count)
        self.span = Span(where.first, where.last, max(where.count, old.count))
        room = self._room(len(fresh), whole=True)
        if len(room.slots) < len(fresh):
            self.span = old
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"{len(fresh)} new blocks don't fit in {self!r}; wait until blocks are stored, "
                    "or raise the capacity"
                ),
            )
        self._evict(room.victims)
        if where.count < old.count:
            self._forget(np.arange(where.count, old.count, dtype=np.int32))
        self.span = where
        self._has_copy[old.count : num_host] = True
        self._has_copy[where.count :] = False
        self._swapping[num_complete:] = False
        self._put(fresh, room.slots, _MAPPED)
        mapped = self._mapped_blocks()
        self._has_copy[num_complete : where.count] &= ~mapped[num_complete:]
        swap_out = np.flatnonzero(
            mapped[:num_complete] & ~self._has_copy[:num_complete] & ~self._swapping[:num_complete]
        ).astype(np.int32)
        self._swapping[swap_out] = True
        return Growth(Moves(fresh, room.slots, room.victims), swap_out)

    def swapped_out(self, blocks: I32, success: bool) -> None:
        """Host memory has (or, without success, has not) a copy of `blocks`; those that failed are
        offered again by the next `extend`."""
        self._check_blocks(blocks)
        if success:
            self._has_copy[blocks] |= self._swapping[blocks]
        self._swapping[blocks] = False

    def seed(self, blocks: I32) -> Moves:
        """Maps `blocks` of host memory, in order of importance, as far as there is room without
        evicting; load them before attending."""
        self._check_blocks(blocks)
        _, order = np.unique(blocks, return_index=True)
        blocks = blocks[np.sort(order)]
        blocks = blocks[self._slot_of[blocks] == NO_SLOT]
        free = np.flatnonzero(self._state == _FREE).astype(np.int32)
        count = min(len(blocks), len(free), self.capacity_blocks - self._num_mapped())
        blocks, slots = blocks[: max(count, 0)], free[: max(count, 0)]
        self._has_copy[blocks] = True
        self._put(blocks, slots, _MAPPED)
        return Moves(blocks, slots, _NONE)

    def step(self, selection: Selection, max_loads: int) -> Step:
        """One step with a fresh selection over the present span: at most `max_loads` missing
        candidates are loaded now, heaviest first.

        Always kept blocks are resident unless they were never seeded; those that are missing are
        loaded first, whatever `max_loads` says.
        """
        if self._kernels is None:
            return self._step_reference(selection, max_loads)
        blocks, weights = (
            np.asarray(selection.blocks, np.int32),
            np.asarray(selection.weights, np.float32),
        )
        self.map()
        num_slots, where = len(self._state), self.span
        maps, moves = (
            np.empty((2, num_slots), np.int32),
            np.empty((4, max(len(blocks), num_slots)), np.int32),
        )
        (
            num_mapped, num_loads, num_out, num_rest, num_always, num_resident, num_kept, hand,
        ) = self._kernels.hot_step(
            blocks, weights, max_loads, self._mapped, maps, moves, *self._tables(),
            self.capacity_blocks, self._clock + 1, self._hand, self._policy,
            where.first, where.last, where.count,
        )  # fmt: skip
        if num_mapped == self._kernels.REFUSED:
            raise self._outside()
        self._clock, self._hand = self._clock + 1, hand
        if num_loads or num_out:
            self.version += 1
            self._publish(maps[:, :num_mapped])
        loads = Moves(moves[0, :num_loads], moves[1, :num_loads], moves[2, :num_out])
        return Step(
            self._map, loads, moves[3, :num_rest], len(blocks) - num_always, num_resident - num_kept
        )

    def begin_prefetch(self, blocks: I32) -> Moves:
        """Free slots for `blocks`, in order, as far as they reach; report each with
        `finish_prefetch`. Nothing is evicted."""
        if not len(blocks):
            return Moves(_NONE, _NONE, _NONE)
        if self._kernels is None:
            return self._begin_prefetch_reference(blocks)
        moves = np.empty((2, min(len(blocks), self.num_slots)), np.int32)
        num = self._kernels.hot_begin_prefetch(
            np.asarray(blocks, np.int32), moves, *self._tables(), self._clock, self.span.count
        )
        if num == self._kernels.REFUSED:
            raise self._outside()
        return Moves(moves[0, :num], moves[1, :num], _NONE)

    def finish_prefetch(self, slots: I32, success: bool) -> None:
        """The prefetch has written `slots`, or will never touch them again."""
        if self._kernels is None:
            return self._finish_prefetch_reference(slots, success)
        slots = np.asarray(slots, np.int32)
        if (
            self._kernels.hot_finish_prefetch(
                slots, success, self._state, self._block_of, self._slot_of
            )
            == self._kernels.REFUSED
        ):
            raise self._not_loading()

    def adopt(self) -> Moves:
        """Step boundary: what prefetch has written joins the map, evicting by policy; what finds no
        room is dropped. No copies."""
        if self._kernels is None:
            return self._adopt_reference()
        maps, moves = (
            np.empty((2, self.num_slots), np.int32),
            np.empty((3, self.num_slots), np.int32),
        )
        num_mapped, num, num_out, self._hand = self._kernels.hot_adopt(
            self.map().blocks, maps, moves, *self._tables(),
            self.capacity_blocks, self._clock, self._hand, self._policy,
            self.span.first, self.span.last,
        )  # fmt: skip
        if num or num_out:
            self.version += 1
            self._publish(maps[:, :num_mapped])
        return Moves(moves[0, :num], moves[1, :num], moves[2, :num_out])

    def resize(self, capacity_blocks: int) -> I32:
        """A new capacity: more slots, or victims by policy (those that may be evicted; the rest
        goes when it may). Returns the victims."""
        if capacity_blocks < 1:
            raise HotKVError(
                Reason.INVALID_FIELD, f"capacity is {capacity_blocks} blocks; use 1 or more"
            )
        more = capacity_blocks + self.spare_slots - self.num_slots
        if more > 0:
            self._state = np.concatenate([self._state, np.full(more, _FREE, np.int8)])
            self._block_of = np.concatenate([self._block_of, np.full(more, NO_SLOT, np.int32)])
            self._used_at = np.concatenate([self._used_at, np.zeros(more, np.int64)])
            self._referenced = np.concatenate([self._referenced, np.zeros(more, np.bool_)])
        self.capacity_blocks = capacity_blocks
        victims = self._victims(self._num_mapped() - capacity_blocks)
        self._evict(victims)
        return victims

    # ----------------------------------------------------------------------------------- references

    def _step_reference(self, selection: Selection, max_loads: int) -> Step:
        self._check_blocks(selection.blocks)
        self._clock += 1
        blocks, weights = selection.blocks, selection.weights
        slots = self._slot_of[blocks]
        mapped = (slots >= 0) & (self._state[slots] == _MAPPED)
        self._used_at[slots[mapped]] = self._clock
        self._referenced[slots[mapped]] = True
        dropped = self._drop_unselected() if self.policy == "none" else _NONE
        missing = np.flatnonzero(~mapped)
        missing = missing[np.argsort(-weights[missing], kind="stable")]
        num_kept = int(np.isinf(weights[missing]).sum())
        wanted = missing[: max(num_kept, max_loads)]
        room = self._room(len(wanted))
        chosen = blocks[wanted[: len(room.slots)]]
        self._evict(room.victims)
        self._abandon(chosen)
        self._put(chosen, room.slots, _MAPPED)
        num_always = int(np.isinf(weights).sum())
        rest = blocks[missing[len(chosen) :]]
        prefetch = rest[self._slot_of[rest] == NO_SLOT]
        num_resident = int(mapped.sum()) - (num_always - num_kept)
        moves = Moves(chosen, room.slots, np.concatenate([dropped, room.victims]))
        return Step(self.map(), moves, prefetch, len(blocks) - num_always, num_resident)

    def _begin_prefetch_reference(self, blocks: I32) -> Moves:
        self._check_blocks(blocks)
        _, order = np.unique(blocks, return_index=True)
        blocks = blocks[np.sort(order)]
        blocks = blocks[(self._slot_of[blocks] == NO_SLOT) & self._has_copy[blocks]]
        free = np.flatnonzero(self._state == _FREE).astype(np.int32)
        count = min(len(blocks), len(free))
        self._put(blocks[:count], free[:count], _LOADING)
        return Moves(blocks[:count], free[:count], _NONE)

    def _finish_prefetch_reference(self, slots: I32, success: bool) -> None:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise self._not_loading()
        state = self._state[slots]
        if not np.isin(state, (_LOADING, _CANCELLED)).all():
            raise self._not_loading()
        wanted = (state == _LOADING) & success
        self._state[slots[wanted]] = _READY
        unwanted = slots[~wanted]
        loading = unwanted[self._state[unwanted] == _LOADING]
        self._slot_of[self._block_of[loading]] = NO_SLOT
        self._release(unwanted)

    def _adopt_reference(self) -> Moves:
        ready = np.flatnonzero(self._state == _READY).astype(np.int32)
        if not len(ready):
            return Moves(_NONE, _NONE, _NONE)
        excess = self._num_mapped() + len(ready) - self.capacity_blocks
        victims = self._victims(excess) if excess > 0 else _NONE
        kept, lost = (
            ready[: len(ready) - max(excess - len(victims), 0)],
            ready[len(ready) - max(excess - len(victims), 0) :],
        )
        self._evict(victims)
        self._slot_of[self._block_of[lost]] = NO_SLOT
        self._release(lost)
        self._state[kept] = _MAPPED
        self._used_at[kept] = self._clock
        self._referenced[kept] = True
        self.version += 1
        return Moves(self._block_of[kept], kept, victims)

    # ------------------------------------------------------------------------------------- eviction

    def _room(self, count: int, *, whole: bool = False) -> _Room:
        """Slots for up to `count` blocks (`whole`: for all of them or none): free ones while the
        map may grow, then those of victims."""
        growth = self.capacity_blocks - self._num_mapped()
        free = (
            np.flatnonzero(self._state == _FREE)[: max(min(count, growth), 0)].astype(np.int32)
            if growth > 0
            else _NONE
        )
        victims = self._victims(
            count - len(free) + max(-growth, 0), protected=not whole, whole=whole
        )
        return _Room(np.concatenate([free, self._slot_of[victims]])[:count], victims)

    def _victims(self, count: int, *, protected: bool = False, whole: bool = False) -> I32:
        """Up to `count` mapped blocks to evict (`whole`: all or none), by policy; none that is
        always kept or has no copy.

        `protected`: nor any that the running step has selected.
        """
        if count <= 0:
            return _NONE
        evictable = self._state == _MAPPED
        if protected:
            evictable &= self._used_at < self._clock
        slots = np.flatnonzero(evictable)
        slots = slots[~self._pinned(self._block_of[slots])]
        if whole and len(slots) < count:
            return _NONE
        if self.policy == "clock":
            return self._block_of[self._sweep(slots, count)]
        # Least recently used first, of equals the lowest block.
        order = (self._used_at[slots] << 32) | self._block_of[slots]
        if count < len(order):
            order = np.partition(order, count - 1)[:count]
        return (np.sort(order) & 0xFFFFFFFF).astype(np.int32)

    def _sweep(self, slots: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
        """The clock's hand: slots from the hand on, those not referenced first; slots it passes
        lose their mark."""
        order = np.concatenate([slots[slots >= self._hand], slots[slots < self._hand]])
        marked = self._referenced[order]
        cold = np.flatnonzero(~marked)
        if len(cold) >= count:
            passed = order[: cold[count - 1] + 1]
            chosen = order[cold[:count]]
        else:
            passed = order
            chosen = np.concatenate([order[cold], order[marked][: count - len(cold)]])
        self._referenced[passed] = False
        if len(chosen):
            self._hand = (int(chosen[-1]) + 1) % self.num_slots
        return chosen

    def _drop_unselected(self) -> I32:
        slots = np.flatnonzero((self._state == _MAPPED) & (self._used_at < self._clock))
        blocks = self._block_of[slots]
        blocks = blocks[~self._pinned(blocks)]
        self._evict(blocks)
        return blocks

    def _evict(self, blocks: I32) -> None:
        if len(blocks):
            slots = self._slot_of[blocks]
            self._slot_of[blocks] = NO_SLOT
            self._release(slots)
            self.version += 1

    def _release(self, slots: I32) -> None:
        self._state[slots] = _FREE
        self._block_of[slots] = NO_SLOT

    def _put(self, blocks: I32, slots: I32, state: int) -> None:
        if len(blocks):
            self._slot_of[blocks] = slots
            self._block_of[slots] = blocks
            self._state[slots] = state
            self._used_at[slots] = self._clock
            self._referenced[slots] = True
            self.version += state == _MAPPED

    def _abandon(self, blocks: I32) -> None:
        """Prefetches of `blocks` are no longer wanted: written slots are free, slots being written
        become so when the writer is done."""
        slots = self._slot_of[blocks]
        slots = slots[slots >= 0]
        self._slot_of[self._block_of[slots]] = NO_SLOT
        self._block_of[slots] = NO_SLOT
        self._state[slots] = np.where(self._state[slots] == _LOADING, _CANCELLED, _FREE)

    def _forget(self, blocks: I32) -> None:
        slots = self._slot_of[blocks]
        mapped = blocks[(slots >= 0) & (self._state[slots] == _MAPPED)]
        self._evict(mapped)
        self._abandon(blocks)

    def _reach(self, num_blocks: int) -> None:
        more = (
            max(num_blocks, 2 * len(self._slot_of)) - len(self._slot_of)
            if num_blocks > len(self._slot_of)
            else 0
        )
        if more:
            self._slot_of = np.concatenate([self._slot_of, np.full(more, NO_SLOT, np.int32)])
            self._has_copy = np.concatenate([self._has_copy, np.zeros(more, np.bool_)])
            self._swapping = np.concatenate([self._swapping, np.zeros(more, np.bool_)])

    def _check_blocks(self, blocks: I32) -> None:
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.span.count:
            raise self._outside()

    def _outside(self) -> HotKVError:
        return HotKVError(Reason.INVALID_FIELD, f"blocks must be from 0 to {self.span.count - 1}")

    def _not_loading(self) -> HotKVError:
        why = (
            f"slots (0 to {self.num_slots - 1}) include some that no prefetch is writing; pass "
            "those of begin_prefetch, once"
        )
        return HotKVError(Reason.INVALID_FIELD, why)

    def _tables(self) -> tuple[npt.NDArray[Any], ...]:
        """What the kernels change."""
        return (
            self._state,
            self._block_of,
            self._used_at,
            self._referenced,
            self._slot_of,
            self._has_copy,
        )

    def check_invariants(self) -> None:
        """Asserts what the module promises."""
        held = np.isin(self._state, (_MAPPED, _LOADING, _READY))
        assert (self._block_of[held] >= 0).all() and (self._block_of[~held] == NO_SLOT).all()
        blocks = self._block_of[held]
        assert len(np.unique(blocks)) == len(blocks) and (blocks < self.span.count).all()
        assert (self._slot_of[blocks] == np.flatnonzero(held)).all()
        assert int((self._slot_of >= 0).sum()) == len(blocks)
        assert self._num_mapped() <= self.num_slots - self.spare_slots
        assert (
            not self._has_copy[self.span.count :].any()
            and not (self._has_copy & self._swapping).any()
        )
        present = self.map()
        assert (present.blocks == np.sort(self._block_of[self._state == _MAPPED])).all() and len(
            present.blocks
        ) == self._num_mapped()
        assert (present.slots == self._slot_of[present.blocks]).all()
        assert (np.diff(present.blocks) > 0).all() and len(present.blocks) == self._num_mapped()
