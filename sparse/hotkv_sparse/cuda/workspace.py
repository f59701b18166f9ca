"""Device memory that all layers of a step on CUDA share: the step's plan (lengths and candidates of
each sequence), scratch memory, and the places of blocks.

The engine calls `workspace.begin(context_tokens)` once a step, before the forward pass.

Always true:
- Shapes and buffers are fixed when the workspace is made. `begin` allocates no memory and never
  waits, so a CUDA graph may capture it.
- A sequence whose `context_tokens` is 0 is skipped at almost no cost. The caller passes 0 if the
  row is empty, or if its request attends to its whole context.

A *row* is a sequence of the current step. A *state* is a sequence with hot sets (blocks in device
memory to which its steps attend); its tables are kept for many steps. `state_of` maps rows to
states.

Shapes: R rows of a step, S states, Q query heads, B blocks of a sequence (upper limit), K hot slots
(pages for selected blocks) of a sequence.
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


@dataclass(frozen=True, slots=True)
class StepShape:
    """The fixed sizes of a workspace.

    num_sequences: largest number of sequences (rows) in a step.
    max_blocks: largest number of blocks in a sequence.
    num_slots: hot slots (pages of device memory for selected blocks) of a sequence and layer,
        including spare slots.
    max_prefetch: largest number of blocks that a step requests to be prefetched for the next step.
    num_states: largest number of sequences that have hot sets (blocks on the device) at the same
        time; 0: the same as `num_sequences`.
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
        """Returns the largest number of sequences that have hot sets (blocks on the device) at the
        same time. At most `num_sequences` of them are in a step."""
        return self.num_states or self.num_sequences

    @property
    def group(self) -> int:
        """Returns the number of query heads that share a KV head."""
        return self.num_heads // self.kv_heads


class Workspace:
    """Device memory that all layers of a step share (see the module for rows and states).

    pages: int32 [states, hot slots], the page of the engine's cache for each hot slot (page for a
        selected block) of a state, in all layers; at first the numbers 0, 1, ….
    state_of: int32 [rows], the state of each row; -1 for a row without a state; at first the
        numbers 0, 1, ….
    residents: tables for contexts beyond device memory. If set, `begin_batch` begins a step; if
        None, `begin` begins it.
    capacity: the most blocks of a hot set.
    faults: int32 [3], counts that only grow. [0]: sequences that had no slot for a new block. [1]:
        blocks that had no copy in the arena. [2]: pages that were copied from the arena (no
        faults).
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
            # The first step of a sequence fills its whole hot set. Slots beyond the budget, in
            # which CPU engines prefetch, stay unused.
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
        self.always_log_mass = device.zeros((sequences, heads), np.float32)
        self.always_mass = device.zeros((sequences,), np.float32)
        self.words = device.zeros((sequences, heads, 2), np.float32)

    def __repr__(self) -> str:
        return (
            f"Workspace({self.shape.num_sequences} sequences of up to {self.shape.max_blocks} "
            "blocks)"
        )

    def set_blocks(self, sequence: int, first: int, rows: I32, addresses: I64) -> None:
        """Sets, for consecutive blocks of a sequence from position `first` on, where their
        sketches (compact forms of keys) are, and where the blocks' copies in the arena are.

        Call this method between two steps. Blocks until the values are copied to the device.

        sequence: index of the sequence's state.
        rows: for each block, the row of its sketch in the pools.
        addresses: for each block, the device address of its slot in the mapped arena; 0: no copy.
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
        """Begins a step, in a workspace without `residents`.

        context_tokens: int32 [rows], tokens of each context, including the step's tokens; 0: skip
            the row.
        """
        check_length("context_tokens", context_tokens.shape, (self.shape.num_sequences,))
        self._plan(context_tokens, self.shape.num_sequences)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows in the step, which determines the size of kernel grids."""
        residents = self.residents
        batch = None if residents is None else residents.batch
        return self.shape.num_sequences if batch is None else batch.num_rows

    def engine_arguments(self) -> tuple[Argument, ...]:
        """Returns four kernel arguments about the engine's block table: the table; its stride;
        `Residents.freed` (for each sequence with hot sets, the position up to which its blocks,
        except the sinks, are only in host memory); and the number of sink blocks."""
        residents = self.residents
        if residents is None or residents.batch is None:
            return None, np.int64(0), None, np.int32(0)
        batch = residents.batch
        stride = np.int64(batch.table_stride)
        return batch.table, stride, residents.freed, np.int32(residents.num_sinks)

    def begin_batch(self, batch: EngineBatch, is_named: bool = True) -> None:
        """Begins a step with an engine's batch. Only for a workspace with `residents` (tables for
        contexts beyond device memory). The batch occupies the first rows of the workspace; the
        other rows are empty. `is_named`: see `Residents.find`."""
        assert self.residents is not None, "a workspace without an engine"
        self.residents.find(batch, self.rows, self.state_of, is_named)
        # Plans all rows of the workspace, not only the rows of the batch. A CUDA graph may have
        # been captured with more rows than the batch has; it must find these rows empty.
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
