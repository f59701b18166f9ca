"""Building representations from unpacked keys, and unpacking them again.

Pure array functions: numpy references here, compiled kernels behind the same call if they can be
used. A representation is built once, when its block fills, from keys as attention sees them (after
RoPE).

Shapes: B blocks, T tokens of a block, H KV heads, D channels, N bytes of a block and head, R runs
of 16 tokens, L lines.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import axis_codes, formats
from hotkv_sparse.axes import Axes, run_channels
from hotkv_sparse.formats import NO_TOKEN, RUN_TOKENS, Format
from hotkv_sparse.lines import pack_lines, unpack_lines
from hotkv_sparse.rotation import factors, pass_arrays, rotate

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
    out: U8 | None = None,
    axes: Axes | None = None,
) -> U8:
    """Representations uint8 [B, H, N] of keys float32 [B, T, H, D]; centre `mu_HD` (None: 0), valid
    tokens `num_tokens_B` (None: all). mix2 needs `axes`, the other formats have none.

    Token formats: x = k − mu, y = rotated x, codes nearest to y / rms(y), sigma = |y|² / (y ·
    level) (docs/sparse.md; of the RaBitQ and TurboQuant family). mix2: the same of principal
    axes (`axes`, `axis_codes`). Summaries: quest min and max
    (Quest), mean. `out` may be any array with contiguous last axis. Raises INVALID_FIELD. Does not
    block; compiled code runs without the GIL.
    """
    form = formats.format_named(name)
    keys_BTHD, mu_HD, num_tokens_B = _checked(keys_BTHD, mu_HD, num_tokens_B)
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    shape = (num_blocks, kv_heads, formats.head_bytes(name, block_tokens, head_size))
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8 or (out.size and out.strides[-1] != 1):
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"out is {out.dtype} {list(out.shape)}; pass uint8 {list(shape)} with contiguous "
                "last axis"
            ),
        )
    kernels = native.load("hotkv_sparse.kernels")
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
    if kernels is None:
        out[...] = build_reference(form, keys_BTHD, mu_HD, num_tokens_B)
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
    """Axes for format `name` that fit keys of `shape` = (kv_heads, head_size), or INVALID_FIELD."""
    if axes is None:
        raise HotKVError(Reason.INVALID_FIELD, f"{name} has no axes; calibrate them first")
    if axes.into.shape[:2] != shape:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"axes are of {list(axes.into.shape[:2])}; {name} of these keys needs {list(shape)}",
        )
    return axes


def _build_by_axes(
    kernels: ModuleType | None, keys_BTHD: F32, mu_HD: F32, num_tokens_B: I32, out: U8, axes: Axes
) -> None:
    y_HBTD = axis_codes.channels_of(keys_BTHD, mu_HD, axes)
    if kernels is None:
        out[...] = axis_codes.build_reference(y_HBTD, axes, num_tokens_B)
        return
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    runs, (num_fine, num_coarse) = formats.num_runs(block_tokens), run_channels(head_size)
    sigma = np.empty((num_blocks, kv_heads, runs, RUN_TOKENS), np.float32)
    kernels.build_axes(
        y_HBTD,
        np.ascontiguousarray(axes.rms),
        axis_codes.half_steps(axes),
        axis_codes.offsets_of(head_size),
        num_tokens_B,
        num_fine,
        num_fine + num_coarse,
        sigma,
        out,
    )
    step, halves = out.shape[2] // runs, sigma.astype(np.float16).view(np.uint8)
    for run in range(runs):
        out[:, :, (run + 1) * step - 2 * RUN_TOKENS : (run + 1) * step] = halves[:, :, run]


def build_reference(form: Format, keys_BTHD: F32, mu_HD: F32, num_tokens_B: I32) -> U8:
    """`build` in plain numpy, arguments complete and checked."""
    valid_BT = np.arange(keys_BTHD.shape[1]) < num_tokens_B[:, None]
    x_BHTD = np.ascontiguousarray((keys_BTHD - mu_HD).transpose(0, 2, 1, 3))
    x_BHTD[~np.broadcast_to(valid_BT[:, None], x_BHTD.shape[:3])] = 0.0
    return (
        _pack_tokens(form, x_BHTD, valid_BT) if form.bits else _pack_summary(form, x_BHTD, valid_BT)
    )


def _thresholds(form: Format) -> F32:
    """float32 [codes − 1]: halfway between neighbouring levels, in units of the rms."""
    levels = np.array(form.levels, np.float64)
    return ((levels[1:] + levels[:-1]) / 2.0 / form.level_unit).astype(np.float32)


def _pack_tokens(form: Format, x_BHTD: F32, valid_BT: npt.NDArray[np.bool_]) -> U8:
    num_blocks, kv_heads, block_tokens, head_size = x_BHTD.shape
    runs, channels = formats.num_runs(block_tokens), formats.padded_channels(form, head_size)
    padding = ((0, 0), (0, 0), (0, runs * RUN_TOKENS - block_tokens), (0, channels - head_size))
    y = np.pad(rotate(x_BHTD), padding)
    energy = np.sum(y * y, axis=-1)
    rms = np.sqrt(energy / np.float32(head_size))
    codes = np.zeros(y.shape, np.uint8)
    for threshold in _thresholds(form):
        codes += y > (threshold * rms)[..., None]
    product = np.sum(y * np.array(form.levels, np.float32)[codes], axis=-1)
    sigma = np.where(product > 0, energy / np.where(product > 0, product, 1.0), 0.0) * np.float32(
        form.level_unit
    )
    present = np.pad(valid_BT, (padding[0], padding[2]))[:, None]
    sigma = np.where(present, np.minimum(sigma, 65504.0), NO_TOKEN).astype(np.float16)
    codes_BHRTD = codes.reshape(num_blocks, kv_heads, runs, RUN_TOKENS, channels)
    sigma_BHRT = sigma.reshape(num_blocks, kv_heads, runs, RUN_TOKENS)
    lines = [pack_lines(codes_BHRTD & np.uint8(3), 2)]
    if form.bits == 3:
        lines.append(pack_lines(codes_BHRTD >> np.uint8(2), 1))
    packed: U8 = np.concatenate([*lines, np.ascontiguousarray(sigma_BHRT).view(np.uint8)], axis=-1)
    result: U8 = packed.reshape(num_blocks, kv_heads, packed.shape[-1] * runs)
    return result


def _pack_summary(form: Format, x_BHTD: F32, valid_BT: npt.NDArray[np.bool_]) -> U8:
    valid = valid_BT[:, None, :, None]
    count = np.maximum(valid_BT.sum(axis=1), 1).astype(np.float32)[:, None, None]
    low = np.where(valid, x_BHTD, np.inf).min(axis=2)
    high = np.where(valid, x_BHTD, -np.inf).max(axis=2)
    some: npt.NDArray[np.bool_] = np.any(valid_BT, axis=1, keepdims=False)
    low, high = (
        np.where(some[:, None, None], edge, 0.0).astype(np.float32) for edge in (low, high)
    )
    parts = [x_BHTD.sum(axis=2) / count] if form.name == "mean" else [high, low]
    return pack_parts(form, np.stack(parts, axis=2).astype(np.float32), some)


def pack_parts(form: Format, parts_BHPD: F32, some_B: npt.NDArray[np.bool_]) -> U8:
    """Summary bytes uint8 [B, H, N] of float parts [B, H, P, D]; `some_B` is False if a block is
    empty.

    quest rounds its edges outwards, so that its score stays an upper bound; mean rounds to nearest.
    """
    num_blocks, kv_heads, num_parts, head_size = parts_BHPD.shape
    limit = np.float32(126.0 if form.name == "quest" else 127.0)
    scale = np.maximum(np.abs(parts_BHPD).max(axis=-1), np.float32(1e-20)) / limit
    steps = parts_BHPD / scale[..., None]
    rounded = (
        np.stack([np.ceil(steps[:, :, 0]), np.floor(steps[:, :, 1])], axis=2)
        if form.name == "quest"
        else np.rint(steps)
    )
    codes = np.full(
        (num_blocks, kv_heads, num_parts, formats.padded_channels(form, head_size)), 128, np.uint8
    )
    codes[..., :head_size] = (rounded + 128.0).astype(np.uint8)
    scale = np.where(some_B[:, None, None], scale, NO_TOKEN).astype(np.float32)
    return np.concatenate(
        [codes.reshape(num_blocks, kv_heads, num_parts * codes.shape[-1]), scale.view(np.uint8)],
        axis=-1,
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """An unpacked token format: `levels` int8 [B, H, R * 16, channels], `sigma` float32 [B, H, R *
    16], negative if there is no token.

    A rotated key is about sigma · level / `level_unit`; of mix2, levels are in half steps.
    """

    levels: npt.NDArray[np.int8]
    sigma: F32


def unpack_tokens(name: str, packed: U8, head_size: int) -> Tokens:
    """A token format's bytes uint8 [B, H, N]; padding channels mean nothing."""
    form = formats.format_named(name)
    if form.by_axes:
        return Tokens(*axis_codes.unpack(packed, head_size))
    lead = packed.shape[:-1]
    channels, step = formats.padded_channels(form, head_size), formats.run_bytes(form, head_size)
    num_runs = packed.shape[-1] // step
    runs = packed.reshape(*lead, num_runs, step)
    sigma = (
        np.ascontiguousarray(runs[..., step - 2 * RUN_TOKENS :]).view(np.float16).astype(np.float32)
    )
    low_bytes = RUN_TOKENS * channels // 4
    codes = unpack_lines(runs[..., :low_bytes], 2)
    if form.bits == 3:
        codes |= unpack_lines(runs[..., low_bytes : step - 2 * RUN_TOKENS], 1) << 2
    levels = np.array(form.levels, np.int8)[codes]
    num_tokens = num_runs * RUN_TOKENS
    return Tokens(levels.reshape(*lead, num_tokens, channels), sigma.reshape(*lead, num_tokens))


def unpack_parts(name: str, packed: U8, head_size: int) -> tuple[F32, npt.NDArray[np.bool_]]:
    """Parts float32 [B, H, P, D] of a summary format's bytes uint8 [B, H, N], and bool [B, H]:
    which have tokens at all."""
    form = formats.format_named(name)
    lead, channels = packed.shape[:-1], formats.padded_channels(form, head_size)
    codes = packed[..., : form.parts * channels].reshape(*lead, form.parts, channels)[
        ..., :head_size
    ]
    scale = np.ascontiguousarray(packed[..., form.parts * channels :]).view(np.float32)
    return (codes.astype(np.float32) - 128.0) * np.maximum(scale, 0.0)[..., None], scale[
        ..., 0
    ] >= 0.0


def approximate_keys(name: str, packed: U8, head_size: int) -> F32:
    """The rotated keys as a token format holds them: float32 [B, H, R * 16, D]; for tests and
    inspection."""
    tokens = unpack_tokens(name, packed, head_size)
    scale = np.maximum(tokens.sigma, np.float32(0.0)) / np.float32(
        formats.format_named(name).level_unit
    )
    return np.asarray(tokens.levels[..., :head_size] * scale[..., None], np.float32)
