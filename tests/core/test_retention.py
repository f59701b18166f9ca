"""Tests retention in the whole core."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bench.policies import POLICIES
from hotkv_proto.blocks import MAX_TTL_S, NO_RETENTION, BlockResult, Retention
from hotkv_server.cache.values import HashList
from hotkv_server.hints.book import actions as hint_actions
from tests.core.chained_cache import NUM_SLOTS, Cache
from tests.core.support import evict, expire, words_of

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
