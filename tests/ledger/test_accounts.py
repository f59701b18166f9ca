"""Tests the ledger's accounts against a list of all counts."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_proto.reports import Miss
from hotkv_server.ledger.book.accounts import (
    FASTEST,
    MAX_SPEEDS,
    NUM_HOURS,
    NUM_MINUTES,
    REASONS,
    SLOWEST,
    Account,
    Accounts,
    Buckets,
    Columns,
    Usage,
)

COLUMNS = Columns(["disk", "valkey"])
MAX_ACCOUNTS = 5
START = 29_000_000
USAGES = st.builds(
    Usage,
    requests=st.integers(0, 3),
    prompt_tokens=st.integers(0, 1000),
    device_hit_tokens=st.integers(0, 9),
    saved_s=st.sampled_from([0.0, 0.5, -0.25]),
    waited_s=st.sampled_from([0.0, 0.125]),
    loaded_bytes=st.integers(0, 1 << 40),
    hit_tokens=st.dictionaries(st.sampled_from(COLUMNS.tiers), st.integers(-5, 50)),
    missed_tokens=st.dictionaries(st.sampled_from(REASONS), st.integers(0, 50)),
)
WHO = st.builds(
    Account,
    st.sampled_from(["", "blue"]),
    st.sampled_from(["small", "large"]),
    st.just("00ff"),
    st.sampled_from([f"engine-{number}" for number in range(12)]),
)


def in_window(minute: int, now: int, seconds: float) -> bool:
    """Does a minute belong to the window of `seconds` (0: all time) that ends now?"""
    if not seconds:
        return True
    if (minutes := -(-seconds // 60)) <= NUM_MINUTES:
        return now - minutes < minute <= now
    hours = min(-(-seconds // 3600), NUM_HOURS)
    return bool(now // 60 - hours < minute // 60 <= now // 60)


class AccountsBesideAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts(COLUMNS, START, MAX_ACCOUNTS)
        self.minute = START
        self.listed: list[tuple[Account, int, np.ndarray]] = []  # type: ignore[type-arg]
        # Least recently used first; beyond the limit, an old account is merged into another.
        self.order: list[Account] = []
        self.num_folded = 0

    @rule(who=WHO, usage=USAGES, age=st.sampled_from([0, 1, 119, 120, 3000, NUM_HOURS * 60]))
    def count(self, who: Account, usage: Usage, age: int) -> None:
        if who not in self.order:
            while len(self.order) >= MAX_ACCOUNTS:
                oldest = next(one for one in self.order if one.folded() != one)
                target = oldest.folded()
                self.listed = [
                    (target if one == oldest else one, at, v) for one, at, v in self.listed
                ]
                self.order = [one for one in self.order if one not in (oldest, target)]
                self.order.append(target)
                self.num_folded += 1
        else:
            self.order.remove(who)
        self.order.append(who)
        values = COLUMNS.values(usage)
        self.listed.append((who, self.minute - age, values))
        self.accounts.add(who, values, self.minute, age)

    @rule(minutes=st.sampled_from([1, 7, 59, 119, 121, 1500, NUM_HOURS * 60 + 30]))
    def wait(self, minutes: int) -> None:
        self.minute += minutes

    @rule(seconds=st.sampled_from([0, 1, 60, 61, 1800, 7200, 7201, 86_400, 8 * 86_400, 1e9]))
    def ask(self, seconds: float) -> None:
        expected: dict[Account, np.ndarray] = {}  # type: ignore[type-arg]
        for who, minute, values in self.listed:
            if in_window(minute, self.minute, seconds):
                expected[who] = expected.get(who, 0.0) + values
        found = dict(self.accounts.since(seconds, self.minute))
        assert set(found) == {who for who, values in expected.items() if values.any()}
        for who, values in found.items():
            assert np.allclose(values, expected[who])
        whole = self.accounts.total.since(seconds, self.minute)
        assert np.allclose(whole, sum(expected.values(), np.zeros(len(COLUMNS))))

    @rule()
    def ask_for_each_minute(self) -> None:
        minutes = self.accounts.total.minutes(self.minute)
        assert len(minutes) == NUM_MINUTES
        for back, values in enumerate(minutes[::-1]):
            counted = [v for _, at, v in self.listed if at == self.minute - back]
            assert np.allclose(values, sum(counted, np.zeros(len(COLUMNS))))

    @invariant()
    def books_agree(self) -> None:
        self.accounts.check_invariants()
        assert [who for who, _ in self.accounts.rows()] == self.order
        assert self.accounts.num_folded == self.num_folded


TestAccounts = AccountsBesideAList.TestCase


@given(usage=USAGES)
def test_a_usage_comes_back_from_its_values(usage: Usage) -> None:
    back = COLUMNS.usage(COLUMNS.values(usage))
    assert COLUMNS.usage(COLUMNS.values(back)) == back

    def counted(one: Usage) -> Usage:
        tokens = ((one.hit_tokens, "hit_tokens"), (one.missed_tokens, "missed_tokens"))
        return replace(one, **{name: {k: c for k, c in of.items() if c} for of, name in tokens})

    assert counted(back) == counted(usage)


def test_unknown_tier_counts_as_host_memory() -> None:
    values = COLUMNS.values(Usage(hit_tokens={"host": 1, "tape": 7}))
    assert COLUMNS.usage(values).hit_tokens == {"host": 8, "disk": 0, "valkey": 0}


@pytest.mark.parametrize(("back", "is_kept"), [(1, True), (60, True), (61, False), (10**6, False)])
def test_clock_going_back_hides_nothing_for_long(back: int, is_kept: bool) -> None:
    """Up to an hour back, the latest window must still show both counts."""
    buckets = Buckets(1, START)
    buckets.add(np.ones(1), START)
    buckets.add(np.ones(1), START - back)
    assert buckets.since(0, START - back)[0] == 2
    assert buckets.since(60, START - back)[0] == (2 if is_kept else 1)
    assert Miss.ABSENT not in REASONS


@given(
    reports=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 1000),
            st.sampled_from([0.0, 0.5, 5e-324, 1e9]),
            st.sampled_from([0.0, 100.0, 2500.0, 5e-324, 1e300]),
        )
    )
)
def test_fresh_engines_hit_saves_by_earlier_speed(
    reports: list[tuple[str, int, float, float]],
) -> None:
    accounts, known = Accounts(Columns(()), 0), dict[str, float]()
    for name, hit_tokens, said_s, speed in reports:
        told = hit_tokens / said_s if said_s else 0.0
        if SLOWEST <= (speed or told) <= FASTEST:
            known[name] = speed or told
        expected = said_s or (hit_tokens / known[name] if name in known else 0.0)
        assert accounts.saved_s(name, hit_tokens, said_s, speed) == expected < math.inf
        assert accounts.speeds == known


def test_speeds_are_bounded() -> None:
    accounts = Accounts(Columns(()), 0)
    for number in [*range(MAX_SPEEDS), 0, *range(MAX_SPEEDS, MAX_SPEEDS + 5)]:
        accounts.saved_s(str(number), 1, 0.0, 10.0)
    # Only the oldest reports may be dropped, and "0" came again later.
    assert next(iter(accounts.speeds)) == "6" and "0" in accounts.speeds
    assert len(accounts.speeds) == MAX_SPEEDS
