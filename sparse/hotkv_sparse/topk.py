"""Choosing blocks by weight: a fixed number, or as many as reach a share of the attention mass.

Blocks that are always kept are not candidates here: `Span` names them, and `select` adds them. Of
equal weights the lower block wins, so the same weights give the same selection everywhere.

Shapes: S candidate blocks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import MIN_ADAPTIVE_TOKENS, SparseConfig

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """The blocks of a context: [0, first) and [last, count) are always kept, [first, last) are
    candidates."""

    first: int
    last: int
    count: int

    @property
    def num_always(self) -> int:
        """Blocks that are always kept."""
        return self.count - (self.last - self.first)

    @property
    def always(self) -> I32:
        """The always kept blocks, ascending."""
        return np.concatenate(
            [
                np.arange(self.first, dtype=np.int32),
                np.arange(self.last, self.count, dtype=np.int32),
            ]
        )

    @property
    def candidates(self) -> I32:
        """The candidate blocks, ascending."""
        return np.arange(self.first, self.last, dtype=np.int32)


def span(config: SparseConfig, context_tokens: int, block_tokens: int) -> Span:
    """Sinks, candidates and recent window of a context in blocks; the window covers the partial
    block, whatever it asks for."""
    count = -(-context_tokens // block_tokens)
    first = min(-(-config.sink_tokens // block_tokens), count)
    complete = context_tokens // block_tokens
    last = min(max(context_tokens - config.recent_tokens, 0) // block_tokens, complete)
    return Span(first, max(first, last), count)


@dataclass(frozen=True, slots=True)
class Selection:
    """`blocks` int32, ascending, always kept ones included; `weights` float32, inf if always
    kept; `mass`: their estimated share."""

    blocks: I32
    weights: F32
    mass: float


def select(
    weights_S: F32,
    always_mass: float,
    where: Span,
    budget_blocks: int,
    *,
    adaptive_p: float | None = None,
    floor_blocks: int = 0,
) -> Selection:
    """The `budget_blocks` best blocks of a context, always kept ones first; INVALID_FIELD if
    weights do not fit the span.

    With `adaptive_p`, the fewest of the heaviest with always_mass + sum w >= p, but at least
    `floor_blocks`. A budget below the always kept blocks keeps just those.
    """
    if weights_S.shape != (where.last - where.first,):
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"weights are {list(weights_S.shape)}; the span has {where.last - where.first} "
                "candidates"
            ),
        )
    room = min(max(budget_blocks - where.num_always, 0), len(weights_S))
    chosen = top(weights_S, room)
    if adaptive_p is not None:
        chosen = chosen[enough(weights_S[chosen], always_mass, adaptive_p, floor_blocks)]
    mass = min(always_mass + float(weights_S[chosen].sum(dtype=np.float64)), 1.0)
    blocks = np.concatenate(
        [
            np.arange(where.first, dtype=np.int32),
            chosen + np.int32(where.first),
            np.arange(where.last, where.count, dtype=np.int32),
        ]
    )
    weights = np.full(len(blocks), np.inf, np.float32)
    weights[where.first : where.first + len(chosen)] = weights_S[chosen]
    return Selection(blocks, weights, mass)


def enough(weights: F32, always_mass: float, p: float, floor_blocks: int) -> npt.NDArray[np.intp]:
    """Returns the fewest of the chosen blocks, heaviest first, that reach `p` together with the
    blocks that are always kept: ascending indices, at least `floor_blocks`."""
    order = np.argsort(-weights, kind="stable")
    reached = np.concatenate(
        [[always_mass], always_mass + np.cumsum(weights[order], dtype=np.float64)]
    )
    # Where even all of them fall short, all of them stay.
    num_needed = int(np.searchsorted(reached, p))
    return np.sort(order[: max(num_needed, floor_blocks)])


def floor_blocks(block_tokens: int) -> int:
    """Candidates that an adaptive selection keeps at least."""
    return -(-MIN_ADAPTIVE_TOKENS // block_tokens)


def top(weights_S: F32, count: int) -> I32:
    """The indices of the `count` largest weights, ascending; of equals the lowest indices. What is
    not above 0 ranks as 0."""
    if count >= len(weights_S):
        return np.arange(len(weights_S), dtype=np.int32)
    kernels = native.load("hotkv_sparse.kernels")
    if kernels is None:
        return top_reference(weights_S, count)
    out = np.empty(count, np.int32)
    kernels.top(np.ascontiguousarray(weights_S, np.float32), out)
    return out


def top_reference(weights_S: F32, count: int) -> I32:
    """`top` in plain numpy."""
    positive = np.where(weights_S > 0, weights_S, 0.0)
    return np.sort(np.argsort(-positive, kind="stable")[:count]).astype(np.int32)
