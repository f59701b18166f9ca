"""`GhostTable` agrees with a dict."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.shared import WAYS, GhostTable, spread

POOL = np.random.default_rng(0).integers(0, 1 << 64, 60, np.uint64)
POSITIONS = st.lists(st.integers(0, len(POOL) - 1), unique=True, max_size=20)


def never_lost(table: GhostTable) -> NDArray[np.bool_]:
    """Returns which keys of the pool always keep a place, because their bucket can't overflow."""
    high = (spread(POOL) >> np.uint64(32)).tolist()
    buckets = [int(half) * len(table.tags) >> 32 for half in high]
    return np.array([buckets.count(bucket) <= WAYS for bucket in buckets])


class GhostMachine(RuleBasedStateMachine):
    """Checks that found ghosts were remembered last and recently, and that young ghosts of buckets
    without overflow are found."""

    @initialize(num_ghosts=st.sampled_from([1, 2, 5, 16, 60, 200]))
    def start(self, num_ghosts: int) -> None:
        self.table = GhostTable(num_ghosts)
        self.naive: dict[int, tuple[int, int]] = {}
        self.num_remembered = 0
        self.never_lost = never_lost(self.table)

    def kept(self) -> Counter[int]:
        return Counter(self.table.values[self.table.tags != 0].tolist())

    @rule(positions=POSITIONS)
    def remember(self, positions: list[int]) -> None:
        before = self.kept()
        values = [self.num_remembered + i + 1 for i in range(len(positions))]
        gone = self.table.remember(POOL[positions], np.array(values, np.uint64))
        assert before + Counter(values) - self.kept() == Counter(gone.tolist()), (
            "those that went are not those that are reported"
        )
        for position, value in zip(positions, values, strict=True):
            self.naive[position] = (value, self.num_remembered)
            self.num_remembered += 1

    @rule(positions=POSITIONS)
    def take(self, positions: list[int]) -> None:
        before = self.kept()
        found, values = self.table.take(POOL[positions])
        assert before - self.kept() == Counter(values[found].tolist()), (
            "what was found is not what went"
        )
        for position, hit, value in zip(positions, found.tolist(), values.tolist(), strict=True):
            expected, number = self.naive.get(position, (0, -self.table.num_ghosts - 1))
            is_young = self.num_remembered - number <= self.table.num_ghosts
            assert value == (expected if hit else 0)
            assert is_young or not hit, "a ghost too old was found"
            assert hit or not is_young or not self.never_lost[position], "a young ghost was lost"
            if hit:
                del self.naive[position]

    @invariant()
    def agree(self) -> None:
        self.table.check_invariants()
        assert len(self.table) <= self.table.tags.size


TestGhostMachine = GhostMachine.TestCase


@given(num_ghosts=st.integers(1, 64), num_before=st.integers(0, 30), num_after=st.integers(0, 30))
def test_ages_start_anew(num_ghosts: int, num_before: int, num_after: int) -> None:
    """Lets the numbers of ages run out. All ghosts are dropped then; later ghosts must be found."""
    table = GhostTable(num_ghosts)
    table._next_age = (1 << 32) - 1 - num_before
    values = np.arange(1, len(POOL) + 1, dtype=np.uint64)
    for some in (slice(num_before), slice(num_before, num_before + num_after)):
        table.remember(POOL[some], values[some])
    table.check_invariants()
    found, found_values = table.take(POOL)
    assert found_values[found].tolist() == values[found].tolist()
    assert not found[num_before + num_after :].any()
    assert table._next_age < (1 << 32)
    after = found[num_before : num_before + num_after]
    assert after[-1:].all(), "the last one was lost"
    assert not after[: max(0, num_after - num_ghosts)].any()


@given(num_ghosts=st.integers(16, 64), num_before=st.integers(0, 30), num_after=st.integers(0, 30))
def test_lasting_ghosts_outlive_the_numbers_of_coming(
    num_ghosts: int, num_before: int, num_after: int
) -> None:
    table = GhostTable(num_ghosts, is_lasting=True)
    first, second = POOL[:num_before], POOL[num_before : num_before + num_after]
    table.remember(first, first)
    table._next_age = (1 << 32) - 1 - num_after
    table.remember(second, second)
    table.remember(second[:1], second[:1])
    table.check_invariants()
    assert table._next_age < (1 << 32)
    kept = never_lost(table)[: num_before + num_after]
    found, values = table.take(POOL[: num_before + num_after])
    assert found[kept].all() and values[found].tolist() == POOL[: len(found)][found].tolist()


def test_a_place_that_is_free_is_taken_before_a_ghost_is_dropped() -> None:
    """Drops half of the ghosts by their tags. Their places are reused."""
    table = GhostTable(4, is_lasting=True)
    table.remember(POOL[:WAYS], POOL[:WAYS])
    middle = int(np.sort(table.tags[0])[WAYS // 2])
    table.drop_from(middle)
    assert len(table) == WAYS // 2
    left = table.tags[0][table.tags[0] != 0].tolist()
    table.remember(POOL[WAYS : WAYS + WAYS // 2], POOL[: WAYS // 2])
    assert len(table) == WAYS and set(left) <= set(table.tags[0].tolist())
