"""Measures sparse decode: counts per layer (`LayerCounters`), and comparisons of a selection with
exact attention (`measure`).

Counting a step costs a few additions of Python floats. A comparison reads every key of a context.

Shapes: Q query heads, H KV heads, D channels, C blocks of the context.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_sparse.selection import exact_log_mass, top
from hotkv_sparse.vllm.cpu.sequence import Attended

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
    """Counts under the names of `SPARSE_COUNTERS`. Each `take` returns the growth since the last.
    Skips values that are not finite, such as the mass of a query with NaN: the sum would stay NaN,
    which the server refuses.
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
        """Counts one request's selection.

        context_blocks: in the request's context.
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
        """Sums over the layers, with the prefix `sparse_`, without zeros."""
        # Plain Python: called in every step, and for so few numbers numpy would be slower.
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
        """Keyed by layer index and name, without zeros."""
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
    """A selection of n blocks compared with exact attention. Both figures count all attended
    blocks.

    recall: attended share of the n blocks with the most attention.
    mass: share of the attention on attended blocks and learned sinks.
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
    """Exact mass of each block, averaged over the query heads, float64 [blocks]. With the learned
    sinks the sum is 1.

    keys_of: block ids to keys, float32 [blocks, tokens, KV heads, channels].
    blocks_C: ids of the context's blocks.
    sink_logits: float32 [query heads].
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
    """Compares a selection with exact attention over the whole context. Arguments as in
    `block_mass`."""
    share = block_mass(
        keys_of, query_QD, blocks_C, context_tokens, block_tokens, scale, sink_logits
    )
    best = top(share.astype(np.float32), len(attended.selection.blocks))
    left_out = np.delete(share, attended.blocks)
    return Recall(float(np.isin(best, attended.blocks).mean()), 1.0 - float(left_out.sum()))
