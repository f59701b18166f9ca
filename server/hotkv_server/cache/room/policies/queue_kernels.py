# mypy: disable-error-code="untyped-decorator"
"""Numba kernels of the eviction policies. Import them through `hotkv_proto.native.require`:
importing Numba takes a second. Tests in `tests/core` compare them with plain Python."""

from typing import Any

import numba
import numpy as np

from hotkv_proto.table_reading import prefetch

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
WAYS = 8
DEPTH_STEP = 4e-6
LEAK = 1e-3
LOW_HALF = np.uint64(0xFFFF_FFFF)
AHEAD = 8
LIFT = 1e15
"""Above any heat: `observe` adds it to keys that must not be evicted during the call."""


@numba.njit(nogil=True, cache=True, inline="always")
def _spread(key: Any) -> Any:
    """As `shared.spread`."""
    mixed = (key ^ (key >> np.uint64(31))) * MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


@numba.njit(nogil=True, cache=True, inline="always")
def _bucket(mixed: Any, num_buckets: int) -> int:
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32))


@numba.njit(nogil=True, cache=True, inline="always")
def _tag(mixed: Any) -> Any:
    return np.uint32(mixed & LOW_HALF) | np.uint32(1)


@numba.njit(nogil=True, cache=True, inline="always")
def _fetch(tags: Any, values: Any, ages: Any, keys: Any, i: Any) -> None:
    """Prefetches the bucket of a key AHEAD: the table is far larger than the processor's cache."""
    if i + AHEAD < keys.shape[0]:
        bucket = _bucket(_spread(keys[i + AHEAD]), tags.shape[0])
        prefetch(tags, bucket)
        prefetch(values, bucket)
        prefetch(ages, bucket)


@numba.njit(nogil=True, cache=True, inline="always")
def _log2_of_sum(a: Any, b: Any) -> Any:
    """log2(2^a + 2^b); `a` is finite."""
    top, bottom = max(a, b), min(a, b)
    return top + np.log2(1.0 + 2.0 ** (bottom - top))


@numba.njit(
    "void(uint32[:], float32[:], uint32[::1], int64, int64, float64, float64, float64)",
    nogil=True,
    cache=True,
)
def use(
    used: Any,
    uses: Any,
    entries: Any,
    now: Any,
    until: Any,
    weight_log2: Any,
    memory: Any,
    depth_step: Any,
) -> None:
    """Records a use of each entry, in prompt order. Times are in ticks.

    The new c is log2(2^(c - age/memory) + 2^weight_log2), and at least that of the block after it
    plus `depth_step`, so that the end of a prompt goes first. `weight_log2` -inf is a refresh: it
    counts no use, and skips entries without one.

    used, uses: time of last use (becomes `until` if later) and c, by entry.
    until: end of the time to live, or `now`.
    memory: after which a use counts half.
    """
    least = -np.inf
    for i in range(entries.shape[0] - 1, -1, -1):
        entry = entries[i]
        if used[entry] == 0:
            if weight_log2 == -np.inf:
                continue
            count = weight_log2
        else:
            age = max(0.0, np.float64(now) - np.float64(used[entry]))
            count = _log2_of_sum(np.float64(uses[entry]) - age / memory, weight_log2)
        least = max(count, least + depth_step)
        uses[entry] = np.float32(least)
        used[entry] = max(used[entry], np.uint32(until))


@numba.njit(
    "void(uint32[:], float32[:], uint32[::1], float64, float64, float64, float64, int64, "
    "float64, float64[::1])",
    nogil=True,
    cache=True,
)
def heat(
    used: Any,
    uses: Any,
    entries: Any,
    half_life_s: Any,
    most: Any,
    recency: Any,
    tick_s: Any,
    latest: Any,
    kept_s: Any,
    out: Any,
) -> None:
    """Writes heats by `Contender`'s formula into `out`.

    used: in ticks; after `latest` for an entry in its time to live, which gets `kept_s` more heat.
    uses: c, by entry.
    most: `most_doublings`.
    latest: tick of the latest call.
    """
    for i in range(entries.shape[0]):
        entry = entries[i]
        count = np.float64(uses[entry])
        out[i] = half_life_s * (min(count, most) + LEAK * count) + recency * tick_s * np.float64(
            used[entry]
        )
        if np.int64(used[entry]) > latest:
            out[i] += kept_s


