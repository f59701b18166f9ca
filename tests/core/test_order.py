"""Words that count up and wrap, against the driver's own words: `(int32_t)(*addr - value) >= 0`."""

import ctypes

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_proto.order import has_reached

WRAP = 1 << 32
STARTS = (0, 1, (1 << 31) - 1, 1 << 31, WRAP - 1)


@pytest.mark.parametrize("value", STARTS)
@pytest.mark.parametrize(
    ("distance", "reached"),
    [
        (0, True),
        (1, True),
        ((1 << 31) - 1, True),
        (1 << 31, False),
        ((1 << 31) + 1, False),
        (-1, False),
    ],
)
def test_half_of_all_words_are_behind(value: int, distance: int, reached: bool) -> None:
    assert has_reached((value + distance) % WRAP, value) is reached


@given(word=st.integers(0, WRAP - 1), value=st.integers(0, WRAP - 1))
def test_has_reached_is_the_drivers_comparison(word: int, value: int) -> None:
    assert has_reached(word, value) == (ctypes.c_int32(word - value).value >= 0)
