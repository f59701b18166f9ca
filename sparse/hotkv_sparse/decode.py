"""A layer's decode step in one compiled call: scores, selects, and updates the hot set.

The same as `selection.select_layer` and then `HotSet.step`, but faster, which counts over tens of
layers: a call into compiled code costs about 1 µs, arrays passed between two calls cost more.
Without a hot set, and with `fusion` or `adaptive_p`, callers use the two.

Shapes: Q query heads, H KV heads, D channels, B blocks of a pool, N bytes of a block and head, C
    blocks of the context.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.axes import offsets_of
from hotkv_sparse.hotset import HotMap, HotSet
from hotkv_sparse.rotation import factors, pass_arrays
from hotkv_sparse.scores import check_pool, prepare
from hotkv_sparse.selection import Selection, Source

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
_NO_PAGES, _NO_BLOCKS = np.empty((0, 1, 0), np.uint8), np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """A layer's sketches in one format, checked once.

    arguments: the kernel's that are the same in every step.
    """

    source: Source
    arguments: tuple[Any, ...]

    @staticmethod
    def of(name: str, source: Source, num_heads: int, head_size: int, scale: float) -> "Scorer":
        """For queries [num_heads, head_size]. Raises INVALID_FIELD if the source does not fit."""
        mu, axes = source.mu, source.axes
        query = prepare(
            name, np.zeros((num_heads, head_size), np.float32), mu, scale, source.bias, axes
        )
        check_pool(query, source.pool, _NO_BLOCKS)
        form, channels = query.form, formats.padded_channels(query.form, head_size)
        by_axes = (np.empty((0, 0, 0), np.float32), _NO_BLOCKS)
        if axes is not None and form.by_axes:
            by_axes = (axes.weights, offsets_of(head_size))
        numbers = (
            form.kernel,
            max(form.parts, 1),
            1 if form.bits else form.kind,
            channels,
            formats.run_bytes(form, head_size) if form.bits else 0,
        )
        unit = form.level_unit if form.bits and not form.by_axes else 1.0
        bias = form.bias if source.bias is None else source.bias
        centre = np.empty((0, head_size), np.float32) if mu is None else mu
        return Scorer(
            source,
            (
                (factors(head_size), *pass_arrays(head_size)),
                by_axes,
                np.ascontiguousarray(centre, np.float32),
                numbers,
                (float(scale), float(unit), float(bias)),
                source.pool,
            ),
        )


@dataclass(frozen=True, slots=True)
class Always:
    """The mass of the always kept blocks, against which the other blocks' shares are computed:
    known to the caller (`known`), or computed from their keys.

    log_mass: float32 [Q], of these blocks if known; else a log mass to add, such as that of learned
        sinks, or -inf.
    pages: uint8 [pages, H, bytes], the layer's keys as in `score_kernels.page_log_mass`; empty if
        known.
    blocks: int32, indices in `pages`.
    packing: tokens in `blocks` (0: known), tokens of a block, `run`, `pair` and `kind` of
        `page_log_mass`.
    key_scale: what the keys in `pages` must be multiplied by.
    """

    log_mass: F32
    pages: U8
    blocks: I32
    packing: tuple[int, int, int, int, int]
    key_scale: float = 1.0

    @staticmethod
    def known(log_mass: F32) -> "Always":
        """`log_mass`: float32 [Q]."""
        return Always(log_mass, _NO_PAGES, _NO_BLOCKS, (0,) * 5)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of a step.

    map: the hot set after the step, to attend to.
    selection: `map` may lack some of its blocks. A missing one in `ahead` is added in the next
        step, another only if it is selected again.
    ahead: int32, slots to fill before the next step, each with the block in `hot.block_of`.
    num_loaded: candidates added to `map`, to be loaded before attention.
    num_adopted: candidates prefetched after the last step and added now.
    num_selected: candidates.
    num_resident: of these, already in the map.
    """

    map: HotMap
    selection: Selection
    ahead: I32
    num_loaded: int
    num_adopted: int
    num_selected: int
    num_resident: int


def decode(
    hot: HotSet,
    scorer: Scorer,
    query_QD: F32,
    rows_C: I32,
    always: Always,
    budget_blocks: int,
    max_loads: int,
    arriving: I32,
    selected: Mask,
) -> Decoded:
    """Selects among the candidates of `hot.span` and updates `hot`.

    Raises INVALID_FIELD if a row is outside the pool, IndexError if a block of `always` is outside
    the pages; the hot set is then unchanged. Shapes are not checked.

    query_QD: float32, after positional encoding.
    rows_C: int32, row of each block in the scorer's pool; ignored for always kept blocks.
    budget_blocks: always kept ones included.
    max_loads: candidates that may be added.
    arriving: int32, the last step's `ahead`, all filled.
    selected: bool [>= C], output.
    """
    where, num_slots = hot.span, hot.num_slots
    num = where.num_always + min(max(budget_blocks - where.num_always, 0), where.last - where.first)
    blocks, weights = np.empty(num, np.int32), np.empty(num, np.float32)
    maps, moves = np.empty((2, num_slots), np.int32), np.empty((4, max(num, num_slots)), np.int32)
    ahead = np.empty((2, num_slots), np.int32)
    kernels = native.require("hotkv_sparse.all_kernels")
    counts, mass = kernels.decode_step(
        np.ascontiguousarray(query_QD, np.float32), *scorer.arguments, rows_C, always.pages,
        always.blocks, always.packing, always.key_scale, always.log_mass, selected, blocks, weights,
        max_loads, hot.mapped_blocks(), maps, moves, arriving, ahead, *hot.for_kernels(),
        *hot.for_step(),
    )  # fmt: skip
    num_mapped, num_loaded, num_adopted, num_ahead, num_always, num_resident, has_changed = counts
    if num_mapped == kernels.NO_PAGE:
        raise IndexError(f"blocks {always.blocks.tolist()} of pages {always.pages.shape}")
    if num_mapped == kernels.REFUSED:
        raise HotKVError(
            Reason.INVALID_FIELD, f"rows must be from 0 to {len(scorer.source.pool) - 1}"
        )
    return Decoded(
        hot.stepped(maps[:, :num_mapped] if has_changed else None),
        Selection(blocks, weights, mass),
        ahead[1, :num_ahead],
        num_loaded,
        num_adopted,
        num - num_always,
        num_resident,
    )
