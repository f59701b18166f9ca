"""Tests `fitted`: the fixed time and the time per byte of transfers, from measurements."""

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


def test_what_does_not_grow_is_of_any_size() -> None:
    assert fitted([100, 200], [0.25, 0.25]) == (0.25, 0.0)
    assert fitted([1, 10], [0.0, 5.0]) == (0.0, pytest.approx(5 / 11))
    # A small difference may be noise, so there is no fixed time.
    assert fitted([100, 110], [0.3, 0.29])[0] == 0
    assert fitted([100], [0.3]) == (0.0, pytest.approx(0.003))
    assert fitted([], []) == fitted([0], [1.0]) == (0.0, 0.0)
