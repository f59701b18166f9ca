"""Tests chains of blocks in the whole core: a block is evicted only after all behind it, and stays
as long as a request asks."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bench.policies import POLICIES
from hotkv_proto import table
from hotkv_proto.blocks import MAX_TTL_S, NO_RETENTION, BlockResult, Retention
from hotkv_server.cache.table import table_kernels
from hotkv_server.cache.values import HashList
from hotkv_server.hints.book import actions as hint_actions
from tests.core.support import World, evict, expire, words_of

NUM_SLOTS = 64


class Cache(World):
    """A core with one session; a block is a number, a prompt a list of numbers."""

    def __init__(self, policy: str) -> None:
        super().__init__(NUM_SLOTS // 4, 200, policy)
        self.session = self.open()
        self.now_s = 0.0
        self.resident: set[int] = set()
        self._number_of: dict[bytes, int] = {}
        self._next_fresh = 1 << 40

    def fresh(self, num_blocks: int) -> list[int]:
        self._next_fresh += num_blocks
        return list(range(self._next_fresh - num_blocks, self._next_fresh))

    def add(
        self, chain: Sequence[int], start: int = 0, retention: Retention = NO_RETENTION
    ) -> list[int]:
        new, parent = chain[start:], chain[start - 1] if start else None
        self._number_of |= {words_of([number])[0].tobytes(): number for number in new}
        results = self.store(
            self.session, new, self.now_s, depth=start, parent=parent, retention=retention
        )
        self.read_notices()
        done = zip(new, results, strict=True)
        self.resident |= {number for number, result in done if result == BlockResult.STORED}
        return results

    def read_notices(self) -> None:
        gone = [
            self._number_of[row.tobytes()]
            for notice in self.core.take_effects()
            for row in notice.hashes
        ]
        self.resident -= set(gone)

    def touch(self, chain: Sequence[int], retention: Retention = NO_RETENTION) -> None:
        self.core.touch(self.session.number, [HashList(0, words_of(chain))], self.now_s, retention)

    def flood(self, num_blocks: int, until_s: float, chain_blocks: int = 10) -> None:
        """Stores new chains, evenly until `until_s`. None is requested again."""
        starts = range(0, num_blocks, chain_blocks)
        step_s = (until_s - self.now_s) / max(1, len(starts))
        for start in starts:
            self.advance(self.now_s + step_s)
            self.add(self.fresh(min(chain_blocks, num_blocks - start)))

    def advance(self, now_s: float) -> None:
        self.now_s = now_s
        expire(self.core, now_s)

    def check(self) -> None:
        self.core.check_invariants()
        self.core.space.policy.check_invariants()
        assert self.found(sorted(self.resident)) == sorted(self.resident)


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


# Retention


NUM_HELD = NUM_SLOTS // 4
"""Slots that requests may pin."""
LONG = pytest.mark.long
EACH_POLICY = pytest.mark.parametrize(
    "policy",
    [p if p in ("hotness", "lru") else pytest.param(p, marks=LONG) for p in POLICIES],
)


@pytest.mark.parametrize("how", ["stored", "stored again", "used"])
@EACH_POLICY
@settings(max_examples=8)
@given(
    num_pinned=st.integers(1, NUM_HELD),
    ttl_s=st.sampled_from([0.5, 100.0, MAX_TTL_S]),
    flood=st.integers(4, 40),
)
def test_pinned_blocks_stay_until_their_time(
    policy: str, how: str, num_pinned: int, ttl_s: float, flood: int
) -> None:
    cache = Cache(policy)
    chain, keep = list(range(num_pinned)), Retention(ttl_s=ttl_s, pin=True)
    if how != "stored":
        cache.add(chain)
    if how == "used":
        cache.touch(chain, keep)
    else:
        cache.add(chain, retention=keep)
    assert cache.core.counters.held_blocks == num_pinned
    cache.flood(5 * NUM_SLOTS, 0.999 * ttl_s, flood)
    assert cache.found(chain) == chain
    assert evict(cache.core, 1, 0, words_of(chain)) == (0, num_pinned)
    cache.check()
    cache.advance(ttl_s)
    assert not len(cache.core.retention_pins) and cache.found(chain) == chain
    cache.flood(5 * NUM_SLOTS, 3 * ttl_s, flood)
    # Some policies keep blocks that were used twice. They are no longer pinned.
    left = cache.found(chain)
    assert not left or policy not in ("lru", "s3fifo")
    assert evict(cache.core, 1, 0, words_of(chain)) == (len(left), 0)
    cache.read_notices()
    cache.check()


@pytest.mark.parametrize("policy", ["hotness", pytest.param("lru", marks=LONG)])
@given(
    num_kept=st.integers(1, NUM_SLOTS - 14),
    ttl_s=st.sampled_from([1.0, 100.0, MAX_TTL_S]),
    flood=st.integers(4, 14),
)
def test_what_has_time_to_live_outlives_a_flood(
    policy: str, num_kept: int, ttl_s: float, flood: int
) -> None:
    cache = Cache(policy)
    chain = list(range(num_kept))
    cache.add(chain, retention=Retention(ttl_s=ttl_s))
    cache.flood(5 * NUM_SLOTS, 0.98 * ttl_s, flood)
    assert cache.found(chain) == chain and not len(cache.core.retention_pins)
    cache.advance(1.02 * ttl_s + 1.0)
    cache.flood(5 * NUM_SLOTS, 3.0 * ttl_s + 3.0, flood)
    assert not cache.found(chain)
    cache.check()


@EACH_POLICY
@given(
    priority=st.integers(-8, 8),
    ttl_s=st.sampled_from([0.0, 5.0, MAX_TTL_S]),
    seed=st.integers(0, 1 << 32),
)
def test_hints_never_cost_room(policy: str, priority: int, ttl_s: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Cache(policy)
    for _ in range(40):
        cache.advance(cache.now_s + float(rng.choice([0.0, 1.0, 100.0])))
        length = int(rng.integers(1, NUM_SLOTS + 1))
        hint = Retention(priority, ttl_s) if rng.random() < 0.8 else NO_RETENTION
        assert cache.add(cache.fresh(length), retention=hint) == [BlockResult.STORED] * length
        cache.touch([int(number) for number in rng.permutation(sorted(cache.resident))[:9]], hint)
    cache.check()


@pytest.mark.parametrize("policy", ["hotness", pytest.param("lru", marks=LONG)])
@given(passed_s=st.sampled_from([1.5, 60.0, 1e5]), length=st.integers(1, 40))
def test_blocks_before_a_new_block_count_used(policy: str, passed_s: float, length: int) -> None:
    """Those behind a missing block count as used too."""
    cache = Cache(policy)
    chain, other = cache.fresh(length), cache.fresh(3)
    cache.add(chain)
    cache.add(other)
    missing = length // 3
    assert evict(cache.core, 1, 0, words_of(chain[missing : missing + 1])) == (1, 0)
    cache.advance(passed_s)
    cache.add(chain + cache.fresh(5), length)
    used_s = cache.core.space.policy.last_used_s(cache.entries(chain + other)).tolist()
    in_use = {
        number for number, at_s in zip(chain + other, used_s, strict=True) if at_s >= passed_s
    }
    assert in_use == set(chain[missing + 1 :])


@pytest.mark.parametrize("late_s", [0.0, 50.0, 100.0])
def test_late_hint_keeps_blocks_no_longer(late_s: float) -> None:
    """They count as used now, but their time to live began when the hint arrived."""
    cache = Cache("hotness")
    chain, other = cache.fresh(3), cache.fresh(3)
    cache.now_s = 1000.0 + late_s
    cache.add(chain)
    cache.add(other)
    asked, hint = [HashList(0, words_of(chain))], Retention(0, 60.0, pin=True)
    for _ in hint_actions.keep(cache.core, 1, asked, hint, 1000.0, cache.now_s, is_use=True):
        pass
    policy = cache.core.space.policy
    kept, used = cache.entries(chain), cache.entries(other)
    assert policy.last_used_s(kept) == pytest.approx(max(1060.0, cache.now_s), abs=0.1)
    assert policy.last_used_s(used) == pytest.approx(cache.now_s, abs=0.1)
    assert (policy.heat(used) < 1e8).all()  # type: ignore[attr-defined]
    for now_s, num_held in ((1059.0, 3), (1061.0, 0)):
        expire(cache.core, now_s)
        assert len(cache.core.retention_pins) == num_held
