"""A layer's step on CUDA: scores, choice, corrections and the table for attention, without the
host.

    workspace.begin(context_tokens)   once a step, before the forward pass
    selector.grow()                   each layer, before it writes the step's keys and values to
                                      `pages` of `slot_of`'s slots
    selector.step(query)              each layer, with the step's query (after RoPE), before
                                      attention
    … attention over selector.table, with sequence lengths selector.counts[:, SEQUENCE_TOKENS] …

Always true:
- Everything is given to one stream. Shapes, buffers and grids are fixed when objects are made,
  nothing is allocated, nothing waits: a step may be captured in a CUDA graph and replayed (compile
  kernels first: `CupyDevice.compile`).
- A sequence that is not there, or stays dense (shorter than `min_context_tokens`: the caller's
  decision), has 0 tokens and costs next to
nothing.
- Selections are those of `hotkv_sparse.selector.select_layer`, hot sets those of
  `hotkv_sparse.hotset` with policy `lru`, `lru_prior` or
`none`.

Shapes: R sequences, Q query heads, H KV heads, D channels, B blocks a sequence may have, K hot
slots of a sequence, S blocks selected at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import Array, Device
from hotkv_sparse.cuda.index import Index, Pages, check_length, float_kind, upload
from hotkv_sparse.moves import SlotState
from hotkv_sparse.topk import floor_blocks

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

PLAN_WORDS, STEP_WORDS = 8, 8
LOADED, VICTIMS, PREFETCH, SELECTED, RESIDENT, ATTENDED, SEQUENCE_TOKENS = range(7)
"""Columns of a step's counts."""
_PIECE_BLOCKS = 2048
_ITEMS_PER_WARP = 8
_PULL_PIECES = 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that stay: `max_blocks` of a sequence, `num_slots` hot slots of a sequence and layer
    (capacity and spare ones together)."""

    num_sequences: int
    max_blocks: int
    block_tokens: int
    num_heads: int
    kv_heads: int
    head_size: int
    num_slots: int
    max_prefetch: int = 8

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Queries:
    """A step's queries in device memory, [R, Q, D]: strides in elements, channels side by side."""

    data: Array | int
    dtype: str
    sequence_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a block in one layer: `offset_bytes` into the block's slot in the arena, `address`
    of its place in page 0 of the cache."""

    offset_bytes: int
    address: int
    num_bytes: int


class Workspace:
    """What the layers of a step share: the plan, scratch, and where blocks lie.

    `pages` int32 [R, K]: the page of the engine's cache that a hot slot of a sequence is, in all
    layers; slots by number unless written otherwise.
    """

    def __init__(self, device: Device, config: SparseConfig, shape: StepShape) -> None:
        _check(config, shape)
        self.device, self.config, self.shape = device, config, shape
        sequences, heads, blocks = shape.num_sequences, shape.num_heads, shape.max_blocks
        self.max_always = config.max_always_blocks(shape.block_tokens)
        self.max_selected = max(
            config.budget_blocks(blocks * shape.block_tokens, shape.block_tokens), self.max_always
        )
        self.max_loads = max(config.max_correction_blocks, self.max_always)
        self.num_pieces = -(-blocks // _PIECE_BLOCKS)
        self.plan = device.zeros((sequences, PLAN_WORDS), np.int32)
        self.rows = device.zeros((sequences, blocks), np.int32)
        self.arena = device.zeros((sequences, blocks), np.int64)
        self.has_copy = device.zeros((sequences, blocks), np.uint8)
        self.faults = device.zeros((2,), np.int32)
        self.pages = upload(
            device, np.arange(sequences * shape.num_slots, dtype=np.int32).reshape(sequences, -1)
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
        """Blocks from `first` on: their rows in the index pools, and the addresses of their slots
        in the mapped arena (0: no copy yet).

        At a step boundary: it waits for the copy to the device.
        """
        if (
            not 0 <= first <= first + len(rows) <= self.shape.max_blocks
            or len(addresses) != len(rows)
            or not 0 <= sequence < self.shape.num_sequences
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
        """A step over int32 [R] tokens, the step's own included; 0: a sequence that is not
        there."""
        config, shape = self.config, self.shape
        check_length("context_tokens", context_tokens.shape, (shape.num_sequences,))
        topk = config.sparse_topk
        self.device.launch(
            "plan_step",
            (-(-shape.num_sequences // 128),),
            128,
            (
                context_tokens, np.int32(shape.num_sequences), np.int32(shape.block_tokens),
                np.int32(config.sink_tokens),
                np.int32(config.recent_tokens), np.int32(topk if type(topk) is int else 0),
                np.float64(topk),
                np.int32(floor_blocks(shape.block_tokens)), np.int32(shape.max_blocks), self.plan,
            ),
        )  # fmt: skip


class CudaSelector:
    """One layer. `index`: its representations; `keys`, `values`: its cache; `fragments`,
    `page_bytes`: how a block is pulled into a page of it.

    `table` int32 [R, K]: the block table for attention, pages of the cache, the context's last
    block at the end; `slots`: the same as hot slots, which are numbered from 0 in each sequence.
    `counts` int32 [R, 8], see LOADED and so on. `prefetch` int32 [R, max_prefetch]: wanted beyond
    the corrections, heaviest first.
    """

    def __init__(
        self,
        workspace: Workspace,
        layer: int,
        index: Index,
        keys: Pages,
        values: Pages,
        fragments: Sequence[Fragment],
        page_bytes: int,
    ) -> None:
        scorers = workspace.config.scorers_of(layer)
        if list(scorers) != [index.shape.name]:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"layer {layer} is scored by {', '.join(scorers) or 'none: it is dense'}; the "
                    f"index is {index.shape.name}"
                ),
            )
        shape = workspace.shape
        check_length(
            "the index",
            (index.shape.kv_heads, index.shape.head_size),
            (shape.kv_heads, shape.head_size),
        )
        self._workspace, self._device, self.index, self.layer = (
            workspace,
            workspace.device,
            index,
            layer,
        )
        self._keys, self._values = keys, values
        self._page_bytes = page_bytes
        places = np.array(
            [[f.offset_bytes, f.address, f.num_bytes] for f in fragments], np.int64
        ).reshape(-1, 3)
        self._num_fragments, self._fragments = (
            len(places),
            upload(self._device, places) if len(places) else None,
        )
        self._allocate()

    def _allocate(self) -> None:
        device, shape, work = self._device, self._workspace.shape, self._workspace
        sequences, slots = shape.num_sequences, shape.num_slots
        self._codes = device.zeros(
            (sequences, shape.kv_heads, max(self._tiles * self._tile_bytes, 1)), np.int8
        )
        self.blocks = device.zeros((sequences, work.max_selected), np.int32)
        self.chosen = device.zeros((sequences, work.max_selected), np.float32)
        self.numbers = device.zeros((sequences,), np.int32)
        self.mass = device.zeros((sequences,), np.float32)
        self.state = device.zeros((sequences, slots), np.int8)
        self.block_of = upload(device, np.full((sequences, slots), -1, np.int32))
        self.used_at = device.zeros((sequences, slots), np.int32)
        self.slot_of = upload(device, np.full((sequences, shape.max_blocks), -1, np.int32))
        self.capacities = upload(device, np.full(sequences, slots, np.int32))
        self.clocks = device.zeros((sequences,), np.int32)
        self.known = device.zeros((sequences,), np.int32)
        self.loads = device.zeros((sequences, 2, work.max_loads), np.int32)
        self.victims = device.zeros((sequences, slots), np.int32)
        self.prefetch = device.zeros((sequences, shape.max_prefetch), np.int32)
        self.counts = device.zeros((sequences, STEP_WORDS), np.int32)
        self.slots = device.zeros((sequences, slots), np.int32)
        self.table = device.zeros((sequences, slots), np.int32)

    def __repr__(self) -> str:
        return (
            f"CudaSelector(layer {self.layer}, {self.index!r}, "
            f"{self._workspace.shape.num_slots} hot slots a sequence)"
        )

    @property
    def _tiles(self) -> int:
        """Of 8 query heads, for each KV head."""
        return -(-self._workspace.shape.group // 8)

    @property
    def _tile_bytes(self) -> int:
        """Of prepared queries; summaries keep the parts of all heads side by side."""
        shape = self.index.shape
        return shape.tile_bytes if shape.form.bits else 8 * shape.form.parts * shape.channels

    # ------------------------------------------------------------------------------------ sequences

    def place(self, sequence: int, blocks: I32, capacity_blocks: int, num_known: int) -> None:
        """A new sequence: `blocks`, most recently used first, lie in the slots 0, 1, … of
        `sequence`; the first `num_known` blocks of the context exist (later ones get slots from
        `grow`). At a step boundary; waits for the copies to the device.
        """
        shape = self._workspace.shape
        if not 0 <= len(blocks) <= capacity_blocks <= shape.num_slots or len(
            np.unique(blocks)
        ) < len(blocks):
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"{len(blocks)} blocks of {capacity_blocks}; a sequence holds up to "
                    f"{shape.num_slots} blocks, each once"
                ),
            )
        state, block_of, used_at = (
            np.zeros((1, shape.num_slots), np.int8),
            np.full((1, shape.num_slots), -1, np.int32),
            np.zeros((1, shape.num_slots), np.int32),
        )
        slot_of = np.full((1, shape.max_blocks), -1, np.int32)
        count = len(blocks)
        state[0, :count], block_of[0, :count], used_at[0, :count] = (
            int(SlotState.MAPPED),
            blocks,
            np.arange(count, 0, -1),
        )
        slot_of[0, blocks] = np.arange(count)
        for target, values in (
            (self.state, state),
            (self.block_of, block_of),
            (self.used_at, used_at),
            (self.slot_of, slot_of),
        ):
            self._device.write(target, (sequence, 0), values)
        for target, value in (
            (self.capacities, capacity_blocks),
            (self.clocks, count),
            (self.known, num_known),
        ):
            self._device.write(target, (sequence,), np.array([value], np.int32))

    def grow(self) -> None:
        """Slots for the blocks that contexts have gained since the last call. `workspace.faults[0]`
        counts sequences that found no room."""
        work, shape = self._workspace, self._workspace.shape
        self._device.launch(
            "hot_grow",
            (shape.num_sequences,),
            1024,
            (
                work.plan, np.int32(shape.max_blocks), self.state, self.block_of, self.used_at,
                np.int32(shape.num_slots), self.slot_of,
                work.has_copy,
                self.capacities, self.clocks, self.known, work.faults,
            ),
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------- step

    def step(self, query: Queries, scale: float | None = None) -> None:
        """Scores, selection, corrections and the table, for all sequences; `scale` of attention, 1
        / sqrt(D) unless given."""
        scale = 1.0 / math.sqrt(self._workspace.shape.head_size) if scale is None else scale
        self.attend(query, scale=scale, log_mass=self._workspace.always_log_mass, always=True)
        self.score(query, scale)
        self.choose()
        self._correct()

    def score(self, query: Queries, scale: float) -> None:
        """Workspace.scores of the candidates."""
        work, shape, index = self._workspace, self._workspace.shape, self.index.shape
        form = index.form
        unit = form.level_unit if form.bits else 1.0
        self._device.launch(
            "prepare_queries",
            (shape.num_heads, shape.num_sequences),
            32,
            (
                query.data, np.int32(float_kind(query.dtype)), np.int64(query.sequence_stride),
                np.int64(query.head_stride), self.index.mu,
                self.index.factors, np.int32(form.bits), np.int32(2 if form.bits else form.kind),
                np.int32(shape.head_size),
                np.int32(index.channels),
                np.int32(shape.group), np.int32(self._tiles), np.int32(self._tile_bytes),
                np.float32(scale),
                np.float32(scale / (127.0 * unit)),
                np.float32(self.index.bias), self._codes, work.words,
            ),
        )  # fmt: skip
        pool = (self.index.pool, np.int64(index.row_bytes), np.int32(index.head_bytes))
        blocks = (
            work.rows,
            np.int32(shape.max_blocks),
            work.plan,
            self._codes,
            work.words,
            np.int32(shape.group),
        )
        if not form.bits:
            grid = (
                -(-shape.max_blocks // (16 * _ITEMS_PER_WARP)),
                shape.kv_heads,
                shape.num_sequences,
            )
            self._device.launch(
                "score_parts",
                grid,
                128,
                (*pool, np.int32(form.parts), np.int32(index.channels), *blocks, work.scores),
            )
            return
        num_items = -(-shape.max_blocks // 2) if index.num_runs == 1 else shape.max_blocks
        grid = (
            -(-num_items // (4 * _ITEMS_PER_WARP)),
            shape.kv_heads * self._tiles,
            shape.num_sequences,
        )
        low, high = index.level_words()
        self._device.launch(
            f"score_tokens<{form.bits}, {index.line_groups}>",
            grid,
            128,
            (
                *pool,
                np.int32(index.num_runs),
                np.int32(index.num_lines),
                *blocks,
                np.int32(self._tiles),
                np.uint32(low),
                np.uint32(high),
                work.scores,
            ),
        )

    def choose(self) -> None:
        """The selection: `blocks`, `chosen` [R, S] (their weights, inf where always kept),
        `numbers` [R], `mass` [R]."""
        work, shape, config = self._workspace, self._workspace.shape, self._workspace.config
        size, pieces = np.int32(shape.max_blocks), np.int32(work.num_pieces)
        launch, sequences = self._device.launch, shape.num_sequences
        launch(
            "sum_masses",
            (work.num_pieces, shape.num_heads, sequences),
            256,
            (work.scores, size, work.plan, work.masses),
        )
        launch(
            "weigh",
            (work.num_pieces, sequences),
            256,
            (
                work.scores,
                np.int32(shape.num_heads),
                size,
                work.plan,
                work.masses,
                pieces,
                work.always_log_mass,
                work.weights,
                work.always_mass,
            ),
            4 * shape.num_heads,
        )
        prior = config.residency_prior if config.cache_policy == "lru_prior" else 0.0
        launch(
            "choose",
            (sequences,),
            1024,
            (
                work.weights, size, work.plan, work.always_mass, self.slot_of,
                self.state if prior else None, np.int32(shape.num_slots),
                np.float32(prior),
                np.float32(config.adaptive_p or 0.0), np.int32(work.max_selected), self.blocks,
                self.chosen, self.numbers, self.mass,
            ),
        )  # fmt: skip

    def _correct(self) -> None:
        """The hot set's step, its pulls, and the table. `workspace.faults[1]` counts blocks that
        had no copy to pull."""
        work, shape, config = self._workspace, self._workspace.shape, self._workspace.config
        size, slots = np.int32(shape.max_blocks), np.int32(shape.num_slots)
        self._device.launch(
            "hot_step",
            (shape.num_sequences,),
            1024,
            (
                self.blocks, self.chosen, self.numbers, np.int32(work.max_selected), work.plan,
                size, self.state, self.block_of,
                self.used_at, slots,
                self.slot_of, work.has_copy, self.capacities, self.clocks,
                np.int32(config.max_correction_blocks),
                np.int32(config.cache_policy == "none"),
                np.int32(work.max_loads), slots, np.int32(shape.max_prefetch), self.loads,
                self.victims, self.prefetch, self.counts,
            ),
        )  # fmt: skip
        if self._num_fragments:
            self._device.launch(
                "pull_blocks",
                (work.max_loads, _PULL_PIECES, shape.num_sequences),
                256,
                (
                    self.loads, np.int32(work.max_loads), self.counts, work.arena, size,
                    self._fragments, np.int32(self._num_fragments),
                    np.int64(self._page_bytes), work.pages, slots, work.faults,
                ),
            )  # fmt: skip
        table = (
            work.plan,
            np.int32(shape.block_tokens),
            self.state,
            self.block_of,
            slots,
            work.pages,
            self.slots,
            self.table,
            self.counts,
        )
        self._device.launch("hot_table", (shape.num_sequences,), 1024, table)

    def attend(
        self,
        query: Queries,
        out: Array | None = None,
        *,
        scale: float | None = None,
        log_mass: Array | None = None,
        always: bool = False,
    ) -> None:
        """Reference attention over the hot set into `out` float32 [R, Q, D], and its log mass
        float32 [R, Q]; `always`: over what is always kept."""
        work, shape, keys = self._workspace, self._workspace.shape, self._keys
        scale = 1.0 / math.sqrt(shape.head_size) if scale is None else scale
        self._device.launch(
            "attend",
            (shape.num_heads, shape.num_sequences),
            256,
            (
                query.data, np.int32(float_kind(query.dtype)), np.int64(query.sequence_stride),
                np.int64(query.head_stride), keys.data,
                None if out is None else self._values.data, np.int32(float_kind(keys.dtype)),
                np.int64(keys.page_stride),
                np.int64(keys.token_stride),
                np.int64(keys.head_stride), np.int32(shape.group), np.int32(shape.head_size),
                np.int32(shape.block_tokens),
                np.float32(scale), work.plan,
                np.int32(always), self.state, self.block_of, self.slots, work.pages, self.counts,
                np.int32(STEP_WORDS),
                np.int32(ATTENDED), np.int32(shape.num_slots),
                self.slot_of, np.int32(shape.max_blocks), log_mass, out,
            ),
        )  # fmt: skip


def _check(config: SparseConfig, shape: StepShape) -> None:
    if config.fusion:
        raise HotKVError(
            Reason.INVALID_FIELD,
            "sparse.fusion is set; on CUDA a layer has one scorer, leave it out",
        )
    if config.cache_policy == "clock":
        raise HotKVError(
            Reason.INVALID_FIELD,
            "sparse.cache_policy is 'clock'; on CUDA use lru, lru_prior or none",
        )
    if shape.kv_heads < 1 or shape.num_heads % shape.kv_heads:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{shape.num_heads} query heads don't share {shape.kv_heads} KV heads evenly",
        )
    if min(shape.num_sequences, shape.max_blocks, shape.block_tokens, shape.num_slots) < 1:
        raise HotKVError(Reason.INVALID_FIELD, f"{shape} has a size below 1")
