"""A layer's sparse decode step on CUDA, all on the device. The engine calls in each step:

    workspace.begin(context_tokens)   once, before the forward pass
    selector.hot.grow()               in each layer, before it writes KV to new blocks' slots
    selector.step(query)              in each layer, with the query after RoPE
    … then attention over the block table hot.table, with the lengths hot.lengths …

Always true: all work is queued on one stream; shapes, buffers and grids are fixed when objects are
made; a step allocates nothing and never waits, so a CUDA graph may capture it (after
`CupyDevice.compile`). Selections are those of `selection.select_layer`.

Shapes: R sequences, Q query heads, H KV heads, D channels, K hot slots of a sequence; at most B
    blocks of a sequence, S of a selection.
"""

import math
from dataclasses import dataclass

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.cuda.device import Array
from hotkv_sparse.cuda.hotsets import ATTENDED, STEP_WORDS, CudaHotSets
from hotkv_sparse.cuda.index import Index, Pages, check_length, float_kind
from hotkv_sparse.cuda.workspace import Workspace

_ITEMS_PER_WARP = 8
_SHIFTS = (20, 10, 0)
"""Lowest bit of a weight in each round of the search for the best."""


@dataclass(frozen=True, slots=True)
class Queries:
    """A layer's queries on the device [R, Q, D].

    data: a tensor, or the address of the first.
    sequence_stride, head_stride: in elements; channels are contiguous.
    """

    data: Array | int
    dtype: str
    sequence_stride: int
    head_stride: int


class CudaSelector:
    """A step writes its selection to:

    blocks: int32 [R, `Workspace.max_selected`].
    chosen: float32, same shape, their weights; inf for always kept blocks.
    numbers: int32 [R], of selected blocks.
    mass: float32 [R], estimated share of the mass.

    sinks: learned sinks of the softmax [Q], and their dtype; None: none.
    """

    def __init__(
        self,
        workspace: Workspace,
        layer: int,
        index: Index,
        keys: Pages,
        values: Pages,
        hot: CudaHotSets,
        sinks: tuple[Array | int, str] | None = None,
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
        self._workspace, self._device = workspace, workspace.device
        self.index, self.layer = index, layer
        self._keys, self._values = keys, values
        self._sinks = (
            (None, np.int32(0)) if sinks is None else (sinks[0], np.int32(float_kind(sinks[1])))
        )
        self.hot = hot
        device, sequences = workspace.device, shape.num_sequences
        self._codes = device.zeros(
            (sequences, shape.kv_heads, max(self._tiles * self._tile_bytes, 1)), np.int8
        )
        self.blocks = device.zeros((sequences, workspace.max_selected), np.int32)
        self.chosen = device.zeros((sequences, workspace.max_selected), np.float32)
        self.numbers = device.zeros((sequences,), np.int32)
        self.mass = device.zeros((sequences,), np.float32)

    def __repr__(self) -> str:
        return (
            f"CudaSelector(layer {self.layer}, {self.index!r}, "
            f"{self._workspace.shape.num_slots} hot slots a sequence)"
        )

    @property
    def _tiles(self) -> int:
        """Per KV head. A tile is the prepared queries of up to 8 query heads, scored together."""
        return -(-self._workspace.shape.group // 8)

    @property
    def _tile_bytes(self) -> int:
        """In a summary format, the parts of 8 heads one after the other."""
        shape = self.index.shape
        return shape.tile_bytes if shape.form.bits else 8 * shape.form.parts * shape.channels

    def build(
        self, pages: Array | None, rows: Array, num_blocks: int, addresses: Array | None = None
    ) -> None:
        """Queues `Index.build` on the layer's keys."""
        self.index.build(self._keys, pages, rows, num_blocks, addresses=addresses)

    def step(self, query: Queries, scale: float | None = None) -> None:
        """Queues scores, selection, changes of the hot sets and the block table. `scale`: None:
        1 / sqrt(D)."""
        scale = 1.0 / math.sqrt(self._workspace.shape.head_size) if scale is None else scale
        self.attend(query, scale=scale, log_mass=self._workspace.always_log_mass, always=True)
        self.score(query, scale)
        self.choose()
        self.hot.correct(self.blocks, self.chosen, self.numbers)

    def score(self, query: Queries, scale: float) -> None:
        """To `Workspace.scores`."""
        work, shape, index = self._workspace, self._workspace.shape, self.index.shape
        form = index.form
        unit = form.level_unit if form.bits else 1.0
        self._device.launch(
            "prepare_queries",
            (shape.num_heads, work.num_rows),
            32,
            (
                query.data, np.int32(float_kind(query.dtype)), np.int64(query.sequence_stride),
                np.int64(query.head_stride), self.index.mu,
                self.index.factors, np.int32(form.bits), np.int32(1 if form.bits else form.kind),
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
            work.state_of,
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
                work.num_rows,
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
            work.num_rows,
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
        """To `blocks`, `chosen`, `numbers` and `mass`."""
        work, shape, config = self._workspace, self._workspace.shape, self._workspace.config
        size, pieces = np.int32(shape.max_blocks), np.int32(work.num_pieces)
        launch, sequences = self._device.launch, work.num_rows
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
        given = (
            work.weights, size, work.plan, work.always_mass, np.float32(config.adaptive_p or 0.0),
            np.int32(work.max_selected),
        )  # fmt: skip
        selection = (self.blocks, self.chosen, self.numbers, self.mass)
        if work.searches is None:
            launch("choose", (sequences,), 1024, (*given, *selection))
            return
        grid, searches = (work.num_pieces, sequences), work.searches
        for by_mass in (1, 0) if config.adaptive_p else (0,):
            for shift in _SHIFTS:
                numbers = (np.int32(by_mass), np.int32(shift))
                launch("search_round", grid, 256, (*given, *numbers, searches))
        launch("count_chosen", grid, 256, (*given, searches, work.piece_counts))
        launch("write_chosen", grid, 256, (*given, searches, work.piece_counts, *selection))

    def attend(
        self,
        query: Queries,
        out: Array | None = None,
        *,
        scale: float | None = None,
        log_mass: Array | None = None,
        always: bool = False,
    ) -> None:
        """Attention over the hot set, with a simple kernel.

        out: float32 [R, Q, D]; None: not computed.
        scale: None: 1 / sqrt(D).
        log_mass: float32 [R, Q], output: of the attended blocks; None: not computed.
        always: only always kept blocks.
        """
        work, shape, keys, hot = self._workspace, self._workspace.shape, self._keys, self.hot
        scale = 1.0 / math.sqrt(shape.head_size) if scale is None else scale
        self._device.launch(
            "attend",
            (shape.num_heads, work.num_rows),
            256,
            (
                query.data, np.int32(float_kind(query.dtype)), np.int64(query.sequence_stride),
                np.int64(query.head_stride), keys.data,
                None if out is None else self._values.data, np.int32(float_kind(keys.dtype)),
                keys.scales, self._values.scales, np.int32(keys.scale_stride),
                *self._sinks,
                np.int64(keys.page_stride),
                np.int64(keys.token_stride),
                np.int64(keys.head_stride), np.int32(shape.group), np.int32(shape.head_size),
                np.int32(shape.block_tokens),
                np.float32(scale), work.plan, work.state_of,
                np.int32(always), hot.state, hot.block_of, hot.slots, work.pages, hot.counts,
                np.int32(STEP_WORDS),
                np.int32(ATTENDED), np.int32(shape.num_slots),
                hot.slot_of, np.int32(shape.max_blocks), *work.engine_arguments(), log_mass, out,
            ),
        )  # fmt: skip
