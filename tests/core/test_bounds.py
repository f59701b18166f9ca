"""Bounds on a shared resource: how much one owner may take, and how much is left for the next."""

import hypothesis.strategies as st
from hypothesis import given

from hotkv_server.cache.room.shares import FLOOR_SHARE, BoundShare, FairBound

CAPACITIES = st.sampled_from([1, 7, 64, 1000, 4096])
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-60, 60)), max_size=60)


@given(capacity=CAPACITIES, steps=STEPS)
def test_room_is_what_the_rule_allows(capacity: int, steps: list[tuple[str, int]]) -> None:
    bound = FairBound(capacity)
    held = dict.fromkeys("abcd", 0)
    floor = max(1, capacity // FLOOR_SHARE)
    for owner, change in steps:
        left = capacity - sum(held.values())
        allowed = [
            n
            for n in range(1, capacity + 1)
            if n <= left and (held[owner] + n <= floor or held[owner] + n <= left - n)
        ]
        assert bound.room(owner) == max(allowed, default=0)
        # All that is less may be taken, too.
        assert allowed == list(range(1, len(allowed) + 1))
        if change > 0 and change <= bound.room(owner):
            bound.take(owner, change)
            held[owner] += change
        elif change < 0:
            given_back = min(-change, held[owner])
            bound.give(owner, given_back)
            held[owner] -= given_back
        bound.check({name: count for name, count in held.items() if count})


@given(capacity=st.integers(200, 5000), num_owners=st.integers(1, 9), at_once=st.integers(1, 30))
def test_whoever_wants_everything_gets_an_equal_part_and_another_one_as_much(
    capacity: int, num_owners: int, at_once: int
) -> None:
    bound, names = FairBound(capacity), [str(n) for n in range(num_owners)]
    for name in names:
        while bound.room(name):
            bound.take(name, min(at_once, bound.room(name)))
    # The first took half; those after it half of the rest each. When it gives back what it has
    # above its part, all can come to theirs.
    for _ in range(200):
        for name in names:
            bound.give(name, max(0, bound.held(name) - capacity // (num_owners + 1)))
            bound.take(name, min(1 + bound.held(name) // 8, bound.room(name)))
    part = capacity / (num_owners + 1)
    assert all(abs(bound.held(name) - part) <= part / 5 + num_owners + 1 for name in names)
    assert bound.room("another one") >= part / 2 - num_owners - 1
    assert bound.room("another one") >= min(bound.floor, capacity - bound.total)


@given(
    capacity=CAPACITIES,
    units=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(-20, 20)), max_size=60
    ),
)
def test_accounts_share_a_bound(
    capacity: int, units: tuple[int, int], steps: list[tuple[bool, str, int]]
) -> None:
    """What one account holds, in its units, is missing in the other; together they are as one bound
    in bytes."""
    bound = FairBound(capacity)
    accounts = tuple(BoundShare(bound, unit) for unit in units)
    held: list[dict[str, int]] = [{"a": 0, "b": 0}, {"a": 0, "b": 0}]
    for which, owner, change in steps:
        account, mine = accounts[which], held[which]
        assert account.room(owner) == bound.room(owner) // units[which]
        if 0 < change <= account.room(owner):
            account.take(owner, change)
            mine[owner] += change
        elif change < 0:
            given_back = min(-change, mine[owner])
            account.give(owner, given_back)
            mine[owner] -= given_back
        for one, books in zip(accounts, held, strict=True):
            one.check({name: count for name, count in books.items() if count})
        bound.check(
            {
                n: s
                for n in "ab"
                if (s := sum(books[n] * unit for books, unit in zip(held, units, strict=True)))
            }
        )
