"""Bounds on a shared resource: an owner's limit, and the room that stays for the next owner."""

import hypothesis.strategies as st
from hypothesis import given

from hotkv_server.cache.room.shares import FLOOR_SHARE, BoundShare, FairBound


@given(
    capacity=st.sampled_from([1, 7, 64, 1000]),
    units=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abcd"), st.integers(-60, 60)), max_size=60
    ),
)
def test_accounts_share_a_bound_whose_room_is_what_the_rule_allows(
    capacity: int, units: tuple[int, int], steps: list[tuple[int, str, int]]
) -> None:
    """Compares with the rule. A bound and its two accounts each count in units of their own; the
    holdings of each reduce the room of the others."""
    bound = FairBound(capacity)
    accounts, units_of = (bound, *(BoundShare(bound, unit) for unit in units)), (1, *units)
    books: list[dict[str, int]] = [dict.fromkeys("abcd", 0) for _ in accounts]
    floor = max(1, capacity // FLOOR_SHARE)

    def held(owner: str) -> int:
        return sum(book[owner] * unit for book, unit in zip(books, units_of, strict=True))

    for which, owner, change in steps:
        left = capacity - sum(map(held, "abcd"))
        allowed = [
            n for n in range(1, left + 1) if held(owner) + n <= floor or held(owner) + n <= left - n
        ]
        # If an amount is allowed, all smaller amounts are allowed too.
        assert allowed == list(range(1, len(allowed) + 1))
        account, mine = accounts[which], books[which]
        assert bound.room(owner) == max(allowed, default=0)
        assert account.room(owner) == bound.room(owner) // units_of[which]
        if 0 < change <= account.room(owner):
            account.take(owner, change)
            mine[owner] += change
        elif change < 0:
            given_back = min(-change, mine[owner])
            account.give(owner, given_back)
            mine[owner] -= given_back
        for one, book in zip(accounts[1:], books[1:], strict=True):
            one.check({name: count for name, count in book.items() if count})
        bound.check({name: held(name) for name in "abcd" if held(name)})
