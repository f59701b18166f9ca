"""Measures sparse decode: counters by layer, and samples of recall.

Counters only grow; each `take` returns the growth since the last call. Counting costs a few
additions of Python floats; tables are made only when counters are taken. A sample of recall reads
every key of a context.

Shapes: Q query heads, H KV heads, D channels, C blocks of the context.
"""

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
    """The counters of sparse decode of the layers with these `indices`. The counters have the names
    of `hotkv_proto.reports.SPARSE_COUNTERS`."""

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
        self._rows[index][_COLUMN[name]] += value

    def add_step(
        self, index: int, attended: Attended, context_blocks: int, page_bytes: int
    ) -> None:
        """Counts a selection of a layer whose blocks have pages of `page_bytes`."""
        row = self._rows[index]
        num_joined = attended.num_seeded + attended.num_corrected + attended.num_prefetched
        values = (
            1, context_blocks, len(attended.selection.blocks), len(attended.blocks),
            attended.num_seeded, attended.num_corrected, attended.num_prefetched,
            attended.num_wanted,
            attended.num_hits, attended.selection.mass,
            num_joined * page_bytes,
        )  # fmt: skip
        for column, value in zip(_STEP, values, strict=True):
            row[column] += value

    def take(self) -> dict[str, float]:
        """Returns the growth over all layers, by name prefixed with `sparse_`. Counters that did
        not grow are left out."""
        # Once a step, so without an array.
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
        """Returns the growth by layer and name. Layers and counters that did not grow are left
        out."""
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
    """Quality of a selection of n blocks, measured with exact attention.

    recall: share of the n blocks with the most attention mass that were selected.
    mass: share of the attention mass that lies in the selected blocks.
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
) -> npt.NDArray[np.float64]:
    """Returns each block's exact share of the attention mass, mean over query heads; float64 [C],
    sum 1."""
    log_mass = np.empty((len(query_QD), len(blocks_C)))
    for place, block in enumerate(blocks_C):
        keys = keys_of(np.array([block], np.int32))[0]
        log_mass[:, place] = exact_log_mass(
            query_QD, keys[: context_tokens - place * block_tokens], scale
        )
    share = np.exp(log_mass - log_mass.max(axis=1, keepdims=True))
    mean: npt.NDArray[np.float64] = (share / share.sum(axis=1, keepdims=True)).mean(axis=0)
    return mean


def measure(
    keys_of: Callable[[I32], F32],
    query_QD: F32,
    blocks_C: I32,
    context_tokens: int,
    block_tokens: int,
    scale: float,
    attended: Attended,
) -> Recall:
    """Compares a row's selection with its exact attention."""
    share = block_mass(keys_of, query_QD, blocks_C, context_tokens, block_tokens, scale)
    best = top(share.astype(np.float32), len(attended.selection.blocks))
    return Recall(float(np.isin(best, attended.blocks).mean()), float(share[attended.blocks].sum()))
