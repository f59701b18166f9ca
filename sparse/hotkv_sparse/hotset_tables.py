"""The tables of a hot set, by slot and by block, and the map that they stand for.

Always true (`check_invariants`):
- A slot is free, mapped, loading (a prefetch writes it), ready (written, not adopted yet) or
  cancelled (loading, but unwanted).
- A block has at most one slot that is mapped, loading or ready; the map names exactly the mapped
  ones, at most `capacity_blocks` of them.
- A map that was handed out never changes; `version` grows with every change of the present one.

One owner, `hotkv_sparse.hotset.HotSet`. Kernels (`hotset_kernels`) change the arrays in place.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.hotset_answers import HotMap, SlotState
from hotkv_sparse.topk import Span

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
NO_SLOT = -1
NO_BLOCKS = np.empty(0, np.int32)
_FIRST_BLOCKS = 64
# Plain integers: numpy compares arrays with them several times faster than with members of an enum.
FREE, MAPPED, LOADING, READY, CANCELLED = (int(state) for state in SlotState)


class HotTables:
    """See the module.

    By slot: `state` int8, `block_of` int32, `used_at` int64 (the step that selected it last). By
    block, longer than the context: `slot_of` int32, `has_copy` bool (host memory has it),
    `swapping` bool (a copy to host memory is under way). `clock` counts steps.
    """

    def __init__(self, capacity_blocks: int, spare_slots: int, policy: str) -> None:
        self.capacity_blocks, self.spare_slots, self.policy = capacity_blocks, spare_slots, policy
        self.span = Span(0, 0, 0)
        self.version, self.clock = 0, 0
        self.mapped = NO_BLOCKS
        self._map = HotMap(0, NO_BLOCKS, NO_BLOCKS)
        num_slots = capacity_blocks + spare_slots
        self.state = np.full(num_slots, FREE, np.int8)
        self.block_of = np.full(num_slots, NO_SLOT, np.int32)
        self.used_at = np.zeros(num_slots, np.int64)
        self.slot_of = np.full(_FIRST_BLOCKS, NO_SLOT, np.int32)
        self.has_copy = np.zeros(_FIRST_BLOCKS, np.bool_)
        self.swapping = np.zeros(_FIRST_BLOCKS, np.bool_)

    def __repr__(self) -> str:
        counts = (f"{state.name.lower()} {int((self.state == state).sum())}" for state in SlotState)
        return f"HotTables({len(self.state)} slots: {', '.join(counts)})"

    def add_slots(self, more: int) -> None:
        """Appends free slots."""
        if more <= 0:
            return
        self.state = np.concatenate([self.state, np.full(more, FREE, np.int8)])
        self.block_of = np.concatenate([self.block_of, np.full(more, NO_SLOT, np.int32)])
        self.used_at = np.concatenate([self.used_at, np.zeros(more, np.int64)])

    def add_blocks(self, num_blocks: int) -> None:
        """Makes the tables by block hold `num_blocks` at least."""
        if num_blocks <= len(self.slot_of):
            return
        more = max(num_blocks, 2 * len(self.slot_of)) - len(self.slot_of)
        self.slot_of = np.concatenate([self.slot_of, np.full(more, NO_SLOT, np.int32)])
        self.has_copy = np.concatenate([self.has_copy, np.zeros(more, np.bool_)])
        self.swapping = np.concatenate([self.swapping, np.zeros(more, np.bool_)])

    def for_kernels(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that kernels change, in their order."""
        return self.state, self.block_of, self.used_at, self.slot_of, self.has_copy

    # ------------------------------------------------------------------------------------------ map

    def map(self) -> HotMap:
        """The blocks that may be attended at present."""
        if self._map.version != self.version:
            blocks = np.sort(self.block_of[self.state == MAPPED])
            self._set_map(np.stack([blocks, self.slot_of[blocks]]))
        return self._map

    def publish(self, map_2M: I32) -> HotMap:
        """The next version of the map, with these blocks, ascending, and their slots."""
        self.version += 1
        self._set_map(map_2M)
        return self._map

    def _set_map(self, map_2M: I32) -> None:
        # Kernels are called sooner with arrays that may be written; they don't write this one.
        self.mapped = map_2M[0]
        map_2M.setflags(write=False)
        self._map = HotMap(self.version, map_2M[0], map_2M[1])

    @property
    def num_mapped(self) -> int:
        """Blocks of the map."""
        return len(self.map().blocks)

    def is_mapped(self) -> Mask:
        """bool [blocks of the context]: which of them may be attended."""
        mapped = np.zeros(self.span.count, np.bool_)
        mapped[self.map().blocks] = True
        return mapped

    def is_pinned(self, blocks: I32) -> Mask:
        """Which of `blocks` are always kept or have no copy to come back from."""
        return (blocks < self.span.first) | (blocks >= self.span.last) | ~self.has_copy[blocks]

    # -------------------------------------------------------------------------------------- changes

    def put(self, blocks: I32, slots: I32, state: int) -> None:
        """Gives `blocks` the free `slots`, used now."""
        if len(blocks):
            self.slot_of[blocks] = slots
            self.block_of[slots] = blocks
            self.state[slots] = state
            self.used_at[slots] = self.clock
            self.version += state == MAPPED

    def evict(self, blocks: I32) -> None:
        """Takes the slots of mapped blocks."""
        if len(blocks):
            slots = self.slot_of[blocks]
            self.slot_of[blocks] = NO_SLOT
            self.release(slots)
            self.version += 1

    def release(self, slots: I32) -> None:
        """Makes slots free whose blocks don't point to them any more."""
        self.state[slots] = FREE
        self.block_of[slots] = NO_SLOT

    def abandon(self, blocks: I32) -> None:
        """Drops prefetches of `blocks`: written slots are free at once, slots being written when
        the writer is done."""
        slots = self.slot_of[blocks]
        slots = slots[slots >= 0]
        self.slot_of[self.block_of[slots]] = NO_SLOT
        self.block_of[slots] = NO_SLOT
        self.state[slots] = np.where(self.state[slots] == LOADING, CANCELLED, FREE)

    def forget(self, blocks: I32) -> None:
        """Takes all slots of `blocks`, which have left the context."""
        slots = self.slot_of[blocks]
        self.evict(blocks[(slots >= 0) & (self.state[slots] == MAPPED)])
        self.abandon(blocks)

    # --------------------------------------------------------------------------------------- checks

    def check_blocks(self, blocks: I32) -> None:
        """INVALID_FIELD if one of `blocks` is outside the context."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.span.count:
            raise self.outside()

    def outside(self) -> HotKVError:
        """The error of a block outside the context."""
        return HotKVError(Reason.INVALID_FIELD, f"blocks must be from 0 to {self.span.count - 1}")

    def not_loading(self) -> HotKVError:
        """The error of a slot that no prefetch is writing."""
        why = (
            f"slots (0 to {len(self.state) - 1}) include some that no prefetch is writing; pass "
            "those of begin_prefetch, once"
        )
        return HotKVError(Reason.INVALID_FIELD, why)

    def check_invariants(self) -> None:
        """Asserts what the module promises."""
        held = np.isin(self.state, (MAPPED, LOADING, READY))
        assert (self.block_of[held] >= 0).all() and (self.block_of[~held] == NO_SLOT).all()
        blocks = self.block_of[held]
        assert len(np.unique(blocks)) == len(blocks) and (blocks < self.span.count).all()
        assert (self.slot_of[blocks] == np.flatnonzero(held)).all()
        assert int((self.slot_of >= 0).sum()) == len(blocks)
        assert self.num_mapped <= len(self.state) - self.spare_slots
        assert not self.has_copy[self.span.count :].any()
        assert not (self.has_copy & self.swapping).any()
        present = self.map()
        assert (present.blocks == np.sort(self.block_of[self.state == MAPPED])).all()
        assert (present.slots == self.slot_of[present.blocks]).all()
        assert (np.diff(present.blocks) > 0).all()
