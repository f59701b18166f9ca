"""Tests `Hotness` against its definition: uses make heat, and heat the order of eviction."""

import math
from collections import OrderedDict
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hotkv_proto.blocks import MAX_PRIORITY, NO_RETENTION, Retention
from hotkv_server.cache.room.policies import shared
from hotkv_server.cache.room.policies.hotness import (
    CONTENDERS,
    GHOSTS_PER_BLOCK,
    KEPT_S,
    LEAK,
    TICKS_PER_S,
    Contender,
    Duel,
    Hotness,
)
from hotkv_server.cache.room.policies.protocol import Entries, Keys

CAPACITY = 12
TOLERANCE = 2e-5
"""Error of a block's count (a log2) per use, which rounds it to float32."""
PASSED_TICKS = st.sampled_from([0, 1, 7, 64, 64 * 90, 64 * 4000])


def make_hotness(capacity: int, contender: Contender) -> Hotness:
    """A policy in which this contender has won for good."""
    policy = Hotness(capacity)
    policy.duel = Duel(capacity, (contender,))
    return policy


def entries_of(numbers: list[int]) -> Entries:
    return np.array(numbers, np.uint32)


def keys_of(numbers: list[int]) -> Keys:
    return np.array([number * 0x9E37_79B9_7F4A_7C15 % (1 << 64) for number in numbers], np.uint64)


class DefinitionMachine(RuleBasedStateMachine):
    """A use counts 1, and half after every `memory_s`; a block's count is log2 of the sum, also
    over an eviction."""

    @initialize(contender=st.sampled_from(CONTENDERS))
    def start(self, contender: Contender) -> None:
        self.policy = make_hotness(CAPACITY, contender)
        self.memory_s = contender.memory_s
        self.now_s = 1000.0
        self.entry_of: dict[int, int] = {}
        self.uses: dict[int, list[tuple[float, int]]] = {}
        # Evicted keys, the oldest first; bounded.
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self.num_evicted = 0

    def use(self, block: int, priority: int) -> None:
        self.uses.setdefault(block, []).append((self.now_s, priority))

    def leave(self, block: int) -> None:
        self.ghosts[block] = self.num_evicted
        self.num_evicted += 1

    def recall(self, block: int) -> None:
        number = self.ghosts.pop(block, -CAPACITY * GHOSTS_PER_BLOCK)
        if self.num_evicted - number > CAPACITY * GHOSTS_PER_BLOCK:
            self.uses.pop(block, None)

    def absent(self) -> st.SearchStrategy[int]:
        return st.sampled_from([block for block in range(1, 21) if block not in self.entry_of])

    @precondition(lambda self: len(self.entry_of) < CAPACITY)
    @rule(data=st.data(), passed=PASSED_TICKS, priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY))
    def admit(self, data: st.DataObject, passed: int, priority: int) -> None:
        self.now_s += passed / TICKS_PER_S
        block = data.draw(self.absent())
        free = set(range(1, CAPACITY + 1)) - set(self.entry_of.values())
        entry = data.draw(st.sampled_from(sorted(free)))
        self.recall(block)
        self.policy.admit(entries_of([entry]), keys_of([block]), self.now_s, Retention(priority))
        self.entry_of[block] = entry
        self.use(block, priority)

    @precondition(lambda self: self.entry_of)
    @rule(data=st.data(), passed=PASSED_TICKS, priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY))
    def touch(self, data: st.DataObject, passed: int, priority: int) -> None:
        self.now_s += passed / TICKS_PER_S
        block = data.draw(st.sampled_from(sorted(self.entry_of)))
        self.policy.touch(
            entries_of([self.entry_of[block]]), keys_of([block]), self.now_s, Retention(priority)
        )
        self.use(block, priority)

    @precondition(lambda self: self.entry_of)
    @rule(data=st.data(), evicted=st.booleans())
    def forget(self, data: st.DataObject, evicted: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.entry_of)))
        self.policy.forget(
            entries_of([self.entry_of.pop(block)]), keys_of([block]), evicted=evicted
        )
        if evicted:
            self.leave(block)
        else:
            del self.uses[block]

    @rule(data=st.data(), passed=PASSED_TICKS, priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY))
    def decline(self, data: st.DataObject, passed: int, priority: int) -> None:
        """A rule that holds blocks counts the offer as a use and remembers the key; others
        ignore it."""
        self.now_s += passed / TICKS_PER_S
        block = data.draw(self.absent())
        depth = data.draw(st.integers(0, 2))
        self.policy.decline(keys_of([block]), depth, self.now_s, Retention(priority))
        if not self.policy.duel.winner.hold_s or len(self.entry_of) <= depth:
            return
        self.recall(block)
        self.use(block, priority)
        self.leave(block)

    @invariant()
    def remembers(self) -> None:
        for block, entry in self.entry_of.items():
            last_s = self.uses[block][-1][0]
            total = sum(
                2.0 ** (priority - (last_s - used_s) / self.memory_s)
                for used_s, priority in self.uses[block]
            )
            assert abs(float(self.policy._uses[entry]) - math.log2(total)) <= TOLERANCE * len(
                self.uses[block]
            )
            assert self.policy.last_used_s(entries_of([entry]))[0] == last_s
        assert set(np.flatnonzero(self.policy._used)) == set(self.entry_of.values())
        held = entries_of(list(self.entry_of.values()))
        assert (self.policy.heat(held) < KEPT_S / 2).all(), "a use counts as kept"
        self.policy.check_invariants()


