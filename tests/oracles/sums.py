"""Numpy reference of `hotkv_server.integrity.sums.add_sums`, with the same arguments and
results."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity import sums
from hotkv_server.integrity.checksums import Int64s, Sums

LINE_BYTES = 64
PART_LINES = 1 << 14
"""Read at a time: 1 MiB; computing takes a few times as much."""
_PHASE_STEP = 37
_LINE_FACTOR, _FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xD6E8_FEB8_6659_FD93)


def add_sums(
    memory: Region, offsets: Int64s, num_bytes: int, shard: int, strides: Int64s, out: Sums
) -> None:
    """offsets: of the slots in `memory`.
    num_bytes: of each slot, covered by the sum.
    strides: of how many lines of each slot one is read.
    """
    if not num_bytes:
        return
    num_lines = -(-num_bytes // LINE_BYTES)
    for stride in np.unique(strides).tolist():
        first = np.arange(0, num_lines, stride)
        lines = first + (first // stride * _PHASE_STEP) % stride
        lines = np.append(lines[lines < num_lines - 1], num_lines - 1)
        mine = np.flatnonzero(strides == stride)
        part_slots = max(1, PART_LINES // len(lines))
        for part in (mine[i : i + part_slots] for i in range(0, len(mine), part_slots)):
            words = _words(memory, offsets[part], lines, num_bytes) + sums._SALTS
            total = (words[..., ::2].astype(np.uint64) * words[..., 1::2].astype(np.uint64)).sum(
                axis=2, dtype=np.uint64
            )
            total = (
                total
                ^ ((lines.astype(np.uint64) + np.uint64(1)) * _LINE_FACTOR)
                ^ sums._seed(shard)
            ) * _FACTOR
            out[part] += ((total ^ (total >> np.uint64(32))) * _FACTOR).sum(axis=1, dtype=np.uint64)


def _words(memory: Region, offsets: Int64s, lines: Int64s, num_bytes: int) -> NDArray[np.uint32]:
    """uint32 [slots, lines, 16]. `lines` must end with a slot's last line, which is padded with
    zeros."""
    view, tail = memory.array(), num_bytes - int(lines[-1]) * LINE_BYTES
    found = np.zeros((len(offsets), len(lines), LINE_BYTES), np.uint8)
    if len(lines) > 1:
        found[:, :-1] = sliding_window_view(view, LINE_BYTES)[
            offsets[:, None] + lines[:-1] * LINE_BYTES
        ]
    found[:, -1, :tail] = sliding_window_view(view, tail)[offsets + lines[-1] * LINE_BYTES]
    return found.view(np.uint32)
