"""Keys and queries of a context as they would be at other positions of a longer one.

RoPE turns the slow channels of a key so slowly that some thousand tokens see a small part of a
turn. There they look constant, and codes would spend no bits on them; later in the context they are
what differs most (SmolLM2-135M: with axes from 2048 tokens the block scores at 8192 are off by 2.2
nats, with axes from the same tokens moved all over the context by 0.33, with axes from all 8192
tokens by 0.30). Turning a key by the angle of a shift moves it exactly.

Shapes: N tokens, X heads, D channels, F frequencies (2 F of the channels are turned).
"""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
PLACES = 4
"""Positions that each token is moved to."""
GOLDEN_RATIO = 0.6180339887498949


def moved(x_NXD: F32, shifts_N: npt.NDArray[np.int64], frequencies_F: F64) -> F32:
    """float32 [N, X, D]: what each token would be `shifts_N` positions later.

    Frequencies are in radians a token; channel i is turned with channel i + F (the NeoX order), and
    channels from 2 F on are not.
    """
    count = len(frequencies_F)
    angles = shifts_N[:, None, None] * frequencies_F
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x_NXD[..., :count], x_NXD[..., count : 2 * count]
    return np.concatenate(
        [low * cos - high * sin, high * cos + low * sin, x_NXD[..., 2 * count :]], axis=-1
    )


def places(positions_N: npt.NDArray[np.int64], context_tokens: int, turn: int) -> F64:
    """Positions float64 [N], whole numbers, evenly spread over a context of `context_tokens`, in an
    order that has nothing to do with the tokens'. `turn` from 0 to `PLACES` - 1: which of a token's
    places."""
    share = (positions_N * GOLDEN_RATIO + turn / PLACES) % 1.0
    return np.floor(share * context_tokens)
