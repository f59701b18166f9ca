"""The fixed random rotation that spreads a key evenly over its channels, so that the rounding of
each channel to a few bits loses little. Sketches (compact forms of a block's keys) in the
formats rot2u and rot3u hold rotated keys; mix2 mixes its principal axes with the same rotation.

A rotation consists of one or two passes. A pass flips the signs of some channels and applies an
orthonormal Hadamard matrix to a part of the vector. If the head size is a power of two, a single
pass covers all channels. Otherwise there are two passes. Let n be the largest power of two below
the head size. The first pass covers the first n channels, and the second pass covers the last n
channels, so that every channel is mixed. (Overlapping passes spread a large channel better than
separate passes.) The signs are the same in every engine and never change.

Shapes: D channels of a head.
"""

import functools
import hashlib

import numpy as np
import numpy.typing as npt

SIGN_SEED = b"hotkv-signs-1"


def passes(head_size: int) -> tuple[tuple[int, int], ...]:
    """Returns (first channel, number of channels) of each pass of the rotation. A pass is one
    Hadamard transform of a range of channels; the module's docstring says why there may be two."""
    size = 1 << (head_size.bit_length() - 1)
    return ((0, size),) if size == head_size else ((0, size), (head_size - size, size))


@functools.cache
def signs(head_size: int) -> npt.NDArray[np.float32]:
    """Returns the signs of each pass of the rotation, 1 or -1, float32 [passes, channels].

    The signs come, pass by pass, from the bits of SHA-256("hotkv-signs-1" ‖ counter), with the
    counter as little-endian uint32 from 0 on. The lowest bit of a byte comes first; 1 means -1.
    Each pass has a sign for every channel of a head. Signs of channels that the pass does not cover
    are not used.
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
    """Returns the factor by which each channel is multiplied before each pass of the rotation,
    float32 [passes, channels]. A pass is one Hadamard transform of a range of channels.

    A factor is a random sign divided by the square root of the number of channels in the pass.
    `hadamard` makes vectors longer by this square root; the division keeps their length unchanged.
    """
    scale = np.array([[1.0 / np.sqrt(size)] for _, size in passes(head_size)])
    result: npt.NDArray[np.float32] = (signs(head_size) * scale).astype(np.float32)
    result.setflags(write=False)
    return result


@functools.cache
def pass_arrays(head_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns two arrays, int64 [passes] each: the first channel and the number of channels of each
    pass of the rotation (Hadamard transform of a range of channels). Kernels need arrays, not
    tuples."""
    starts, sizes = np.array(passes(head_size), np.int64).T.copy()
    return starts, sizes


def rotate(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns a rotated copy of vectors, float32 [..., channels]. Inner products and norms are
    preserved."""
    y = np.array(x, np.float32, order="C")
    head_size = y.shape[-1]
    for (start, size), factor in zip(passes(head_size), factors(head_size), strict=True):
        part = y[..., start : start + size]
        part *= factor[start : start + size]
        hadamard(part)
    return y


def hadamard(x: npt.NDArray[np.float32]) -> None:
    """Applies the fast Walsh-Hadamard transform to the last axis, in place and without
    normalisation. The length of the axis must be a power of two."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        x[...] = np.stack((low, high), axis=-2).reshape(x.shape)
        half *= 2
