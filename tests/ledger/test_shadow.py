"""Tests the ledger's shadow cache against a simple LRU cache."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.policies import POLICIES
from bench.policies.lru import LRU
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Keys
from hotkv_server.ledger.book.shadow import Shadow
from hotkv_server.simulate.replay import replay
from hotkv_server.simulate.trace import make_trace
from tests.simulate.naive import NaiveLRU, prefix_length
from tests.simulate.traces import regular_turns

MAX_KEYS = 24


class SpyLru(LRU):
    """declined: per call of `decline`, keys without room and their first position in the request.
    gone: removed keys; True: evicted.
    """

    def __init__(self) -> None:
        super().__init__(MAX_KEYS)
        self.declined: list[tuple[list[int], int]] = []
        self.gone: dict[bool, list[int]] = {True: [], False: []}

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        self.declined.append((keys.tolist(), depth))

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        self.gone[evicted] += keys.tolist()
        super().forget(entries, keys, evicted=evicted)


class ShadowBesideNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.naive = SpyLru(), NaiveLRU(MAX_KEYS)
        self.declined: list[tuple[list[int], int]] = []
        self.gone: dict[bool, list[int]] = {True: [], False: []}
        self.shadow = Shadow(lambda _: self.policy, MAX_KEYS)
        self.now_s = 1.0

    @initialize(size=st.sampled_from([1, 4]))
    def start(self, size: int) -> None:
        self.size = size

    @rule(
        keys=st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
        limit=st.sampled_from([0, 20, 60, 90, 400]),
    )
    def serve(self, keys: list[int], limit: int) -> None:
        self.now_s += 1.0
        hits = self.shadow.serve(np.array(keys, np.uint64), self.size, limit, self.now_s)
        assert hits == prefix_length(keys, self.naive.blocks)
        self.naive.capacity = min(limit // self.size, MAX_KEYS)
        absent = [key for key in keys if key not in self.naive.blocks]
        self.gone[True] += self.naive.store(keys)
        if left := [key for key in absent if key not in self.naive.blocks]:
            self.declined.append((left, len(keys) - len(left)))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.naive.blocks) or [0]), unique=True))
        gone = [key for key in gone if key in self.naive.blocks]
        self.shadow.drop(np.array(gone, np.uint64))
        self.gone[False] += gone
        for key in gone:
            del self.naive.blocks[key]

    @invariant()
    def holds_the_same(self) -> None:
        self.shadow.check_invariants()
        assert set(self.shadow.keys.tolist()) == set(self.naive.blocks)
        assert (self.policy.declined, self.policy.gone) == (self.declined, self.gone)


TestShadow = ShadowBesideNaive.TestCase


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_the_limit(policy: str) -> None:
    rng, shadow = np.random.default_rng(3), Shadow(POLICIES[policy], 64)
    for number in range(300):
        keys = rng.choice(200, rng.integers(1, 20), replace=False).astype(np.uint64) + np.uint64(1)
        size = 3 if number % 3 else 16
        # All blocks of a key space have one size.
        shadow.serve(keys + np.uint64(1000 * size), size, 400, float(number))
        shadow.check_invariants()
        assert shadow.used_bytes <= 400


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_small_blocks_evict_no_extra_large_blocks(policy: str) -> None:
    shadow = Shadow(POLICIES[policy], 64)
    shadow.serve(np.arange(1, 11, dtype=np.uint64), 100, 1000, 1.0)
    shadow.serve(np.arange(101, 106, dtype=np.uint64), 10, 1000, 2.0)
    shadow.check_invariants()
    assert (len(shadow), shadow.used_bytes) == (9 + 5, 950)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_large_block_keeps_all_small_ones_or_none(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the policy takes time of the event loop."""
    made, asked = POLICIES[policy](2048), list[int]()
    victims = made.victims

    def counting(slot_bytes: int, count: int, *rest: Any, **named: Any) -> Entries:
        asked.append(count)
        return victims(slot_bytes, count, *rest, **named)

    monkeypatch.setattr(made, "victims", counting)
    shadow = Shadow(lambda _: made, 2048)
    shadow.serve(np.arange(1, 1001, dtype=np.uint64), 1, 2000, 1.0)
    shadow.serve(np.array([5000], np.uint64), 1000, 2000, 2.0)
    shadow.serve(np.arange(1001, 1501, dtype=np.uint64), 1, 2000, 3.0)
    shadow.check_invariants()
    assert shadow.used_bytes <= 2000 and len(asked) < 20


def test_policy_keeps_as_many_hits_as_the_node() -> None:
    """With regular pauses, hotness keeps recent blocks from eviction."""
    trace = make_trace("regular_turns", regular_turns(0, 1500))
    capacity = trace.capacity_blocks(5)
    hits = replay(trace, capacity, POLICIES["hotness"]).prefix.sum()
    keys = np.ascontiguousarray(trace.hashes[:, :2]).view(np.uint64)[:, 0]
    shadow, starts, total = Shadow(POLICIES["hotness"], capacity), trace.starts.tolist(), 0
    for request, now_s in enumerate(trace.times_s.tolist()):
        mine = keys[starts[request] : starts[request + 1]]
        total += shadow.serve(mine, 1, capacity, now_s, may_refuse=True)
    shadow.check_invariants()
    assert total == pytest.approx(hits, rel=0.1)
