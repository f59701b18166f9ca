"""The shadow cache beside a naive cache, under LRU, whose victims are known."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies import LRU, POLICIES
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.ledger.book.shadow import Shadow
from hotkv_server.simulate.replay import replay
from hotkv_server.simulate.trace import make_trace
from tests.simulate.traces import regular_turns

MAX_KEYS = 24


class SpyLru(LRU):
    """Notes the keys that were declined, and the number of the request's keys before them."""

    def __init__(self) -> None:
        super().__init__(MAX_KEYS)
        self.declined: list[tuple[list[int], int]] = []

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        self.declined.append((keys.tolist(), depth))


class NaiveLru:
    """Keys in order of use, the oldest first. A request uses held keys, then stores the rest; its
    head is used last."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.declined: list[tuple[list[int], int]] = []

    def serve(self, keys: list[int], size: int, limit: int) -> int:
        hits = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        mine = [key for key in keys if key in self.held]
        for key in reversed(mine):
            self.held[key] = self.held.pop(key)
        absent = [key for key in keys if key not in self.held]
        while (
            sum(self.held.values()) + len(absent) * size > limit
            or len(self.held) + len(absent) > MAX_KEYS
        ):
            victim = next((key for key in self.held if key not in mine), None)
            if victim is None:
                break
            del self.held[victim]
        room = max(0, limit - sum(self.held.values())) // size
        stored = min(room, MAX_KEYS - len(self.held))
        for key in reversed(absent[:stored]):
            self.held[key] = size
        if absent[stored:]:
            self.declined.append((absent[stored:], len(keys) - len(absent[stored:])))
        return hits


class ShadowBesideNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.naive = SpyLru(), NaiveLru()
        self.shadow = Shadow(lambda _: self.policy, MAX_KEYS)
        self.now_s = 1.0

    @rule(
        keys=st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
        size=st.just(4),
        limit=st.sampled_from([0, 20, 60, 90, 400]),
    )
    def serve(self, keys: list[int], size: int, limit: int) -> None:
        self.now_s += 1.0
        hits = self.shadow.serve(np.array(keys, np.uint64), size, limit, self.now_s)
        assert hits == self.naive.serve(keys, size, limit)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.naive.held) or [0]), unique=True))
        gone = [key for key in gone if key in self.naive.held]
        self.shadow.drop(np.array(gone, np.uint64))
        for key in gone:
            del self.naive.held[key]

    @invariant()
    def holds_the_same(self) -> None:
        self.shadow.check_invariants()
        assert set(self.shadow.keys.tolist()) == set(self.naive.held)
        assert self.policy.declined == self.naive.declined


TestShadow = ShadowBesideNaive.TestCase


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_the_limit(policy: str) -> None:
    """Keys have two sizes."""
    rng, shadow = np.random.default_rng(3), Shadow(POLICIES[policy], 64)
    for number in range(300):
        keys = rng.choice(200, rng.integers(1, 20), replace=False).astype(np.uint64) + np.uint64(1)
        size = 3 if number % 3 else 16
        # A key has the size of its key space.
        shadow.serve(keys + np.uint64(1000 * size), size, 400, float(number))
        shadow.check_invariants()
        assert shadow.used_bytes <= 400


def test_a_policy_that_keeps_others_hits_as_on_the_node() -> None:
    """Turns come at regular gaps, so the policy holds blocks; without that a third less would
    hit."""
    trace = make_trace("regular_turns", regular_turns(0, 1500))
    capacity = trace.capacity_blocks(5)
    hits = replay(trace, capacity, POLICIES["hotness"]).prefix.sum()
    keys = np.ascontiguousarray(trace.hashes[:, :2]).view(np.uint64)[:, 0]
    shadow, starts, total = Shadow(POLICIES["hotness"], capacity), trace.starts.tolist(), 0
    for request, now_s in enumerate(trace.times_s.tolist()):
        mine = keys[starts[request] : starts[request + 1]]
        total += shadow.serve(mine, 1, capacity, now_s, may_keep=True)
    shadow.check_invariants()
    assert total == pytest.approx(hits, rel=0.1)
