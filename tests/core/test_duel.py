"""The duel: kernels beside references, and shadow caches as a plain reading of their definition."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_server.cache.room.policies import hotness, kernels
from hotkv_server.cache.room.policies.hotness import (
    CONTENDERS,
    DEPTH_STEP,
    EPOCH_S,
    HOLD_MARGIN,
    KEEP,
    LEAK,
    MARGIN,
    Contender,
    Duel,
)
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.room.policies.shared import spread
from tests.oracles import policies as oracle

KEEPS_THE_OLDER = Contender(10_000.0, recency=-1.0)
HOLDING = [number for number, contender in enumerate(CONTENDERS) if contender.hold_s]
STEPS_S = st.sampled_from([0.0, 1e-6, 0.7, 33.3, 4e3, 1e7])


def keys_of(numbers: list[int]) -> Keys:
    """Keys that look like hashes; no two of them differ in the lowest bit only, which the sample
    does not see."""
    return np.array(
        [(2 * number + 3) * 0x9E37_79B9_7F4A_7C15 % (1 << 64) | 1 for number in numbers], np.uint64
    )


class NaiveShadow:
    """A cache that evicts the least heat, if that was not used within the time that it holds, and
    remembers every key that it ever saw."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.heat: dict[int, float] = {}
        self.seen: dict[int, tuple[float, float]] = {}
        self.hits = 0

    def ask(self, numbers: list[int], now_s: float, limit: int) -> None:
        """One request; its keys never displace each other."""
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
def test_shadows_hold_what_naive_ones_do(data: st.DataObject, seed: int) -> None:
    """While all keys are looked at and all can be remembered."""
    rng = np.random.default_rng(seed)
    cache = Duel(128)
    shadows = [NaiveShadow(contender) for contender in CONTENDERS]
    now_s = 10.0
    for _ in range(data.draw(st.integers(1, 30))):
        # Never the same moment twice, so that no two keys are equally hot.
        now_s += float(rng.exponential(rng.choice([1.0, 50.0, 900.0]))) + 1e-3
        numbers = rng.permutation(60)[: rng.integers(0, 15)].tolist()
        limit = int(rng.integers(1, 50))
        cache.observe(keys_of(numbers), now_s, limit)
        assert cache.share == 1.0
        total = cache.scores + cache._hits
        for index, shadow in enumerate(shadows):
            shadow.ask(numbers, now_s, limit)
            assert held_by(cache, index) == set(keys_of(list(shadow.heat)).tolist()), (
                shadow.contender
            )
            assert total[index] <= shadow.hits
            if now_s < 10.0 + EPOCH_S:
                assert total[index] == shadow.hits
        cache.check_invariants()


