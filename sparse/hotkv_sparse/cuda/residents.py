"""State that a step's layers share if an engine owns pages and block tables.

Old blocks of a context are then in host memory only (*away*).

    residents.name_rows({block: row})   the host, between steps, as it hears of requests
    residents.find(batch, …)            once a step, before the forward pass

Always true:
- The host identifies a request by its *state*. The device finds the state's row in the batch: the
    block that a row writes last identifies it. The host reads nothing back, so it may run ahead.
- A row attends sparsely only if the host named it so (`NamedRow`); no kernel decides that.
- Blocks [sinks, `freed`) of a state are away and have an address in `arena`. All other blocks are
    in the page that the engine's block table names. `freed` is raised after the addresses are
    written.
- A state starts anew, in all layers, when its `epoch` changes.

Shapes: R rows of a batch, S states, B blocks a sequence may have, K hot slots of a sequence, P
pages of the engine's pool.
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
"""Thread blocks that copy a page."""


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """A step's batch in device memory.

    context_tokens: int32 [R], including the step's own tokens.
    starts: int32 [R + 1], starts of the rows' queries.
    table: int32 [R, ≥ B], the engine's block table.
    table_stride: elements between two rows of `table`.
    """

    context_tokens: Array
    starts: Array
    table: Array
    table_stride: int
    num_rows: int
    num_tokens: int


class NamedRow(NamedTuple):
    """A row of the next step: its state, and whether it attends sparsely."""

    state: int
    is_sparse: bool

    @property
    def word(self) -> np.int32:
        """Returns the word that kernels read; -1 would mean that there is no row."""
        return np.int32(2 * self.state + self.is_sparse)


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """The places of a layer's pages.

    cache: address of page 0.
    page_bytes: bytes of a page.
    layer_offset: bytes from the start of a block's slot in the arena to the layer's page.
    """

    cache: int
    page_bytes: int
    layer_offset: int


class Residents:
    """State that a step's layers share; see the module. One thread of the host.

    Every call queues work on the device's stream.

    table, lengths: int32 [R, B] and int32 [R], contiguous, the input of attention. For rows that
        decode sparsely, the last layer's result; for other rows, the engine's own values.
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

        max_tokens: most tokens of a step, over all rows.
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
        """Returns the most blocks that a step of this many rows and tokens completes."""
        return num_tokens // self.block_tokens + num_rows

    # ------------------------------------------------------------------------- between two steps

    def begin_anew(self, state: int) -> None:
        """Makes the state's hot sets start anew, in all layers, with its next step."""
        self._epochs[state] += 1
        self._freed[state] = 0
        self.device.write(self.epochs, (state,), self._epochs[state : state + 1])
        self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def give_back(self, state: int, num_freed: int) -> None:
        """Marks the blocks from the sinks up to `num_freed` as away. Their addresses are already
        written."""
        if num_freed != self._freed[state]:
            self._freed[state] = num_freed
            self.device.write(self.freed, (state,), self._freed[state : state + 1])

    def name_rows(self, rows: dict[int, NamedRow]) -> None:
        """Names the rows of the next step by the block that each row writes last.

        Rows without a name attend to the blocks of the engine's table. Raises INVALID_FIELD if a
        block or state is out of range.
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

    def find(self, batch: EngineBatch, rows: Array, state_of: Array) -> None:
        """Finds the state of each row. Writes it to `own_of`, and to `state_of` for rows that
        attend sparsely.

        rows: int32 [S, B], the blocks' rows in the pools of representations.
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
                np.int32(self.num_pages), rows, np.int32(self.max_blocks), self.own_of, state_of,
                self.complete_pages, self.complete_rows, np.int32(self._max_complete),
                self.table, np.int64(self.max_blocks), self.lengths,
            ),
        )  # fmt: skip

    def locate_keys(
        self, state: int, count: int, places: PagePlaces, arena: Array, rows: Array
    ) -> None:
        """Fills `addresses` and `found_rows` for the state's blocks [0, count) in a layer."""
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
        """Copies the first `count` pages of a batch row side by side to `target`.

        first_page: page of `target` to start at.
        table: int32 [count], gets the pages' numbers.
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
