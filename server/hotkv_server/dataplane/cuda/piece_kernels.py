# mypy: disable-error-code="untyped-decorator"
"""The Numba kernel that plans pieces. Load it with `hotkv_proto.native.require`, never at import
time."""

from typing import Any

import numba
import numpy as np

BLOCK, RUN, BYTE, HAS_SKIPPED = range(4)
"""Of a cursor: what is planned next, and whether runs were left out."""
DEVICE, HOST, SIZE, REGISTRATION = range(4)
"""Rows of `out`."""


@numba.njit(
    "UniTuple(int64, 5)(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], "
    "int64, int64, int64, boolean, int64, int64, int64[::1], int64[:,::1])",
    nogil=True,
    cache=True,
)
def next_piece(
    block_ids: Any,
    hosts: Any,
    bases: Any,
    strides: Any,
    places: Any,
    sizes: Any,
    arena: Any,
    registration_bytes: Any,
    pinned_end: Any,
    wants_pinned: Any,
    room_bytes: Any,
    extra_bytes: Any,
    cursor: Any,
    out: Any,
) -> Any:
    """Writes runs to `out` from `cursor` on, which moves behind them. Returns how many, of how
    many contiguous host ranges, the least and largest size, and the sum.

    block_ids, hosts [blocks]: ids in the engine's memory, addresses of the slots.
    bases, strides, places, sizes [runs]: as of `Recipe`; `bases` are addresses.
    arena, pinned_end: addresses.
    wants_pinned: leaves out runs in memory that is not pinned; False: the others.
    room_bytes: of the piece, in which each run takes its size and `extra_bytes`.
    """
    block, run, done = cursor[BLOCK], cursor[RUN], cursor[BYTE]
    num_runs, count, num_ranges, used = bases.shape[0], 0, 0, np.int64(0)
    device_end = host_end = last_registration = np.int64(-1)
    while block < block_ids.shape[0]:
        left = sizes[run] - done
        if left > 0:
            device = bases[run] + block_ids[block] * strides[run] + done
            host = hosts[block] + places[run] + done
            registration = (host - arena) // registration_bytes
            size = min(left, (registration + 1) * registration_bytes - (host - arena))
            if (host >= arena and host + size <= pinned_end) != wants_pinned:
                cursor[HAS_SKIPPED] = 1
            else:
                adjoins = host == host_end and registration == last_registration
                is_merged = count > 0 and adjoins and device == device_end
                needed = size if is_merged else size + extra_bytes
                if used + needed > room_bytes and count > 0:
                    break
                if not is_merged and count == out.shape[1]:
                    break
                size = min(size, room_bytes - extra_bytes - used)
                if is_merged:
                    out[SIZE, count - 1] += size
                    used += size
                else:
                    out[DEVICE, count], out[HOST, count] = device, host
                    out[SIZE, count], out[REGISTRATION, count] = size, registration
                    count += 1
                    used += size + extra_bytes
                    num_ranges += not adjoins
                device_end, host_end = device + size, host + size
                last_registration = registration
            done += size
        if done >= sizes[run]:
            done, run = np.int64(0), run + 1
            if run == num_runs:
                block, run = block + 1, 0
    cursor[BLOCK], cursor[RUN], cursor[BYTE] = block, run, done
    least, most, total = np.int64(1 << 62), np.int64(0), np.int64(0)
    for i in range(count):
        least, most = min(least, out[SIZE, i]), max(most, out[SIZE, i])
        total += out[SIZE, i]
    return count, num_ranges, least, most, total
