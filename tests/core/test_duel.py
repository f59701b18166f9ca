"""Tests `Duel`, which plays eviction rules in small shadow caches and selects the one with the
most hits."""

import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from hotkv_server.cache.room.policies import hotness
from hotkv_server.cache.room.policies.hotness import (
    CONTENDERS,
    DEPTH_STEP,
    HOLD_MARGIN,
    KEEP,
    LEAK,
    MARGIN,
    ROUND_S,
    Contender,
    Duel,
)
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.room.policies.shared import spread

HOLDING = [number for number, contender in enumerate(CONTENDERS) if contender.hold_s]


def keys_of(numbers: list[int]) -> Keys:
    """They differ in many bits, as sampling needs."""
    return np.array(
        [(2 * number + 3) * 0x9E37_79B9_7F4A_7C15 % (1 << 64) | 1 for number in numbers], np.uint64
    )


class NaiveShadow:
    """A naive shadow cache: evicts the coldest key, but none within the hold time, and remembers
    all uses."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.heat: dict[int, float] = {}
        self.seen: dict[int, tuple[float, float]] = {}
        self.hits = 0

    def ask(self, numbers: list[int], now_s: float, limit: int) -> None:
        """The keys of one request never evict each other."""
        while len(self.heat) > limit and numbers:
            del self.heat[min(self.heat, key=self.heat.__getitem__)]
        for depth, number in enumerate(numbers):
            count = 0.0
            if number in self.seen:
                used_s, before = self.seen[number]
                count = math.log2(
                    2.0 ** (before - (now_s - used_s) / self.contender.memory_s) + 1.0
                )
            self.seen[number] = (now_s, count)
            if number in self.heat:
                self.hits += 1
            elif not self.make_room(set(numbers[:depth]), now_s, limit):
                continue
            count -= DEPTH_STEP * depth
            most = self.contender.most_doublings
            worth = self.contender.half_life_s * (min(count, most) + LEAK * count)
            self.heat[number] = self.contender.recency * now_s + worth

    def make_room(self, staying: set[int], now_s: float, limit: int) -> bool:
        if len(self.heat) < limit:
            return True
        coldest = min(self.heat, key=lambda key: (key in staying, self.heat[key]))
        if coldest in staying or now_s - self.seen[coldest][0] < self.contender.hold_s:
            return False
        del self.heat[coldest]
        return True


def held_by(cache: Duel, contender: int) -> set[int]:
    return set(cache._keys[cache._holders >> contender & 1 == 1].tolist())


@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_shadows_hold_and_hit_what_naive_ones_do(data: st.DataObject, seed: int) -> None:
    """A score is halved at a round's end, and the round's hits are added."""
    rng = np.random.default_rng(seed)
    cache = Duel(128)
    shadows = [NaiveShadow(contender) for contender in CONTENDERS]
    scores, before, ends_s = np.zeros(len(CONTENDERS)), np.zeros(len(CONTENDERS)), np.inf
    now_s = 10.0
    for _ in range(data.draw(st.integers(1, 60))):
        # No two requests have the same time, so that any two keys differ in heat.
        now_s += float(rng.exponential(rng.choice([1.0, 9.0, 50.0, 900.0]))) + 1e-3
        numbers = rng.permutation(60)[: rng.integers(1, 15)].tolist()
        limit = int(rng.integers(1, 50))
        cache.observe(keys_of(numbers), now_s, limit)
        assert cache.share == 1.0
        for index, shadow in enumerate(shadows):
            shadow.ask(numbers, now_s, limit)
            assert held_by(cache, index) == set(keys_of(list(shadow.heat)).tolist()), (
                shadow.contender
            )
        hits = np.array([shadow.hits for shadow in shadows], float)
        if ends_s == np.inf:
            ends_s = now_s + ROUND_S
        elif now_s >= ends_s:
            scores, before, ends_s = KEEP * scores + hits - before, hits, now_s + ROUND_S
        assert cache.scores.tolist() == scores.tolist()
        cache.check_invariants()


def test_only_the_oldest_ghosts_make_way() -> None:
    """Otherwise the shadows would hold other keys than naive ones that forget nothing."""
    cache, shadows = Duel(1), [NaiveShadow(contender) for contender in CONTENDERS]
    for now in range(5 * cache._keys.size):
        number = now if now % 5 else max(0, now - 12)
        cache.observe(keys_of([number]), float(now), 2)
        for index, shadow in enumerate(shadows):
            shadow.ask([number], float(now), 2)
            assert held_by(cache, index) == set(keys_of(list(shadow.heat)).tolist())


@given(
    sizes=st.lists(st.integers(0, 1 << 24) | st.integers(0, 2000), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 32),
)
def test_the_sample_follows_the_size_of_the_cache(sizes: list[int], seed: int) -> None:
    """If the sampled share shrinks, shadows drop only keys outside the sample; if it grows, they
    start empty."""
    rng = np.random.default_rng(seed)
    cache = Duel(20_000)
    for number, size in enumerate(sizes):
        keys = keys_of(rng.integers(0, 1 << 40, 3000).tolist())
        cache.observe(keys, 100.0 * number, max(200, cache._too_few))
        before = {index: held_by(cache, index) for index in range(len(CONTENDERS))}
        share = cache.share
        cache.observe(keys[:0], 100.0 * number, size)
        assert cache._too_few <= size < cache._too_many and math.log2(cache.share).is_integer()
        fitting = hotness._share_for(size)
        assert cache.share / 2 < fitting, "the sample is too large for so many blocks"
        assert fitting < hotness.REGROW * cache.share or size <= 1, "the sample is too small"
        for index, held in before.items():
            all_held = np.array(sorted(held), np.uint64)
            in_sample = (spread(all_held) & np.uint64(0xFFFF_FFFF)) < cache.share * (1 << 32)
            left = set(all_held[in_sample].tolist()) if cache.share <= share else set()
            assert held_by(cache, index) == left
        cache.check_invariants()


@given(seed=st.integers(0, 1 << 32))
def test_only_a_clear_win_of_a_round_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Duel(64)
    now_s, ended_s = 0.0, -np.inf
    for _ in range(200):
        now_s += float(rng.exponential(8.0))
        before, scores, hits = cache.current, cache.scores.copy(), cache._hits.copy()
        chain = np.arange(5) + 5 * rng.integers(0, 20)
        numbers = chain if rng.random() < 0.5 else rng.integers(0, 60, 5)
        changed = cache.observe(keys_of(np.unique(numbers).tolist()), now_s, 40)
        assert changed == (cache.current != before)
        if np.array_equal(scores, cache.scores) and not (hits > cache._hits).any():
            assert not changed, "changed in the middle of a round"
            continue
        assert now_s >= ended_s + ROUND_S
        ended_s = now_s
        worth = [
            score / (HOLD_MARGIN if contender.hold_s else 1.0)
            for score, contender in zip(cache.scores.tolist(), CONTENDERS, strict=True)
        ]
        assert changed == (max(worth) > MARGIN * worth[before])
        assert not changed or worth[cache.current] == max(worth)


def test_holding_policy_leaves_the_race_while_barred() -> None:
    cache = Duel(64)
    cache.observe(keys_of([1]), 0.0, 40)
    assert not cache.observe(keys_of([]), 90.0, 40), "nobody had a hit"
    second = next(n for n in range(1, len(CONTENDERS)) if n not in HOLDING)

    def end_round(now_s: float) -> bool:
        cache._hits[:] = 0
        cache._hits[second], cache._hits[HOLDING] = 100_000, 200_000
        cache._round_ends_s = now_s
        return cache.observe(keys_of([]), now_s, 40)

    assert end_round(100.0) and cache.current == HOLDING[0]
    assert cache.hold_s == CONTENDERS[HOLDING[0]].hold_s
    cache._scores[second] *= 3
    assert not cache.allow_holding(True) and cache.current == HOLDING[0], "no round has ended"
    assert cache.allow_holding(False) and cache.current == second and not cache.hold_s
    assert not cache.allow_holding(False), "it was left before"
    assert not end_round(200.0) and cache.current == second
    assert not cache.allow_holding(True) and cache.current == second, "no round has ended"
    assert end_round(300.0) and cache.current == HOLDING[0]


def test_years_and_long_silences() -> None:
    """Without room for a whole chain, its first blocks must stay."""
    cache = Duel(64)
    for number, now_s in enumerate([1e9, 1e9 + 1.0, 1.1e9, 1.1e9 + 61.0]):
        cache.observe(keys_of(list(range(30 + number))), now_s, 20)
        cache.check_invariants()
    assert held_by(cache, 0) == set(keys_of(list(range(20))).tolist()), (
        "the tail of a chain was kept for its head"
    )
