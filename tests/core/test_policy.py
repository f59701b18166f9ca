"""Tests all eviction policies by one contract, ARC and S3-FIFO against naive versions, and
`GhostTable` against a dict. test_replay tests LRU."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from bench.policies import POLICIES
from bench.policies.lru import LRU
from hotkv_server.cache.room.policies import shared
from hotkv_server.cache.room.policies.shared import WAYS, GhostTable, spread
from tests.contracts.policy_contract import (
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
def test_every_policy_keeps_the_contract(name: str, seed: int) -> None:
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


class NaiveLists:
    """Two lists, the coldest first, and ghosts. Only those of the last 16 evictions count, as in
    one bucket of the real table."""

    def __init__(self) -> None:
        self.lists: tuple[list[int], list[int]] = [], []
        self.ghosts: dict[int, tuple[int, int]] = {}
        self.num_evicted = 0

    def remember(self, block: int, number: int) -> None:
        self.ghosts.pop(block, None)
        if len(self.ghosts) == shared.WAYS:
            del self.ghosts[next(iter(self.ghosts))]
        self.num_evicted += 1
        self.ghosts[block] = number, self.num_evicted

    def recall(self, block: int) -> int | None:
        if self.ghosts.get(block, (0, -16))[1] <= self.num_evicted - 16:
            return None
        return self.ghosts.pop(block)[0]

    def leave(self, block: int) -> int:
        number = int(block in self.lists[1])
        self.lists[number].remove(block)
        return number


class NaiveARC(NaiveLists):
    """ARC as in its paper. `target`: length of the list of blocks used once."""

    target = 0.0

    def admit(self, block: int) -> None:
        again = sum(number for number, _ in self.ghosts.values())
        once = len(self.ghosts) - again
        number = self.recall(block)
        self.lists[number is not None].append(block)
        if number is not None:
            self.target += max(1.0, again / once) if number == 0 else -max(1.0, once / again)
        self.target = min(max(self.target, 0.0), len(self.lists[0]) + len(self.lists[1]))

    def touch(self, block: int) -> None:
        self.leave(block)
        self.lists[1].append(block)

    def refresh(self, block: int) -> None:
        self.lists[self.leave(block)].append(block)

    def victims(self, count: int, may_go: set[int]) -> list[int]:
        once, again = ([one for one in part if one in may_go] for part in self.lists)
        first = once[: min(count, max(0, len(self.lists[0]) - int(self.target)))]
        return (first + again + once[len(first) :])[:count]

    def evict(self, block: int) -> None:
        self.remember(block, self.leave(block))


class NaiveS3FIFO(NaiveLists):
    """S3-FIFO as in its paper. Looks at as many blocks as are missing, until it has all or none
    may go."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}

    def admit(self, block: int) -> None:
        self.lists[self.recall(block) is not None].append(block)
        self.uses[block] = 0

    def touch(self, block: int) -> None:
        self.uses[block] = min(3, self.uses[block] + 1)

    def refresh(self, block: int) -> None: ...

    def victims(self, count: int, may_go: set[int]) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count:
            small, main = ([one for one in part if one not in chosen] for part in self.lists)
            queues = [[one for one in part if one in may_go] for part in (small, main)]
            if not any(queues):
                break
            crowded = len(small) > 0.1 * len(small + main)
            number = int(not ((crowded and queues[0]) or not queues[1]))
            for block in queues[number][: count - len(chosen)]:
                if self.uses[block] < (2, 1)[number]:
                    chosen.append(block)
                    continue
                self.lists[number].remove(block)
                self.lists[1].append(block)
                self.uses[block] = number * (self.uses[block] - 1)
        return chosen

    def evict(self, block: int) -> None:
        if self.leave(block) == 0:
            self.remember(block, 0)


