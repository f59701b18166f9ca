"""Two levels for summary scorers: eight blocks share a coarser summary, and only the best quarter
is scored block by block.

Nearly free on prose, where mass is spread; on long-range copy a summary of eight blocks hides the
one that matters.

Shapes: B blocks in the order of the context, K super-blocks (ceil(B / 8)), H KV heads, P parts, D
channels, N bytes, Q query heads.
"""

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.representations import pack_parts, unpack_parts
from hotkv_sparse.scores import Query, score
from hotkv_sparse.topk import top
from hotkv_sparse.weights import aggregate

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
SUPER_BLOCKS = 8
KEEP_RATIO = 0.25


def merge(name: str, packed_BHN: U8, head_size: int) -> U8:
    """Super-blocks uint8 [K, H, N] of a summary format, in its own bytes; INVALID_FIELD for token
    formats.

    quest: the widest edges, so the score stays an upper bound; mean: the mean; cuboid: the mean
    centre, and the mean of radius plus distance to it. Blocks without tokens don't count.
    """
    form = formats.format_named(name)
    if not form.parts:
        raise HotKVError(
            Reason.INVALID_FIELD, f"super-blocks of {name} make no sense; use quest, cuboid or mean"
        )
    parts, some_BH = unpack_parts(name, packed_BHN, head_size)
    padding = -len(parts) % SUPER_BLOCKS
    parts = np.pad(parts, ((0, padding), (0, 0), (0, 0), (0, 0))).reshape(
        -1, SUPER_BLOCKS, *parts.shape[1:]
    )
    some = np.pad(some_BH[:, 0], (0, padding)).reshape(-1, SUPER_BLOCKS)
    valid, count = (
        some[:, :, None, None],
        np.maximum(some.sum(axis=1), 1).astype(np.float32)[:, None, None],
    )
    some_K: npt.NDArray[np.bool_] = np.any(some, axis=1, keepdims=False)
    empty = ~some_K[:, None, None]
    first = parts[:, :, :, 0]
    if name == "quest":
        high = np.where(valid, first, -np.inf).max(axis=1)
        low = np.where(valid, parts[:, :, :, 1], np.inf).min(axis=1)
        merged = [np.where(empty, 0.0, high), np.where(empty, 0.0, low)]
    else:
        centre = np.where(valid, first, 0.0).sum(axis=1) / count
        merged = [centre]
        if name == "cuboid":
            distance = parts[:, :, :, 1] + np.abs(first - centre[:, None])
            merged.append(np.where(valid, distance, 0.0).sum(axis=1) / count)
    return pack_parts(form, np.stack(merged, axis=2).astype(np.float32), some_K)


def score_pruned(
    query: Query,
    packed_BHN: U8,
    supers_KHN: U8,
    rows_B: I32 | None = None,
    keep_ratio: float = KEEP_RATIO,
) -> F32:
    """Scores float32 [Q, B] of a context's blocks, -inf if their super-block is not among the
    best `keep_ratio`.

    Super-blocks compete with the mean weight over all KV heads, so that the second level reads
    whole blocks. `rows_B` says where block b lies in the pool (None: at b).
    """
    num_blocks = len(packed_BHN) if rows_B is None else len(rows_B)
    if len(supers_KHN) != -(-num_blocks // SUPER_BLOCKS):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{len(supers_KHN)} super-blocks do not fit {num_blocks} blocks; merge them anew",
        )
    coarse = score(query, supers_KHN)
    nothing = np.full(len(coarse), -np.inf, np.float32)
    num_kept = int(np.ceil(keep_ratio * len(supers_KHN)))
    kept = top(aggregate(coarse, nothing, packed_BHN.shape[1]).shared, num_kept)
    # The last super-block may be short: its missing blocks are scored as its last one, and cut off.
    blocks = (kept[:, None] * SUPER_BLOCKS + np.arange(SUPER_BLOCKS, dtype=np.int32)).ravel()
    blocks = np.minimum(blocks, num_blocks - 1).astype(np.int32)
    result = np.full((len(coarse), len(supers_KHN), SUPER_BLOCKS), -np.inf, np.float32)
    fine = score(query, packed_BHN, blocks if rows_B is None else rows_B[blocks])
    result[:, kept] = fine.reshape(len(fine), len(kept), SUPER_BLOCKS)
    return np.ascontiguousarray(
        result.reshape(len(fine), len(supers_KHN) * SUPER_BLOCKS)[:, :num_blocks]
    )
