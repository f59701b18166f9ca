"""Numpy references of `hotkv_sparse.all_kernels`, from the definitions in `hotkv_sparse.formats`
and docs/sparse.md.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels, C channels with
    padding, P parts, R runs of 16 tokens, S scored blocks, N bytes per block and head.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse import formats
from hotkv_sparse.axes import Axes, half_steps, offsets_of, run_channels
from hotkv_sparse.formats import LINE_BYTES, NO_TOKEN, RUN_TOKENS, Format
from hotkv_sparse.rotation import rotate
from hotkv_sparse.scores import Query
from hotkv_sparse.selection import CandidateSpan, Selection, enough

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]


def as_stored(values: F32, dtype: str) -> tuple[F32, npt.NDArray[Any]]:
    """Rounded values as float32, and as a cache stores them (bfloat16 as uint16, 8 bits as
    uint8)."""
    if dtype.startswith("float8"):
        table = _eight_bits(4 if dtype == "float8_e4m3fn" else 5)
        order = np.argsort(table)
        nearest = np.searchsorted((table[order][1:] + table[order][:-1]) / 2, values)
        codes = order[nearest].astype(np.uint8)
        return table[codes], codes
    if dtype != "bfloat16":
        held = values.astype(dtype)
        return held.astype(np.float32), held
    words = values.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
    return words.view(np.float32), (words >> np.uint32(16)).astype(np.uint16)


def _eight_bits(exponent_bits: int) -> F32:
    """The value of each code; that of NaN is infinity."""
    codes, fraction_bits, bias = np.arange(256), 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    exponent = codes >> fraction_bits & 2**exponent_bits - 1
    fraction = (codes & 2**fraction_bits - 1) / 2**fraction_bits
    power = np.exp2(np.maximum(exponent, 1) - float(bias))
    sizes = np.where(exponent > 0, 1 + fraction, fraction) * power
    special = (codes & 127) > (126 if exponent_bits == 4 else 123)
    return np.where(special, np.inf, np.where(codes < 128, sizes, -sizes)).astype(np.float32)


def build(form: Format, keys_BTHD: F32, mu_HD: F32, num_tokens_B: I32) -> U8:
    """Sketches [B, H, N]. Tokens beyond `num_tokens_B` are ignored; `mu_HD` is subtracted."""
    valid_BT = np.arange(keys_BTHD.shape[1]) < num_tokens_B[:, None]
    x_BHTD = np.ascontiguousarray((keys_BTHD - mu_HD).transpose(0, 2, 1, 3))
    x_BHTD[~np.broadcast_to(valid_BT[:, None], x_BHTD.shape[:3])] = 0.0
    return (
        _pack_tokens(form, x_BHTD, valid_BT) if form.bits else _pack_summary(form, x_BHTD, valid_BT)
    )


def _thresholds(form: Format) -> F32:
    """Midpoints between levels, in units of the root mean square: [codes − 1]."""
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
    """Packs float [B, H, P, D] into [B, H, N]; `some_B` is False without tokens.

    quest rounds minima down and maxima up: its score stays an upper bound.
    """
    num_blocks, kv_heads, num_parts, head_size = parts_BHPD.shape
    limit = np.float32(126.0 if form.name == "quest" else 127.0)
    scale = np.maximum(np.abs(parts_BHPD).max(axis=-1), np.float32(1e-20)) / limit
    steps = parts_BHPD / scale[..., None]
    rounded = np.rint(steps)
    if form.name == "quest":
        rounded = np.stack([np.ceil(steps[:, :, 0]), np.floor(steps[:, :, 1])], axis=2)
    channels = formats.padded_channels(form, head_size)
    codes = np.full((num_blocks, kv_heads, num_parts, channels), 128, np.uint8)
    codes[..., :head_size] = (rounded + 128.0).astype(np.uint8)
    scale = np.where(some_B[:, None, None], scale, NO_TOKEN).astype(np.float32)
    codes_BHN = codes.reshape(num_blocks, kv_heads, num_parts * channels)
    return np.concatenate([codes_BHN, scale.view(np.uint8)], axis=-1)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Unpacked sketches. A rotated key is about sigma · level / `level_unit`.

    levels: [B, H, R * 16, C]; mix2's count half steps.
    sigma: [B, H, R * 16]; negative for an absent token.
    """

    levels: npt.NDArray[np.int8]
    sigma: F32


