"""Device memory that all layers of a step share: its plan, scratch memory, places of blocks.
`begin` is called once a step, before the forward pass.

Always true: shapes and buffers are fixed; `begin` allocates nothing and never waits, so a CUDA
graph may capture it. A row with 0 `context_tokens` costs almost nothing: it is empty, or attends to
its whole context.

A *row* is a sequence of the step; a *state* is a sequence with hot sets, kept for many steps.
`state_of` maps rows to states.

Shapes: R rows of a step, S states, Q query heads, B blocks of a sequence at most, K hot slots of
    a sequence.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import Argument, Array, Device
from hotkv_sparse.cuda.index import check_length, upload
from hotkv_sparse.cuda.residents import EngineBatch, Residents
from hotkv_sparse.selection import floor_blocks

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

PLAN_WORDS = 8
_PIECE_BLOCKS = 2048
MOST_CHOSEN_BY_ONE = 8192
"""Blocks of a sequence up to which one thread block chooses."""
_SEARCH_BYTES = 12 * 2048 + 40
"""Of `Search` in choose.cu."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The fixed sizes of a workspace.

    num_sequences: rows of a step, at most.
    max_blocks: of a sequence.
    num_slots: of a sequence and layer, spare ones included.
    max_prefetch: blocks that a step asks to prefetch for the next.
    num_states: 0: as `num_sequences`.
    """

    num_sequences: int
    max_blocks: int
    block_tokens: int
    num_heads: int
    kv_heads: int
    head_size: int
    num_slots: int
    max_prefetch: int = 8
    num_states: int = 0

    @property
    def states(self) -> int:
        return self.num_states or self.num_sequences

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.kv_heads


class Workspace:
    """What the layers of a step share.

    pages: int32 [S, K], the engine's page of each hot slot, in all layers; at first 0, 1, ….
    state_of: int32 [R]; -1 without a state; at first 0, 1, ….
    residents: if set, `begin_batch` begins a step, else `begin`.
    capacity: blocks of a hot set, at most.
    searches: uint8 [R, bytes]; None: one thread block chooses a row's blocks.
    piece_counts: int32 [R, pieces, 2]; None like `searches`.
    faults: int32 [3], counts that only grow: sequences without a slot for a new block; blocks
        without a copy in the arena; pages copied from the arena (no faults).
    """

    def __init__(
        self,
        device: Device,
        config: SparseConfig,
        shape: StepShape,
        residents: Residents | None = None,
    ) -> None:
        _check(config, shape)
        self.residents = residents
        self.device, self.config, self.shape = device, config, shape
        sequences, heads, blocks = shape.num_sequences, shape.num_heads, shape.max_blocks
        self.max_always = config.max_always_blocks(shape.block_tokens)
        max_tokens = blocks * shape.block_tokens
        budget = config.most_blocks(max_tokens, shape.block_tokens)
        self.max_selected = max(budget, self.max_always)
        self.max_loads = max(config.max_correction_blocks, self.max_always)
        self.capacity = shape.num_slots
        if residents is not None:
            # A sequence's first step fills its hot set. Slots beyond the budget, where CPU
            # engines prefetch, stay unused.
            self.max_loads = shape.num_slots
            budget = config.budget_blocks(max_tokens, shape.block_tokens)
            self.capacity = min(self.capacity, max(budget, self.max_always))
        self.num_pieces = -(-blocks // _PIECE_BLOCKS)
        self.plan = device.zeros((sequences, PLAN_WORDS), np.int32)
        states = shape.states
        self.rows = device.zeros((states, blocks), np.int32)
        self.arena = device.zeros((states, blocks), np.int64)
        self.has_copy = device.zeros((states, blocks), np.uint8)
        self.faults = device.zeros((3,), np.int32)
        self.pages = upload(
            device, np.arange(states * shape.num_slots, dtype=np.int32).reshape(states, -1)
        )
        self.state_of = upload(
            device, np.where(np.arange(sequences) < states, np.arange(sequences), -1).astype("i4")
        )
        self.scores = device.zeros((sequences, heads, blocks), np.float32)
        self.masses = device.zeros((sequences, heads, self.num_pieces, 2), np.float32)
        self.weights = device.zeros((sequences, blocks), np.float32)
        self.searches = self.piece_counts = None
        if blocks > MOST_CHOSEN_BY_ONE:
            self.searches = device.zeros((sequences, _SEARCH_BYTES), np.uint8)
            self.piece_counts = device.zeros((sequences, self.num_pieces, 2), np.int32)
        self.always_log_mass = device.zeros((sequences, heads), np.float32)
        self.always_mass = device.zeros((sequences,), np.float32)
        self.words = device.zeros((sequences, heads, 2), np.float32)

    def __repr__(self) -> str:
        return (
            f"Workspace({self.shape.num_sequences} sequences of up to {self.shape.max_blocks} "
            "blocks)"
        )

    def set_blocks(self, sequence: int, first: int, rows: I32, addresses: I64) -> None:
        """Places of consecutive blocks from position `first` on. Between two steps. Blocks until
        the values are copied.

        sequence: its state.
        rows: of sketches in the pools.
        addresses: of slots in the mapped arena; 0: no copy.
        """
        if (
            not 0 <= first <= first + len(rows) <= self.shape.max_blocks
            or len(addresses) != len(rows)
            or not 0 <= sequence < self.shape.states
        ):
            why = (
                f"{len(rows)} rows and {len(addresses)} addresses from block {first} of "
                f"sequence {sequence}"
            )
            raise HotKVError(Reason.INVALID_FIELD, f"{why}; pass equal numbers within {self!r}")
        self.device.write(self.rows, (sequence, first), rows.astype(np.int32)[None])
        self.device.write(self.arena, (sequence, first), addresses.astype(np.int64)[None])
        self.device.write(self.has_copy, (sequence, first), (addresses != 0).astype(np.uint8)[None])

    def begin(self, context_tokens: Array) -> None:
        """Without `residents`. `context_tokens`: int32 [R], with the step's tokens; 0 skips the
        row."""
        check_length("context_tokens", context_tokens.shape, (self.shape.num_sequences,))
        self._plan(context_tokens, self.shape.num_sequences)

    @property
    def num_rows(self) -> int:
        """Of the step; determines the kernels' grids."""
        residents = self.residents
        batch = None if residents is None else residents.batch
        return self.shape.num_sequences if batch is None else batch.num_rows

    def engine_arguments(self) -> tuple[Argument, ...]:
        """The engine's block table, its stride, `Residents.freed` and the number of sink blocks."""
        residents = self.residents
        if residents is None or residents.batch is None:
            return None, np.int64(0), None, np.int32(0)
        batch = residents.batch
        stride = np.int64(batch.table_stride)
        return batch.table, stride, residents.freed, np.int32(residents.num_sinks)

    def begin_batch(self, batch: EngineBatch, is_named: bool = True) -> None:
        """With `residents`. The batch takes the first rows; the others are empty. `is_named`:
        see `Residents.find`."""
        assert self.residents is not None, "a workspace without an engine"
        self.residents.find(batch, self.rows, self.state_of, is_named)
        # All rows, not only the batch's: a graph captured with more rows must find these empty.
        self._plan(batch.context_tokens, self.shape.num_sequences)

    def _plan(self, context_tokens: Array, num_rows: int) -> None:
        config, shape, residents = self.config, self.shape, self.residents
        topk = config.sparse_topk
        self.device.launch(
            "plan_step",
            (-(-num_rows // 128),),
            128,
            (
                context_tokens, self.state_of, np.int32(num_rows), np.int32(shape.block_tokens),
                np.int32(config.sink_tokens),
                np.int32(config.recent_tokens), np.int32(topk if type(topk) is int else 0),
                np.float64(topk),
                np.int32(floor_blocks(shape.block_tokens)), np.int32(shape.max_blocks),
                None if residents is None else residents.epochs,
                None if residents is None else residents.begun, np.int32(config.sets), self.plan,
            ),
        )  # fmt: skip


def _check(config: SparseConfig, shape: StepShape) -> None:
    if config.fusion:
        raise HotKVError(
            Reason.INVALID_FIELD,
            "sparse.fusion is set; on CUDA a layer has one scorer, leave it out",
        )
    if shape.kv_heads < 1 or shape.num_heads % shape.kv_heads:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{shape.num_heads} query heads don't share {shape.kv_heads} KV heads evenly",
        )
    if min(shape.num_sequences, shape.max_blocks, shape.block_tokens, shape.num_slots) < 1:
        raise HotKVError(Reason.INVALID_FIELD, f"{shape} has a size below 1")
