"""A layer's decode step in one compiled call: from a query to the hot set's next map.

The result is that of `selection.select_layer` and `hotset.HotSet` one after the other. They remain
for fusion and `adaptive_p`, whose choice is made in numpy, and for callers without a hot set. A
call into compiled code costs a microsecond and the arrays between two calls some more, so a model
of thirty layers notices.

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
    """A layer's representations in one format, checked, as the kernel takes them.

    `arguments`: constants of every call.
    """

    source: Source
    arguments: tuple[Any, ...]

    @staticmethod
    def of(name: str, source: Source, num_heads: int, head_size: int, scale: float) -> "Scorer":
        """Returns the scorer of queries [num_heads, head_size]. Raises INVALID_FIELD if the source
        does not fit."""
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
    """The mass of the blocks that are always attended.

    log_mass: float32 [Q]; without pages, log mass of these blocks. With pages, the mass of other
        things, such as learned sinks; -inf for nothing.
    pages: uint8 [blocks, H, bytes], keys as in `score_kernels.page_log_mass`.
    blocks: int32, in these pages.
    packing: number of tokens in `blocks` (0: without pages), tokens of a block, tokens of a run,
        pair, kind.
    """

    log_mass: F32
    pages: U8
    blocks: I32
    packing: tuple[int, int, int, int, int]

    @staticmethod
    def known(log_mass: F32) -> "Always":
        """Returns blocks whose mass is known."""
        return Always(log_mass, _NO_PAGES, _NO_BLOCKS, (0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of a layer's decode step. The caller attends to all blocks of `map`.

    ahead: int32, slots of blocks to prefetch before the next step.
    num_loaded: candidates that this step's query added to `map`.
    num_adopted: candidates that the step before has prefetched, and this step added to `map`.
    num_selected, num_resident: as in `hotset.Step`.
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
    """Selects from the current span of `hot` with a fresh query, and makes the step of the hot set.

    Raises INVALID_FIELD if a row is outside the pool, IndexError if a block of `always` is outside
    the pages; the hot set has then not changed.

    rows_C: int32, pool row of each block of the context; ignored for always kept blocks.
    max_loads: as in `HotSet.step`.
    arriving: int32, `ahead` of the step before, all of them written.
    selected: bool [>= C], set for the blocks of the selection.
    """
    where, num_slots = hot.span, hot.num_slots
    num = where.num_always + min(max(budget_blocks - where.num_always, 0), where.last - where.first)
    blocks, weights = np.empty(num, np.int32), np.empty(num, np.float32)
    maps, moves = np.empty((2, num_slots), np.int32), np.empty((4, max(num, num_slots)), np.int32)
    ahead = np.empty((2, num_slots), np.int32)
    kernels = native.require("hotkv_sparse.kernels")
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
