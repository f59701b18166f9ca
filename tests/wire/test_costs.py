"""Costs of transfers, from a few measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.costs import fitted


@given(
    st.lists(st.integers(1, 1 << 20), min_size=2, max_size=16, unique=True),
    st.floats(0, 1),
    st.floats(1e-9, 1e-3),
)
def test_it_finds_what_they_follow(sizes: list[int], fixed_s: float, each_s: float) -> None:
    found_s, found_each_s = fitted(sizes, [fixed_s + each_s * size for size in sizes])
    for size in sizes:
        predicted_s = found_s + found_each_s * size
        assert predicted_s == pytest.approx(fixed_s + each_s * size, rel=1e-6, abs=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), max_size=16),
    st.integers(0, 1 << 30),
)
def test_no_prediction_is_below_zero(known: list[tuple[int, float]], size: int) -> None:
    fixed_s, each_s = fitted([size for size, _ in known], [seconds for _, seconds in known])
    assert fixed_s >= 0 and each_s >= 0 and fixed_s + each_s * size >= 0


def test_what_does_not_grow_is_of_any_size() -> None:
    assert fitted([100, 200, 400], [0.3, 0.3, 0.3]) == (pytest.approx(0.3), 0.0)
    # Small differences prove nothing: a much larger size will take longer.
    assert fitted([100, 110], [0.3, 0.29])[0] == 0
    assert fitted([100], [0.3]) == (0.0, pytest.approx(0.003))
    assert fitted([], []) == fitted([0], [1.0]) == (0.0, 0.0)
