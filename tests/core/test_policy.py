"""The contract of all policies, and their shared parts. `tests/simulate/test_replay.py` compares
LRU with plain dicts."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hotkv_server.cache.room.policies import LRU, POLICIES, shared
from hotkv_server.testing.policy_contract import (
    check_demoted_go_first,
    check_leaves_go_first,
    check_policy,
)


@pytest.fixture(params=["large queues", "small queues"])
def queues(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small queues":
        monkeypatch.setattr(shared, "MIN_QUEUED", 2)
        monkeypatch.setattr(shared, "SWEEP_ENTRIES", 17)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_contract(name: str, seed: int) -> None:
    check_policy(POLICIES[name], seed=seed)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 2, 50])
def test_leaves_go_first(name: str, num_blocks: int) -> None:
    check_leaves_go_first(POLICIES[name], num_blocks)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_blocks", [1, 2, 50])
def test_demoted_go_first(name: str, num_blocks: int) -> None:
    check_demoted_go_first(POLICIES[name], num_blocks)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_demoted_entries_are_taken_once_and_not_after_a_use(
    data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PART_ENTRIES", 8)
    state = np.zeros(41, np.uint64)
    pile = shared.DemotedEntries(state)
    expected: set[int] = set()
    entry = st.integers(1, 40)
    for _ in range(data.draw(st.integers(0, 40))):
        added = data.draw(st.lists(entry, max_size=20))
        pile.add(np.array(added, np.uint32))
        assert len(pile) <= 4 * 40
        expected |= set(added)
        used = data.draw(st.lists(entry, max_size=10, unique=True))
        state[used] += np.uint64(1)
        expected -= set(used)
        if data.draw(st.booleans()):
            taken = pile.take(7, lambda entries: entries % 2 == 0).tolist()
            assert len(taken) == len(set(taken)) and set(taken) <= expected
            assert len(taken) == min(7, sum(one % 2 == 0 for one in expected))
            expected -= set(taken)
    left = pile.take(100, lambda entries: entries > 0).tolist()
    assert sorted(left) == sorted(expected)


def test_an_entry_that_is_demoted_twice_at_once_keeps_its_first_place() -> None:
    pile = shared.DemotedEntries(np.zeros(11, np.uint64))
    pile.add(np.array([3, 5, 3, 4, 5], np.uint32))
    assert pile.take(9, lambda entries: entries > 0).tolist() == [3, 5, 4]


def test_stamps_stay_apart_after_years() -> None:
    """Orders the blocks of a touch even three years after the clock began."""
    policy = LRU(1000)
    entries = np.arange(1, 1001, dtype=np.uint32)
    policy.admit(entries, entries.astype(np.uint64), 1.0e8)
    assert np.all(np.diff(policy.last_used_s(entries)) < 0)
