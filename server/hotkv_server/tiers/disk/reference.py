"""Reference of `kernels`, and what is used without numba: `os.preadv` and `os.pwritev`, a call a
block, and the package xxhash. Python gives the GIL up during each call and repeats it after a
signal.

Always true: same results as the kernels, byte for byte and errno for errno.
"""

import ctypes
import os
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from hotkv.table import SLOT_ALIGN
from hotkv_server.tiers.protocol import Int64s, Seals

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
"""XXH3's own, of its specification."""


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


def seal_many(addresses: Int64s, sizes: Int64s, secrets: Seals, seals: Seals) -> None:
    """Seals of `sizes[i]` bytes of memory at `addresses[i]`, more than 240, both int64 [n]: as
    `tiers.seals.seal` gives them. `secrets` uint64 [n, 24]: of `secrets`."""
    for i, (address, size) in enumerate(_rows(addresses, sizes)):
        seed = (int(secrets[i, 0]) - int(SECRET[0])) % 2**64
        seals[i] = xxhash.xxh3_64_intdigest(_buffer(address, size), seed) or 1


def secrets(keys: Sequence[bytes]) -> Seals:
    """XXH3's secrets uint64 [n, 24] for the seeds that keys give."""
    seeds = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)
    # Even words plus the seed, odd ones less: in arithmetic modulo 2**64.
    signs = np.where(np.arange(len(SECRET)) % 2 == 0, 1, -1).astype(np.int64).view(np.uint64)
    return SECRET + signs * seeds[:, None]


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
