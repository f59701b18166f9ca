"""Computes principal axes of a head's keys, weighted by its queries. `mix2`, a format of
sketches (compact forms of blocks' keys), quantises keys along these axes.

Some directions of the keys matter much more for attention scores than others. The axes of each KV
head are computed from a few thousand keys k and queries:
1. Each key is centred: x = k - mu, with the mean key mu. It is then multiplied by A, the matrix
   square root of the second moment of the queries that share the KV head. In the product x A every
   direction has the same influence on the score.
2. The principal axes of the vectors x A are computed, strongest first. They are split into three
   groups of channels, whose codes have 4, 2 and 0 bits (`formats.num_lines`).
3. Within a group, signs and a Hadamard matrix rotate the axes, so that the values of the channels
   are nearly normally distributed.
This is reverse water-filling in the whitened space (KLT coding; Loki, arXiv 2406.02542, is the
special case of 16 or 0 bits).

Axes are calibrated on text. Codes made with different axes can't be compared. So the version of a
kind of sketch is a hash that also covers the axes (`Axes.to_bytes`): engines with other
axes never share sketches.

A token's code in a channel is a whole number of quantisation steps. The size of a step is the
product of three numbers: the constant STEPS, the usual rms of the channel's group (`Axes.rms`), and
the token's gain. The gain says how large the token's channels are relative to their usual rms. Each
token also has a scale, sigma = |y|² / (y · code), where y are the token's channels along the axes.
As in the format rot2u, this scale preserves the norm of y.

`AxesEstimate.add_moved` is for texts that are shorter than the contexts in use. RoPE rotates the
slow channels of a key so slowly that a few thousand tokens cover only a small part of a full
rotation. Over so few tokens these channels look constant and would get no bits, although they
differ most over a long context. So `add_moved` computes the key that each token would have at
several positions of a long context. With RoPE this computation is exact. (SmolLM2-135M: the block
scores at 8192 tokens are off by 2.2 nats with axes from 2048 tokens, by 0.48 with axes from the
same tokens moved over the whole context, and by 0.43 with axes from all 8192 tokens.)

Shapes: N tokens, B blocks, T tokens of a block, H KV heads, G query heads of a group, Q = H * G, X
heads, D channels, C coded channels with padding, R = 2 groups of coded channels, F frequencies of
RoPE (it rotates 2 F of the channels).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.formats import COARSE_CHANNELS, FINE_CHANNELS
from hotkv_sparse.rotation import rotate

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
STEPS = (0.3352, 0.9957)
"""Step sizes of the best evenly spaced quantisers with 16 and with 4 levels for a normal
distribution, in units of the rms (Max 1960).

