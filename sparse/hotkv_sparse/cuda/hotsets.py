"""A layer's hot sets on CUDA. In each step and layer the engine calls:

    hot_sets.grow()      before KV is written to the pages of new blocks' slots (`Workspace.pages`)
    hot_sets.correct()   after the selection, before attention

Always true: the hot sets are those of `hotkv_sparse.hotset` with `lru` or `none`. Calls queue work
on one stream, allocate nothing and never wait.

Shapes: R rows of a step, Z states, K hot slots of a sequence; at most B blocks of a sequence, L
    loaded in a step, S of a selection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotkv_sparse.cuda.device import Array
from hotkv_sparse.cuda.index import upload
from hotkv_sparse.cuda.residents import PIECES
from hotkv_sparse.cuda.workspace import Workspace

STEP_WORDS = 8
LOADED, VICTIMS, PREFETCH, SELECTED, RESIDENT, ATTENDED, SEQUENCE_TOKENS = range(7)
"""Columns of `CudaHotSets.counts`: blocks loaded, evicted, to prefetch, selected, of these
already in the hot set, attended to, and tokens of the latter."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Contiguous bytes of a block in a layer, copied from arena to cache.

    offset_bytes: in the block's slot.
    address: in page 0 of the cache; p * `page_bytes` higher in page p.
    """

    offset_bytes: int
    address: int
    num_bytes: int


class CudaHotSets:
    """A layer's hot sets, one per sequence.

    fragments: of a block, copied by `correct`.
    page_bytes: between two pages of the layer's cache.
    table: int32 [R, K], block table for attention, in the order of the context. With `Residents`
        all layers share `table` and `lengths`.
    slots: int32 [R, K], of the same blocks, from 0 in each sequence.
    lengths: int32 [R], tokens in the blocks of `table`.
    counts: int32 [R, 8] of the last step; columns from LOADED on.
    loads: int32 [R, 2, L], blocks and slots.
    victims: int32 [R, K].
    prefetch: int32 [R, max_prefetch], selected but not loaded, heaviest first.
    """

    def __init__(
        self, workspace: Workspace, fragments: Sequence[Fragment], page_bytes: int
    ) -> None:
        self._workspace, self._device = workspace, workspace.device
        self._page_bytes = page_bytes
        places = np.array(
            [[f.offset_bytes, f.address, f.num_bytes] for f in fragments], np.int64
        ).reshape(-1, 3)
        self._num_fragments = len(places)
        self._fragments = upload(self._device, places) if len(places) else None
        device, shape, work = self._device, workspace.shape, workspace
        sequences, states, slots = shape.num_sequences, shape.states, shape.num_slots
        self.state = device.zeros((states, slots), np.int8)
        self.block_of = upload(device, np.full((states, slots), -1, np.int32))
        self.used_at = device.zeros((states, slots), np.int32)
        self.slot_of = upload(device, np.full((states, shape.max_blocks), -1, np.int32))
        self.capacities = upload(device, np.full(states, work.capacity, np.int32))
        self.clocks = device.zeros((states,), np.int32)
        self.known = device.zeros((states,), np.int32)
        self._seen = device.zeros((states,), np.int32)
        self._is_first = device.zeros((states,), np.uint8)
        self._content = upload(device, np.full((states, slots), -1, np.int32))
        self.loads = device.zeros((sequences, 2, work.max_loads), np.int32)
        self.victims = device.zeros((sequences, slots), np.int32)
        self.prefetch = device.zeros((sequences, shape.max_prefetch), np.int32)
        self.counts = device.zeros((sequences, STEP_WORDS), np.int32)
        self.slots = device.zeros((sequences, slots), np.int32)
        residents = work.residents
        if residents is None:
            self.table, self.lengths = (
                device.zeros((sequences, slots), np.int32),
                device.zeros((sequences,), np.int32),
            )
        else:
            self.table, self.lengths = residents.table, residents.lengths
        self._table_stride = slots if residents is None else residents.max_blocks

    def __repr__(self) -> str:
        shape = self._workspace.shape
        return f"CudaHotSets({shape.num_sequences} sequences of {shape.num_slots} hot slots)"

    def _has_copy(self) -> Array | None:
        """None with `Residents`: every complete block has a copy."""
        return self._workspace.has_copy if self._workspace.residents is None else None

    def grow(self) -> None:
        """Slots for new blocks of contexts. `workspace.faults[0]` counts sequences without room
        for one."""
        work, shape = self._workspace, self._workspace.shape
        self._device.launch(
            "hot_grow",
            (work.num_rows,),
            1024,
            (
                work.plan, work.state_of, np.int32(shape.max_blocks), self.state, self.block_of,
                self.used_at, np.int32(shape.num_slots), self.slot_of, self._has_copy(),
                self.capacities, self.clocks, self.known, work.faults,
                None if work.residents is None else work.residents.epochs, self._seen,
                self._is_first, self._content,
            ),
        )  # fmt: skip

    def correct(self, blocks: Array, weights: Array, numbers: Array) -> None:
        """Evicts, adds selected blocks, copies them from the arena and writes `table`.
        `workspace.faults[1]` counts blocks without a copy.

        blocks: int32 [R, S].
        weights: float32, same shape; inf for always kept blocks.
        numbers: int32 [R], of selected blocks.
        """
        work, shape, config = self._workspace, self._workspace.shape, self._workspace.config
        size, slots = np.int32(shape.max_blocks), np.int32(shape.num_slots)
        self._device.launch(
            "hot_step",
            (work.num_rows,),
            1024,
            (
                blocks, weights, numbers, np.int32(work.max_selected), work.plan, work.state_of,
                size, self.state, self.block_of,
                self.used_at, slots,
                self.slot_of, self._has_copy(), self.capacities, self.clocks,
                np.int32(config.max_correction_blocks),
                np.int32(config.cache_policy == "none"),
                np.int32(work.max_loads), slots, np.int32(shape.max_prefetch), self.loads,
                self.victims, self.prefetch, self.counts, self._is_first,
            ),
        )  # fmt: skip
        self._pull()
        self._device.launch(
            "hot_table",
            (work.num_rows,),
            1024,
            (
                work.plan, work.state_of, np.int32(shape.block_tokens), self.state, self.block_of,
                slots, work.pages, *work.engine_arguments(),
                None if work.residents is None else self._content, self.slots, self.table,
                np.int64(self._table_stride), self.lengths, self.counts,
            ),
        )  # fmt: skip

    def _pull(self) -> None:
        work, shape, residents = self._workspace, self._workspace.shape, self._workspace.residents
        if not self._num_fragments:
            return
        arena = (work.arena, np.int32(shape.max_blocks), self._fragments)
        pages = (np.int32(self._num_fragments), np.int64(self._page_bytes), work.pages)
        slots = np.int32(shape.num_slots)
        if residents is None:
            self._device.launch(
                "pull_blocks",
                (work.max_loads, PIECES, work.num_rows),
                256,
                (
                    self.loads, np.int32(work.max_loads), self.counts, work.state_of, *arena,
                    *pages, slots, work.faults,
                ),
            )  # fmt: skip
            return
        self._device.launch(
            "pull_pages",
            (shape.num_slots, PIECES, work.num_rows),
            256,
            (
                work.state_of, self.state, self.block_of, self._content, slots, residents.freed,
                np.int32(residents.num_sinks), *arena, *pages, work.faults,
            ),
        )  # fmt: skip
