"""Histograms count as a plain search through all values does, one at a time or many."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.cache.histogram import AGES_S, SECONDS, SIZES_BYTES, Histogram

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
