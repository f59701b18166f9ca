"""mix2 in plain numpy: keys into codes of their principal axes, and queries made ready for them.

`representations` and `scores` dispatch here for the formats that need `axes.Axes`; the compiled
twins are in `axis_kernels`. A key's channels y come from one product with the calibrated matrix,
which numpy does for both. Codes are relative to the usual rms of their run and to one gain of the
token's own; sigma = |y|² / (y · code) keeps the norm, as with rot2u.

Shapes: B blocks, T tokens of a block, H KV heads, D channels, C coded channels with padding, R runs
of 16 tokens, Q query heads, N bytes of a block and head.
"""

import numpy as np
import numpy.typing as npt

from hotkv_sparse import formats
from hotkv_sparse.axes import STEPS, Axes, run_channels
from hotkv_sparse.formats import COARSE_CHANNELS, FINE_CHANNELS, FORMATS, NO_TOKEN, RUN_TOKENS
from hotkv_sparse.lines import pack_lines, unpack_lines

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
NUM_LEVELS = (16, 4)


def channels_of(keys_BTHD: F32, mu_HD: F32, axes: Axes) -> F32:
    """y float32 [H, B, T, D]: the channels of keys less their centre."""
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    x_HSD = (keys_BTHD - mu_HD).transpose(2, 0, 1, 3).reshape(kv_heads, -1, head_size)
    y_HSD = np.asarray(x_HSD @ axes.into, np.float32)
    return y_HSD.reshape(kv_heads, num_blocks, block_tokens, head_size)


def offsets_of(head_size: int) -> npt.NDArray[np.int32]:
    """int32 [C]: a code c stands for 2 c less this, in half steps."""
    fine, coarse = formats.num_lines(head_size)
    return np.repeat(
        np.array(NUM_LEVELS, np.int32) - 1, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS)
    ).astype(np.int32)


def half_steps(axes: Axes) -> F32:
    """float32 [H, C]: half a step of each coded channel's code, for a token of gain 1."""
    head_size = axes.into.shape[1]
    fine, coarse = formats.num_lines(head_size)
    steps = axes.rms * np.array(STEPS, np.float32) / np.float32(2.0)
    return np.repeat(steps, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS), axis=1)


def build_reference(y_HBTD: F32, axes: Axes, num_tokens_B: I32) -> U8:
    """Representations uint8 [B, H, N] of channels that `channels_of` gave."""
    kv_heads, num_blocks, block_tokens, head_size = y_HBTD.shape
    runs, channels = (
        formats.num_runs(block_tokens),
        formats.padded_channels(FORMATS["mix2"], head_size),
    )
    num_fine, num_coarse = run_channels(head_size)
    num_coded = num_fine + num_coarse
    present_BT = np.arange(runs * RUN_TOKENS) < num_tokens_B[:, None]
    y = np.zeros((kv_heads, num_blocks, runs * RUN_TOKENS, max(channels, head_size)), np.float32)
    y[:, :, :block_tokens, :head_size] = y_HBTD
    y[:, ~present_BT] = 0.0
    energy = np.sum(y * y, axis=-1)
    half_H1C = half_steps(axes)[:, None, None, :]
    relative = (
        y[..., :num_coded] / np.repeat(axes.rms, (num_fine, num_coarse), axis=1)[:, None, None]
    )
    gain = np.sqrt(np.sum(relative * relative, axis=-1) / np.float32(num_coded))
    inverse = np.where(gain > 0, 1.0 / np.where(gain > 0, gain, 1.0), 0.0).astype(np.float32)
    offsets_C = offsets_of(head_size)
    middle_C = ((offsets_C + 1) // 2).astype(np.float32)
    position = y[..., :channels] * inverse[..., None] / (2 * half_H1C) + middle_C
    codes = np.fmin(np.fmax(position, 0.0), offsets_C.astype(np.float32)).astype(np.uint8)
    levels = (2 * codes.astype(np.int32) - offsets_C).astype(np.float32)
    product = np.sum(y[..., :channels] * levels * half_H1C, axis=-1)
    sigma = np.where(product > 0, energy / np.where(product > 0, product, 1.0), 0.0)
    sigma = np.where(present_BT, np.minimum(sigma, 65504.0), NO_TOKEN).astype(np.float16)
    codes_HBRTC = codes.reshape(kv_heads, num_blocks, runs, RUN_TOKENS, channels)
    packed = np.concatenate(
        [
            pack_lines(codes_HBRTC[..., :num_fine], 4),
            pack_lines(codes_HBRTC[..., num_fine:], 2),
            sigma.reshape(kv_heads, num_blocks, runs, RUN_TOKENS).view(np.uint8),
        ],
        axis=-1,
    )
    return np.ascontiguousarray(
        packed.reshape(kv_heads, num_blocks, runs * packed.shape[-1]).transpose(1, 0, 2), np.uint8
    )


def unpack(packed_BHN: U8, head_size: int) -> tuple[I8, F32]:
    """Levels int8 [B, H, R * 16, C] in half steps, and sigma float32 [B, H, R * 16], negative if
    there is no token."""
    lead, step = packed_BHN.shape[:-1], formats.run_bytes(FORMATS["mix2"], head_size)
    runs = packed_BHN.reshape(*lead, packed_BHN.shape[-1] // step, step)
    fine_bytes = formats.num_lines(head_size)[0] * formats.LINE_BYTES
    codes = np.concatenate(
        [
            unpack_lines(runs[..., :fine_bytes], 4),
            unpack_lines(runs[..., fine_bytes : step - 2 * RUN_TOKENS], 2),
        ],
        axis=-1,
    )
    sigma = np.ascontiguousarray(runs[..., step - 2 * RUN_TOKENS :]).view(np.float16)
    levels = (2 * codes.astype(np.int32) - offsets_of(head_size)).astype(np.int8)
    return (
        levels.reshape(*lead, runs.shape[-2] * RUN_TOKENS, levels.shape[-1]),
        sigma.astype(np.float32).reshape(*lead, runs.shape[-2] * RUN_TOKENS),
    )


def approximate_channels(packed_BHN: U8, axes: Axes) -> F32:
    """The channels that codes stand for, float32 [B, H, R * 16, C]; for tests and inspection."""
    levels, sigma = unpack(packed_BHN, axes.into.shape[1])
    return np.asarray(
        levels * half_steps(axes)[:, None] * np.maximum(sigma, np.float32(0.0))[..., None],
        np.float32,
    )


def prepare_reference(query_QD: F32, axes: Axes, codes_QC: I8) -> tuple[F32, I32]:
    """Fills the int8 codes of queries; returns their peaks float32 [Q], one step being a 127th of
    it, and minus the sum of code times offset, int32 [Q]."""
    num_heads, head_size = query_QD.shape
    grouped_HGD = query_QD.reshape(len(axes.into), -1, head_size).astype(np.float32)
    worth_QC = (grouped_HGD @ axes.weights).reshape(num_heads, -1)
    peak: F32 = np.maximum(np.abs(worth_QC).max(axis=1), np.float32(1e-20))
    codes_QC[...] = np.rint(worth_QC * (np.float32(127.0) / peak)[:, None]).astype(np.int8)
    sums = -(codes_QC.astype(np.int32) @ offsets_of(head_size))
    return peak, sums.astype(np.int32)
