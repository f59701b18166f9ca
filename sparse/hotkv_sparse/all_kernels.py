"""All numba kernels of sparse selection.

Load this module through `hotkv_proto.native.load` at the first use of a kernel, not by an import
statement, because the first import compiles for seconds. An import of this module loads every
kernel. So the command `hotkv-server compile` can compile all of them in advance, for example for a
container image.
"""

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
