"""The capacity follows what steps need, within its bounds."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_sparse.hotset import MAX_SETS, AdaptiveCapacity


@given(
    budget=st.integers(1, 1000),
    always=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50)), max_size=80),
)
def test_capacity_stays_in_bounds(budget: int, always: int, steps: list[tuple[int, int]]) -> None:
    capacity = AdaptiveCapacity(budget, always)
    assert capacity.capacity_blocks == max(2 * budget, 2 * always)
    for selected, left in steps:
        blocks = capacity.observe(selected, left)
        assert blocks == capacity.capacity_blocks
        assert (
            max(2 * min(selected, budget), 2 * always) <= blocks + 1
            and blocks <= max(MAX_SETS * budget, 2 * always) + 1
        )


def test_up_at_once_down_slowly() -> None:
    capacity = AdaptiveCapacity(500, 5)
    assert capacity.observe(50, 0) == 100
    assert capacity.observe(400, 0) == 800
    assert capacity.observe(50, 0) == 784
    for _ in range(200):
        last = capacity.observe(50, 0)
    assert last == 100


def test_pressure_widens_the_set_and_calm_narrows_it() -> None:
    capacity = AdaptiveCapacity(100, 5)
    wide = [capacity.observe(50, 3) for _ in range(60)][-1]
    assert wide == 200
    calm = [capacity.observe(50, 0) for _ in range(200)][-1]
    assert calm == 100
