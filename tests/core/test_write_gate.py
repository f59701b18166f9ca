"""Tests `WriteGate`, which limits the bytes written to a disk per day. It admits or refuses
whole chains."""

from collections import deque
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_server.cache.values import BoolMask
from hotkv_server.tiers.book.write_gate import DAY_S, EARLY_TOKENS, SLOT_S, Offered, WriteGate

BLOCK_TOKENS, BLOCK_BYTES = 512, 4096
EARLY = EARLY_TOKENS // BLOCK_TOKENS


def offered(
    numbers: Sequence[int], first: int = 0, *, follows: bool = False, has_gap: bool = False
) -> Offered:
    """Consecutive blocks of a chain.

    follows: the block before them is on the disk.
    has_gap: only host memory has it.
    """
    begins = np.arange(len(numbers)) == 0
    # The multipliers are odd, so that different numbers give different keys.
    keys = np.array(numbers, np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    hashes = np.zeros((len(numbers), 8), np.uint32)
    hashes[:, :2] = keys.view(np.uint32).reshape(-1, 2)
    sizes = np.full(len(numbers), BLOCK_BYTES, np.int64)
    ends = (first + 1 + np.arange(len(numbers))) * BLOCK_TOKENS
    return Offered(keys, hashes, sizes, ends, begins, begins & follows, begins & has_gap)


def writes_all(gate: WriteGate, part: Offered, now_s: float) -> bool:
    """The gate must admit all, or none."""
    admitted = gate.admit(part, now_s)
    assert admitted.all() or not admitted.any(), "half a chain was written"
    return bool(admitted.all())


def busy() -> WriteGate:
    """A gate that was offered far more than its budget, so it admits few chains."""
    gate = WriteGate(20_000 * BLOCK_BYTES)
    for at in range(400):
        gate.admit(offered(range((1 << 40) + 30 * at, (1 << 40) + 30 * at + 30)), float(at))
    return gate


@pytest.mark.parametrize(("budget_bytes", "writes"), [(None, True), (0, False)])
def test_no_budget_writes_all_none_left_nothing(budget_bytes: int | None, writes: bool) -> None:
    gate = WriteGate(budget_bytes)
    for now_s in (0.0, 1.0):
        assert writes_all(gate, offered(range(100), has_gap=True), now_s) == writes
        assert writes_all(gate, offered([200, 201]), now_s) == writes


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
def test_day_has_its_budget_plus_one_chain(
    budget: int, offers: list[tuple[float, int, int, int, bool, bool, bool]]
) -> None:
    """That is in any 24 hours, over restarts of the server and of its clock."""
    gate, now_s, began_s = WriteGate(budget * BLOCK_BYTES), 0.0, 0.0
    written: deque[tuple[float, int]] = deque()
    for passed_s, number, count, depth, follows, has_gap, starts_anew in offers:
        if starts_anew:
            noted, began_s = gate.written(now_s - began_s), now_s
            gate = WriteGate(budget * BLOCK_BYTES)
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


def test_future_write_times_count_from_now() -> None:
    """The clock may have been changed. A write of two days ago does not count."""
    gate = WriteGate(10 * BLOCK_BYTES)
    gate.recall([(2 * DAY_S, BLOCK_BYTES), (-7 * DAY_S, 4 * BLOCK_BYTES)], 50.0)
    assert gate.left_bytes(50.0 + DAY_S) == 6 * BLOCK_BYTES
    assert gate.left_bytes(50.0 + DAY_S + SLOT_S) == 10 * BLOCK_BYTES


def test_share_of_chains_is_written_refused_later() -> None:
    gate = busy()
    assert 0.0 < gate.share(400.0) < 0.3
    refused = [
        first
        for first in range(0, 30_000, 30)
        if not writes_all(gate, offered(range(first, first + 30)), 400.0)
    ]
    assert 600 < len(refused) < 1000
    assert all(writes_all(gate, offered(range(at, at + 30)), 400.0) for at in refused[-2:])
    # The chain was refused before, and has a new block now.
    longer = [*range(refused[0], refused[0] + 30), 1 << 50]
    assert writes_all(gate, offered(longer, EARLY), 2000.0)


def test_chains_that_part_late_go_together() -> None:
    """They differ only in their last block."""
    head = list(range(EARLY))
    taken = {writes_all(busy(), offered([*head, 1000 + tail]), 400.0) for tail in range(20)}
    assert len(taken) == 1


def test_a_steady_load_spends_most_of_the_budget() -> None:
    """Of five times the budget, it must write 60 % to 100 % of it a day."""
    budget, gate = 2000, WriteGate(2000 * BLOCK_BYTES)
    written = np.zeros(3 * 24)
    for at in range(3 * 1000):
        now_s = at * DAY_S / 1000
        part = offered([(at << 8) + i for i in range(10)])
        written[int(now_s // 3600)] += int(gate.admit(part, now_s).sum())
    days = np.convolve(written, np.ones(24), "valid")
    assert days.max() <= budget + 10 and days.min() >= 0.6 * budget
    # It must not write all at once.
    assert np.convolve(written, np.ones(6), "valid").min() > 0


def test_another_budget_holds_from_now_on() -> None:
    gate = WriteGate(None)
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
