"""Naive caches over dicts for comparison with the simulator, and requests."""

from collections.abc import Sequence

import hypothesis.strategies as st

from tests.simulate.traces import Chains, Requests


class NaiveLRU:
    """Block ids in a dict, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, None] = {}

    def use(self, ids: Sequence[int]) -> None:
        """From tail to head, so a prompt's head counts as used last."""
        for block in reversed(ids):
            self.blocks.pop(block, None)
            self.blocks[block] = None

    def store(self, ids: Sequence[int]) -> list[int]:
        """Uses the present blocks, inserts what fits, then uses the first inserted block and
        those before it again. Evicted blocks."""
        present = [block for block in ids if block in self.blocks]
        most = max(self.capacity, len(present))
        fresh = [block for block in ids if block not in self.blocks][: most - len(present)]
        self.use(present)
        evicted = []
        while len(self.blocks) + len(fresh) > most:
            evicted.append(next(iter(self.blocks)))
            del self.blocks[evicted[-1]]
        self.use(fresh)
        if fresh:
            self.use(ids[: ids.index(fresh[0]) + 1])
        return evicted


def distinct(ids: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def prefix_length(ids: Sequence[int], held: object) -> int:
    for position, block in enumerate(ids):
        if block not in held:  # type: ignore[operator]
            return position
    return len(ids)


def lru_hits(requests: Requests, capacity: int) -> int:
    cache, hits = NaiveLRU(capacity), 0
    for _, ids in sorted(requests, key=lambda request: request[0]):
        hits += prefix_length(ids, cache.blocks)
        cache.store(distinct(ids))
    return hits


def two_tier_hits(requests: Requests, capacity: int, second_capacity: int) -> tuple[int, int, int]:
    """(Hits, hits of the second tier, blocks written to it)."""
    first, second = NaiveLRU(capacity), NaiveLRU(second_capacity)
    hits = lower_hits = writes = 0
    for _, listed in sorted(requests, key=lambda request: request[0]):
        ids = distinct(listed)
        prefix = ids[: prefix_length(ids, first.blocks | second.blocks)]
        loaded = [block for block in prefix if block not in first.blocks]
        here = [block for block in prefix if block in first.blocks]
        loaded = loaded[: capacity - len(here)]
        second.use(loaded)
        while len(first.blocks) + len(loaded) > capacity:
            del first.blocks[next(block for block in first.blocks if block not in here)]
        first.use(loaded)
        lower_hits += len(loaded)
        hits += min(prefix_length(listed, {*here, *loaded}), prefix_length(listed, first.blocks))
        first.store(ids)
        wanted = [block for block in ids if block in first.blocks and block not in second.blocks]
        writes += len(wanted[:second_capacity])
        second.store(wanted)
    return hits, lower_hits, writes


def unbounded_hits(requests: Requests) -> int:
    seen: set[int] = set()
    hits = 0
    for _, ids in sorted(requests, key=lambda request: request[0]):
        hits += prefix_length(ids, seen)
        seen.update(ids)
    return hits


def most_hits(requests: Requests, capacity: int) -> int:
    """Tries every choice of blocks to keep, so it is only for a handful."""
    best = {frozenset[int](): 0}
    for _, ids in sorted(requests, key=lambda request: request[0]):
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            total = hits + prefix_length(ids, held)
            for kept in _subsets(sorted(held | set(ids)), capacity):
                after[kept] = max(after.get(kept, 0), total)
        best = after
    return max(best.values())


def _subsets(blocks: list[int], capacity: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for block in blocks:
        found += [subset | {block} for subset in found if len(subset) < capacity]
    return found


@st.composite
def chained_requests(
    draw: st.DrawFn, max_requests: int = 40, max_blocks: int = 6, branches: int = 2
) -> Requests:
    chains = Chains()
    contents = st.lists(st.integers(0, branches), min_size=1, max_size=max_blocks)
    times_s = st.sampled_from([0.0, 1.0, 60.0, 1000.0])
    listed = draw(st.lists(st.tuples(times_s, contents), min_size=1, max_size=max_requests))
    now_s, requests = 0.0, []
    for passed_s, request in listed:
        now_s += passed_s
        requests.append((now_s, chains.chain(request)))
    return requests


@st.composite
def any_requests(draw: st.DrawFn) -> Requests:
    """Against the trace format: repeated ids, times in any order, empty requests."""
    ids = st.lists(
        st.one_of(st.integers(0, 12), st.sampled_from([-1, (1 << 64) - 1, -(1 << 63)])), max_size=9
    )
    requests = draw(
        st.lists(st.tuples(st.sampled_from([0.0, 1.5, 7.0, 1e9]), ids), min_size=1, max_size=40)
    )
    return [*requests, (3.0, [1, 2, 3])]
