"""Tests that a block is evicted only after all blocks behind it in its chain."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto import table
from hotkv_server.cache.table import table_kernels
from tests.core.chained_cache import Cache


def headless(cache: Cache, chains: Sequence[list[int]]) -> list[int]:
    """Blocks of no use to any request: an earlier block of their chain is missing."""
    tails = [chain[first_missing(cache, chain) :] for chain in chains]
    return [number for tail in tails for number in tail if number in cache.resident]


def first_missing(cache: Cache, chain: list[int]) -> int:
    """The chain's length if all are present."""
    return next(
        (position for position, number in enumerate(chain) if number not in cache.resident),
        len(chain),
    )


@pytest.mark.parametrize("policy", ["hotness", "lru"])
@given(seed=st.integers(0, 1 << 32), gaps_s=st.sampled_from([(0.3,), (0.9,), (1.5, 30.0, 400.0)]))
def test_chains_that_grow_keep_their_heads(
    policy: str, seed: int, gaps_s: tuple[float, ...]
) -> None:
    """Each step stores only new blocks, and uses no earlier one."""
    rng = np.random.default_rng(seed)
    cache = Cache(policy)
    chains: list[list[int]] = [[], [], []]
    for _ in range(50):
        cache.advance(cache.now_s + float(rng.choice(gaps_s)))
        number = int(rng.integers(0, 6))
        if number >= 3 or len(chains[number]) > 24:
            chains.append([])
            number = len(chains) - 1
        start = first_missing(cache, chains[number])
        chains[number] = chains[number][:start] + cache.fresh(int(rng.integers(1, 9)))
        cache.add(chains[number], start)
        assert not headless(cache, chains), "a head went before its tail"
    cache.check()


def test_what_counts_as_in_use_keeps_its_frequency() -> None:
    """A refresh marks blocks as recently used, but adds no heat."""
    cache = Cache("hotness")
    prefix = cache.fresh(40)
    for number in range(20):
        cache.advance(float(number))
        cache.add(prefix)
    policy, entries = cache.core.space.policy, cache.entries(prefix)
    before = policy.heat(entries)
    for _ in range(1000):
        policy.refresh(entries, cache.now_s)
    assert np.allclose(policy.heat(entries), before, rtol=0, atol=0.1)
    policy.refresh(entries, 25.0)
    assert policy.heat(entries).max() < 1e6


@pytest.mark.parametrize("policy", ["arc", "hotness", "lru", "s3fifo"])
def test_a_block_listed_twice_is_counted_once(policy: str) -> None:
    cache = Cache(policy)
    chain = cache.fresh(5)
    cache.add(chain)
    cache.touch([chain[0], chain[0], *chain])
    cache.check()


@given(data=st.data())
def test_chain_goes_back_as_far_as_links(data: st.DataObject) -> None:
    """The chain ends at a removed block, or at one of another chain."""
    words = {
        table.W_PARENT: st.integers(0, 7),
        table.W_KEY_SPACE: st.integers(1, 2),
        table.W_GROUP_STATE: st.sampled_from(
            [state << 16 | group for state in range(4) for group in (0, 1)]
        ),
        table.W_DEPTH: st.integers(0, 3),
    }
    records = np.zeros((8, table.RECORD_WORDS), np.uint32)
    records[1:, table.W_PARENT] = range(7)
    records[1:, table.W_KEY_SPACE] = 1
    records[1:, table.W_GROUP_STATE] = table.STATE_READY << 16
    records[1:, table.W_DEPTH] = range(1, 8)
    for _ in range(data.draw(st.integers(0, 3))):
        word = data.draw(st.sampled_from(sorted(words)))
        records[data.draw(st.integers(1, 7)), word] = data.draw(words[word])
    most = data.draw(st.integers(0, 8))
    expected: list[int] = []
    at = 7
    while len(expected) < most:
        parent = int(records[at, table.W_PARENT])
        of_one_chain = all(
            records[parent, word] & mask == records[at, word] & mask
            for word, mask in ((table.W_KEY_SPACE, 0xFFFF_FFFF), (table.W_GROUP_STATE, 0xFFFF))
        )
        is_ready = records[parent, table.W_GROUP_STATE] >> 16 == table.STATE_READY
        is_before = records[parent, table.W_DEPTH] + 1 == records[at, table.W_DEPTH]
        if not parent or not (of_one_chain and is_ready and is_before):
            break
        expected.append(parent)
        at = parent
    out = np.zeros(most, np.uint32)
    count = int(table_kernels.ancestors(records, 7, out))
    assert out[:count].tolist() == expected
