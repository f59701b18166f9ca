"""Array functions of the core give what plain Python gives."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from hotkv_server.cache.arrays import first_occurrences, rows

FEW_WORDS = st.lists(st.sampled_from([0, 1]), min_size=8, max_size=8)


@given(words=st.lists(FEW_WORDS, max_size=8))
def test_first_occurrences_are_those_that_no_earlier_row_equals(words: list[list[int]]) -> None:
    """Also of hashes that differ only behind their first eight bytes."""
    hashes = np.array(words, np.uint32).reshape(-1, 8)
    expected = [at for at, row in enumerate(words) if row not in words[:at]]
    assert first_occurrences(hashes).tolist() == expected


@given(data=st.data(), words=st.lists(FEW_WORDS, max_size=8))
def test_rows_are_those_at_their_places(data: st.DataObject, words: list[list[int]]) -> None:
    hashes = np.array(words, np.uint32).reshape(-1, 8)
    places = [at for at in range(len(words)) if data.draw(st.booleans())]
    assert rows(hashes, np.array(places, np.int64)).tolist() == [words[at] for at in places]
