"""Sparse decode: selects the blocks of a long context to which a decode step attends.

The functions in the order of their use:
- `sketches.build` computes a sketch of a block, a compact approximation of its keys,
  when the block is full.
- `scores.prepare` and `scores.score` score all blocks with a step's query, by their
  sketches.
- `selection.select_layer` scores the blocks and selects the best blocks.
- `hotset.HotSet.step` decides which selected blocks to load to the device.
- `decode.decode` selects blocks and updates the hot set (the blocks of a layer that are on the
  device) in one compiled call.

`axes.AxesEstimate` and `centre` measure, on text, mean keys and principal axes of keys, which make
sketches more precise. `config.SparseConfig` has the settings. `cuda` has the same functions
for a GPU.

Only `centre_file`, `estimate` and `cuda.device` (the kernels' sources) touch files, and only
`cuda.mapped_arena` has a thread. The package needs numpy and numba; numba is loaded on first use.
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
