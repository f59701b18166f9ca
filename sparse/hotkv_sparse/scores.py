"""Scores blocks by their sketches. A *token format* has a code per token (rot2u, rot3u, mix2), a
*summary format* a vector or two per block (mean, quest). mix2 splits channels into *parts* of other
precision, along the axes of the keys. `mu` is the centre.

In a token format a score estimates a block's log mass in nats: the log of the sum of exp(q · k *
scale) over its tokens. In a summary format it is the formula's value (`score`). Kernels compute
from products of integers; the numpy twin `tests/oracles/sparse.py` differs only by rounding.

Shapes: Q query heads, H KV heads, D channels, C channels with padding, P parts, B blocks of a
    pool, S scored blocks, N bytes of a block and head.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.axes import Axes, offsets_of
from hotkv_sparse.formats import Format
from hotkv_sparse.rotation import factors, pass_arrays
from hotkv_sparse.sketches import checked_axes

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Query:
    """A query prepared for one format: quantised to int8, each head's largest channel 127.

    codes: int8 [Q, P * C]; one part in a token format.
    offsets: int32 [Q, P], added to sums of products: keys' bytes are larger by a constant than what
        they stand for (`LEVEL_OFFSET`; in mix2 `axes.offsets_of`).
    factor: float32 [Q], from the corrected sum to nats.
    shift: float32 [Q], added to every score: q · mu * scale - bias.
    """

    form: Format
    head_size: int
    codes: npt.NDArray[np.int8]
    offsets: I32
    factor: F32
    shift: F32


def prepare(
    name: str,
    query_QD: F32,
    mu_HD: F32 | None = None,
    scale: float | None = None,
    bias: float | None = None,
    axes: Axes | None = None,
) -> Query:
    """Prepares a float32 query [Q, D] (after RoPE). Raises INVALID_FIELD if shapes do not fit.
    Rounding to int8 loses below 1 % of a rotated query's norm, far less than the keys' codes lose.

    mu_HD: of the sketches; None: 0.
    scale: None: 1 / sqrt(D).
    bias: by how much scores overestimate the log mass, in nats; None: the format's.
    axes: of the sketches, for mix2.
    """
    form = formats.format_named(name)
    num_heads, head_size = query_QD.shape
    scale = 1.0 / np.sqrt(head_size) if scale is None else scale
    shift = np.zeros(num_heads, np.float32)
    if mu_HD is not None:
        if mu_HD.ndim != 2 or mu_HD.shape[1] != head_size or num_heads % mu_HD.shape[0]:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"mu is {list(mu_HD.shape)}; a query [{num_heads}, {head_size}] needs "
                f"[kv_heads, {head_size}]",
            )
        shift = np.sum(
            query_QD * np.repeat(mu_HD, num_heads // mu_HD.shape[0], axis=0), axis=1
        ) * np.float32(scale)
    codes = np.zeros(
        (num_heads, max(form.parts, 1), formats.padded_channels(form, head_size)), np.int8
    )
    kernels = native.require("hotkv_sparse.all_kernels")
    unit = form.level_unit if form.bits else 1.0
    if form.by_axes:
        unit = 1.0
        peak, offsets = _prepare_by_axes(kernels, name, query_QD, codes[:, 0], axes)
    else:
        peak, sums = np.empty(num_heads, np.float32), np.zeros(codes.shape[:2], np.int32)
        starts, sizes = pass_arrays(head_size)
        query = np.ascontiguousarray(query_QD, np.float32)
        kernels.prepare(
            query,
            factors(head_size),
            starts,
            sizes,
            form.bits,
            1 if form.bits else form.kind,
            peak,
            sums,
            codes,
        )
        offsets = sums * np.int32(-formats.LEVEL_OFFSET)
    factor = (peak * np.float32(scale / (127.0 * unit))).astype(np.float32)
    return Query(
        form,
        head_size,
        codes.reshape(num_heads, -1),
        offsets,
        factor,
        (shift - np.float32(form.bias if bias is None else bias)).astype(np.float32),
    )


def _prepare_by_axes(
    kernels: ModuleType,
    name: str,
    query_QD: F32,
    codes_QC: npt.NDArray[np.int8],
    axes: Axes | None,
) -> tuple[F32, I32]:
    """For mix2: writes `codes_QC`; what code 127 of each head stands for, float32 [Q], and
    `Query.offsets`. Raises INVALID_FIELD if axes are missing or do not fit."""
    num_heads, head_size = query_QD.shape
    kv_heads = 1 if axes is None else len(axes.into)
    if num_heads % kv_heads:
        raise HotKVError(
            Reason.INVALID_FIELD, f"axes are of {kv_heads} KV heads, the query has {num_heads}"
        )
    found = checked_axes(name, axes, (kv_heads, head_size))
    peak, sums = np.empty(num_heads, np.float32), np.empty(num_heads, np.int32)
    query = np.ascontiguousarray(query_QD, np.float32)
    kernels.prepare_axes(query, found.weights, offsets_of(head_size), peak, sums, codes_QC)
    return peak, sums[:, None]


def check_pool(query: Query, packed_BHN: U8, rows_S: I32) -> None:
    if (
        packed_BHN.ndim != 3
        or packed_BHN.dtype != np.uint8
        or (packed_BHN.size and packed_BHN.strides[-1] != 1)
        or query.codes.shape[0] % packed_BHN.shape[1]
    ):
        need = f"uint8 [blocks, kv_heads, bytes], kv_heads a divisor of {query.codes.shape[0]}"
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"sketches are {packed_BHN.dtype} {list(packed_BHN.shape)}; pass {need}",
        )
    form, size = query.form, query.head_size
    fits = (
        packed_BHN.shape[2] % formats.run_bytes(form, size) == 0
        if form.bits
        else packed_BHN.shape[2] == formats.head_bytes(form.name, 1, size)
    )
    if not fits:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"sketches have {packed_BHN.shape[2]} bytes a head, which is no {form.name} "
                f"of {size} channels"
            ),
        )
    # Negative rows are large as uint32: one comparison finds both.
    if rows_S.size and rows_S.view(np.uint32).max() >= packed_BHN.shape[0]:
        raise HotKVError(Reason.INVALID_FIELD, f"rows must be from 0 to {packed_BHN.shape[0] - 1}")


def score(query: Query, packed_BHN: U8, rows_S: I32 | None = None) -> F32:
    """Scores, float32 [Q, S] (docs/sparse.md):
    - Token formats: logsumexp_i((sigma_i q~ · z_i + q · mu) * scale) - bias over the tokens i, with
      the rotated query q~, and token i's levels z_i and scale sigma_i.
    - quest and mean: (s + q · mu) * scale - bias. With x the block's keys minus mu, s is for quest
      the sum over channels of max(q m, q M), with minimum m and maximum M of x over the tokens; for
      mean, q · mean of x.

    -inf for a block without tokens. Raises INVALID_FIELD if pool or rows do not fit. Runs without
    the GIL.

    packed_BHN: uint8, last axis contiguous, such as a view of a mapped arena.
    rows_S: int32; None: all, in order.
    """
    rows_S = (
        np.arange(len(packed_BHN), dtype=np.int32)
        if rows_S is None
        else np.ascontiguousarray(rows_S, np.int32)
    )
    check_pool(query, packed_BHN, rows_S)
    kernels = native.require("hotkv_sparse.all_kernels")
    out = np.empty((query.codes.shape[0], len(rows_S)), np.float32)
    if query.form.bits:
        run_bytes, factor = (
            formats.run_bytes(query.form, query.head_size),
            query.factor * np.float32(_LOG2_E),
        )
        kernels.score_tokens(
            packed_BHN,
            rows_S,
            query.form.kernel,
            run_bytes,
            query.codes,
            query.offsets[:, 0].copy(),
            factor,
            query.shift,
            out,
        )
    else:
        kernels.score_parts(
            packed_BHN,
            rows_S,
            query.form.parts,
            query.codes,
            query.offsets,
            query.factor,
            query.shift,
            out,
        )
    return out
