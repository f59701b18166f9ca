"""Calibrates layers from the first prompts that the engine computes.

The format `mix2` needs principal axes, which depend on the distribution of a layer's keys and
queries. `FirstPrompt` records it from `ENOUGH_TOKENS` computed tokens. Until then all requests
attend to everything in the layer; afterwards its axes are fixed.

RoPE rotates keys by their position, so axes of a short prompt would not fit later positions: the
tokens are spread over the longest context (`hotkv_sparse.axes`). Engines see different prompts, and
don't share this calibration.

Shapes: N tokens of a step, R rows, H KV heads, Q query heads, D channels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.axes import PLACES, Axes, AxesEstimate
from hotkv_sparse.centre import FIRST_TOKENS
from hotkv_sparse.vllm.cpu.batch import Batch, SparseLayer

F32 = npt.NDArray[np.float32]
Calibrated = Callable[[int, F32, Axes], None]
"""Takes a layer's index, centre, float32 [KV heads, channels], and axes."""
ENOUGH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Turning:
    """How a model's RoPE rotates keys.

    frequencies: float64 [F], radians per token. Channels i and i + F of a head rotate by
        frequencies[i].
    context_tokens: of the longest context.
    """

    frequencies: npt.NDArray[np.float64]
    context_tokens: int


NO_TURNING = Turning(np.empty(0), 1)
"""For models without RoPE."""


class FirstPrompt:
    """Records keys and queries until they suffice to calibrate each layer.

    waiting: records of the uncalibrated layers, by index.
    shapes: (KV heads, channels) by layer index.
    then: gets each calibration.
    """

    def __init__(
        self, shapes: Mapping[int, tuple[int, int]], turning: Turning, then: Calibrated
    ) -> None:
        self.waiting = {index: AxesEstimate(*shape) for index, shape in shapes.items()}
        self._turning = turning
        self._then = then

    @staticmethod
    def of(layers: Iterable[SparseLayer], turning: Turning, then: Calibrated) -> "FirstPrompt":
        shapes = {layer.index: layer.shape for layer in layers if not layer.shape.is_calibrated}
        return FirstPrompt(
            {index: (shape.kv_heads, shape.head_size) for index, shape in shapes.items()},
            turning,
            then,
        )

    def __repr__(self) -> str:
        return f"FirstPrompt({len(self.waiting)} layers wait)"

    def see(self, index: int, batch: Batch, keys_NHD: F32, queries_NQD: F32) -> None:
        """Records a step of a layer in `waiting`, in the order of the batch, after RoPE."""
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
        # Counts each token once per position to which it was moved; none that is not finite.
        if estimate.num_tokens < PLACES * ENOUGH_TOKENS:
            return
        found = estimate.axes()
        assert found is not None, "enough tokens give axes"
        del self.waiting[index]
        self._then(index, *found)