@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_hits_are_counted(data: st.DataObject, seed: int) -> None:
    """Scores are the hits of each epoch, older ones halved again and again."""
    rng = np.random.default_rng(seed)
    cache = Duel(128)
    shadows = [NaiveShadow(contender) for contender in CONTENDERS]
    scores, before, ends_s = np.zeros(len(CONTENDERS)), np.zeros(len(CONTENDERS)), np.inf
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += float(rng.exponential(9.0)) + 1e-3
        numbers = rng.permutation(20)[: rng.integers(1, 6)].tolist()
        cache.observe(keys_of(numbers), now_s, 12)
        for shadow in shadows:
            shadow.ask(numbers, now_s, 12)
        hits = np.array([shadow.hits for shadow in shadows], float)
        if ends_s == np.inf:
            ends_s = now_s + EPOCH_S
        elif now_s >= ends_s:
            scores, before, ends_s = KEEP * scores + hits - before, hits, now_s + EPOCH_S
        assert cache.scores.tolist() == scores.tolist()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 32), capacity=st.sampled_from([1, 60, 3000, 100_000]), data=st.data()
)
def test_kernels_equal_references(seed: int, capacity: int, data: st.DataObject) -> None:
    """Also where buckets overflow, the sample thins out, limits jump and keys are asked for twice
    at once."""
    rng = np.random.default_rng(seed)
    one, two = Duel(capacity), Duel(capacity)
    two._kernels = oracle
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        now_s += data.draw(STEPS_S)
        num_resident = int(rng.choice([0, 1, 3, 40, capacity, int(rng.integers(0, capacity + 1))]))
        keys = keys_of(rng.zipf(1.2, rng.integers(0, 60)).clip(0, 1 << 40).tolist())
        changes = [each.observe(keys, now_s, min(num_resident, capacity)) for each in (one, two)]
        assert changes[0] == changes[1] and one.current == two.current and one.share == two.share
        for name in ("_keys", "_holders", "_held", "_hits", "_used_s", "_scores"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
        assert np.allclose(one._uses, two._uses, rtol=0, atol=1e-9)
        assert np.allclose(one._trees, two._trees, rtol=1e-12, atol=1e-6)
        one.check_invariants()


@given(
    sizes=st.lists(st.integers(0, 1 << 24) | st.integers(0, 2000), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 32),
)
def test_the_sample_follows_the_size_of_the_cache(sizes: list[int], seed: int) -> None:
    """Keys outside a smaller sample leave all shadows, nothing else does; a larger sample begins
    with empty ones."""
    rng = np.random.default_rng(seed)
    cache = Duel(20_000)
    for number, size in enumerate(sizes):
        keys = keys_of(rng.integers(0, 1 << 40, 3000).tolist())
        cache.observe(keys, 100.0 * number, min(max(cache._too_few, 200), cache._too_many - 1))
        before = {index: held_by(cache, index) for index in range(len(CONTENDERS))}
        share = cache.share
        cache.observe(keys[:0], 100.0 * number, size)
        assert cache._too_few <= size < cache._too_many and math.log2(cache.share).is_integer()
        assert hotness._share_for(size) > cache.share / 2, (
            "the sample is too large for so many blocks"
        )
        assert hotness._share_for(size) < hotness.REGROW * cache.share or size <= 1, (
            "the sample is too small for so many blocks"
        )
        for index, held in before.items():
            in_sample = {
                key
                for key in held
                if int(spread(np.array([key], np.uint64))[0]) & 0xFFFF_FFFF
                < cache.share * (1 << 32)
            }
            assert held_by(cache, index) == (in_sample if cache.share <= share else set())
        cache.check_invariants()


@given(seed=st.integers(0, 1 << 32))
def test_only_a_clear_win_at_the_end_of_an_epoch_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = Duel(64)
    now_s, ended_s = 0.0, -np.inf
    for _ in range(200):
        now_s += float(rng.exponential(8.0))
        before, scores, hits = cache.current, cache.scores.copy(), cache._hits.copy()
        numbers = (
            (np.arange(5) + 5 * rng.integers(0, 20))
            if rng.random() < 0.5
            else rng.integers(0, 60, 5)
        )
        changed = cache.observe(keys_of(np.unique(numbers).tolist()), now_s, 40)
        assert changed == (cache.current != before)
        if np.array_equal(scores, cache.scores) and not (hits > cache._hits).any():
            assert not changed, "changed in the middle of an epoch"
            continue
        assert now_s >= ended_s + EPOCH_S
        ended_s = now_s
        worth = [
            score / (HOLD_MARGIN if contender.hold_s else 1.0)
            for score, contender in zip(cache.scores.tolist(), CONTENDERS, strict=True)
        ]
        assert (
            worth[cache.current] == max(worth) > MARGIN * worth[before]
            if changed
            else max(worth) <= MARGIN * worth[before]
        )


@pytest.mark.parametrize("num_keys", [150, 400])
def test_loops_are_won_by_what_keeps_the_older(num_keys: int) -> None:
    """A loop larger than the cache."""
    cache = Duel(100)
    for number in range(12 * num_keys):
        cache.observe(keys_of([number % num_keys]), number * 0.5, 100)
    assert cache.winner == KEEPS_THE_OLDER


def test_a_steady_zipf_is_won_by_frequency() -> None:
    rng = np.random.default_rng(0)
    cache = Duel(100)
    for number, key in enumerate((rng.zipf(1.1, 12_000) % 100_000).tolist()):
        cache.observe(keys_of([key]), number * 0.1, 100)
    lasting = [
        c
        for c in CONTENDERS
        if c.recency == 1.0 and c.most_doublings > 1.0 and c.half_life_s >= 300.0
    ]
    shortest = CONTENDERS.index(Contender(1.0))
    assert cache.winner in lasting, cache
    assert cache.scores[shortest] < MARGIN * cache.scores[cache.current]


def test_what_keeps_the_older_loses_where_popularity_is_brief() -> None:
    """Keys are asked for a few times within seconds and never again."""
    cache = Duel(100)
    for number in range(8000):
        cache.observe(keys_of([number // 4]), number * 0.2, 60)
        cache.observe(keys_of([number // 4 + 30]), number * 0.2, 60)
    the_older = cache.scores[CONTENDERS.index(KEEPS_THE_OLDER)]
    assert cache.scores[CONTENDERS.index(Contender(1.0))] > the_older
    assert cache.winner != KEEPS_THE_OLDER


@pytest.mark.parametrize("gap_s", [1.0, 12.0, 50.0])
def test_sessions_in_turn_are_won_by_what_holds(gap_s: float) -> None:
    """Six sessions, each with a turn after every `gap_s` and twenty times so, then others; the
    cache has room for three."""
    rng = np.random.default_rng(0)
    cache = Duel(100)
    now_s = 0.0
    for number in range(900):
        now_s = number * gap_s / 6
        session = number % 6 + 6 * (number // 120)
        jitter_s = float(rng.uniform(0, gap_s / 12))
        cache.observe(keys_of(list(range(30 * session, 30 * session + 30))), now_s + jitter_s, 90)
    assert cache.winner.hold_s > gap_s, cache
    assert cache.winner.hold_s <= 6 * gap_s, cache


def test_what_holds_must_win_clearly() -> None:
    cache = Duel(64)
    cache.observe(keys_of([1]), 0.0, 40)
    for ratio, wins in ((1.0, False), (HOLD_MARGIN, False), (HOLD_MARGIN * MARGIN + 0.001, True)):
        cache.current = 0
        cache._scores[:] = 0.0
        cache._hits[:] = 0
        cache._hits[0], cache._hits[HOLDING[0]] = 100_000, round(100_000 * ratio)
        cache._epoch_ends_s = 10.0
        assert cache.observe(keys_of([]), 10.0, 40) == wins
        assert (cache.current == HOLDING[0]) == wins
        # And it goes as soon as it is not ahead by so much.
        if wins:
            cache._scores[:] = 0.0
            cache._hits[:] = 0
            cache._hits[0] = cache._hits[HOLDING[0]] = 100_000
            cache._epoch_ends_s = 20.0
            assert cache.observe(keys_of([]), 20.0, 40) and cache.current == 0


def test_what_holds_is_out_of_the_race_while_it_may_not() -> None:
    cache = Duel(64)
    cache.observe(keys_of([1]), 0.0, 40)
    second = next(n for n in range(1, len(CONTENDERS)) if n not in HOLDING)

    def end_epoch(now_s: float) -> bool:
        cache._hits[:] = 0
        cache._hits[second], cache._hits[HOLDING] = 100_000, 200_000
        cache._epoch_ends_s = now_s
        return cache.observe(keys_of([]), now_s, 40)

    assert end_epoch(100.0) and cache.current == HOLDING[0]
    assert cache.hold_s == CONTENDERS[HOLDING[0]].hold_s
    assert cache.allow_holding(False) and cache.current == second and not cache.hold_s
    assert not cache.allow_holding(False), "it was left before"
    assert not end_epoch(200.0) and cache.current == second
    assert not cache.allow_holding(True) and cache.current == second, "no epoch has ended"
    assert end_epoch(300.0) and cache.current == HOLDING[0]


def test_years_and_long_silences() -> None:
    """Late clocks keep the order of chains, and after any silence one epoch ends."""
    cache = Duel(64)
    for number, now_s in enumerate([1e9, 1e9 + 1.0, 1.1e9, 1.1e9 + 61.0]):
        cache.observe(keys_of(list(range(30 + number))), now_s, 20)
        cache.check_invariants()
    assert held_by(cache, 0) == set(keys_of(list(range(20))).tolist()), (
        "the tail of a chain was kept for its head"
    )


def test_contenders_fit_the_shadows() -> None:
    """Who holds a key is one bit a contender of sixteen; the first contender is the one that
    starts."""
    assert len(CONTENDERS) <= 16 and len(set(CONTENDERS)) == len(CONTENDERS)
    assert Duel(10).winner == CONTENDERS[0]
    assert kernels.LEAK == LEAK and kernels.DEPTH_STEP == DEPTH_STEP


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.5, np.inf]), min_size=1, max_size=16),
    changes=st.lists(st.tuples(st.integers(0, 15), st.sampled_from([0.0, 3.0, np.inf]))),
)
def test_a_tree_finds_its_least_leaf(values: list[float], changes: list[tuple[int, float]]) -> None:
    leaves = 1 << (len(values) - 1).bit_length()
    tree = np.full(2 * leaves, np.inf)
    model = np.full(leaves, np.inf)
    for leaf, value in [*enumerate(values), *changes]:
        if leaf < leaves:
            kernels._set_leaf(tree, leaf, value)
            model[leaf] = value
    assert model[kernels._least_leaf(tree)] == model.min()
