"""The hot sets of a layer on CUDA. A sequence's hot set is the blocks in its hot slots (pages of
device memory for selected blocks). A step attends only to these blocks.

In each step and layer the engine calls:
    hot_sets.grow()      before the layer writes the step's keys and values to the pages of new
                         blocks' slots (`Workspace.pages`)
    hot_sets.correct()   after the selection, before attention

Always true: `hotkv_sparse.hotset` would compute the same hot sets on a CPU, with the policy `lru`
or `none`. `grow` and `correct` queue work on one stream, allocate no memory and never wait.

Shapes: R rows of a step, Z states (sequences with hot sets), K hot slots of a sequence. Upper
limits: B blocks of a sequence, L blocks that a step loads, S blocks of a selection.
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
"""Columns of `CudaHotSets.counts`, in which a step writes: blocks loaded, blocks evicted, blocks to
prefetch, selected blocks, selected blocks that were already in the hot set, blocks attended to, and
the tokens of these."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Contiguous bytes of a block in a layer, which a kernel copies from the arena to the engine's
    cache.

    offset_bytes: start of the bytes in the block's slot in the arena.
    address: device address of the bytes in page 0 of the cache; in page p it is p * `page_bytes`
        higher.
    num_bytes: number of these bytes.
    """

    offset_bytes: int
    address: int
    num_bytes: int


class CudaHotSets:
    """The hot sets of a layer, one for each sequence: the blocks on the device to which a step
    attends.

    fragments: the pieces of a block that `correct` copies from the arena to a page of the cache.
    page_bytes: distance between two pages of the layer's cache.
    table: int32 [rows, hot slots], the block table for attention: the pages of each row's hot set,
        with the last block of the context at the end. In a workspace with `Residents` (the tables
        for contexts beyond device memory), all layers share one `table` and one `lengths`.
    slots: int32 [rows, hot slots], the hot slots of the same blocks, numbered from 0 in each
        sequence.
    lengths: int32 [rows], number of tokens in the blocks of `table`.
    counts: int32 [rows, 8], counts of the last step. The indices of the columns are LOADED and the
        constants after it.
    loads: int32 [rows, 2, `Workspace.max_loads`], the blocks that the last step loaded, and their
        slots.
    victims: int32 [rows, hot slots], the blocks that the last step evicted.
    prefetch: int32 [rows, max_prefetch], selected blocks that the last step did not load, heaviest
        first.
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
        """Returns the array that marks the blocks of which the arena has a copy. Returns None in a
        workspace with `Residents` (the tables for contexts beyond device memory), because then the
        arena has a copy of every complete block."""
        return self._workspace.has_copy if self._workspace.residents is None else None

    def grow(self) -> None:
        """Assigns hot slots (pages of device memory) to the blocks that contexts have gained since
        the last call. Call it before the layer writes keys and values to these pages.

        `workspace.faults[0]` counts the sequences that had no slot for a new block.
        """
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
        """Queues the work that updates the hot sets (the blocks on the device to which a step
        attends). The work evicts blocks, adds selected blocks, copies these from the arena to the
        cache, and writes `table`.

        `workspace.faults[1]` counts blocks that had no copy in the arena.

        blocks: int32 [rows, `Workspace.max_selected`], the selected blocks of each row.
        weights: float32, same shape, the selected blocks' weights; inf for always kept blocks.
        numbers: int32 [rows], number of selected blocks of each row.
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
