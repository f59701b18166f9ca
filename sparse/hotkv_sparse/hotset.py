"""The hot set of one sequence, layer and set of heads: which blocks are resident in which hot
slots.

Always true:
- The promises of `hotset_tables` about slots, blocks and maps, and of `hotset_eviction` about
  victims.
- Prefetch gets free slots only. A block that it wrote becomes visible in `adopt`, at a step
  boundary, in a new map. A correction may take the slot of the block it evicts, as the engine
  writes it itself before it attends.

Decides, and does nothing: the caller copies. One owner, one thread. A step is a compiled kernel
over the tables (`hotset_kernels`), with `hotset_reference` beside it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import hotset_eviction as eviction
from hotkv_sparse import hotset_reference as reference
from hotkv_sparse.config import CACHE_POLICIES
from hotkv_sparse.hotset_answers import Growth, HotMap, SlotMoves, SlotState, Step
from hotkv_sparse.hotset_tables import FREE, MAPPED, NO_BLOCKS, NO_SLOT, HotTables
from hotkv_sparse.topk import Selection, Span

I32 = npt.NDArray[np.int32]


class HotSet:
    """One hot set. INVALID_FIELD for arguments that make no sense; a call that raises changes
    nothing.

    `spare_slots`: slots beyond the capacity that prefetch may always use. `policy`: `lru` evicts
    the block that was selected least recently, `none` keeps nothing that the present selection
    leaves out. `tables`: the state; nobody else writes it.
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
        self.tables = HotTables(capacity_blocks, spare_slots, policy)
        self._keeps_unselected = policy != "none"
        self._kernels: Any = native.load("hotkv_sparse.kernels")

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{state.name.lower()} {int((self.tables.state == state).sum())}" for state in SlotState
        )
        return (
            f"HotSet({self.tables.policy}, capacity {self.capacity_blocks}, blocks "
            f"{self.span.count}, {counts})"
        )

    # ---------------------------------------------------------------------------------------- state

    @property
    def capacity_blocks(self) -> int:
        """The most blocks that the map may name."""
        return self.tables.capacity_blocks

    @property
    def num_slots(self) -> int:
        """Hot slots in all; the slot numbers are below it."""
        return len(self.tables.state)

    @property
    def span(self) -> Span:
        """The context's blocks, and which of them are candidates."""
        return self.tables.span

    def map(self) -> HotMap:
        """The blocks that may be attended at present."""
        return self.tables.map()

    def check_invariants(self) -> None:
        """Asserts what the tables promise."""
        self.tables.check_invariants()

    # -------------------------------------------------------------------------------------- changes

    def extend(self, where: Span, num_complete: int, num_host: int = 0) -> Growth:
        """The context has `where.count` blocks, the first `num_complete` of them complete; call it
        whenever a block is begun, or fills.

        Blocks that the context gains get slots, but for those below `num_host`, which host memory
        has already. A smaller context (a rewind; settle swaps first) gives its slots back.
        OVERLOADED if too little may be evicted: then wait for swaps, or `resize`.
        """
        if not 0 <= num_complete <= where.count or num_host > num_complete:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"{num_complete} blocks complete, {num_host} in host memory; the context has "
                f"{where.count}",
            )
        tables = self.tables
        old = tables.span
        fresh = np.arange(max(old.count, num_host), where.count, dtype=np.int32)
        tables.add_blocks(where.count)
        tables.span = Span(where.first, where.last, max(where.count, old.count))
        room = eviction.room(tables, len(fresh), whole=True)
        if len(room.slots) < len(fresh):
            tables.span = old
            raise HotKVError(
                Reason.OVERLOADED,
                f"{len(fresh)} new blocks don't fit in {self!r}; wait until blocks are stored, or "
                "raise the capacity",
            )
        tables.evict(room.victims)
        if where.count < old.count:
            tables.forget(np.arange(where.count, old.count, dtype=np.int32))
        tables.span = where
        tables.has_copy[old.count : num_host] = True
        tables.has_copy[where.count :] = False
        tables.swapping[num_complete:] = False
        tables.put(fresh, room.slots, MAPPED)
        mapped = tables.is_mapped()
        tables.has_copy[num_complete : where.count] &= ~mapped[num_complete:]
        swap_out = np.flatnonzero(
            mapped[:num_complete]
            & ~tables.has_copy[:num_complete]
            & ~tables.swapping[:num_complete]
        ).astype(np.int32)
        tables.swapping[swap_out] = True
        return Growth(SlotMoves(fresh, room.slots, room.victims), swap_out)

    def swapped_out(self, blocks: I32, success: bool) -> None:
        """Host memory has (or, without success, has not) a copy of `blocks`; those that failed are
        offered again by the next `extend`."""
        self.tables.check_blocks(blocks)
        if success:
            self.tables.has_copy[blocks] |= self.tables.swapping[blocks]
        self.tables.swapping[blocks] = False

    def seed(self, blocks: I32) -> SlotMoves:
        """Maps `blocks` of host memory, in order of importance, as far as there is room without
        evicting; load them before attending."""
        tables = self.tables
        tables.check_blocks(blocks)
        _, order = np.unique(blocks, return_index=True)
        blocks = blocks[np.sort(order)]
        blocks = blocks[tables.slot_of[blocks] == NO_SLOT]
        free = np.flatnonzero(tables.state == FREE).astype(np.int32)
        count = min(len(blocks), len(free), tables.capacity_blocks - tables.num_mapped)
        blocks, slots = blocks[: max(count, 0)], free[: max(count, 0)]
        tables.has_copy[blocks] = True
        tables.put(blocks, slots, MAPPED)
        return SlotMoves(blocks, slots, NO_BLOCKS)

    def step(self, selection: Selection, max_loads: int) -> Step:
        """One step with a fresh selection over the present span: at most `max_loads` missing
        candidates are loaded now, heaviest first.

        Always kept blocks are resident unless they were never seeded; those that are missing are
        loaded first, whatever `max_loads` says.
        """
        if self._kernels is None:
            return reference.step(self.tables, selection, max_loads)
        blocks, weights = (
            np.asarray(selection.blocks, np.int32),
            np.asarray(selection.weights, np.float32),
        )
        tables = self.tables
        present = tables.map()
        num_slots, where = len(tables.state), tables.span
        maps, moves = (
            np.empty((2, num_slots), np.int32),
            np.empty((4, max(len(blocks), num_slots)), np.int32),
        )
        (
            num_mapped, num_loads, num_out, num_rest, num_always, num_resident, num_kept,
        ) = self._kernels.hot_step(
            blocks, weights, max_loads, tables.mapped, maps, moves, *tables.for_kernels(),
            tables.capacity_blocks, tables.clock + 1, self._keeps_unselected,
            where.first, where.last, where.count,
        )  # fmt: skip
        if num_mapped == self._kernels.REFUSED:
            raise tables.outside()
        tables.clock += 1
        if num_loads or num_out:
            present = tables.publish(maps[:, :num_mapped])
        loads = SlotMoves(moves[0, :num_loads], moves[1, :num_loads], moves[2, :num_out])
        return Step(
            present, loads, moves[3, :num_rest], len(blocks) - num_always, num_resident - num_kept
        )

    def begin_prefetch(self, blocks: I32) -> SlotMoves:
        """Free slots for `blocks`, in order, as far as they reach; report each with
        `finish_prefetch`. Nothing is evicted."""
        if not len(blocks):
            return SlotMoves(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)
        if self._kernels is None:
            return reference.begin_prefetch(self.tables, blocks)
        tables = self.tables
        moves = np.empty((2, min(len(blocks), self.num_slots)), np.int32)
        num = self._kernels.hot_begin_prefetch(
            np.asarray(blocks, np.int32), moves, *tables.for_kernels(), tables.clock,
            tables.span.count,
        )  # fmt: skip
        if num == self._kernels.REFUSED:
            raise tables.outside()
        return SlotMoves(moves[0, :num], moves[1, :num], NO_BLOCKS)

    def finish_prefetch(self, slots: I32, success: bool) -> None:
        """The prefetch has written `slots`, or will never touch them again."""
        if self._kernels is None:
            return reference.finish_prefetch(self.tables, slots, success)
        tables = self.tables
        answer = self._kernels.hot_finish_prefetch(
            np.asarray(slots, np.int32), success, tables.state, tables.block_of, tables.slot_of
        )
        if answer == self._kernels.REFUSED:
            raise tables.not_loading()

    def adopt(self) -> SlotMoves:
        """Step boundary: prefetched blocks join the map, evicting others; those without room are
        dropped. No copies."""
        if self._kernels is None:
            return reference.adopt(self.tables)
        tables = self.tables
        maps, moves = (
            np.empty((2, self.num_slots), np.int32),
            np.empty((3, self.num_slots), np.int32),
        )
        num_mapped, num, num_out = self._kernels.hot_adopt(
            tables.map().blocks, maps, moves, *tables.for_kernels(),
            tables.capacity_blocks, tables.clock, tables.span.first, tables.span.last,
        )  # fmt: skip
        if num or num_out:
            tables.publish(maps[:, :num_mapped])
        return SlotMoves(moves[0, :num], moves[1, :num], moves[2, :num_out])

    def resize(self, capacity_blocks: int) -> I32:
        """Sets the capacity: adds slots, or evicts what may be evicted now; later changes evict the
        rest. Returns the victims."""
        if capacity_blocks < 1:
            raise HotKVError(
                Reason.INVALID_FIELD, f"capacity is {capacity_blocks} blocks; use 1 or more"
            )
        tables = self.tables
        tables.add_slots(capacity_blocks + tables.spare_slots - self.num_slots)
        tables.capacity_blocks = capacity_blocks
        victims = eviction.victims(tables, tables.num_mapped - capacity_blocks)
        tables.evict(victims)
        return victims
