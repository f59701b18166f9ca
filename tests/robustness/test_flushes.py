"""The flush campaign in short; `python -m tests.robustness.flushes` runs the long form."""

import pytest

from tests.robustness.flushes import campaign


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("store", "num_nodes"), [("valkey", 3), ("s3", 2)])
def test_no_block_of_before_a_flush_is_loaded(store: str, num_nodes: int) -> None:
    found = campaign(5, store, num_nodes, 25)
    assert not found.stale, found
    assert found.answered and found.loads, found