@pytest.mark.parametrize(("name", "naive"), [("arc", NaiveARC), ("s3fifo", NaiveS3FIFO)])
@given(seed=st.integers(0, 1 << 32))
def test_victims_are_those_of_the_paper(
    name: str, naive: type[NaiveARC | NaiveS3FIFO], seed: int
) -> None:
    rng, policy, model = np.random.default_rng(seed), POLICIES[name](16), naive()
    pool = np.random.default_rng(0).integers(0, 1 << 64, 400, np.uint64)
    keys = pool[shared.spread(pool) >> np.uint64(62) == 0][:30]
    entry_of: dict[int, int] = {}

    def named(*blocks: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([entry_of[block] for block in blocks], np.uint32), keys[list(blocks)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "MIN_QUEUED", 0)
        patch.setattr(shared, "SHARE", 1 << 40)
        for now in range(120):
            block, what = int(rng.integers(0, 30)), rng.random()
            if block not in entry_of and len(entry_of) < 16:
                entry_of[block] = min(set(range(1, 17)) - set(entry_of.values()))
                policy.admit(*named(block), float(now))
                model.admit(block)
            elif block in entry_of and what < 0.6:
                policy.touch(*named(block), float(now))
                model.touch(block)
            elif block in entry_of and what < 0.8:
                policy.refresh(named(block)[0], float(now))
                model.refresh(block)
            elif block in entry_of:
                policy.forget(*named(block), evicted=False)
                model.leave(block)
                del entry_of[block]
            may_go = {one for one in entry_of if rng.random() < 0.8}
            count, numbers = int(rng.choice([0] * 6 + [1, 3])), [entry_of[one] for one in may_go]
            found = policy.victims(0, count, lambda some, numbers=numbers: np.isin(some, numbers))  # type: ignore[misc]
            expected = model.victims(count, may_go)
            assert found.tolist() == [entry_of[one] for one in expected]
            policy.forget(*named(*expected), evicted=True)
            for one in expected:
                model.evict(one)
                del entry_of[one]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_demoted_entries_are_taken_once_before_use(
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


def test_entry_demoted_twice_keeps_its_first_place() -> None:
    pile = shared.DemotedEntries(np.zeros(11, np.uint64))
    pile.add(np.array([3, 5, 3, 4, 5], np.uint32))
    assert pile.take(9, lambda entries: entries > 0).tolist() == [3, 5, 4]


def test_stuck_demoted_entries_make_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "PART_ENTRIES", 2)
    monkeypatch.setattr(shared, "LOOKED_ENTRIES", 2)
    pile = shared.DemotedEntries(np.zeros(11, np.uint64))
    pile.add(np.array([1, 3, 5, 2, 4, 6], np.uint32))
    taken = [pile.take(9, lambda entries: entries % 2 == 0).tolist() for _ in range(4)]
    assert taken == [[], [2], [4, 6], []]
    assert pile.take(9, lambda entries: entries > 0).tolist() == [5, 1, 3]


def test_stamps_stay_apart_after_years() -> None:
    """They are a thousand in one call, three years after the clock began."""
    policy = LRU(1000)
    entries = np.arange(1, 1001, dtype=np.uint32)
    policy.admit(entries, entries.astype(np.uint64), 1.0e8)
    assert np.all(np.diff(policy.last_used_s(entries)) < 0)


# Ghosts


POOL = np.random.default_rng(0).integers(0, 1 << 64, 60, np.uint64)
POSITIONS = st.lists(st.integers(0, len(POOL) - 1), unique=True, max_size=20)


def never_lost(table: GhostTable) -> NDArray[np.bool_]:
    """Keys whose bucket has room for all keys of the pool that belong into it."""
    high = (spread(POOL) >> np.uint64(32)).tolist()
    buckets = [int(half) * len(table.tags) >> 32 for half in high]
    return np.array([buckets.count(bucket) <= WAYS for bucket in buckets])


class GhostMachine(RuleBasedStateMachine):
    """A young ghost is found, unless more keys belong into its bucket than fit."""

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
    """When the numbers that order ghosts end, all are dropped."""
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


def test_free_place_is_taken_before_ghosts_drop() -> None:
    table = GhostTable(4, is_lasting=True)
    table.remember(POOL[:WAYS], POOL[:WAYS])
    middle = int(np.sort(table.tags[0])[WAYS // 2])
    table.drop_from(middle)
    assert len(table) == WAYS // 2
    left = table.tags[0][table.tags[0] != 0].tolist()
    table.remember(POOL[WAYS : WAYS + WAYS // 2], POOL[: WAYS // 2])
    assert len(table) == WAYS and set(left) <= set(table.tags[0].tolist())
