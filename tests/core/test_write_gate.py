"""What may be written below: whole chains, within a budget of bytes a day."""

from collections import deque

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from hotkv_server.cache.values import BoolMask
from hotkv_server.tiers.book import write_gate
from hotkv_server.tiers.book.write_gate import DAY_S, EARLY_TOKENS, SLOT_S, Offered, WriteGate

BLOCK_TOKENS, BLOCK_BYTES = 512, 4096
EARLY = EARLY_TOKENS // BLOCK_TOKENS


def offered(
    numbers: list[int], first: int = 0, *, follows: bool = False, has_gap: bool = False
) -> Offered:
    """Part of one chain: blocks with these numbers, from depth `first` on."""
    n = len(numbers)
    begins = np.arange(n) == 0
    hashes = np.zeros((n, 8), np.uint32)
    # Odd multipliers: distinct numbers have distinct keys and hashes.
    keys = np.array(numbers, np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    hashes[:, 1] = keys >> np.uint64(32)
    hashes[:, 0] = keys & np.uint64(0xFFFF_FFFF)
    return Offered(
        keys,
        hashes,
        np.full(n, BLOCK_BYTES, np.int64),
        (first + 1 + np.arange(n)) * BLOCK_TOKENS,
        begins,
        begins & follows,
        begins & has_gap,
    )


def busy(gate: WriteGate, now_s: float, number: int = 1 << 40) -> None:
    """Far more is offered than the budget allows, so that the gate takes a small share."""
    for at in range(400):
        gate.admit(offered([number + 30 * at + i for i in range(30)]), now_s + at)


def chosen(gate: WriteGate, now_s: float) -> tuple[list[int], list[int]]:
    """Chains of 30 blocks by their first number, those that were written and those that were
    not."""
    taken: tuple[list[int], list[int]] = ([], [])
    for first in range(0, 30_000, 30):
        admitted = gate.admit(offered(list(range(first, first + 30))), now_s)
        assert admitted.all() or not admitted.any(), "half a chain was written"
        taken[not admitted[0]].append(first)
    return taken


def test_without_a_budget_all_is_written() -> None:
    gate = WriteGate(None, 10)
    for _ in range(3):
        assert gate.admit(offered(list(range(100)), has_gap=True), 0.0).all()


def test_with_none_left_nothing_is() -> None:
    gate = WriteGate(0, 10)
    assert not gate.admit(offered([1, 2]), 0.0).any()
    assert not gate.admit(offered([1, 2]), 1.0).any()


@given(
    st.integers(0, 200),
    st.lists(
        st.tuples(
            st.floats(0, 40_000), st.integers(0, 60), st.integers(1, 12), st.integers(0, 40),
            st.booleans(), st.booleans(), st.booleans(),
        ),
        max_size=60,
    ),
)  # fmt: skip
def test_a_day_has_no_more_than_the_budget_and_one_chain(
    budget: int, offers: list[tuple[float, int, int, int, bool, bool, bool]]
) -> None:
    """However often the server starts anew, with a clock of its own."""
    gate, now_s, began_s = WriteGate(budget * BLOCK_BYTES, 16), 0.0, 0.0
    written: deque[tuple[float, int]] = deque()
    for passed_s, number, count, depth, follows, has_gap, starts_anew in offers:
        if starts_anew:
            noted, began_s = gate.written(now_s - began_s), now_s
            gate = WriteGate(budget * BLOCK_BYTES, 16)
            gate.recall(noted, 0.0)
        now_s += passed_s
        part = offered(list(range(number, number + count)), depth, follows=follows, has_gap=has_gap)
        admitted: BoolMask = gate.admit(part, now_s - began_s)
        count = int(admitted.sum())
        assert admitted[:count].all(), "what was written has a gap"
        written.append((now_s, count))
        while written[0][0] <= now_s - DAY_S:
            written.popleft()
        last = max((count for _, count in written), default=0)
        assert sum(count for _, count in written) <= budget + last
        assert 0 <= gate.left_bytes(now_s - began_s) <= budget * BLOCK_BYTES


def test_what_seems_to_be_written_later_counts_from_now_on() -> None:
    """A clock that was set back, and one that was set forward by more than a day."""
    gate = WriteGate(10 * BLOCK_BYTES, 16)
    gate.recall([(2 * DAY_S, BLOCK_BYTES), (-7 * DAY_S, 4 * BLOCK_BYTES)], 50.0)
    assert gate.left_bytes(50.0 + DAY_S) == 6 * BLOCK_BYTES
    assert gate.left_bytes(50.0 + DAY_S + SLOT_S) == 10 * BLOCK_BYTES


def test_what_is_left_comes_back_after_a_day() -> None:
    gate = WriteGate(10 * BLOCK_BYTES, 16)
    assert gate.admit(offered(list(range(10)), EARLY, follows=True), 0.0).all()
    assert gate.left_bytes(DAY_S) == 0
    assert gate.left_bytes(DAY_S + SLOT_S) == 10 * BLOCK_BYTES


def test_a_share_of_the_chains_is_written_and_each_wholly() -> None:
    gate = WriteGate(20_000 * BLOCK_BYTES, 1 << 16)
    busy(gate, 0.0)
    share = gate.share(400.0)
    assert 0.0 < share < 0.3
    taken, _ = chosen(gate, 400.0)
    assert 0 < len(taken) < 400


def test_what_was_refused_is_written_when_it_comes_again() -> None:
    gate = WriteGate(20_000 * BLOCK_BYTES, 1 << 20)
    busy(gate, 0.0)
    _, refused = chosen(gate, 400.0)
    first = refused[0]
    longer = [*range(first, first + 30), 1 << 50]
    # With it, what goes on from there, as it is late in its chain.
    assert gate.admit(offered(longer, EARLY), 2000.0).all()


def test_a_block_is_written_only_after_the_one_before_it() -> None:
    gate = WriteGate(20_000 * BLOCK_BYTES, 1 << 16)
    assert not gate.admit(offered([1, 2], 5, has_gap=True), 0.0).any()
    busy(gate, 0.0)
    late = [number + (1 << 45) for number in range(40)]
    assert gate.admit(offered(late[:20], EARLY, follows=True), 400.0).all()
    assert not gate.admit(offered(late[20:], EARLY, has_gap=True), 400.0).any()


def test_chains_that_part_late_go_together() -> None:
    """What comes after the early block has no say."""
    taken = []
    for tail in range(20):
        gate = WriteGate(20_000 * BLOCK_BYTES, 1 << 16)
        busy(gate, 0.0)
        head = list(range(EARLY))
        taken.append(bool(gate.admit(offered([*head, 1000 + tail]), 400.0)[-1]))
    assert len(set(taken)) == 1


def test_a_steady_load_spends_most_of_the_budget() -> None:
    """Five times as much as the budget is offered, for three days."""
    budget, gate = 2000, WriteGate(2000 * BLOCK_BYTES, 1 << 12)
    written = np.zeros(3 * 24)
    for at in range(3 * 1000):
        now_s = at * DAY_S / 1000
        part = offered([(at << 8) + i for i in range(10)])
        written[int(now_s // 3600)] += int(gate.admit(part, now_s).sum())
    days = np.convolve(written, np.ones(24), "valid")
    assert days.max() <= budget + 10 and days.min() >= 0.6 * budget
    # A burst at the start does not use up the day.
    assert np.convolve(written, np.ones(6), "valid").min() > 0


def test_what_is_remembered_is_bounded() -> None:
    gate = WriteGate(1, 1 << 40)
    assert len(gate._refused) == write_gate.MAX_REMEMBERED
    assert gate.admit(offered([0]), 0.0).size == 1


def test_another_budget_holds_from_now_on() -> None:
    gate = WriteGate(None, 100)
    gate.admit(offered(list(range(10))), 0.0)
    assert gate.budget_bytes == 0
    gate.set_budget(12 * BLOCK_BYTES)
    assert gate.budget_bytes == 12 * BLOCK_BYTES
    assert gate.left_bytes(1.0) == 2 * BLOCK_BYTES, "what was written before counts"
    gate.set_budget(5 * BLOCK_BYTES)
    assert gate.left_bytes(1.0) == 0
    assert not gate.admit(offered(list(range(100, 110))), 2.0).any()
    gate.set_budget(None)
    assert gate.admit(offered(list(range(200, 210))), 3.0).all()
