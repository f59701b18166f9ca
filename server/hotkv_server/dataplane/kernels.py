# mypy: disable-error-code="untyped-decorator"
"""Numba kernels of the data plane. Import through `hotkv.native.load`, never at import time. What they compute, and the twin: `checks`."""

from typing import Any

import numba
import numpy as np

from hotkv.kernels import copy_bytes, prefetch_address

LINE_BYTES, LINE_WORDS = 64, 16
PHASE_STEP = 37
AHEAD_LINES = 12
_U64 = np.uint64


@numba.njit(nogil=True, cache=True, inline="always")
def _mixed(words: Any, salts: Any, line: Any, seed: Any) -> Any:
    """Sum of products of neighbours, then mixed with the line's number."""
    total = _U64(0)
    for pair in range(LINE_WORDS // 2):
        low = np.uint32(words[2 * pair] + salts[2 * pair])
        total += _U64(low) * _U64(np.uint32(words[2 * pair + 1] + salts[2 * pair + 1]))
    total = (total ^ ((_U64(line) + _U64(1)) * _U64(0x9E37_79B9_7F4A_7C15)) ^ seed) * _U64(0xD6E8_FEB8_6659_FD93)
    return (total ^ (total >> _U64(32))) * _U64(0xD6E8_FEB8_6659_FD93)


@numba.njit("void(int64, int64[::1], int64, uint64, int64[::1], uint32[::1], uint64[::1])", nogil=True, cache=True)
def add_sums(base: Any, offsets: Any, num_bytes: Any, seed: Any, strides: Any, salts: Any, out: Any) -> None:
    """Adds to out[i] the sum over sampled lines of the `num_bytes` bytes at address base + offsets[i]; every `strides[i]`-th line."""
    words = np.zeros(LINE_WORDS, np.uint32)
    num_lines = (num_bytes + LINE_BYTES - 1) // LINE_BYTES
    for i in range(offsets.shape[0]):
        start, stride, last, total = base + offsets[i], strides[i], num_lines - 1, _U64(0)
        following = base + offsets[min(i + 1, offsets.shape[0] - 1)]
        for first in range(0, num_lines, stride):
            line = first + (first // stride * PHASE_STEP) % stride
            ahead, origin = first + AHEAD_LINES * stride, start
            if ahead > last:
                ahead, origin = (ahead - num_lines) // stride * stride, following
            prefetch_address(origin + min(ahead + (ahead // stride * PHASE_STEP) % stride, last) * LINE_BYTES)
            if line < last:
                copy_bytes(words.ctypes.data, start + line * LINE_BYTES, LINE_BYTES)
                total += _mixed(words, salts, line, seed)
        if num_lines:
            words[:] = 0
            copy_bytes(words.ctypes.data, start + last * LINE_BYTES, num_bytes - last * LINE_BYTES)
            total += _mixed(words, salts, last, seed)
        out[i] += total
