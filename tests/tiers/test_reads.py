"""Tests `worth`, from which tiers a lookup fetches, against sets; and `TierReads`, costs from
recent reads."""

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_server.tiers.drive.reads import (
    COSTED,
    READ_BOUNDS_S,
    RECENT,
    TRIED_S,
    Listed,
    Offer,
    TierReads,
    hit_tokens,
    needed,
    worth,
)

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16, (1000,))
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, (500,), window_tokens=33)
NUM_BLOCKS = 8
masks = st.lists(st.booleans(), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
costs = st.tuples(masks, st.sampled_from([0.0, 0.01, 1.0]), st.sampled_from([1e-6, 1e-5, 1e-3]))


def mask(flags: list[bool] | str) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    return np.array([flag in (True, "x") for flag in flags], np.bool_)


def naive(ready: list[bool], offers: list[Any], tokens_per_s: float) -> list[bool]:
    """Per tier: must `worth` use it? One group of full attention.

    ready: per block, in host memory.
    offers: per tier (its blocks, wait in seconds, seconds per byte).
    """
    here = {at for at, flag in enumerate(ready) if flag}
    lies = [{at for at, flag in enumerate(flags) if flag} for flags, _, _ in offers]
    taken = [True] * len(offers)

    def hit(blocks: set[int]) -> set[int]:
        return set(takewhile(lambda at: at in blocks, range(NUM_BLOCKS)))

    while any(taken):
        reached = hit(here.union(*(some for some, is_in in zip(lies, taken, strict=True) if is_in)))
        saved_s = 16 * (len(reached) - len(hit(here))) / tokens_per_s
        lacking, seconds = reached - here, []
        for some, (_, wait_s, s_per_byte), is_in in zip(lies, offers, taken, strict=True):
            mine = lacking & some if is_in else set()
            lacking = lacking - mine
            seconds.append(wait_s + len(mine) * 1000 * s_per_byte if mine else 0.0)
        slowest = max(at for at, is_in in enumerate(taken) if is_in)
        for at, is_in in enumerate(taken):
            if is_in and seconds[at] >= seconds[slowest]:
                slowest = at
        if seconds[slowest] <= saved_s:
            break
        taken[slowest] = False
    return taken


@given(masks, st.lists(costs, max_size=3), st.sampled_from([100.0, 1e4, 1e6]))
@example(
    [False] * 8, [([True] + [False] * 7, 0.0, 1e-6), ([False, True] + [False] * 6, 1.0, 1e-3)], 1e4
)
def test_the_choice_is_that_of_the_naive_one(
    ready: list[bool], offers: list[Any], tokens_per_s: float
) -> None:
    lists = [Listed(FULL, mask(ready))]
    made = [Offer([mask(flags)], wait_s, each) for flags, wait_s, each in offers]
    assert worth(lists, made, tokens_per_s) == naive(ready, offers, tokens_per_s)
    assert worth(lists, made, 0.0) == [True] * len(offers)


def test_a_window_needs_its_end_only() -> None:
    lists = [Listed(FULL, mask("xxxxxxxx")), Listed(WINDOW, mask("......xx"))]
    both = [one.ready for one in lists]
    assert hit_tokens(lists, both) == NUM_BLOCKS * 16
    assert [one.tolist() for one in needed(lists, both)] == [
        [True] * 8,
        [False] * 6 + [True] * 2,
    ]
    assert hit_tokens([], []) == 0 and needed([], []) == []


def test_costs_follow_last_reads_slow_tier_retried() -> None:
    reads, here = TierReads(), [mask("x")]
    assert reads.costs() == (0.0, 0.0)
    for at in range(COSTED):
        reads.add(0.01 + 1000 * (at + 1) * 1e-6, 1000 * (at + 1))
    fixed_s, s_per_byte = reads.costs()
    assert abs(fixed_s - 0.01) < 1e-9 and abs(s_per_byte - 1e-6) < 1e-12
    reads.queued_bytes = 5000
    offer = reads.offer(here, reads.last_s)
    assert abs(offer.wait_s - 0.015) < 1e-9 and offer.s_per_byte == s_per_byte
    free = reads.offer(here, reads.last_s + TRIED_S)
    assert (free.wait_s, free.s_per_byte) == (0.0, 0.0)
    for _ in range(COSTED):
        reads.add(0.5, 1000)
    assert reads.costs() == (0.0, 0.5 / 1000)
    # A larger, quicker read: the time no longer depends on bytes.
    reads.add(0.1, 9000)
    assert 0.1 < reads.costs()[0] < 0.5 and reads.costs()[1] == 0.0


def test_quantiles_follow_last_reads_sums_all() -> None:
    reads = TierReads()
    assert (reads.quantile_s(0.5), reads.bytes_per_s()) == (0.0, 0.0)
    # Found nothing: a duration, but no rate.
    reads.add(5.0, 0)
    assert (reads.quantile_s(1.0), reads.bytes_per_s()) == (5.0, 0.0)
    reads.add(0.5, 500)
    assert reads.bytes_per_s() == 1000.0
    reads = TierReads()
    for _ in range(RECENT):
        reads.add(20.0, 1)
    for at in range(RECENT):
        reads.add(0.001 * (1 + at % 100), 1000)
    assert 0.045 < reads.quantile_s(0.5) < 0.055
    assert 0.09 < reads.quantile_s(0.99) <= 0.1
    assert reads.bytes_per_s() == pytest.approx(1000 / 0.05, rel=0.05)
    assert reads.num_reads == reads.times_s.count == 2 * RECENT
    assert reads.times_s.counts[READ_BOUNDS_S.index(30.0)] == RECENT
    assert reads.times_s.sum > 20 * RECENT
    reads.add(31.0, 0)
    assert reads.times_s.counts[-1] == 1