These quantisers lose 1.15 % and 11.9 % of the energy. Lloyd-Max levels would lose 0.95 % and
11.7 %, but would need a table.
"""
MIN_TOKENS = 1024
"""Least number of tokens for a calibration. With fewer tokens, centre and axes are unreliable."""
NUM_LEVELS = (16, 4)
PLACES = 4
"""For calibration texts that are shorter than the contexts in use: `add_moved` adds each token this
many times, at positions spread over a longer context."""
GOLDEN_RATIO = 0.6180339887498949
QUERY_FLOOR = 0.05
"""Share of the queries' mean energy that is added to every direction of their second moment, so
that its matrix root A (see the module) can be inverted."""


def run_channels(head_size: int) -> tuple[int, int]:
    """Returns the number of channels that the format mix2 stores with 4-bit codes and with 2-bit
    codes, without padding."""
    fine, coarse = formats.num_lines(head_size)
    num_fine = min(fine * FINE_CHANNELS, head_size)
    return num_fine, min(coarse * COARSE_CHANNELS, head_size - num_fine)


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """The principal axes of a layer's keys, along which the format mix2 quantises keys. Raises
    INVALID_FIELD if the axes can't be used.

    into: float32 [KV heads, channels, channels], projects keys onto the axes: a key k of head h,
        whose centre (mean key) is mu, has the channels y = (k - mu) @ into[h], the coded channels
        first.
    rms: float32 [KV heads, 2], measured by the calibration: rms of the channels with 4-bit codes
        and rms of the channels with 2-bit codes.
    weights: float32 [KV heads, channels, coded channels], computed from `into` and `rms`. For a
        query q, w = q @ weights[h] is the change of the score if a coded channel changes by half a
        quantisation step. For a key with codes c and scale sigma, the score q · (k - mu) is about
        sigma * sum(w * (2 * c - offsets)), with `offsets` from `offsets_of`.
    """

    into: F32
    rms: F32
    weights: F32 = field(init=False, repr=False)

    def __post_init__(self) -> None:
        into, rms = self.into, self.rms
        if (
            into.dtype != np.float32
            or into.ndim != 3
            or not into.size
            or into.shape[1] != into.shape[2]
            or rms.dtype != np.float32
            or rms.shape != (len(into), len(STEPS))
        ):
            raise _refuse(
                f"are {into.dtype} {list(into.shape)} and {rms.dtype} {list(rms.shape)}, not "
                "float32 [kv_heads, head_size, head_size] and [kv_heads, 2]"
            )
        if not (np.isfinite(into).all() and np.isfinite(rms).all() and (rms > 0).all()):
            raise _refuse("have values that are not finite, or an rms that is not above 0")
        try:
            back = np.linalg.inv(into.astype(np.float64)).transpose(0, 2, 1)
        except np.linalg.LinAlgError:
            raise _refuse("of a head cannot be inverted") from None
        head_size = into.shape[1]
        weights = np.zeros(
            (*into.shape[:2], formats.padded_channels(formats.FORMATS["mix2"], head_size)),
            np.float32,
        )
        first = 0
        for run, count in enumerate(run_channels(head_size)):
            half_step = rms[:, run, None, None].astype(np.float64) * (STEPS[run] / 2.0)
            weights[..., first : first + count] = back[..., first : first + count] * half_step
            first += count
        object.__setattr__(self, "weights", weights)

    def to_bytes(self) -> bytes:
        """Returns `into` and `rms` as bytes. They are part of the version of sketches
        (compact forms of keys), so engines share sketches only if they have the same
        axes."""
        return b"".join(
            np.ascontiguousarray(part, dtype="<f4").tobytes() for part in (self.into, self.rms)
        )

    def heads(self, first: int, count: int) -> "Axes":
        """Returns the axes of `count` heads from `first` on."""
        part = slice(first, first + count)
        return Axes(np.ascontiguousarray(self.into[part]), np.ascontiguousarray(self.rms[part]))


class AxesEstimate:
    """Collects sums and second moments of a layer's keys and queries (after RoPE). From them it
    computes, for each KV head, the centre (mean key) and the principal axes of the keys.

    The caller must omit the first `centre.FIRST_TOKENS` tokens of a context, which include
    attention sinks.
    """

    def __init__(self, kv_heads: int, head_size: int) -> None:
        self.num_tokens = 0
        self._keys_HD = np.zeros((kv_heads, head_size), np.float64)
        self._keys_HDD = np.zeros((kv_heads, head_size, head_size), np.float64)
        self._queries_HDD = np.zeros_like(self._keys_HDD)

    def __repr__(self) -> str:
        return f"AxesEstimate({list(self._keys_HD.shape)}, {self.num_tokens} tokens)"

    def add(self, keys_NHD: F32, queries_NQD: F32) -> None:
        """Adds the keys and queries of the same tokens, float32 [tokens, KV heads, channels] and
        [tokens, query heads, channels].

        Ignores tokens with values that are not finite. Raises INVALID_FIELD if the shapes do not
        fit.
        """
        kv_heads, head_size = self._keys_HD.shape
        num_tokens = len(keys_NHD)
        if (
            keys_NHD.shape[1:] != (kv_heads, head_size)
            or queries_NQD.ndim != 3
            or queries_NQD.shape[::2] != (num_tokens, head_size)
            or queries_NQD.shape[1] % kv_heads
        ):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"keys are {list(keys_NHD.shape)} and queries {list(queries_NQD.shape)}; pass "
                f"[tokens, {kv_heads}, {head_size}] and [tokens, query_heads, {head_size}]",
            )
        finite = np.isfinite(keys_NHD).all(axis=(1, 2)) & np.isfinite(queries_NQD).all(axis=(1, 2))
        keys_HND = keys_NHD[finite].transpose(1, 0, 2).astype(np.float64)
        grouped_HND = (
            queries_NQD[finite]
            .reshape(-1, kv_heads, queries_NQD.shape[1] // kv_heads, head_size)
            .transpose(1, 0, 2, 3)
            .reshape(kv_heads, -1, head_size)
        )
        self.num_tokens += keys_HND.shape[1]
        self._keys_HD += keys_HND.sum(axis=1)
        self._keys_HDD += keys_HND.transpose(0, 2, 1) @ keys_HND
        # Divides by the number of query heads that share the KV head, so that the result does not
        # depend on this number.
        self._queries_HDD += (grouped_HND.transpose(0, 2, 1) @ grouped_HND).astype(np.float64) / (
            queries_NQD.shape[1] // kv_heads
        )

    def add_moved(
        self,
        keys_NHD: F32,
        queries_NQD: F32,
        positions_N: npt.NDArray[np.int64],
        frequencies_F: F64,
        context_tokens: int,
    ) -> None:
        """Adds each token `PLACES` times, with the keys and queries that it would have at positions
        spread over a context of `context_tokens`. Use it if the text is shorter than the contexts
        for which it calibrates.

        keys_NHD, queries_NQD: as in `add`, after RoPE at `positions_N`.
        positions_N: position of each token in the text.
        frequencies_F: RoPE's frequencies, in radians per token.
        """
        for turn in range(PLACES):
            shifts = (places(positions_N, context_tokens, turn) - positions_N).astype(np.int64)
            self.add(
                moved(keys_NHD, shifts, frequencies_F),
                moved(queries_NQD, shifts, frequencies_F),
            )

    def axes(self, min_tokens: int = MIN_TOKENS) -> tuple[F32, Axes] | None:
        """Returns the centre (mean key of each KV head), float32 [KV heads, channels], and the
        principal axes of the keys. Returns None if fewer than `min_tokens` tokens were added."""
        if self.num_tokens < min_tokens:
            return None
        mean_HD = self._keys_HD / self.num_tokens
        covariance_HDD = (
            self._keys_HDD / self.num_tokens - mean_HD[:, :, None] * mean_HD[:, None, :]
        )
        moment_HDD = self._queries_HDD / self.num_tokens
        mixing = _mixing(mean_HD.shape[1])
        into_HDD = np.stack(
            [
                _whitened_axes(moment, covariance) @ mixing
                for moment, covariance in zip(moment_HDD, covariance_HDD, strict=True)
            ]
        )
        variance_HD = ((covariance_HDD @ into_HDD) * into_HDD).sum(axis=1)
        num_fine, num_coarse = run_channels(mean_HD.shape[1])
        runs = (slice(0, num_fine), slice(num_fine, num_fine + num_coarse))
        rms_HR = np.stack(
            [
                np.sqrt(np.maximum(variance_HD[:, run], 1e-12).mean(axis=1))
                if run.stop > run.start
                else np.ones(len(mean_HD))
                for run in runs
            ],
            axis=1,
        )
        return mean_HD.astype(np.float32), Axes(
            into_HDD.astype(np.float32), rms_HR.astype(np.float32)
        )


def _mixing(head_size: int) -> F64:
    """Returns the rotation of step 3 in the module's docstring: an orthonormal matrix, float64
    [channels, channels], that mixes channels so that the mixed channels have values of about the
    same magnitude. Channels with 4-bit codes are mixed only with each other, and so are channels
    with 2-bit codes."""
    matrix, first = np.eye(head_size), 0
    for count in run_channels(head_size):
        run = slice(first, first + count)
        if count:
            matrix[run, run] = rotate(np.eye(count, dtype=np.float32))
        first += count
    return matrix


def _whitened_axes(moment_DD: F64, covariance_DD: F64) -> F64:
    """Returns the projection onto the principal axes of the keys, weighted by the queries: the
    matrix A U, float64 [channels, channels].

    A is the matrix square root of the queries' second moment `moment_DD`. The columns of U are the
    principal axes of A C A, strongest first, where C is the keys' covariance `covariance_DD`.
    """
    mean_energy = max(float(moment_DD.diagonal().mean()), 1e-12)
    floored = moment_DD + QUERY_FLOOR * mean_energy * np.eye(len(moment_DD))
    values, vectors = np.linalg.eigh(floored)
    root = (vectors * np.sqrt(values)) @ vectors.T
    principal = np.linalg.eigh(root @ covariance_DD @ root)[1][:, ::-1]
    result: F64 = root @ principal
    return result


def _refuse(problem: str) -> HotKVError:
    return HotKVError(Reason.INVALID_FIELD, f"axes {problem}; calibrate again")


# -------------------------------------------------------------------------------------------- codes


def channels_of(keys_BTHD: F32, mu_HD: F32, axes: Axes) -> F32:
    """Projects keys minus their centre (mean key) onto the principal axes, as the format mix2
    stores them. Returns the channels y (components along the axes), float32 [KV heads, blocks,
    tokens, channels]."""
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    x_HSD = (keys_BTHD - mu_HD).transpose(2, 0, 1, 3).reshape(kv_heads, -1, head_size)
    y_HSD = np.asarray(x_HSD @ axes.into, np.float32)
    return y_HSD.reshape(kv_heads, num_blocks, block_tokens, head_size)


def offsets_of(head_size: int) -> npt.NDArray[np.int32]:
    """Returns the largest code of each coded channel of the format mix2, int32: 15 with 4 bits, 3
    with 2 bits. It is called offset, because a code c stands for the value 2 c - offset, in units
    of half a quantisation step."""
    fine, coarse = formats.num_lines(head_size)
    return np.repeat(
        np.array(NUM_LEVELS, np.int32) - 1, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS)
    ).astype(np.int32)


def half_steps(axes: Axes) -> F32:
    """Returns half a quantisation step of each coded channel of the format mix2, float32 [KV heads,
    coded channels], for a token whose channels have the usual rms (gain 1)."""
    head_size = axes.into.shape[1]
    fine, coarse = formats.num_lines(head_size)
    steps = axes.rms * np.array(STEPS, np.float32) / np.float32(2.0)
    return np.repeat(steps, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS), axis=1)


# ---------------------------------------------------------------------------------- other positions


def moved(x_NXD: F32, shifts_N: npt.NDArray[np.int64], frequencies_F: F64) -> F32:
    """Returns the keys or queries that the tokens would have `shifts_N` positions later, by RoPE;
    float32 [tokens, heads, channels].

    x_NXD: keys or queries of N tokens, after RoPE.
    frequencies_F: RoPE's frequencies in radians per token. RoPE rotates channel i together with
        channel i + F (the NeoX order), and does not rotate channels from 2 F on.
    """
    count = len(frequencies_F)
    angles = shifts_N[:, None, None] * frequencies_F
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x_NXD[..., :count], x_NXD[..., count : 2 * count]
    return np.concatenate(
        [low * cos - high * sin, high * cos + low * sin, x_NXD[..., 2 * count :]], axis=-1
    )


def places(positions_N: npt.NDArray[np.int64], context_tokens: int, turn: int) -> F64:
    """Returns a new position for each token, float64 [tokens], whole numbers. The positions are
    evenly spread over a context of `context_tokens`, in an order unrelated to that of the tokens.

    turn: 0 to `PLACES` - 1; with each value of `turn` the tokens get other positions.
    """
    share = (positions_N * GOLDEN_RATIO + turn / PLACES) % 1.0
    found: F64 = np.floor(share * context_tokens)
    return found
