"""Mappings of the server's files, table and arena. Nobody writes through the arrays.

Always true: the address is a multiple of 2 MiB. The files are of huge pages as far as the kernel
gives them, and it maps those as such only at such addresses, which Python's own mmap does not
promise. In small pages a cold lookup waits for page tables longer than for the table.
"""

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def map_file(fd: int, num_bytes: int, is_writable: bool = False) -> NDArray[np.uint8]:
    """The first bytes of a file, uint8 [num_bytes], a read-only array; mapped as long as somebody
    holds the array or a view of it. `is_writable`: the pages are writable all the same, which CUDA
    asks of memory that it registers.

    `fd` stays the caller's. Raises OSError if the system refuses, or the file is shorter.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < num_bytes:
        raise OSError(f"the file has {file_bytes} bytes, not {num_bytes}")
    # The file replaces a part of this mapping and is unmapped with it.
    room = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ
    )
    whole = np.frombuffer(room, np.uint8)
    offset = -whole.ctypes.data % HUGE_PAGE_BYTES
    place = whole[offset : offset + num_bytes]
    address = place.ctypes.data
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    if (
        num_bytes
        and _libc.mmap(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return place
