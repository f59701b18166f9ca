"""A layer's decode step in one compiled call: scores the blocks with a query, selects the best
blocks, and adds some of them to the hot set (the blocks of the layer that are on the device).

`decode` gives the same result as `selection.select_layer` followed by `hotset.HotSet.step`, but is
faster. This matters because a model has tens of layers: a call into compiled code costs about a
microsecond, and passing arrays between two calls costs more. Callers use the two functions if there
is no hot set, or with the settings `fusion` or `adaptive_p`, for which numpy chooses the blocks.

The attention mass of a block is the sum of exp(q · k * scale) over its tokens; the log mass is the
logarithm of the mass.

Shapes: Q query heads, H KV heads, D channels, B blocks of a pool (the array of sketches), N
bytes of a block and head, C blocks of the context.
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
    """A layer's sketches (compact forms of blocks' keys) in one format, checked once and
    prepared for the kernel, so that a step need not do it.

    source: the sketches, with their centre (mean key) and axes.
    arguments: the kernel's arguments that are the same in every step.
    """

    source: Source
    arguments: tuple[Any, ...]

    @staticmethod
    def of(name: str, source: Source, num_heads: int, head_size: int, scale: float) -> "Scorer":
        """Makes the scorer for queries [num_heads, head_size] in format `name`. Raises
        INVALID_FIELD if the source does not fit the format or the heads.

        scale: factor by which attention multiplies q · k.
        """
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
    """The amount of a layer's attention that goes to the blocks that every step attends to: the
    context's first blocks (sinks), the recent window and the partial last block. An argument of
    `decode`, which needs this attention mass (sum of exp(q · k * scale)) to compute each other
    block's share of the whole attention.

    There are two forms. In the first, the caller knows the mass (`known`). In the second, `decode`
    computes the mass of these blocks from their keys.

    log_mass: float32 [query heads]. In the first form: the log of the mass of these blocks. In the
        second form: the log of a mass to add to the computed mass, such as that of the layer's
        learned sinks; -inf to add nothing.
    pages: only in the second form: uint8 [pages, KV heads, bytes], the layer's keys in the order
        that `score_kernels.page_log_mass` describes. Otherwise empty.
    blocks: only in the second form: int32, indices of these blocks in `pages`.
    packing: five numbers: the number of tokens in `blocks` (0 selects the first form), the tokens
        of a block, then `run`, `pair` and `kind` of `page_log_mass`.
    """

    log_mass: F32
    pages: U8
    blocks: I32
    packing: tuple[int, int, int, int, int]

    @staticmethod
    def known(log_mass: F32) -> "Always":
        """Returns the first form: the caller knows `log_mass`, the log of the attention mass of the
        blocks that every step attends to, float32 [query heads]."""
        return Always(log_mass, _NO_PAGES, _NO_BLOCKS, (0,) * 5)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of a layer's decode step. A candidate is a block that is not always kept, so that
    the step may select it or not.

    map: the hot set (blocks on the device, with their slots) after the step. The caller must attend
        to all of its blocks.
    selection: the selected blocks. `map` may lack some of them, because a step may load only a few
        blocks. A missing block in `ahead` is added in the next step; any other missing block is
        added only if it is selected again.
    ahead: int32, hot slots (places on the device) that the caller must fill before the next step,
        each with the block that `hot.block_of` names.
    num_loaded: number of candidates that this step's selection added to `map`. The caller must load
        these blocks before it attends.
    num_adopted: number of candidates that were prefetched after the previous step and that this
        step added to `map`.
    num_selected: number of selected candidates, without always kept blocks.
    num_resident: number of selected candidates that were already in the map.
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
    """Selects blocks with this step's query, and updates the hot set (the blocks of the layer that
    are on the device). Selects among the candidates of `hot.span`: the blocks that are not always
    kept.

    Raises INVALID_FIELD if a row is outside the pool, IndexError if a block of `always` is outside
    the pages. The hot set is then unchanged. The shapes of the arrays are not checked.

    query_QD: float32 [query heads, channels], after positional encoding.
    rows_C: int32, for each block of the context, the row of its sketch (compact form of its
        keys) in the scorer's pool; ignored for always kept blocks.
    budget_blocks: number of blocks to select, including the always kept blocks.
    max_loads: largest number of candidates that the step may add to the hot set.
    arriving: int32, `Decoded.ahead` of the previous step. The caller has filled all these slots.
    selected: bool [at least the blocks of the context], output: True for each selected block.
    """
    where, num_slots = hot.span, hot.num_slots
    num = where.num_always + min(max(budget_blocks - where.num_always, 0), where.last - where.first)
    blocks, weights = np.empty(num, np.int32), np.empty(num, np.float32)
    maps, moves = np.empty((2, num_slots), np.int32), np.empty((4, max(num, num_slots)), np.int32)
    ahead = np.empty((2, num_slots), np.int32)
    kernels = native.require("hotkv_sparse.all_kernels")
    counts, mass = kernels.decode_step(
        np.ascontiguousarray(query_QD, np.float32), *scorer.arguments, rows_C, always.pages,
        always.blocks, always.packing, always.log_mass, selected, blocks, weights, max_loads,
        hot.mapped_blocks(), maps, moves, arriving, ahead, *hot.for_kernels(), *hot.for_step(),
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
