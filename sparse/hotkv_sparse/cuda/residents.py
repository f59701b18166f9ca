"""Tables on the device for contexts beyond its memory, shared by all layers. A block that is only
in host memory is *away*. vLLM owns pages and block tables, and calls:

    residents.name_rows({block: row})   on the host, between two steps
    residents.find(batch, …)            once a step, before the forward pass

Always true:
- A request is its *state*, an index in the tables; in a batch it is a row, recognised by the block
  that takes its newest token, which is its alone. The host never waits for the device, so it may
  plan ahead.
- Only the host decides whether a row attends sparsely (`NamedRow`).
- Blocks [sinks, `freed`) of a state are away and have an arena address, written before `freed` is
  raised. All others are in the engine's pages.
- When a state's number in `epochs` changes, each layer builds its hot set anew.

Shapes: R rows of a batch, S states, B blocks of a sequence at most, K hot slots, P pages of the
    engine.
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
"""Thread blocks that copy a page together."""


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """A step's batch on the device.

    context_tokens: int32 [R], with the step's tokens.
    starts: int32 [R + 1], first query of each row among the step's tokens.
    table: int32 [R, >= blocks], the engine's block table.
    table_stride: elements between two rows.
    """

    context_tokens: Array
    starts: Array
    table: Array
    table_stride: int
    num_rows: int
    num_tokens: int


class NamedRow(NamedTuple):
    """What the host decides for a row of the next step. Not sparse: it attends to its whole
    context."""

    state: int
    is_sparse: bool

    @property
    def word(self) -> np.int32:
        """2 * state + is_sparse; NO_ROW for a row that is not named."""
        return np.int32(2 * self.state + self.is_sparse)


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """Where a layer's pages lie.

    cache: address of page 0.
    layer_offset: of the layer's page in a block's slot.
    """

    cache: int
    page_bytes: int
    layer_offset: int


class Residents:
    """Used by one host thread; work is queued on the device's stream.

    table: int32 [R, B], the block table for attention. Each layer replaces the sparse rows; others
        are the engine's.
    lengths: int32 [R], tokens in each row's blocks.
    state_of_row: int32 [R], output of `find`: states; -1 without.
    addresses, found_rows: [B], output of `locate_keys` for one state and layer.
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
        """Allocates the tables.

        num_rows: of a batch, at most.
        max_blocks: of a sequence.
        num_pages: of the engine.
        max_tokens: of a step, over all rows.
        """
        self.device, self.config = device, config
        self.num_rows, self.num_states = num_rows, num_states
        self.max_blocks, self.block_tokens, self.num_pages = max_blocks, block_tokens, num_pages
        self.num_sinks = -(-config.sink_tokens // block_tokens)
        self.freed = device.zeros((num_states,), np.int32)
        self.epochs = device.zeros((num_states,), np.int32)
        self.begun = device.zeros((num_states,), np.int32)
        self.row_of_block = upload(device, np.full(num_pages, NO_ROW, np.int32))
        self.state_of_row = upload(device, np.full(num_rows, -1, np.int32))
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
        """Upper bound of blocks that become full in a step."""
        return num_tokens // self.block_tokens + num_rows

    # ------------------------------------------------------------------------- between two steps

    def begin_anew(self, state: int) -> None:
        """Resets a state for another request: nothing is away, and hot sets are built anew."""
        self._epochs[state] += 1
        self._freed[state] = 0
        self.device.write(self.epochs, (state,), self._epochs[state : state + 1])
        self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def give_back(self, state: int, num_freed: int) -> None:
        """Blocks from the sinks to before `num_freed` are away. Their addresses must be written
        already."""
        if num_freed != self._freed[state]:
            self._freed[state] = num_freed
            self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def name_rows(self, rows: dict[int, NamedRow]) -> None:
        """Decisions for the next step, by the page that a row writes last. Other rows attend to
        the engine's blocks. Raises INVALID_FIELD if a block or state is out of range."""
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
        """Writes each row's state to `state_of_row`, sparse rows' also to `state_of`, other rows'
        blocks to `table`, and all `lengths`.

        rows: int32 [S, B], rows of sketches in the pools.
        state_of: int32 [R], output, for sparse attention.
        is_named: False for a batch that `name_rows` does not describe: no row has a state.
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
                self.state_of_row, state_of, self.complete_pages, self.complete_rows,
                np.int32(self._max_complete), self.table, np.int64(self.max_blocks), self.lengths,
            ),
        )  # fmt: skip

    def locate_keys(
        self, state: int, count: int, places: PagePlaces, arena: Array, rows: Array
    ) -> None:
        """Addresses of the pages of a request's first `count` blocks, in the cache or, if away, in
        the arena, to `addresses`; rows of their sketches to `found_rows`, -1 if the request is not
        in the batch.

        arena: addresses of slots.
        rows: as in `find`.
        """
        batch = self._batch()
        self.device.launch(
            "locate_keys",
            (max(1, min(-(-count // 128), 64)),),
            128,
            (
                np.int32(state), np.int32(count), self.state_of_row, np.int32(batch.num_rows),
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
        """Copies the first `count` pages of a row in one layer, from cache or arena, to contiguous
        memory for a prefill.

        arena: addresses of slots.
        first_page: of `target`, for the first.
        table: int32 [count], output: page of `target` of each block.
        faults: counts blocks without an address (`Workspace.faults`).
        """
        batch = self._batch()
        self.device.launch(
            "stage_pages",
            (count, PIECES),
            256,
            (
                np.int32(row), self.state_of_row, batch.table, np.int64(batch.table_stride),
                self.freed,
                np.int32(self.num_sinks), arena, np.int32(self.max_blocks), np.int64(places.cache),
                np.int64(places.page_bytes), np.int64(places.layer_offset), np.int64(target),
                np.int32(first_page), table, faults,
            ),
        )  # fmt: skip

    def _batch(self) -> EngineBatch:
        if self.batch is None:
            raise HotKVError(Reason.INVALID_FIELD, "no step has begun")
        return self.batch
