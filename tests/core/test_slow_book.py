"""Tests which items a slow book keeps, beside a list that forgets nothing."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.slow import book
from hotkv_server.slow.book import KEPT, WINDOW_S, Open, SlowBook

STEPS = st.lists(
    st.tuples(st.sampled_from((0.0, 1.0, WINDOW_S / 3, WINDOW_S, 2.5 * WINDOW_S)),
              st.integers(0, 9), st.integers(1, 40)),
    max_size=30,
)  # fmt: skip
"""Seconds that pass, time that items took, their number."""


def longest(noted: list[tuple[int, float, int]], window: int) -> list[tuple[float, int]]:
    """By sorting all that were noted: window, seconds, number of each."""
    kept = list[tuple[float, int]]()
    for one in (window - 1, window):
        mine = sorted((took_s, -number) for at, took_s, number in noted if at == one and took_s)
        kept += [(took_s, -number) for took_s, number in mine[-KEPT:]]
    return sorted(kept, key=lambda pair: (pair[0], pair[1]), reverse=True)[:KEPT]


@given(STEPS)
def test_the_longest_of_two_windows_are_kept(steps: list[tuple[float, int, int]]) -> None:
    slow: SlowBook[int] = SlowBook()
    noted, now_s, number = list[tuple[int, float, int]](), 0.0, 0
    for passed_s, took_s, count in steps:
        now_s += passed_s
        for _ in range(count):
            number += 1
            slow.note(number, float(took_s), now_s)
            noted.append((int(now_s // WINDOW_S), float(took_s), number))
        slow.check_invariants()
        expected = longest(noted, int(now_s // WINDOW_S))
        found = slow.slowest(KEPT, now_s)
        # Of equal times at the bound of a window, the first noted stay.
        assert [took_s for took_s, _ in found] == [took_s for took_s, _ in expected]
        assert all(noted[at - 1][1] == took_s for took_s, at in found)
        assert slow.slowest(3, now_s) == found[:3]


def test_a_faster_one_is_not_made() -> None:
    slow: SlowBook[int] = SlowBook()
    assert not slow.admits(0.0, 1.0), "it waited for nothing"
    for took_s in range(1, KEPT + 1):
        assert slow.admits(0.5, 1.0)
        slow.note(took_s, float(took_s), 1.0)
    assert not slow.admits(1.0, 1.0) and slow.admits(1.5, 1.0)
    assert slow.admits(0.5, 1.0 + WINDOW_S), "a new window begins empty"


def test_open_items_are_bounded() -> None:
    waiting: Open[int] = Open()
    assert [waiting.begin(at, at) for at in range(book.MAX_OPEN)] == [None] * book.MAX_OPEN
    assert waiting.begin("next", -1) == 0, "the oldest goes"
    assert (waiting.end(0), waiting.end("next"), waiting.end("next")) == (None, -1, None)