def unpack_tokens(name: str, packed: U8, head_size: int) -> Tokens:
    """`packed` [B, H, N] must code each token. Padding channels mean nothing."""
    form = formats.format_named(name)
    if form.by_axes:
        return Tokens(*_unpack_axes(packed, head_size))
    lead = packed.shape[:-1]
    channels, step = formats.padded_channels(form, head_size), formats.run_bytes(form, head_size)
    num_runs = packed.shape[-1] // step
    runs = packed.reshape(*lead, num_runs, step)
    halves = np.ascontiguousarray(runs[..., step - 2 * RUN_TOKENS :]).view(np.float16)
    sigma = halves.astype(np.float32)
    low_bytes = RUN_TOKENS * channels // 4
    codes = unpack_lines(runs[..., :low_bytes], 2)
    if form.bits == 3:
        codes |= unpack_lines(runs[..., low_bytes : step - 2 * RUN_TOKENS], 1) << 2
    levels = np.array(form.levels, np.int8)[codes]
    num_tokens = num_runs * RUN_TOKENS
    return Tokens(levels.reshape(*lead, num_tokens, channels), sigma.reshape(*lead, num_tokens))


def approximate_keys(name: str, packed: U8, head_size: int) -> F32:
    """Rotated keys [B, H, T, D] of sketches that code each token."""
    tokens = unpack_tokens(name, packed, head_size)
    unit = np.float32(formats.format_named(name).level_unit)
    scale = np.maximum(tokens.sigma, np.float32(0.0)) / unit
    return np.asarray(tokens.levels[..., :head_size] * scale[..., None], np.float32)


def build_axes(y_HBTD: F32, axes: Axes, num_tokens_B: I32) -> U8:
    """mix2 sketches. `y_HBTD` is in the coordinates of `axes.channels_of`; tokens beyond
    `num_tokens_B` are ignored."""
    kv_heads, num_blocks, block_tokens, head_size = y_HBTD.shape
    runs = formats.num_runs(block_tokens)
    channels = formats.padded_channels(formats.FORMATS["mix2"], head_size)
    num_fine, num_coarse = run_channels(head_size)
    num_coded = num_fine + num_coarse
    present_BT = np.arange(runs * RUN_TOKENS) < num_tokens_B[:, None]
    y = np.zeros((kv_heads, num_blocks, runs * RUN_TOKENS, max(channels, head_size)), np.float32)
    y[:, :, :block_tokens, :head_size] = y_HBTD
    y[:, ~present_BT] = 0.0
    energy = np.sum(y * y, axis=-1)
    half_H1C = half_steps(axes)[:, None, None, :]
    rms_HC = np.repeat(axes.rms, (num_fine, num_coarse), axis=1)
    relative = y[..., :num_coded] / rms_HC[:, None, None]
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
    fine, coarse = codes_HBRTC[..., :num_fine], codes_HBRTC[..., num_fine:]
    scales = sigma.reshape(kv_heads, num_blocks, runs, RUN_TOKENS).view(np.uint8)
    packed = np.concatenate([pack_lines(fine, 4), pack_lines(coarse, 2), scales], axis=-1)
    packed_HBN = packed.reshape(kv_heads, num_blocks, runs * packed.shape[-1])
    return np.ascontiguousarray(packed_HBN.transpose(1, 0, 2), np.uint8)