TestDefinitionMachine = DefinitionMachine.TestCase


class NaiveHotness:
    """Compares all entries, by times and counts in float64."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.state: dict[int, tuple[float, float]] = {}
        self.latest_s = 0.0

    def use(self, entry: int, now_s: float, retention: Retention = NO_RETENTION) -> None:
        self.latest_s = now_s
        count, until_s = float(retention.priority), now_s + retention.ttl_s
        if entry in self.state:
            used_s, before = self.state[entry]
            count = math.log2(
                2.0 ** (before - max(0.0, now_s - used_s) / self.contender.memory_s)
                + 2.0**retention.priority
            )
            until_s = max(until_s, used_s)
        self.state[entry] = (until_s, count)

    def heat(self, entry: int) -> float:
        used_s, count = self.state[entry]
        c = self.contender
        kept = KEPT_S if used_s > self.latest_s else 0.0
        return (
            kept
            + c.recency * used_s
            + c.half_life_s * (min(count, c.most_doublings) + LEAK * count)
        )


@pytest.fixture
def exact_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy examines all entries for each victim, not a sample."""
    monkeypatch.setattr(shared, "MIN_QUEUED", 0)
    monkeypatch.setattr(shared, "SHARE", 1 << 40)


@pytest.mark.usefixtures("exact_queue")
@pytest.mark.parametrize("contender", CONTENDERS, ids=repr)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_victims_are_the_naive_coldest(contender: Contender, seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = 30
    policy, naive, now_s = make_hotness(capacity, contender), NaiveHotness(contender), 500.0
    # Each key is new, so no ghost is met.
    for step in range(60):
        now_s += float(rng.choice([0.0, 1.0, 30.0, 2000.0])) * TICKS_PER_S // 1 / TICKS_PER_S
        retention = Retention(int(rng.integers(-8, 9)), float(rng.choice([0.0, 0.0, 50.0])))
        known, free = sorted(naive.state), sorted(set(range(1, capacity + 1)) - set(naive.state))
        if known and rng.random() < 0.5:
            entry = int(rng.choice(known))
            policy.touch(entries_of([entry]), keys_of([entry]), now_s, retention)
            naive.use(entry, now_s, retention)
        elif free:
            entry = int(rng.choice(free))
            policy.admit(entries_of([entry]), keys_of([1000 + step]), now_s, retention)
            naive.use(entry, now_s, retention)
        if rng.random() < 0.4:
            evictable = [entry for entry in naive.state if rng.random() < 0.8]
            victims = take_coldest(policy, naive, evictable, int(rng.integers(0, 6)))
            policy.forget(entries_of(victims), keys_of(victims), evicted=True)
            for entry in victims:
                del naive.state[entry]


def take_coldest(
    policy: Hotness, naive: NaiveHotness, evictable: list[int], count: int
) -> list[int]:
    """Victims must be the coldest, within the precision of float32."""
    victims: list[int] = policy.victims(
        4096, count, lambda numbers: np.isin(numbers, evictable)
    ).tolist()
    assert len(set(victims)) == min(count, len(evictable)) and set(victims) <= set(evictable)
    in_turn = [naive.heat(entry) for entry in victims]
    left = [naive.heat(entry) for entry in set(evictable) - set(victims)]
    blurred = 6e-4 * naive.contender.half_life_s
    assert all(after >= before - blurred for before, after in pairwise(in_turn))
    assert not victims or max(in_turn) <= min(left, default=math.inf) + blurred
    return victims


@given(data=st.data(), contender=st.sampled_from(CONTENDERS))
def test_a_head_is_never_colder_than_its_tail(data: st.DataObject, contender: Contender) -> None:
    policy = make_hotness(80, contender)
    chains = [list(range(1, 41)), list(range(41, 61)), [61], [62, 63]]
    resident = dict.fromkeys(range(len(chains)), 0)
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        number = data.draw(st.integers(0, len(chains) - 1))
        chain, kept = chains[number], resident[number]
        now_s += data.draw(st.sampled_from([0.0, 0.01, 1.0, 300.0, 50_000.0]))
        retention = Retention(
            data.draw(st.sampled_from([0, 0, -8, 3, 8])),
            data.draw(st.sampled_from([0.0, 0.0, 100.0])),
        )
        if kept == len(chain):
            policy.touch(entries_of(chain), keys_of(chain), now_s, retention)
            keep = data.draw(st.integers(0, len(chain)))
            if keep < len(chain) and data.draw(st.booleans()):
                policy.forget(
                    entries_of(chain[keep:]),
                    keys_of(chain[keep:]),
                    evicted=data.draw(st.booleans()),
                )
                resident[number] = keep
        elif kept == 0:
            policy.admit(entries_of(chain), keys_of(chain), now_s, retention)
            resident[number] = len(chain)
        else:
            policy.forget(entries_of(chain[:kept]), keys_of(chain[:kept]), evicted=True)
            resident[number] = 0
        for number, kept in resident.items():
            heat = policy.heat(entries_of(chains[number][:kept]))
            assert np.all(np.diff(heat) <= 0), "a block is hotter than the one before it"
    policy.check_invariants()


@given(data=st.data(), hold_s=st.sampled_from([0.0, 2.0, 90.0]))
def test_what_was_just_used_is_kept(data: st.DataObject, hold_s: float) -> None:
    """What was used within `hold_s` or listed by `hold` is kept, unless it was demoted."""
    policy, num_entries, now_s = make_hotness(40, Contender(0.1, hold_s=hold_s)), 40, 100.0
    used_s = {}
    for entry in range(1, num_entries + 1):
        now_s += data.draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
        policy.admit(entries_of([entry]), keys_of([entry]), now_s)
        used_s[entry] = now_s
    for _ in range(data.draw(st.integers(0, 10))):
        entry = data.draw(st.integers(1, num_entries))
        policy.touch(entries_of([entry]), keys_of([entry]), now_s)
        used_s[entry] = now_s
    demoted = set(data.draw(st.lists(st.integers(1, num_entries), max_size=3, unique=True)))
    policy.demote(entries_of(sorted(demoted)), keys_of(sorted(demoted)), now_s)
    held = set(data.draw(st.lists(st.integers(1, num_entries), max_size=9, unique=True)))
    for hold_s_more in (5.0, 1.0):
        policy.hold(entries_of(sorted(held)), now_s + hold_s_more)
    more_s = data.draw(st.sampled_from([0.0, 2.0, 5.0]))
    now_s, held = now_s + more_s, held if more_s < 5.0 else set()
    may_go = {entry for entry in used_s if now_s - used_s[entry] >= hold_s} - held | demoted
    gone: set[int] = set()

    def is_left(numbers: Entries) -> NDArray[np.bool_]:
        return ~np.isin(numbers, list(gone))

    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 20))
        victims = policy.victims(0, count, is_left, refusable_at_s=now_s).tolist()
        assert set(victims) <= may_go - gone
        gone |= set(victims)
    victims = policy.victims(0, num_entries, is_left, refusable_at_s=now_s).tolist()
    assert gone | set(victims) == may_go, "an old block was kept"
    everything = policy.victims(0, num_entries, is_left)
    assert set(everything.tolist()) == set(used_s) - gone


