"""The fixed random rotation that spreads a key evenly over its channels, so that rounding each to a
few bits loses little. rot2u and rot3u hold rotated keys; mix2 mixes its axes with it.

One or two passes, each flips signs and applies an orthonormal Hadamard matrix to n channels, the
largest power of two up to the head size: one pass over all, or one over the first n and one over
the last n. (Overlapping passes spread a large channel better than separate ones.) The signs are the
same in every engine and never change.

Shapes: D channels of a head.
"""

import functools
import hashlib

import numpy as np
import numpy.typing as npt

SIGN_SEED = b"hotkv-signs-1"


def passes(head_size: int) -> tuple[tuple[int, int], ...]:
    """(first channel, number of channels) of each pass."""
    size = 1 << (head_size.bit_length() - 1)
    return ((0, size),) if size == head_size else ((0, size), (head_size - size, size))


@functools.cache
def signs(head_size: int) -> npt.NDArray[np.float32]:
    """1 or -1, float32 [passes, D]; some lie outside their pass and are not used.

    Pass by pass the bits of SHA-256("hotkv-signs-1" ‖ counter), with the counter as
    little-endian uint32 from 0 on; the lowest bit of a byte comes first, 1 means -1.
    """
    num_bits = len(passes(head_size)) * head_size
    stream = b"".join(
        hashlib.sha256(SIGN_SEED + count.to_bytes(4, "little")).digest()
        for count in range(-(-num_bits // 256))
    )
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")[:num_bits]
    result = (1.0 - 2.0 * bits).astype(np.float32).reshape(-1, head_size)
    result.setflags(write=False)
    return result


@functools.cache
def factors(head_size: int) -> npt.NDArray[np.float32]:
    """sign / sqrt(channels of the pass), float32 [passes, D]: undoes the growth by `hadamard`."""
    scale = np.array([[1.0 / np.sqrt(size)] for _, size in passes(head_size)])
    result: npt.NDArray[np.float32] = (signs(head_size) * scale).astype(np.float32)
    result.setflags(write=False)
    return result


@functools.cache
def pass_arrays(head_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First channels and numbers of channels, int64 [passes] each: kernels take no tuples."""
    starts, sizes = np.array(passes(head_size), np.int64).T.copy()
    return starts, sizes


def rotate(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A rotated copy of vectors [..., D]; keeps inner products."""
    y = np.array(x, np.float32, order="C")
    head_size = y.shape[-1]
    for (start, size), factor in zip(passes(head_size), factors(head_size), strict=True):
        part = y[..., start : start + size]
        part *= factor[start : start + size]
        hadamard(part)
    return y


def hadamard(x: npt.NDArray[np.float32]) -> None:
    """Fast Walsh-Hadamard transform of the last axis (a power of two), in place, not normalised."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        x[...] = np.stack((low, high), axis=-2).reshape(x.shape)
        half *= 2
