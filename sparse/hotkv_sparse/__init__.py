"""Sparse decode, the pure part: selects the blocks of a long context that a step attends to.

From unpacked keys to a selection, in the order of a step: `representations.build` when a block
fills; `scores.prepare` and `scores.score` with a step's query; `selection.select_layer`, which
combines these with the choice; `hotset.HotSet.step`. `decode.decode` makes the step of a layer in
one compiled call. `axes.AxesEstimate` and `centre` calibrate.
`config.SparseConfig` has the settings. `cuda` does the same on a GPU.

No I/O except in `centre_file`, no clock, no threads. Needs numpy and numba; numba is loaded on
first use.
"""

from hotkv_sparse.axes import Axes
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import FORMATS, bytes_per_block, version
from hotkv_sparse.hotset import AdaptiveCapacity, Growth, HotMap, HotSet, SlotMoves, Step
from hotkv_sparse.representations import build
from hotkv_sparse.scores import Query, prepare, score
from hotkv_sparse.selection import (
    Selection,
    Source,
    Span,
    choose,
    exact_log_mass,
    fuse,
    select_layer,
    span,
)

__all__ = [
    "FORMATS",
    "AdaptiveCapacity",
    "Axes",
    "Growth",
    "HotMap",
    "HotSet",
    "Query",
    "Selection",
    "SlotMoves",
    "Source",
    "Span",
    "SparseConfig",
    "Step",
    "build",
    "bytes_per_block",
    "choose",
    "exact_log_mass",
    "fuse",
    "prepare",
    "score",
    "select_layer",
    "span",
    "version",
]