@pytest.mark.parametrize("may_hold", [False, True])
def test_a_new_winner_orders_anew_what_was_queued(*, may_hold: bool) -> None:
    """The winner changes at a round's end, or because holding is no longer allowed."""
    policy = make_hotness(40, CONTENDERS[0])
    policy.duel = Duel(40, (Contender(0.1, hold_s=5.0), Contender(0.1, recency=-1.0)))
    for entry in range(1, 41):
        policy.admit(entries_of([entry]), keys_of([entry]), float(entry))
    assert policy.victims(0, 1, lambda numbers: numbers > 0).tolist() == [1]
    policy.duel._hits[1], policy.duel._round_ends_s = 1000, 41.0
    policy.allow_keeping(may_hold)
    policy.touch(entries_of([40]), keys_of([40]), 40.0 + may_hold)
    assert policy.victims(0, 1, lambda numbers: numbers > 0).tolist() == [40]


def test_ghosts_of_a_large_tier_are_small() -> None:
    ghosts = Hotness(1 << 27)._ghosts
    num_bytes = ghosts.tags.nbytes + ghosts.values.nbytes + ghosts._ages.nbytes
    assert num_bytes <= 512 << 20


def test_clock_and_time_to_live_never_shrink() -> None:
    policy = make_hotness(CAPACITY, CONTENDERS[0])
    for number, now_s in ((1, 1000.0), (2, 1100.0)):
        policy.admit(entries_of([number]), keys_of([number]), now_s)
    for told_late in (
        lambda: policy.touch(entries_of([1]), keys_of([1]), 1000.0),
        lambda: policy.refresh(entries_of([1]), 1000.0),
    ):
        told_late()
        assert (policy.heat(entries_of([1, 2])) < KEPT_S / 2).all(), "a use counts as kept"
    policy.admit(entries_of([3]), keys_of([3]), 1100.0, Retention(ttl_s=100.0))
    policy.refresh(entries_of([3]), 1150.0)
    assert policy.last_used_s(entries_of([3]))[0] == 1200.0, "a use without one shortened it"


def test_retained_blocks_go_if_nothing_else_may() -> None:
    policy = make_hotness(4, Contender(0.1, hold_s=5.0))
    policy.admit(entries_of([1, 2]), keys_of([1, 2]), 100.0, Retention(ttl_s=1000.0))
    anything = np.ones(2, np.bool_)
    assert policy.victims(
        0, 2, lambda numbers: anything[: len(numbers)], refusable_at_s=100.0
    ).tolist()


@pytest.mark.parametrize("start_s", [0.0, 1e9, -5.0])
def test_clocks_that_start_anywhere(start_s: float) -> None:
    policy = make_hotness(20, CONTENDERS[0])
    chain = list(range(1, 11))
    policy.admit(entries_of(chain), keys_of(chain), start_s)
    for now_s in (start_s + 1.0, start_s + 6e7, start_s + 1e9):
        policy.touch(entries_of(chain), keys_of(chain), now_s)
        assert np.all(np.diff(policy.heat(entries_of(chain))) < 0)
    policy.admit(entries_of([11]), keys_of([11]), start_s + 2e9)
    assert np.isfinite(policy.heat(entries_of([1, 11]))).all()
    policy.check_invariants()
