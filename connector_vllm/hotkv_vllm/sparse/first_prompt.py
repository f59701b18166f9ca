"""Calibrates the layers of a rank from the first prompts that the engine computes: measures the
mean (centre) and the principal axes of each layer's keys.

The format `mix2` of sketches (compact forms of blocks' keys, by which sparse attention
chooses blocks) stores keys along principal axes. These depend on the distribution of a layer's keys
and queries. `FirstPrompt` records this distribution from the first `ENOUGH_TOKENS` tokens that the
engine computes in the layer. Until then the layer has no such sketches, and all requests
attend to everything in it. Afterwards the layer's axes are fixed.

RoPE rotates keys by their position, so principal axes that fit the positions of a short prompt
would not fit later positions. Therefore the tokens are treated as if they were spread over the
longest context that the engine accepts (`hotkv_sparse.axes`). Tokens whose KV came from a cache are
not computed, so they don't count. Engines don't share this calibration, because they see different
prompts.

Shapes: N tokens of a step, R rows, H KV heads, Q query heads, D channels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_sparse.axes import PLACES, Axes, AxesEstimate
from hotkv_sparse.centre import FIRST_TOKENS
from hotkv_vllm.sparse.batch import Batch, SparseLayer

F32 = npt.NDArray[np.float32]
Calibrated = Callable[[int, F32, Axes], None]
"""A function that receives the calibration of a layer: the layer's index, its centre (the mean key
of each head, float32 [KV heads, channels]), and the principal axes of its keys."""
ENOUGH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Turning:
    """Describes how a model's RoPE rotates keys by their position, so that a key can be moved to
    other positions.

    frequencies: float64 [F], radians per token. The channels i and i + F of a head are rotated
        together, by frequencies[i].
    context_tokens: length of the longest context.
    """

    frequencies: npt.NDArray[np.float64]
    context_tokens: int


NO_TURNING = Turning(np.empty(0), 1)
"""For models without RoPE, whose keys do not depend on the position."""


class FirstPrompt:
    """Records the keys and queries of each layer until the layer has seen enough tokens, and then
    calibrates the layer: computes the mean and the principal axes of its keys.

    waiting: by index of each layer that is not calibrated yet: its record of keys and queries.
    shapes: by index of each layer to calibrate: (number of KV heads, number of channels).
    turning: how the model's RoPE rotates keys by their position.
    then: a function that is called with the calibration of each layer.
    """

    def __init__(
        self, shapes: Mapping[int, tuple[int, int]], turning: Turning, then: Calibrated
    ) -> None:
        self.waiting = {index: AxesEstimate(*shape) for index, shape in shapes.items()}
        self._turning = turning
        self._then = then

    @staticmethod
    def of(layers: Iterable[SparseLayer], turning: Turning, then: Calibrated) -> "FirstPrompt":
        """Returns a `FirstPrompt` that calibrates the uncalibrated layers among `layers`."""
        shapes = {layer.index: layer.shape for layer in layers if not layer.shape.is_calibrated}
        return FirstPrompt(
            {index: (shape.kv_heads, shape.head_size) for index, shape in shapes.items()},
            turning,
            then,
        )

    def __repr__(self) -> str:
        return f"FirstPrompt({len(self.waiting)} layers wait)"

    def see(self, index: int, batch: Batch, keys_NHD: F32, queries_NQD: F32) -> None:
        """Records the keys and queries that a step has computed in a layer that is in `waiting`.
        Once the layer has seen enough tokens, calibrates it and calls `then`.

        index: index of the layer.
        keys_NHD, queries_NQD: of the step's N tokens, in the order of the batch, after RoPE.
        """
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
        # `num_tokens` counts each token PLACES times, once for each position to which it was moved.
        # It does not count tokens whose keys or queries are not finite.
        if estimate.num_tokens < PLACES * ENOUGH_TOKENS:
            return
        found = estimate.axes()
        assert found is not None, "enough tokens give axes"
        del self.waiting[index]
        self._then(index, *found)
