"""Builds sketches from unpacked keys, once, when a block is full. Pure; `tests/oracles/sparse.py`
is the kernels' numpy twin.

Shapes: B blocks, T tokens of a block, H KV heads, D channels, N bytes of a block and head, R
    runs, L lines.
"""

from types import ModuleType

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.axes import Axes, channels_of, half_steps, offsets_of, run_channels
from hotkv_sparse.formats import RUN_TOKENS
from hotkv_sparse.rotation import factors, pass_arrays

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]


def _checked(keys_BTHD: F32, mu_HD: F32 | None, num_tokens_B: I32 | None) -> tuple[F32, F32, I32]:
    if keys_BTHD.ndim != 4 or keys_BTHD.dtype != np.float32:
        shape = f"{keys_BTHD.dtype} {list(keys_BTHD.shape)}"
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"keys are {shape}; pass float32 [blocks, tokens, kv_heads, head_size]",
        )
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    if mu_HD is None:
        mu_HD = np.zeros((kv_heads, head_size), np.float32)
    elif mu_HD.shape != (kv_heads, head_size):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"mu is {list(mu_HD.shape)}; the keys need [{kv_heads}, {head_size}]",
        )
    if num_tokens_B is None:
        num_tokens_B = np.full(num_blocks, block_tokens, np.int32)
    elif num_tokens_B.shape != (num_blocks,) or (
        num_blocks and not 0 <= num_tokens_B.min() <= num_tokens_B.max() <= block_tokens
    ):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"num_tokens must be [{num_blocks}] counts from 0 to {block_tokens}",
        )
    return (
        keys_BTHD,
        np.ascontiguousarray(mu_HD, np.float32),
        np.ascontiguousarray(num_tokens_B, np.int32),
    )


def build(
    name: str,
    keys_BTHD: F32,
    mu_HD: F32 | None = None,
    num_tokens_B: I32 | None = None,
    axes: Axes | None = None,
) -> U8:
    """Sketches in format `name`, uint8 [B, H, N], of keys after RoPE, float32 [B, T, H, D].

    With x = k − mu:
    - rot2u and rot3u rotate x to y, store for each channel the code whose level is nearest to y /
      rms(y), and for each token sigma = |y|² / (y · levels) (docs/sparse.md; similar to RaBitQ and
      TurboQuant).
    - mix2 does so along principal axes.
    - quest stores maximum and minimum of x over the tokens (Quest), mean its mean.

    Raises INVALID_FIELD for a wrong shape, dtype or format. Runs without the GIL.

    mu_HD: float32; None: 0.
    num_tokens_B: int32, valid tokens; None: all.
    axes: for mix2.
    """
    form = formats.format_named(name)
    keys_BTHD, mu_HD, num_tokens_B = _checked(keys_BTHD, mu_HD, num_tokens_B)
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    shape = (num_blocks, kv_heads, formats.head_bytes(name, block_tokens, head_size))
    out = np.empty(shape, np.uint8)
    kernels = native.require("hotkv_sparse.all_kernels")
    if form.by_axes:
        _build_by_axes(
            kernels,
            keys_BTHD,
            mu_HD,
            num_tokens_B,
            out,
            checked_axes(name, axes, keys_BTHD.shape[2:]),
        )
        return out
    channels = formats.padded_channels(form, head_size)
    if form.bits:
        starts, sizes = pass_arrays(head_size)
        kernels.build_tokens(
            keys_BTHD,
            mu_HD,
            num_tokens_B,
            factors(head_size),
            starts,
            sizes,
            form.bits,
            channels,
            out,
        )
    else:
        kernels.build_parts(keys_BTHD, mu_HD, num_tokens_B, form.kind, channels, out)
    return out


def checked_axes(name: str, axes: Axes | None, shape: tuple[int, ...]) -> Axes:
    """Raises INVALID_FIELD unless `axes` fit `shape`, (kv_heads, head_size)."""
    if axes is None:
        raise HotKVError(Reason.INVALID_FIELD, f"{name} has no axes; calibrate them first")
    if axes.into.shape[:2] != shape:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"axes are of {list(axes.into.shape[:2])}; {name} of these keys needs {list(shape)}",
        )
    return axes


def _build_by_axes(
    kernels: ModuleType, keys_BTHD: F32, mu_HD: F32, num_tokens_B: I32, out: U8, axes: Axes
) -> None:
    y_HBTD = channels_of(keys_BTHD, mu_HD, axes)
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    runs, (num_fine, num_coarse) = formats.num_runs(block_tokens), run_channels(head_size)
    sigma = np.empty((num_blocks, kv_heads, runs, RUN_TOKENS), np.float32)
    kernels.build_axes(
        y_HBTD,
        np.ascontiguousarray(axes.rms),
        half_steps(axes),
        offsets_of(head_size),
        num_tokens_B,
        num_fine,
        num_fine + num_coarse,
        sigma,
        out,
    )
    step, halves = out.shape[2] // runs, sigma.astype(np.float16).view(np.uint8)
    for run in range(runs):
        out[:, :, (run + 1) * step - 2 * RUN_TOKENS : (run + 1) * step] = halves[:, :, run]
