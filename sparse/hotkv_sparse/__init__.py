"""Sparse decode, the pure part: which blocks of a long context a step should attend to.

From unpacked keys to a selection, in the order of a step: `representations.build` when a block
fills; `scores.prepare` and `scores.score` with a step's query; `weights.aggregate` (if scorers
are fused, after `weights.fuse`); `topk.span` and `topk.select`; `hotset.HotSet.step`.
`axes.AxesEstimate` and `centre` calibrate.
`config.SparseConfig` says how, `budget.AdaptiveCapacity` how large, `torch_ops` is the same on a
GPU.

No I/O but in `centre_file`, no clock, no threads. numpy is enough; numba makes it fast, and is
loaded on first use.
"""

from hotkv_sparse.axes import Axes
from hotkv_sparse.budget import AdaptiveCapacity
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import FORMATS, bytes_per_block, version
from hotkv_sparse.hotset import HotSet
from hotkv_sparse.hotset_answers import Growth, HotMap, SlotMoves, Step
from hotkv_sparse.representations import build
from hotkv_sparse.scores import Query, prepare, score
from hotkv_sparse.selector import Source, exact_log_mass, select_layer
from hotkv_sparse.topk import Selection, Span, select, span
from hotkv_sparse.weights import Weights, aggregate, fuse

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
    "Weights",
    "aggregate",
    "build",
    "bytes_per_block",
    "exact_log_mass",
    "fuse",
    "prepare",
    "score",
    "select",
    "select_layer",
    "span",
    "version",
]
