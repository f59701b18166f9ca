"""The centre of a layer's keys: what all of them share, and no code should spend its bits on.

Calibrated once per model from any ordinary text, a centre makes codes of the same size clearly better (SmolLM2-135M, 4k tokens,
5 % budget, centre from other text: strong-block recall on long-range copy .90 to .98 with rot2u, .56 to .77 with rot1u). A
centre that does not fit is worse than none. It is part of a representation's version.

Shapes: N tokens, H KV heads, D channels.
"""

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason

MIN_TOKENS = 1024
"""Fewer tokens give no centre to rely on."""


class CentreEstimate:
    """Mean key of one layer over the tokens it is shown; leave the first tokens of a context out, their keys are unlike all others."""

    def __init__(self, kv_heads: int, head_size: int) -> None:
        self.num_tokens = 0
        self._sum_HD = np.zeros((kv_heads, head_size), np.float64)

    def __repr__(self) -> str:
        return f"CentreEstimate({list(self._sum_HD.shape)}, {self.num_tokens} tokens)"

    def add(self, keys_NHD: npt.NDArray[np.float32]) -> None:
        """Takes keys float32 [N, H, D], after RoPE, into account; keys that aren't finite are left out. INVALID_FIELD on another shape."""
        if keys_NHD.shape[1:] != self._sum_HD.shape:
            raise HotKVError(
                Reason.INVALID_FIELD, f"keys are {list(keys_NHD.shape)}; pass [tokens, {', '.join(map(str, self._sum_HD.shape))}]"
            )
        finite = keys_NHD[np.isfinite(keys_NHD).all(axis=(1, 2))]
        self.num_tokens += len(finite)
        self._sum_HD += finite.sum(axis=0, dtype=np.float64)

    def mu(self) -> npt.NDArray[np.float32] | None:
        """The centre float32 [H, D], or None where too few tokens were seen."""
        if self.num_tokens < MIN_TOKENS:
            return None
        return (self._sum_HD / self.num_tokens).astype(np.float32)