@numba.njit(
    "int64(uint64[::1], uint32[::1], uint64[::1], uint64[::1], uint64[::1])", nogil=True, cache=True
)
def leave(states: Any, entries: Any, keys: Any, gone_keys: Any, gone_states: Any) -> int:
    """Sets the entries' states to 0. Returns how many were not; writes their keys and states
    out."""
    count = 0
    for i in range(entries.shape[0]):
        state = states[entries[i]]
        if state != 0:
            gone_keys[count], gone_states[count] = keys[i], state
            count += 1
            states[entries[i]] = np.uint64(0)
    return count


@numba.njit(
    "int64(uint32[:, ::1], uint64[:, ::1], uint32[:, ::1], uint64[::1], uint64[::1], int64, "
    "uint64[::1])",
    nogil=True,
    cache=True,
)
def remember(
    tags: Any, values: Any, ages: Any, keys: Any, new_values: Any, next_age: Any, gone: Any
) -> int:
    """Adds ghosts in order. One replaces the ghost with its tag, or in a full bucket the oldest.
    Returns how many were replaced, and writes their values into `gone`. `next_age`: of the
    first."""
    num_gone = 0
    for i in range(keys.shape[0]):
        _fetch(tags, values, ages, keys, i)
        mixed = _spread(keys[i])
        bucket, tag = _bucket(mixed, tags.shape[0]), _tag(mixed)
        place = 0
        for way in range(WAYS):
            if tags[bucket, way] == tag:
                place = way
                break
            # A free way has age 0, below any ghost's.
            if ages[bucket, way] < ages[bucket, place]:
                place = way
        if tags[bucket, place] != 0:
            gone[num_gone] = values[bucket, place]
            num_gone += 1
        tags[bucket, place] = tag
        values[bucket, place] = new_values[i]
        ages[bucket, place] = np.uint32(next_age + i)
    return num_gone


@numba.njit(
    "void(uint32[:, ::1], uint64[:, ::1], uint32[:, ::1], uint64[::1], int64, boolean[::1], "
    "uint64[::1])",
    nogil=True,
    cache=True,
)
def take(tags: Any, values: Any, ages: Any, keys: Any, oldest: Any, found: Any, out: Any) -> None:
    """Removes the keys' ghosts; writes into `found` whether each had one, and its value into
    `out`. Ghosts older than `oldest` have expired."""
    for i in range(keys.shape[0]):
        _fetch(tags, values, ages, keys, i)
        mixed = _spread(keys[i])
        bucket, tag = _bucket(mixed, tags.shape[0]), _tag(mixed)
        for way in range(WAYS):
            if tags[bucket, way] == tag:
                if np.int64(ages[bucket, way]) >= oldest:
                    found[i] = True
                    out[i] = values[bucket, way]
                    tags[bucket, way] = np.uint32(0)
                    ages[bucket, way] = np.uint32(0)
                break


@numba.njit(nogil=True, cache=True)
def _set_leaf(tree: Any, leaf: Any, value: Any) -> None:
    node = (tree.shape[0] >> 1) + leaf
    tree[node] = value
    node >>= 1
    while node >= 1:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            break
        tree[node] = least
        node >>= 1


@numba.njit(nogil=True, cache=True)
def _least_leaf(tree: Any) -> int:
    leaves = tree.shape[0] >> 1
    node = 1
    while node < leaves:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - leaves


@numba.njit(nogil=True, cache=True, inline="always")
def _worth(rule: Any, count: Any, depth: Any, now_s: Any) -> Any:
    """Heat of a key used at `now_s`; slightly below the keys before it in its prompt. `rule`: a
    contender's half_life_s, most_doublings, recency, hold_s; `count`: c."""
    count = count - DEPTH_STEP * depth
    return rule[2] * now_s + rule[0] * (min(count, rule[1]) + LEAK * count)


