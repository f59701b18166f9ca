"""Runs the flush campaign (`tests.robustness.flushes`) briefly."""

import pytest

from tests.robustness.flushes import campaign
from tests.support.daemons import quick_servers

ALL_FAULTS = 4672
"""The first events with this seed have all kinds of faults."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "num_flushes", "seed"),
    [
        pytest.param(3, 7, ALL_FAULTS, marks=pytest.mark.long),
        pytest.param(2, 25, 5, marks=pytest.mark.campaign),
    ],
)
def test_no_block_of_before_a_flush_is_loaded(num_nodes: int, num_flushes: int, seed: int) -> None:
    with quick_servers():
        found = campaign(seed, num_nodes, num_flushes)
    assert not found.stale, found
    assert found.answered and found.loads, found
    faults = {"cut_or_heal", "stop_or_go_on", "kill", "lose_power", "store_older"}
    assert seed != ALL_FAULTS or faults <= set(found.done), found
