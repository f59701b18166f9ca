"""Tables on the device for contexts beyond device memory. The old blocks of such contexts are only
in host memory. All layers of a step share the tables.

A block that is only in host memory is called *away*. The engine (vLLM) owns the pages and the block
tables. It calls:

    residents.name_rows({block: row})   on the host, between two steps
    residents.find(batch, …)            once a step, before the forward pass

Always true:
- The host identifies a request by its *state*, an index in the tables. A step's batch has a row for
  each request. The host and the kernels recognise a row by the block to which it writes its newest
  token, because this block belongs to one request only. The host never waits for results of the
  device, so it may plan further steps before they arrive.
- Only the host decides whether a row attends sparsely (`NamedRow`); kernels never decide this.
- Blocks [sinks, `freed`) of a state are away and have an address in the arena. All other blocks are
  in the pages that the engine's block table names. `freed` is raised only after the addresses are
  written.
- `epochs` has a number for each state. When the number changes, every layer discards the state's
  hot set (the blocks to which the request attends) and builds it anew.

Shapes: R rows of a batch, S states, B blocks of a sequence (upper limit), K hot slots of a
sequence, P pages of the engine's pool.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import Array, Device
from hotkv_sparse.cuda.index import upload

NO_ROW = np.int32(-1)
PIECES = 2
"""Number of thread blocks that copy a page together."""


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The engine's batch of a step, in device memory.

    context_tokens: int32 [rows], tokens in the context of each row, including the step's tokens.
    starts: int32 [rows + 1], index of each row's first query among the step's tokens.
    table: int32 [rows, at least the blocks of a row], the engine's block table: the page of each
        block of a row.
    table_stride: number of elements between two rows of `table`.
    num_rows, num_tokens: rows and tokens of the step.
    """

    context_tokens: Array
    starts: Array
    table: Array
    table_stride: int
    num_rows: int
    num_tokens: int


class NamedRow(NamedTuple):
    """The host's decision about a row (request) of the next step.

    state: index of the request in the tables.
    is_sparse: True: the row attends only to its hot set (blocks on the device). False: it attends
        to its whole context.
    """

    state: int
    is_sparse: bool

    @property
    def word(self) -> np.int32:
        """Returns the number that stands for this decision in device memory: 2 * state + is_sparse.
        (NO_ROW stands for a row that the host has not named.)"""
        return np.int32(2 * self.state + self.is_sparse)


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """The places of a layer's pages (a block's bytes in this layer) in the engine's cache and in
    the arena.

    cache: device address of page 0.
    page_bytes: bytes of a page.
    layer_offset: bytes from the start of a block's slot in the arena to the layer's page.
    """

    cache: int
    page_bytes: int
    layer_offset: int


