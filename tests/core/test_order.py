"""Tests of `has_reached`, which compares 32-bit counters that wrap around, as the CUDA driver does:
`(int32_t)(*addr - value) >= 0`."""

import ctypes

import hypothesis.strategies as st
from hypothesis import example, given

from hotkv_proto.order import has_reached

WRAP = 1 << 32


@given(value=st.integers(0, WRAP - 1), distance=st.integers(0, WRAP - 1))
@example(value=WRAP - 1, distance=0)
@example(value=WRAP - 1, distance=(1 << 31) - 1)
@example(value=1 << 31, distance=1 << 31)
@example(value=0, distance=WRAP - 1)
def test_has_reached_is_the_drivers_comparison(value: int, distance: int) -> None:
    """Compares `has_reached(counter, value)` with the driver's formula in C integers. A counter
    must count as having reached the value if it is at most 2^31 - 1 steps ahead of it."""
    word = (value + distance) % WRAP
    reached = has_reached(word, value)
    assert reached == (distance < 1 << 31) == (ctypes.c_int32(word - value).value >= 0)
