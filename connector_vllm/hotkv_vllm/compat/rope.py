"""How vLLM's model turns keys by their positions.

Reads the rotary modules that the model has made in this process (`_ROPE_DICT`), whose tables of
cosines and sines hold for any scaling of RoPE.
"""

from typing import Any

import numpy as np
import numpy.typing as npt


def frequencies(head_size: int) -> npt.NDArray[np.float64] | None:
    """Radians a token float64 [F] by which heads of this size are turned, channel i with channel
    i + F; None if that is not known: no such module, several unlike ones, or another order of
    channels."""
    from vllm.model_executor.layers import rotary_embedding

    found: list[npt.NDArray[np.float64]] = []
    for module in getattr(rotary_embedding, "_ROPE_DICT", {}).values():
        if getattr(module, "head_size", None) != head_size:
            continue
        table: Any = getattr(module, "cos_sin_cache", None)
        if table is None or not getattr(module, "is_neox_style", False) or len(table) < 2:
            return None
        cos, sin = table[1].detach().double().cpu().numpy().reshape(2, -1)
        found.append(np.arctan2(sin, cos))
    if not found or any(not np.array_equal(found[0], other) for other in found[1:]):
        return None
    return found[0]