class Residents:
    """The tables for contexts beyond device memory (see the module). Used by one host thread.

    Methods queue work on the device's stream. A state is a request's index in the tables; a row is
    its place in the batch of a step.

    table: int32 [rows, blocks], contiguous, the block table for attention. In each layer, rows that
        attend sparsely are replaced; the other rows are copies of the engine's rows.
    lengths: int32 [rows], number of tokens in the blocks of each row of `table`.
    own_of: int32 [rows], output of `find`: the state of each batch row; -1 without a state.
    addresses, found_rows: [blocks], output of `locate_keys` for one state and layer.
    """

    def __init__(
        self,
        device: Device,
        config: SparseConfig,
        num_rows: int,
        num_states: int,
        max_blocks: int,
        block_tokens: int,
        num_pages: int,
        max_tokens: int,
    ) -> None:
        """Allocates the tables on the device.

        num_rows: largest number of rows in a batch.
        num_states: number of states (requests that the tables can hold).
        max_blocks: largest number of blocks in a sequence.
        num_pages: number of pages of the engine's pool.
        max_tokens: largest number of tokens in a step, summed over all rows.
        """
        self.device, self.config = device, config
        self.num_rows, self.num_states = num_rows, num_states
        self.max_blocks, self.block_tokens, self.num_pages = max_blocks, block_tokens, num_pages
        self.num_sinks = -(-config.sink_tokens // block_tokens)
        self.freed = device.zeros((num_states,), np.int32)
        self.epochs = device.zeros((num_states,), np.int32)
        self.begun = device.zeros((num_states,), np.int32)
        self.row_of_block = upload(device, np.full(num_pages, NO_ROW, np.int32))
        self.own_of = upload(device, np.full(num_rows, -1, np.int32))
        self._max_complete = self.num_complete(num_rows, max_tokens)
        self.complete_pages = device.zeros((self._max_complete,), np.int32)
        self.complete_rows = upload(device, np.full(self._max_complete, -1, np.int32))
        self.table = device.zeros((num_rows, max_blocks), np.int32)
        self.lengths = device.zeros((num_rows,), np.int32)
        self.addresses = device.zeros((max_blocks,), np.int64)
        self.found_rows = device.zeros((max_blocks,), np.int32)
        self.batch: EngineBatch | None = None
        self._epochs = np.zeros(num_states, np.int32)
        self._freed = np.zeros(num_states, np.int32)
        self._named: dict[int, np.int32] = {}

    def __repr__(self) -> str:
        return f"Residents({self.num_states} states, {len(self._named)} in the step)"

    def num_complete(self, num_rows: int, num_tokens: int) -> int:
        """Returns an upper bound of the number of blocks that become full in a step with `num_rows`
        rows and `num_tokens` tokens."""
        return num_tokens // self.block_tokens + num_rows

    # ------------------------------------------------------------------------- between two steps

    def begin_anew(self, state: int) -> None:
        """Resets a state for another request: no block of the state is away (only in host memory),
        and the next step builds its hot sets (blocks on the device) again in all layers."""
        self._epochs[state] += 1
        self._freed[state] = 0
        self.device.write(self.epochs, (state,), self._epochs[state : state + 1])
        self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def give_back(self, state: int, num_freed: int) -> None:
        """Marks blocks of a request as away (only in host memory): the blocks from the end of the
        sinks to position `num_freed` (exclusive). Kernels then no longer read them from the pages
        of the engine's block table. The caller must already have written the host addresses of
        these blocks."""
        if num_freed != self._freed[state]:
            self._freed[state] = num_freed
            self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def name_rows(self, rows: dict[int, NamedRow]) -> None:
        """Writes to the device, for each row of the next step, its state (index of a request in the
        tables) and whether it attends sparsely.

        Raises INVALID_FIELD if a block or state is out of range.

        rows: the decision about each row, by the id of the block (page) that the row writes last.
            Rows without a decision attend to the blocks of the engine's table.
        """
        for block, (state, _) in rows.items():
            if not 0 <= block < self.num_pages or not 0 <= state < self.num_states:
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"block {block} of state {state}; there are {self.num_pages} pages and "
                    f"{self.num_states} states",
                )
        words = {block: row.word for block, row in rows.items()}
        for block in self._named.keys() | words.keys():
            word = words.get(block, NO_ROW)
            if word != self._named.get(block, NO_ROW):
                self.device.write(self.row_of_block, (block,), np.array([word]))
        self._named = words

    # --------------------------------------------------------------------------------- in a step

    def find(self, batch: EngineBatch, rows: Array, state_of: Array, is_named: bool = True) -> None:
        """Finds the state (index of a request in the tables) of each row of the batch, and writes
        it to `own_of`. For a row that attends sparsely, also writes the state to `state_of`, which
        the kernels of sparse attention read. For any other row, writes the row's blocks to `table`.
        Writes `lengths` for all rows.

        rows: int32 [states, blocks], for each block of a state, the row of its sketch
            (compact form of its keys) in the pools.
        state_of: int32 [rows], output.
        is_named: False for a batch that `name_rows` does not describe; then no row has a state.
        """
        if batch.num_rows > self.num_rows:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"a batch of {batch.num_rows} rows; there is room for {self.num_rows}",
            )
        self.batch = batch
        self.device.launch(
            "find_states",
            (self.num_rows,),
            128,
            (
                batch.context_tokens, batch.starts, np.int32(batch.num_rows), batch.table,
                np.int64(batch.table_stride), np.int32(self.block_tokens), self.row_of_block,
                np.int32(self.num_pages if is_named else 0), rows, np.int32(self.max_blocks),
                self.own_of, state_of, self.complete_pages, self.complete_rows,
                np.int32(self._max_complete), self.table, np.int64(self.max_blocks), self.lengths,
            ),
        )  # fmt: skip

    def locate_keys(
        self, state: int, count: int, places: PagePlaces, arena: Array, rows: Array
    ) -> None:
        """Finds where the keys of the first `count` blocks of a request are in a layer. Writes the
        address of each block's page to `addresses`, and the row of its sketch to
        `found_rows`. The row is -1 if the request is not in the batch.

        The page is in the cache, or in the arena if the block is away (only in host memory).

        arena: addresses of the blocks' slots in the arena.
        rows: for each block of a state, the row of its sketch (compact form of its keys) in
            the pools.
        """
        batch = self._batch()
        self.device.launch(
            "locate_keys",
            (max(1, min(-(-count // 128), 64)),),
            128,
            (
                np.int32(state), np.int32(count), self.own_of, np.int32(batch.num_rows),
                batch.table, np.int64(batch.table_stride), self.freed, np.int32(self.num_sinks),
                arena, rows, np.int32(self.max_blocks), np.int64(places.cache),
                np.int64(places.page_bytes), np.int64(places.layer_offset), self.addresses,
                self.found_rows,
            ),
        )  # fmt: skip

    def stage(
        self,
        row: int,
        count: int,
        places: PagePlaces,
        arena: Array,
        target: int,
        first_page: int,
        table: Array | int,
        faults: Array,
    ) -> None:
        """Copies the first `count` pages of a batch row, in one layer, to contiguous memory, so
        that a prefill can attend to the whole context. Copies a page from the cache, or from the
        arena if its block is away (only in host memory).

        arena: addresses of the blocks' slots in the arena.
        target: address of the contiguous memory.
        first_page: page of `target` that receives the first page.
        table: int32 [count], output: the page of `target` that received each block.
        faults: counts of blocks without an address (`Workspace.faults`).
        """
        batch = self._batch()
        self.device.launch(
            "stage_pages",
            (count, PIECES),
            256,
            (
                np.int32(row), self.own_of, batch.table, np.int64(batch.table_stride), self.freed,
                np.int32(self.num_sinks), arena, np.int32(self.max_blocks), np.int64(places.cache),
                np.int64(places.page_bytes), np.int64(places.layer_offset), np.int64(target),
                np.int32(first_page), table, faults,
            ),
        )  # fmt: skip

    def _batch(self) -> EngineBatch:
        if self.batch is None:
            raise HotKVError(Reason.INVALID_FIELD, "no step has begun")
        return self.batch
