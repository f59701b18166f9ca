"""Copy plans of single runs."""

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.layout import Recipe
from hotkv_server.dataplane.plan import BlockCopies, Region
from hotkv_server.device.runtime import HOST

Int64s = NDArray[np.int64]


def runs_plan(
    dst: Region, src: Region, dst_offsets: Int64s, src_offsets: Int64s, num_bytes: Int64s
) -> BlockCopies:
    """One block whose runs go from `src` + `src_offsets[i]` to `dst` + `dst_offsets[i]`; the
    memory of a device counts as the engine's. Arrays are int64 [runs]."""
    to_engine = dst.device != HOST or src.device == HOST
    engine, arena = (dst, src) if to_engine else (src, dst)
    bases, places = (dst_offsets, src_offsets) if to_engine else (src_offsets, dst_offsets)
    sizes = np.array(num_bytes, np.int64)
    recipe = Recipe("kv", np.array(bases), np.zeros(len(sizes), np.int64), np.array(places), sizes)
    blocks = np.zeros(min(1, len(sizes)), np.int64)
    return BlockCopies(recipe, engine, arena, blocks, blocks, to_engine)
