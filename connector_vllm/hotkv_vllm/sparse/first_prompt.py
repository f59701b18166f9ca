"""Calibrates a rank's layers from the first prompt that the engine computes.

Representations along principal axes (mix2) need the distribution of a layer's keys and queries. A
layer has no such representations until it has seen `ENOUGH_TOKENS` tokens; until then its rows
attend to everything. After that its axes are fixed. The tokens are treated as spread over the
longest context that the engine accepts: axes of a short prompt alone would fail at later positions
(`hotkv_sparse.axes`). Tokens whose KV came from a cache are not computed and don't count. Engines
don't share this calibration, because they see different prompts.

Shapes: N tokens of a step, R rows, H KV heads, Q query heads, D channels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.axes import Axes, AxesEstimate
from hotkv_sparse.centre import FIRST_TOKENS
from hotkv_vllm.sparse.batch import Batch, SparseLayer

F32 = npt.NDArray[np.float32]
Calibrated = Callable[[int, F32, Axes], None]
"""A function that receives the calibration of a layer: its index, its centre float32 [H, D], its
axes."""
ENOUGH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Turning:
    """How a model's RoPE rotates keys by their position.

    frequencies: float64 [F], radians per token, by which the channels i and i + F rotate together.
    context_tokens: the longest context.
    """

    frequencies: npt.NDArray[np.float64]
    context_tokens: int


NO_TURNING = Turning(np.empty(0), 1)
"""For models without RoPE, whose keys do not depend on the position."""


class FirstPrompt:
    """Records the layers in `waiting` until each layer has seen enough tokens, and then calibrates
    the layer.

    shapes: (H, D) by layer index.
    turning: the model's RoPE.
    then: called with each layer's result.
    """

    def __init__(
        self, shapes: Mapping[int, tuple[int, int]], turning: Turning, then: Calibrated
    ) -> None:
        self.waiting = {index: AxesEstimate(*shape) for index, shape in shapes.items()}
        self._num_seen = dict.fromkeys(self.waiting, 0)
        self._turning = turning
        self._then = then

    @staticmethod
    def of(layers: Iterable[SparseLayer], turning: Turning, then: Calibrated) -> "FirstPrompt":
        """Returns the calibration for the layers that are not calibrated yet."""
        shapes = {layer.index: layer.shape for layer in layers if not layer.shape.is_calibrated}
        return FirstPrompt(
            {index: (shape.kv_heads, shape.head_size) for index, shape in shapes.items()},
            turning,
            then,
        )

    def __repr__(self) -> str:
        return f"FirstPrompt({len(self.waiting)} layers wait)"

    def see(self, index: int, batch: Batch, keys_NHD: F32, queries_NQD: F32) -> None:
        """Records the keys and queries of a waiting layer's step. Calls `then` once enough tokens
        are recorded."""
        estimate = self.waiting[index]
        counts = np.maximum(np.diff(batch.starts), 0)
        first = np.repeat(batch.seq_lens - counts - batch.starts[:-1], counts)
        positions = np.arange(len(first)) + first
        counted = np.flatnonzero(positions >= FIRST_TOKENS)
        estimate.add_moved(
            keys_NHD[counted],
            queries_NQD[counted],
            positions[counted],
            self._turning.frequencies,
            self._turning.context_tokens,
        )
        self._num_seen[index] += len(counted)
        if self._num_seen[index] < ENOUGH_TOKENS:
            return
        found = estimate.axes()
        assert found is not None, "enough tokens give axes"
        del self.waiting[index]
        self._then(index, *found)
