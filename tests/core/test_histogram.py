"""Histograms count right, and the core counts the ages of evicted blocks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.cache import inspect
from hotkv_server.cache.histogram import AGES_S, SECONDS, SIZES_BYTES, Histogram
from hotkv_server.cache.values import HashList
from tests.core.support import World, expire, words_of

VALUES = st.lists(
    st.one_of(st.floats(0, 1e6), st.sampled_from([*SECONDS, *AGES_S])), min_size=0, max_size=40
)


@given(VALUES, VALUES, st.sampled_from([SECONDS, AGES_S, SIZES_BYTES]))
def test_it_counts_as_a_plain_search_does(
    single: list[float], many: list[float], bounds: tuple[float, ...]
) -> None:
    counted, every = Histogram(bounds), [*single, *many]
    for value in single:
        counted.add(value)
    counted.add_all(np.array(many))
    assert counted.count == len(every) and math.isclose(counted.sum, math.fsum(every))
    assert counted.cumulative() == [
        *((str(bound), float(sum(value <= bound for value in every))) for bound in bounds),
        ("+Inf", float(len(every))),
    ]


@pytest.mark.parametrize("policy", ["lru", "hotness", "arc"])
def test_an_age_is_the_time_since_the_last_use(policy: str) -> None:
    """Checks the ages of evicted blocks. The core learns the time from a session that opens, and
    from the clock's tick."""
    world = World(1, policy=policy)
    core, session = world.core, world.open(now_s=900.0)
    counted = inspect.eviction_ages(core)

    def store(numbers: range, now_s: float) -> None:
        for number in numbers:
            world.store(session, [number], now_s)

    store(range(4), 500.0)
    store(range(10, 14), 900.0)
    assert (counted.count, counted.sum) == (4, pytest.approx(4 * 400.0, abs=0.1))
    for number in (12, 13):
        core.touch(session.number, [HashList(0, words_of([number]))], 1050.0)
    expire(core, 1110.0)
    store(range(20, 22), 1110.0)
    assert counted.count == core.space.removal.evicted_blocks == 6
    assert counted.sum == pytest.approx(4 * 400.0 + 2 * 210.0, abs=0.1)
    assert counted.counts[AGES_S.index(300.0)] == 2
    expire(core, 1111.0)
    store(range(30, 34), 1111.0)
    assert counted.count == core.space.removal.evicted_blocks == 10
    assert counted.counts[AGES_S.index(1.0)] >= 2, "those of the same second"


def test_no_age_is_counted_before_the_core_knows_the_time() -> None:
    world = World(1)
    session = world.open()
    for number in range(6):
        world.store(session, [number], 10.0)
    assert world.core.space.removal.evicted_blocks == 2
    assert not inspect.eviction_ages(world.core).count
