"""The flush campaign in short; `python -m tests.robustness.flushes` runs the long form."""

import pytest

from tests.robustness.flushes import campaign


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "num_nodes", "num_flushes"),
    [
        pytest.param("valkey", 3, 8, marks=pytest.mark.long),
        pytest.param("valkey", 2, 25, marks=pytest.mark.campaign),
        pytest.param("s3", 2, 25, marks=pytest.mark.campaign),
    ],
)
def test_no_block_of_before_a_flush_is_loaded(store: str, num_nodes: int, num_flushes: int) -> None:
    found = campaign(5, store, num_nodes, num_flushes)
    assert not found.stale, found
    assert found.answered and found.loads, found