@numba.njit(nogil=True, cache=True)
def _take_least(holders: Any, trees: Any, held: Any, c: Any) -> None:
    """Removes the coldest key from contender `c`'s shadow cache."""
    victim = _least_leaf(trees[c])
    holders[victim // WAYS, victim % WAYS] &= ~np.uint16(1 << c)
    _set_leaf(trees[c], victim, np.inf)
    held[c] -= 1


@numba.njit(nogil=True, cache=True)
def _raise(
    keys: Any,
    uses: Any,
    holders: Any,
    trees: Any,
    rules: Any,
    memory_of: Any,
    asked: Any,
    threshold: Any,
    now_s: Any,
    lift: Any,
) -> None:
    """Raises the heat of the sampled keys of `asked` in the shadow caches that hold them, to
    that of a key used at `now_s` plus `lift`."""
    for i in range(asked.shape[0]):
        key = asked[i] | np.uint64(1)
        mixed = _spread(key)
        if np.int64(mixed & LOW_HALF) >= threshold:
            continue
        bucket = _bucket(mixed, keys.shape[0])
        for way in range(WAYS):
            if keys[bucket, way] == key:
                for c in range(rules.shape[0]):
                    if holders[bucket, way] >> c & 1:
                        count = uses[memory_of[c], bucket, way]
                        heat = lift + _worth(rules[c], count, i, now_s)
                        _set_leaf(trees[c], bucket * WAYS + way, heat)
                break


@numba.njit(
    "void(uint64[:, ::1], float64[:, ::1], float64[:, :, ::1], uint16[:, ::1], float64[:, ::1], "
    "int64[::1], int64[::1], float64[:, ::1],"
    " float64[::1], int64[::1], uint64[::1], int64, int64, float64)",
    nogil=True,
    cache=True,
)
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
    threshold: Any,
    limit: Any,
    now_s: Any,
) -> None:
    """Records a use of each sampled key of `asked`, a request's keys from its first block on, in
    all shadow caches, of at most `limit` keys each. Other arguments are arrays of `hotness.Duel`.

    A key is not stored if a key of the same call would have to go for it: the real cache too stores
    a request's first blocks. Nor if the key to evict was used within the contender's `hold_s`.

    threshold: sampled if the low 32 bits of the mixed key are below it.
    """
    num_contenders = rules.shape[0]
    for c in range(num_contenders):
        while held[c] > limit and asked.shape[0]:
            _take_least(holders, trees, held, c)
    lift = 0.0
    for i in range(asked.shape[0]):
        key = asked[i] | np.uint64(1)
        mixed = _spread(key)
        if np.int64(mixed & LOW_HALF) >= threshold:
            continue
        bucket = _bucket(mixed, keys.shape[0])
        place, known = 0, False
        for way in range(WAYS):
            if keys[bucket, way] == key:
                place, known = way, True
                break
            # A new key takes a free way, else that of the oldest evicted key, else of the oldest
            # held key.
            rank = (keys[bucket, way] != 0) + (holders[bucket, way] != 0)
            least = (keys[bucket, place] != 0) + (holders[bucket, place] != 0)
            if rank < least or (rank == least and used_s[bucket, way] < used_s[bucket, place]):
                place = way
        leaf = bucket * WAYS + place
        if known:
            age_s = max(0.0, now_s - used_s[bucket, place])
            for m in range(memories_s.shape[0]):
                uses[m, bucket, place] = _log2_of_sum(
                    uses[m, bucket, place] - age_s / memories_s[m], 0.0
                )
        else:
            uses[:, bucket, place] = 0.0
            for c in range(num_contenders):
                if holders[bucket, place] >> c & 1:
                    _set_leaf(trees[c], leaf, np.inf)
                    held[c] -= 1
            holders[bucket, place] = np.uint16(0)
            keys[bucket, place] = key
        used_s[bucket, place] = now_s
        for c in range(num_contenders):
            if holders[bucket, place] >> c & 1:
                hits[c] += 1
            else:
                if held[c] >= limit and lift == 0.0:
                    # Full: from here on the keys of this call get LIFT more heat, so that none
                    # is evicted for another.
                    lift = LIFT
                    so_far = asked[: i + 1]
                    _raise(
                        keys, uses, holders, trees, rules, memory_of, so_far, threshold, now_s, lift
                    )
                if held[c] >= limit:
                    victim = _least_leaf(trees[c])
                    age_s = now_s - used_s[victim // WAYS, victim % WAYS]
                    if age_s < rules[c, 3] or trees[c, 1] > LIFT / 2:
                        continue
                    _take_least(holders, trees, held, c)
                holders[bucket, place] |= np.uint16(1 << c)
                held[c] += 1
            count = uses[memory_of[c], bucket, place]
            _set_leaf(trees[c], leaf, lift + _worth(rules[c], count, i, now_s))
    if lift > 0.0:
        _raise(keys, uses, holders, trees, rules, memory_of, asked, threshold, now_s, 0.0)
