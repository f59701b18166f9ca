"""Tests `has_reached` against the CUDA driver's comparison: `(int32_t)(*addr - value) >= 0`."""

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
    word = (value + distance) % WRAP
    reached = has_reached(word, value)
    assert reached == (distance < 1 << 31) == (ctypes.c_int32(word - value).value >= 0)
