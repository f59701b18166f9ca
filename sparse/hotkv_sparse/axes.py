"""Principal axes of a head's keys, weighted by its queries, along which mix2 quantises.

Some directions matter far more for scores than others. For each KV head, from a few thousand
tokens:
1. Keys are centred, x = k - mu, and multiplied by A, the root of the second moment of its queries,
   so that all directions of x A have the same influence.
2. The principal axes of x A, strongest first, are split into channels of 4, 2 and 0 bits
   (`formats.num_lines`).
3. Within a group, signs and a Hadamard matrix mix the axes, so that channels are nearly normal.

This is reverse water-filling in the whitened space (KLT coding; Loki, arXiv 2406.02542, is the
special case of 16 or 0 bits).

A code counts steps of STEPS * the group's usual rms (`Axes.rms`) * the token's gain. The scale
sigma = |y|² / (y · code), with y the token's channels, preserves the norm, as in rot2u. Codes of
different axes can't be compared, so a sketch's version covers the axes.

`AxesEstimate.add_moved` is for texts shorter than the contexts in use. RoPE turns slow channels so
little over a few thousand tokens that they look constant and would get no bits, though they differ
most over a long context; so keys are computed, exactly, for positions all over it. (SmolLM2-135M at
8192 tokens: scores are off by 2.2 nats with axes from 2048 tokens, 0.48 with these moved, 0.43 with
axes from all 8192.)

Shapes: N tokens, B blocks, T tokens of a block, S = B * T, H KV heads, G query heads per KV
    head, Q = H * G, X heads, D channels, C coded channels with padding, R = 2 groups of coded
    channels, F frequencies of RoPE (it rotates 2 F channels).
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
"""Of the best even quantisers with 16 and 4 levels for a normal distribution, in rms (Max 1960).
They lose 1.15 % and 11.9 % of the energy; Lloyd-Max levels 0.95 % and 11.7 %, but need a table."""
MIN_TOKENS = 1024
"""With fewer, centre and axes are unreliable."""
NUM_LEVELS = (16, 4)
PLACES = 4
"""Times that `add_moved` adds each token."""
GOLDEN_RATIO = 0.6180339887498949
QUERY_FLOOR = 0.05
"""Share of the queries' mean energy added to every direction, so that A can be inverted."""


def run_channels(head_size: int) -> tuple[int, int]:
    """Channels with 4-bit and with 2-bit codes, without padding."""
    fine, coarse = formats.num_lines(head_size)
    num_fine = min(fine * FINE_CHANNELS, head_size)
    return num_fine, min(coarse * COARSE_CHANNELS, head_size - num_fine)


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """Raises INVALID_FIELD if the axes can't be used.

    into: float32 [H, D, D]: channels y = (k - mu) @ into[h], coded ones first.
    rms: float32 [H, 2], usual rms of channels with 4-bit and with 2-bit codes.
    weights: float32 [H, D, C], computed from `into` and `rms`: w = q @ weights[h] is by how much
        a score changes with each half step of each coded channel. A score is about sigma * sum(w
        * (2 * c - offsets)) with `offsets_of`.
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
        """Part of a sketch's version."""
        return b"".join(
            np.ascontiguousarray(part, dtype="<f4").tobytes() for part in (self.into, self.rms)
        )

    def heads(self, first: int, count: int) -> "Axes":
        part = slice(first, first + count)
        return Axes(np.ascontiguousarray(self.into[part]), np.ascontiguousarray(self.rms[part]))


