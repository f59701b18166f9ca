"""Reference of `kernels`, and what is used without numba: `os.preadv` and `os.pwritev`, a call a
block. Python gives the GIL up during each and repeats it after a signal.

Always true: same results as the kernels, byte for byte and errno for errno.
"""

import ctypes
import os
from collections.abc import Callable

from hotkv.table import SLOT_ALIGN
from hotkv_server.tiers.protocol import Int64s


def read_many(fd: int, addresses: Int64s, offsets: Int64s, sizes: Int64s, results: Int64s) -> None:
    """Reads `sizes[i]` bytes at `offsets[i]` of the file to memory at `addresses[i]`; all int64
    [n].

    Results int64 [n]: bytes read, fewer than asked for only at the end of the file; -errno if it
    failed, whatever was read before that. A read that stops between multiples of SLOT_ALIGN is at
    the end of the file; direct I/O would refuse to go on from there.
    """
    for i, (address, offset, size) in enumerate(_rows(addresses, offsets, sizes)):
        done = 0
        buffer = _buffer(address, size)
        while done < size:
            moved = _result(os.preadv, fd, buffer[done:], offset + done)
            if moved < 0:
                done = moved
                break
            done += moved
            if moved == 0 or done % SLOT_ALIGN:
                break
        results[i] = done


def write_many(fd: int, addresses: Int64s, offsets: Int64s, sizes: Int64s, results: Int64s) -> None:
    """Writes `sizes[i]` bytes of memory at `addresses[i]` to `offsets[i]` of the file; all int64
    [n].

    Results int64 [n]: bytes written, fewer than asked for only if the file takes no more without
    saying why; -errno if it failed, whatever was written before that.
    """
    for i, (address, offset, size) in enumerate(_rows(addresses, offsets, sizes)):
        done = 0
        buffer = _buffer(address, size)
        while done < size:
            moved = _result(os.pwritev, fd, buffer[done:], offset + done)
            if moved < 0:
                done = moved
                break
            done += moved
            if moved == 0:
                break
        results[i] = done


def _rows(*columns: Int64s) -> "zip[tuple[int, ...]]":
    return zip(*(column.tolist() for column in columns), strict=True)


def _buffer(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")


def _result(
    move: Callable[[int, list[memoryview], int], int], fd: int, buffer: memoryview, offset: int
) -> int:
    try:
        return move(fd, [buffer], offset)
    except OSError as error:
        assert error.errno is not None
        return -error.errno
