"""Scores blocks: estimates from the blocks' sketches (compact forms of their keys) how much
attention a query pays to each block.

In a token format (a code per channel of each token), a score estimates the block's log mass, in
nats: the logarithm of the attention mass, which is the sum of exp(q · k * scale) over the block's
tokens. In a summary format (one or two vectors, parts, per block), a score is the value of the
format's formula (see `score`). Compiled kernels compute the scores from products of integers.
`tests/oracles/sparse.py` computes the same in numpy; the results differ only by float rounding.

Shapes: Q query heads, H KV heads (Q / H query heads share a KV head), D channels, C channels with
padding, P parts, B blocks of a pool (the array of sketches), S scored blocks, N bytes of a
block and head.
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
    """A step's query, prepared for scoring blocks by sketches of one format. It is quantised
    to int8 so that the largest channel of each head becomes 127.

    codes: int8 [query heads, parts * padded channels], the quantised query. It has a part for each
        vector that the format stores of a block; in a token format one part.
    offsets: int32 [query heads, parts], added to the sum of products of `codes` with a key's bytes.
        All these bytes are larger by a constant than the values for which they stand
        (`LEVEL_OFFSET`; in mix2 `axes.offsets_of`); adding `offsets` corrects this.
    factor: float32 [query heads], by which the corrected sum is multiplied to get nats.
    shift: float32 [query heads], added to every score: q · mu * scale, minus the bias. mu is the
        centre (mean key), which sketches lack.
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
    """Prepares a float32 query [query heads, channels] (after RoPE), so that it can score
    sketches (compact forms of blocks' keys) in format `name`.

    Raises INVALID_FIELD if the shapes do not fit. The rounding to int8 loses less than 1 % of the
    norm of a rotated query, far less than the codes of the keys lose.

    mu_HD: the centre (mean key of each head) with which the sketches were built; None: 0.
    scale: scale of attention; None: 1 / sqrt(D).
    bias: by how much scores overestimate the log of a block's attention mass with this centre, in
        nats. It is subtracted from scores. None: the format's bias.
    axes: the principal axes with which the sketches were built; required for mix2.
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
    """Quantises a query for the format mix2 (keys quantised along principal axes): writes its codes
    to `codes_QC`. Returns the value that code 127 of each head stands for, float32 [query heads],
    and `Query.offsets`, int32 [Q, 1].

    Raises INVALID_FIELD if the axes are missing or do not fit the query.

    kernels: the module `hotkv_sparse.all_kernels`.
    """
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
    # A negative row is a large number as uint32, so a single comparison finds rows below 0 and rows
    # beyond the pool.
    if rows_S.size and rows_S.view(np.uint32).max() >= packed_BHN.shape[0]:
        raise HotKVError(Reason.INVALID_FIELD, f"rows must be from 0 to {packed_BHN.shape[0] - 1}")


def score(query: Query, packed_BHN: U8, rows_S: I32 | None = None) -> F32:
    """Returns the scores, float32 [query heads, blocks], of blocks: estimates, from their
    sketches (compact forms of keys), how much attention the query pays to each block.

    The formula depends on the kind of format (docs/sparse.md):
    - Token formats: logsumexp_i((sigma_i q~ · z_i + q · mu) * scale) - bias, over the tokens i of
      the block. q~ is the rotated query; z_i and sigma_i are the levels and the scale of token i;
      mu is the centre (mean key).
    - quest and mean: (s + q · mu) * scale - bias. Let x be the keys of the block minus mu. For
      quest, s is the sum over channels of max(q m, q M), with the minimum m and the maximum M of x
      over the tokens. For mean, s is the product of q and the mean of x over the tokens.

    A block without tokens has the score -inf. Raises INVALID_FIELD if the pool or the rows do not
    fit the query. Compiled code runs without the GIL.

    packed_BHN: the pool of sketches, uint8 [blocks, KV heads, bytes]: any array whose last
        axis is contiguous, such as a view of a mapped arena.
    rows_S: int32, rows of the blocks to score; None: all rows, in order.
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
