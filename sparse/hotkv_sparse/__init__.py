"""Sparse decode: selects the blocks of a long context to which a decode step attends.

In the order of their use:
- `sketches.build` builds a block's sketch when the block is full.
- `scores.prepare` and `scores.score` score all blocks with a step's query.
- `selection.select_layer` scores the blocks and selects the best.
- `hotset.HotSet.step` decides which selected blocks to load to the device.
- `decode.decode` does both in one compiled call.

`axes.AxesEstimate` and `centre` calibrate on text what makes sketches more precise; `config` has
the settings; `cuda` is the same for a GPU. Only `centre_file`, `estimate` and `cuda.device`
touch files, and only `cuda.mapped_arena` has a thread. numba is loaded on first use.
"""

from hotkv_sparse.axes import Axes
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import FORMATS, bytes_per_block, version
from hotkv_sparse.hotset import AdaptiveCapacity, HotMap, HotSet, HotSetGrowth, SlotMoves, Step
from hotkv_sparse.scores import Query, prepare, score
from hotkv_sparse.selection import (
    CandidateSpan,
    Selection,
    Source,
    choose,
    exact_log_mass,
    fuse,
    select_layer,
    span,
)
from hotkv_sparse.sketches import build

__all__ = [
    "FORMATS",
    "AdaptiveCapacity",
    "Axes",
    "CandidateSpan",
    "HotMap",
    "HotSet",
    "HotSetGrowth",
    "Query",
    "Selection",
    "SlotMoves",
    "Source",
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
