"""Numpy references of `hotkv_server.cache.room.policies.kernels`: same arguments, same results."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.hotness import DEPTH_STEP, LEAK
from hotkv_server.cache.room.policies.shared import WAYS, spread

LIFT = 1e15


def _buckets(mixed: NDArray[np.uint64], num_buckets: int) -> NDArray[np.int64]:
    return (((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)


def _tags(mixed: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return mixed.astype(np.uint32) | np.uint32(1)


def use(
    used: Any,
    uses: Any,
    entries: Any,
    now: int,
    until: int,
    weight_log2: float,
    memory: float,
    depth_step: float,
) -> None:
    """Computes what `kernels.use` does, the plain way; no entry is listed twice."""
    if weight_log2 == -np.inf:
        entries = entries[used[entries] != 0]
    before = used[entries]
    age = np.maximum(0.0, now - before.astype(np.float64))
    count = np.logaddexp2(uses[entries].astype(np.float64) - age / memory, weight_log2)
    count[before == 0] = weight_log2
    steps = depth_step * np.arange(len(entries))
    uses[entries] = np.maximum.accumulate((count + steps)[::-1])[::-1] - steps
    used[entries] = np.maximum(before, np.uint32(until))


def heat(
    used: Any,
    uses: Any,
    entries: Any,
    half_life_s: float,
    most: float,
    recency: float,
    tick_s: float,
    latest: int,
    kept_s: float,
    out: Any,
) -> None:
    """Computes what `kernels.heat` does, the plain way."""
    count = uses[entries].astype(np.float64)
    out[:] = half_life_s * (np.minimum(count, most) + LEAK * count) + recency * tick_s * used[
        entries
    ].astype(np.float64)
    out[used[entries] > latest] += kept_s


def leave(states: Any, entries: Any, keys: Any, gone_keys: Any, gone_states: Any) -> int:
    """Computes what `kernels.leave` does, the plain way; no entry is listed twice."""
    known = states[entries] != 0
    count = int(known.sum())
    gone_keys[:count], gone_states[:count] = keys[known], states[entries[known]]
    states[entries] = 0
    return count


def remember(
    tags: Any, values: Any, ages: Any, keys: Any, new_values: Any, next_age: int, gone: Any
) -> int:
    """Computes what `kernels.remember` does, the plain way."""
    mixed = spread(keys)
    num_gone = 0
    for i, (bucket, tag) in enumerate(
        zip(_buckets(mixed, len(tags)).tolist(), _tags(mixed).tolist(), strict=True)
    ):
        same = np.flatnonzero(tags[bucket] == tag)
        way = int(same[0]) if len(same) else int(np.argmin(ages[bucket]))
        if tags[bucket, way]:
            gone[num_gone] = values[bucket, way]
            num_gone += 1
        tags[bucket, way], values[bucket, way], ages[bucket, way] = tag, new_values[i], next_age + i
    return num_gone


def take(tags: Any, values: Any, ages: Any, keys: Any, oldest: int, found: Any, out: Any) -> None:
    """Computes what `kernels.take` does, the plain way; no key is listed twice."""
    mixed = spread(keys)
    buckets, wanted = _buckets(mixed, len(tags)), _tags(mixed)
    same = (tags[buckets] == wanted[:, None]) & (ages[buckets] >= oldest)
    hit = same.any(axis=1)
    buckets, ways = buckets[hit], same[hit].argmax(axis=1)
    found[hit] = True
    out[hit] = values[buckets, ways]
    tags[buckets, ways] = 0
    ages[buckets, ways] = 0


def _set_leaf(tree: NDArray[np.float64], leaf: int, value: float) -> None:
    node = len(tree) // 2 + leaf
    tree[node] = value
    while node > 1:
        node >>= 1
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


def observe(
    keys: Any,
    used_s: Any,
    uses: Any,
    holders: Any,
    trees: Any,
    held: Any,
    hits: Any,
    rules: Any,
    memories_s: Any,
    memory_of: Any,
    asked: Any,
    threshold: int,
    limit: int,
    now_s: float,
) -> None:
    """Computes what `kernels.observe` does, the plain way."""
    asked = asked | np.uint64(1)
    mixed = spread(asked)
    buckets = _buckets(mixed, len(keys)).tolist()
    leaves = trees.shape[1] // 2
    sampled = np.flatnonzero((mixed & np.uint64(0xFFFF_FFFF)) < threshold).tolist()

    def worth(c: int, i: int, place: int) -> float:
        half_life_s, most_doublings, recency, _ = rules[c]
        count = uses[memory_of[c], buckets[i], place] - DEPTH_STEP * i
        return float(recency * now_s + half_life_s * (min(count, most_doublings) + LEAK * count))

    def set_all(places: list[int], lift: float) -> None:
        for i in places:
            for place in np.flatnonzero(keys[buckets[i]] == asked[i]).tolist():
                for c in np.flatnonzero(holders[buckets[i], place] >> np.arange(len(held)) & 1):
                    _set_leaf(trees[c], buckets[i] * WAYS + place, lift + worth(c, i, place))

    def take_least(c: int) -> None:
        victim = int(np.argmin(trees[c][leaves:]))
        holders[victim // WAYS, victim % WAYS] &= 0xFFFF ^ (1 << c)
        _set_leaf(trees[c], victim, np.inf)
        held[c] -= 1

    for c in range(len(held)):
        while held[c] > limit and len(asked):
            take_least(c)
    lift = 0.0
    for number, i in enumerate(sampled):
        key, bucket = asked[i], buckets[i]
        same = np.flatnonzero(keys[bucket] == key)
        ranks = (keys[bucket] != 0).astype(int) + (holders[bucket] != 0)
        place = int(same[0]) if len(same) else int(np.lexsort((used_s[bucket], ranks))[0])
        leaf = bucket * WAYS + place
        if len(same):
            age_s = max(0.0, now_s - used_s[bucket, place])
            uses[:, bucket, place] = np.logaddexp2(uses[:, bucket, place] - age_s / memories_s, 0.0)
        else:
            uses[:, bucket, place] = 0.0
            for c in np.flatnonzero(holders[bucket, place] >> np.arange(len(held)) & 1).tolist():
                _set_leaf(trees[c], leaf, np.inf)
                held[c] -= 1
            holders[bucket, place], keys[bucket, place] = 0, key
        used_s[bucket, place] = now_s
        for c in range(len(held)):
            if holders[bucket, place] >> c & 1:
                hits[c] += 1
            else:
                if held[c] >= limit and lift == 0.0:
                    lift = LIFT
                    set_all(sampled[: number + 1], lift)
                if held[c] >= limit:
                    victim = int(np.argmin(trees[c][leaves:]))
                    age_s = now_s - used_s[victim // WAYS, victim % WAYS]
                    if age_s < rules[c, 3] or trees[c][1] > LIFT / 2:
                        continue
                    take_least(c)
                holders[bucket, place] |= 1 << c
                held[c] += 1
            _set_leaf(trees[c], leaf, lift + worth(c, i, place))
    if lift:
        set_all(sampled, 0.0)
