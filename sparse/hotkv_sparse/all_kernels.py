"""All numba kernels of sparse selection. Load it by `hotkv_proto.native.load` at the first use:
the first import compiles for seconds. Importing it loads every kernel, so `hotkv-server compile`
can compile all in advance."""

from hotkv_sparse.build_kernels import build_axes, build_parts, build_tokens, prepare, prepare_axes
from hotkv_sparse.choice_kernels import choose, top
from hotkv_sparse.hotset_kernels import (
    REFUSED,
    hot_adopt,
    hot_begin_prefetch,
    hot_finish_prefetch,
    hot_step,
)
from hotkv_sparse.score_kernels import page_log_mass, score_parts, score_tokens
from hotkv_sparse.step_kernels import NO_PAGE, decode_step

__all__ = [
    "NO_PAGE",
    "REFUSED",
    "build_axes",
    "build_parts",
    "build_tokens",
    "choose",
    "decode_step",
    "hot_adopt",
    "hot_begin_prefetch",
    "hot_finish_prefetch",
    "hot_step",
    "page_log_mass",
    "prepare",
    "prepare_axes",
    "score_parts",
    "score_tokens",
    "top",
]