class AxesEstimate:
    """Sums a layer's keys and queries (after RoPE) for its centre and axes. Leave out the first
    `centre.FIRST_TOKENS` tokens of a context."""

    def __init__(self, kv_heads: int, head_size: int) -> None:
        self.num_tokens = 0
        self._keys_HD = np.zeros((kv_heads, head_size), np.float64)
        self._keys_HDD = np.zeros((kv_heads, head_size, head_size), np.float64)
        self._queries_HDD = np.zeros_like(self._keys_HDD)

    def __repr__(self) -> str:
        return f"AxesEstimate({list(self._keys_HD.shape)}, {self.num_tokens} tokens)"

    def add(self, keys_NHD: F32, queries_NQD: F32) -> None:
        """The same tokens' keys and queries. Ignores tokens with values that are not finite.
        Raises INVALID_FIELD if shapes do not fit."""
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
        # Independent of the number of query heads per KV head.
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
        """Adds each token `PLACES` times, as at positions spread over `context_tokens`.

        keys_NHD, queries_NQD: after RoPE at `positions_N`.
        frequencies_F: in radians per token.
        """
        for turn in range(PLACES):
            shifts = (places(positions_N, context_tokens, turn) - positions_N).astype(np.int64)
            self.add(
                moved(keys_NHD, shifts, frequencies_F),
                moved(queries_NQD, shifts, frequencies_F),
            )

    def axes(self, min_tokens: int = MIN_TOKENS) -> tuple[F32, Axes] | None:
        """Centre, float32 [H, D], and axes; None below `min_tokens`."""
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
    """Step 3's rotation: orthonormal float64 [D, D], which mixes only within a group of codes."""
    matrix, first = np.eye(head_size), 0
    for count in run_channels(head_size):
        run = slice(first, first + count)
        if count:
            matrix[run, run] = rotate(np.eye(count, dtype=np.float32))
        first += count
    return matrix


def _whitened_axes(moment_DD: F64, covariance_DD: F64) -> F64:
    """A U, float64 [D, D]: A the root of `moment_DD`, U's columns the principal axes of A C A,
    strongest first, with C the keys' covariance."""
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
    """Components of keys - mu along the axes, float32 [H, B, T, D]."""
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    x_HSD = (keys_BTHD - mu_HD).transpose(2, 0, 1, 3).reshape(kv_heads, -1, head_size)
    y_HSD = np.asarray(x_HSD @ axes.into, np.float32)
    return y_HSD.reshape(kv_heads, num_blocks, block_tokens, head_size)


def offsets_of(head_size: int) -> npt.NDArray[np.int32]:
    """Largest code of each coded channel, int32: 15 or 3. Code c stands for 2 c - offset half
    steps."""
    fine, coarse = formats.num_lines(head_size)
    return np.repeat(
        np.array(NUM_LEVELS, np.int32) - 1, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS)
    ).astype(np.int32)


def half_steps(axes: Axes) -> F32:
    """float32 [H, C], for a token of gain 1."""
    head_size = axes.into.shape[1]
    fine, coarse = formats.num_lines(head_size)
    steps = axes.rms * np.array(STEPS, np.float32) / np.float32(2.0)
    return np.repeat(steps, (fine * FINE_CHANNELS, coarse * COARSE_CHANNELS), axis=1)


# ---------------------------------------------------------------------------------- other positions


def moved(x_NXD: F32, shifts_N: npt.NDArray[np.int64], frequencies_F: F64) -> F32:
    """Keys or queries (after RoPE) as `shifts_N` positions later, float32 [N, X, D].

    frequencies_F: in radians per token; channel i turns with i + F (NeoX order), those from 2 F
        on don't.
    """
    count = len(frequencies_F)
    angles = shifts_N[:, None, None] * frequencies_F
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x_NXD[..., :count], x_NXD[..., count : 2 * count]
    return np.concatenate(
        [low * cos - high * sin, high * cos + low * sin, x_NXD[..., 2 * count :]], axis=-1
    )


def places(positions_N: npt.NDArray[np.int64], context_tokens: int, turn: int) -> F64:
    """New positions: whole numbers, float64 [N], spread evenly over `context_tokens`, not in the
    tokens' order. Each `turn` from 0 to `PLACES` - 1 gives others."""
    share = (positions_N * GOLDEN_RATIO + turn / PLACES) % 1.0
    found: F64 = np.floor(share * context_tokens)
    return found
