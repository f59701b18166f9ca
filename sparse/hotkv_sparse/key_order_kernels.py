# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that put keys in order: what the kernels of the hot set sort by (age, weight,
block) is packed into int64, from 0 up.

Called by `hotkv_sparse.hotset_kernels`. They write their argument only, and run without the GIL.
"""

from typing import Any

import numba
import numpy as np

_FEW = 16
"""So many keys are put in order one by one; more are sorted by their bytes."""


@numba.njit(nogil=True, cache=True)
def sort(keys: Any, num: Any) -> None:
    """Sorts keys[:num], int64 from 0 up, ascending: a few by insertion, more by their bytes from
    the lowest on."""
    if num <= _FEW:
        for i in range(1, num):
            key, place = keys[i], i
            while place > 0 and keys[place - 1] > key:
                keys[place] = keys[place - 1]
                place -= 1
            keys[place] = key
        return
    counts, other = np.zeros((8, 256), np.int32), np.empty(num, np.int64)
    for i in range(num):
        key = keys[i]
        for byte in range(8):
            counts[byte, (key >> (8 * byte)) & 255] += 1
    source, target, is_elsewhere = keys, other, False
    for byte in range(8):
        shift = 8 * byte
        if counts[byte, (source[0] >> shift) & 255] == num:
            continue
        total = 0
        for digit in range(256):
            count = counts[byte, digit]
            counts[byte, digit] = total
            total += count
        for i in range(num):
            digit = (source[i] >> shift) & 255
            target[counts[byte, digit]] = source[i]
            counts[byte, digit] += 1
        source, target, is_elsewhere = target, source, not is_elsewhere
    if is_elsewhere:
        for i in range(num):
            keys[i] = other[i]


@numba.njit(nogil=True, cache=True)
def coldest(keys: Any, num: Any, count: Any) -> None:
    """keys[:count] = the `count` smallest of keys[:num], ascending."""
    if count > _FEW:
        sort(keys, num)
        return
    size = 0
    for i in range(num):
        key = keys[i]
        if size == count:
            if key > keys[size - 1]:
                continue
            size -= 1
        place = size
        while place > 0 and keys[place - 1] > key:
            keys[place] = keys[place - 1]
            place -= 1
        keys[place] = key
        size += 1
