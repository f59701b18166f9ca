"""Measures sparse decode, for the statistics: counts per layer (`LayerCounters`), and comparisons
of a selection (the blocks that a layer has chosen in a step) with exact attention (`measure`).

Counters only increase; each `take` returns their growth since the last call. Counting a step costs
a few additions of Python floats. A comparison with exact attention reads every key of a context.

Shapes: Q query heads, H KV heads, D channels, C blocks of the context.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.reports import SPARSE_COUNTERS
from hotkv_sparse.selection import exact_log_mass, top
from hotkv_vllm.sparse.sequence import Attended

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
PREFIX = "sparse_"
_COLUMN = {name: column for column, name in enumerate(SPARSE_COUNTERS)}
_STEP = tuple(
    _COLUMN[name]
    for name in (
        "selects", "context_blocks", "selected_blocks", "attended_blocks", "seeded_blocks",
        "corrected_blocks", "prefetched_blocks",
        "wanted_blocks", "hit_blocks", "estimated_mass", "swap_bytes",
    )
)  # fmt: skip


# ----------------------------------------------------------------------------------------- counters


class LayerCounters:
    """Counts what sparse decode does per layer, under the names of
    `hotkv_proto.reports.SPARSE_COUNTERS`. Skips a value that is not finite, such as a share of the
    attention for a query with NaN: the sum would stay NaN for ever, and the server refuses reports
    with NaN.

    indices: indices of the layers.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._rows = {index: [0.0] * len(SPARSE_COUNTERS) for index in indices}
        self._taken = [0.0] * len(SPARSE_COUNTERS)
        self._taken_by_layer = np.zeros((len(self._rows), len(SPARSE_COUNTERS)))

    def __repr__(self) -> str:
        return (
            f"LayerCounters(layers {len(self._rows)}, selects "
            f"{sum(row[_COLUMN['selects']] for row in self._rows.values()):.0f})"
        )

    def add(self, index: int, name: str, value: float) -> None:
        if math.isfinite(value):
            self._rows[index][_COLUMN[name]] += value

    def add_step(
        self, index: int, attended: Attended, context_blocks: int, page_bytes: int
    ) -> None:
        """Counts a selection: the choice of blocks for one request of a step in one layer.

        index: index of the layer.
        attended: the result of the selection.
        context_blocks: number of blocks in the request's context.
        page_bytes: bytes of a block in the layer.
        """
        row = self._rows[index]
        mass = attended.selection.mass
        num_joined = attended.num_seeded + attended.num_corrected + attended.num_prefetched
        values = (
            1, context_blocks, len(attended.selection.blocks), len(attended.blocks),
            attended.num_seeded, attended.num_corrected, attended.num_prefetched,
            attended.num_wanted,
            attended.num_hits, mass if math.isfinite(mass) else 0.0,
            num_joined * page_bytes,
        )  # fmt: skip
        for column, value in zip(_STEP, values, strict=True):
            row[column] += value

    def take(self) -> dict[str, float]:
        """Returns the growth of each counter since the last call, summed over the layers, by its
        name with the prefix `sparse_`. Leaves out counters that did not grow."""
        # Sums with plain Python: this method is called in every step, and for so few numbers numpy
        # would be slower.
        totals: list[float] = [
            sum(column, 0.0) for column in zip(*self._rows.values(), strict=True)
        ] or self._taken
        growth = [total - taken for total, taken in zip(totals, self._taken, strict=True)]
        self._taken = totals
        return {
            PREFIX + name: value
            for name, value in zip(SPARSE_COUNTERS, growth, strict=True)
            if value
        }

    def take_by_layer(self) -> dict[int, dict[str, float]]:
        """Returns the growth of each counter since the last call of this method, by layer index and
        name. Leaves out layers and counters that did not grow."""
        totals = np.array(list(self._rows.values())).reshape(self._taken_by_layer.shape)
        growth, self._taken_by_layer = totals - self._taken_by_layer, totals
        found = {
            index: {name: value for name, value in zip(SPARSE_COUNTERS, row, strict=True) if value}
            for index, row in zip(self._rows, growth.tolist(), strict=True)
        }
        return {index: row for index, row in found.items() if row}


# ----------------------------------------------------------------------- recall, by exact attention


@dataclass(frozen=True, slots=True)
class Recall:
    """The quality of a selection of n blocks for a request, compared with exact attention. Both
    figures count all blocks that the request attends to, not only the n selected blocks.

    recall: of the n blocks that get the most attention, the share to which the request attends.
    mass: the share of the request's exact attention that falls on the blocks to which it attends,
        and on the layer's learned sinks, to which it always attends.
    """

    recall: float
    mass: float


def block_mass(
    keys_of: Callable[[I32], F32],
    query_QD: F32,
    blocks_C: I32,
    context_tokens: int,
    block_tokens: int,
    scale: float,
    sink_logits: F32 | None = None,
) -> npt.NDArray[np.float64]:
    """Returns each block's exact share of a request's attention, averaged over the query heads,
    float64 [blocks of the context]. The shares of all blocks and of the learned sinks add up to 1.

    keys_of: takes ids of blocks, and returns these blocks' unpacked keys, float32
        [blocks, tokens, KV heads, channels].
    query_QD: the query vectors of the row's token.
    blocks_C: ids of the context's blocks.
    scale: the factor of the layer's attention scores.
    sink_logits: the layer's learned sinks, float32 [query heads]; None without sinks.
    """
    log_mass = np.full((len(query_QD), len(blocks_C) + 1), -np.inf)
    if sink_logits is not None:
        log_mass[:, -1] = sink_logits
    for place, block in enumerate(blocks_C):
        keys = keys_of(np.array([block], np.int32))[0]
        log_mass[:, place] = exact_log_mass(
            query_QD, keys[: context_tokens - place * block_tokens], scale
        )
    share = np.exp(log_mass - log_mass.max(axis=1, keepdims=True))
    mean: npt.NDArray[np.float64] = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
    return mean[:-1]


def measure(
    keys_of: Callable[[I32], F32],
    query_QD: F32,
    blocks_C: I32,
    context_tokens: int,
    block_tokens: int,
    scale: float,
    attended: Attended,
    sink_logits: F32 | None = None,
) -> Recall:
    """Returns how good the selection of blocks for a request is, compared with exact attention over
    its whole context.

    keys_of: takes ids of blocks, and returns these blocks' unpacked keys, float32
        [blocks, tokens, KV heads, channels].
    query_QD: the query of the request's token, float32 [query heads, channels].
    blocks_C: ids of the context's blocks.
    scale: the factor of the layer's attention scores.
    attended: the selection, and the blocks that the request attends to.
    sink_logits: the layer's learned sinks, float32 [query heads]; None without sinks.
    """
    share = block_mass(
        keys_of, query_QD, blocks_C, context_tokens, block_tokens, scale, sink_logits
    )
    best = top(share.astype(np.float32), len(attended.selection.blocks))
    left_out = np.delete(share, attended.blocks)
    return Recall(float(np.isin(best, attended.blocks).mean()), 1.0 - float(left_out.sum()))