def _unpack_axes(packed_BHN: U8, head_size: int) -> tuple[I8, F32]:
    """Levels in half steps [B, H, T, C], and scales [B, H, T], negative for absent tokens."""
    lead, step = packed_BHN.shape[:-1], formats.run_bytes(formats.FORMATS["mix2"], head_size)
    runs = packed_BHN.reshape(*lead, packed_BHN.shape[-1] // step, step)
    fine_bytes = formats.num_lines(head_size)[0] * formats.LINE_BYTES
    fine, coarse = runs[..., :fine_bytes], runs[..., fine_bytes : step - 2 * RUN_TOKENS]
    codes = np.concatenate([unpack_lines(fine, 4), unpack_lines(coarse, 2)], axis=-1)
    sigma = np.ascontiguousarray(runs[..., step - 2 * RUN_TOKENS :]).view(np.float16)
    levels = (2 * codes.astype(np.int32) - offsets_of(head_size)).astype(np.int8)
    return (
        levels.reshape(*lead, runs.shape[-2] * RUN_TOKENS, levels.shape[-1]),
        sigma.astype(np.float32).reshape(*lead, runs.shape[-2] * RUN_TOKENS),
    )


def pack_lines(codes: U8, width: int) -> U8:
    """Codes of `width` bits [..., 16, C] into lines of 64 bytes [..., lines * 64]."""
    lead, planes = codes.shape[:-2], 8 // width
    num_lines = codes.shape[-1] // (4 * planes)
    codes = codes.reshape(*lead, RUN_TOKENS, num_lines, planes, 4)
    shifts = (np.arange(planes, dtype=np.uint8) * width)[:, None]
    merged = np.bitwise_or.reduce(codes << shifts, axis=-2)
    return np.ascontiguousarray(np.moveaxis(merged, -3, -2)).reshape(*lead, num_lines * LINE_BYTES)


def unpack_lines(data: U8, width: int) -> U8:
    lead, planes = data.shape[:-1], 8 // width
    num_lines = data.shape[-1] // LINE_BYTES
    lines = np.moveaxis(data.reshape(*lead, num_lines, RUN_TOKENS, 4), -2, -3)
    shifts = (np.arange(planes, dtype=np.uint8) * width)[:, None]
    codes = (lines[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return codes.reshape(*lead, RUN_TOKENS, num_lines * planes * 4).astype(np.uint8)


def prepare(form: Format, query_QD: F32, codes_QPC: npt.NDArray[np.int8]) -> F32:
    """Quantizes queries into `codes_QPC`. Returns each one's largest absolute value [Q].

    quest keeps q+ and q- apart, so a score is two products: sum max(q M, q m) = q+ · M + q- · m,
    with the maxima M and minima m of a block's keys.
    """
    x_QD = rotate(query_QD) if form.bits else query_QD.astype(np.float32)
    peak: F32 = np.maximum(np.abs(x_QD).max(axis=1), np.float32(1e-20))
    steps = np.rint(x_QD * (np.float32(127.0) / peak)[:, None]).astype(np.int8)
    parts = [steps]
    if form.name == "quest":
        parts = [np.maximum(steps, 0), np.minimum(steps, 0)]
    codes_QPC[:, :, : query_QD.shape[1]] = np.stack(parts, axis=1)
    return peak


def prepare_axes(query_QD: F32, axes: Axes, codes_QC: I8) -> tuple[F32, I32]:
    """Quantizes queries for mix2 into `codes_QC`. Returns peaks [Q] (a step is peak / 127), and
    negative sums of code times offset [Q]."""
    num_heads, head_size = query_QD.shape
    grouped_HGD = query_QD.reshape(len(axes.into), -1, head_size).astype(np.float32)
    worth_QC = (grouped_HGD @ axes.weights).reshape(num_heads, -1)
    peak: F32 = np.maximum(np.abs(worth_QC).max(axis=1), np.float32(1e-20))
    codes_QC[...] = np.rint(worth_QC * (np.float32(127.0) / peak)[:, None]).astype(np.int8)
    sums = -(codes_QC.astype(np.int32) @ offsets_of(head_size))
    return peak, sums.astype(np.int32)


def score_tokens(query: Query, tokens: Tokens) -> F32:
    """[Q, B]: logsumexp over a block's tokens of the scaled products with the keys."""
    levels, sigma = tokens.levels.astype(np.int32), tokens.sigma
    num_blocks, kv_heads, num_tokens, channels = levels.shape
    grouped = query.codes.astype(np.int32).reshape(kv_heads, len(query.codes) // kv_heads, channels)
    products = np.einsum("bhtc,hgc->hgbt", levels, grouped).reshape(
        len(query.codes), num_blocks, num_tokens
    )
    sigma_QBT = np.repeat(sigma.transpose(1, 0, 2), grouped.shape[1], axis=0)
    scores = products.astype(np.float32) * sigma_QBT * query.factor[:, None, None]
    scores = np.where(sigma_QBT >= 0, scores, -np.inf)
    peak = np.maximum(scores.max(axis=-1), np.float32(-1e30))
    with np.errstate(divide="ignore"):
        log_mass = peak + np.log(np.exp(scores - peak[..., None]).sum(axis=-1))
    return np.asarray(log_mass + query.shift[:, None], np.float32)


def score_parts(query: Query, packed_BHN: U8) -> F32:
    """[Q, B] from packed summaries; -inf for an empty block."""
    form, packed = query.form, packed_BHN
    num_blocks, kv_heads = packed.shape[:2]
    channels = formats.padded_channels(form, query.head_size)
    shape = (num_blocks, kv_heads, form.parts, channels)
    codes = packed[..., : form.parts * channels].reshape(shape).astype(np.int32) - 128
    scale_BHP = np.ascontiguousarray(packed[..., form.parts * channels :]).view(np.float32)
    grouped = query.codes.astype(np.int32).reshape(kv_heads, -1, form.parts, channels)
    products = np.einsum("bhpc,hgpc->hgbp", codes, grouped).astype(np.float32)
    sums = np.einsum("hgbp,bhp->hgb", products, scale_BHP).reshape(len(query.codes), num_blocks)
    absent = np.repeat((scale_BHP[..., 0] < 0).T, grouped.shape[1], axis=0)
    scores = sums * query.factor[:, None] + query.shift[:, None]
    return np.where(absent, -np.inf, scores).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Weights:
    """Expected attention weights.

    shared: [S], averaged over the heads.
    always: [H], of the blocks in every selection.
    """

    shared: F32
    always: F32

    @property
    def always_shared(self) -> float:
        return float(self.always.mean())


def aggregate(scores_QS: F32, always_log_mass_Q: F32, kv_heads: int) -> Weights:
    everything = np.concatenate([scores_QS, always_log_mass_Q[:, None]], axis=1)
    peak = np.maximum(everything.max(axis=1), np.float32(-1e30))
    mass = np.maximum(np.exp(everything - peak[:, None]).sum(axis=1), np.float32(1e-30))
    total = peak + np.log(mass)
    share_HGS = np.exp(scores_QS - total[:, None]).reshape(
        kv_heads, len(scores_QS) // kv_heads, scores_QS.shape[1]
    )
    always = np.exp(always_log_mass_Q - total).reshape(kv_heads, -1).mean(axis=1)
    shared = share_HGS.mean(axis=1).mean(axis=0)
    return Weights(shared.astype(np.float32), always.astype(np.float32))


def top(weights_S: F32, count: int) -> I32:
    positive = np.where(weights_S > 0, weights_S, 0.0)
    return np.sort(np.argsort(-positive, kind="stable")[:count]).astype(np.int32)


def select(
    weights_S: F32,
    always_mass: float,
    where: CandidateSpan,
    budget_blocks: int,
    *,
    adaptive_p: float | None = None,
    floor_blocks: int = 0,
) -> Selection:
    """The always-kept blocks, even beyond the budget, and the heaviest others.

    weights_S: of the other blocks.
    always_mass: of the always-kept blocks.
    adaptive_p: stops once this weight is selected, but not before `floor_blocks`. None: never.
    """
    room = min(max(budget_blocks - where.num_always, 0), len(weights_S))
    chosen = top(weights_S, room)
    if adaptive_p is not None:
        chosen = chosen[enough(weights_S[chosen], always_mass, adaptive_p, floor_blocks)]
    mass = min(always_mass + float(weights_S[chosen].sum(dtype=np.float64)), 1.0)
    first, last = np.arange(where.first), np.arange(where.last, where.count)
    blocks = np.concatenate([first, chosen + where.first, last]).astype(np.int32)
    weights = np.full(len(blocks), np.inf, np.float32)
    weights[where.first : where.first + len(chosen)] = weights_S[chosen]
    return Selection(blocks, weights, mass)
