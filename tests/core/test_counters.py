"""Every count of blocks equals what the answers of the calls said, whatever the calls.

Counters are what operators read, and nothing else depends on them: no other test would see a wrong
one.
"""

from dataclasses import asdict
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from hotkv_proto.blocks import BlockResult
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run
from tests.core.support import (
    begin_store,
    evict,
    expire,
    flush,
    make_key_space,
    make_table,
    words_of,
)

NUM_SLOTS = 4
NUMBERS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
DISTINCT = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
LEASES = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lookup"), NUMBERS),
        st.tuples(st.just("acquire"), LEASES, NUMBERS),
        st.tuples(st.just("load"), LEASES, st.booleans()),
        st.tuples(st.just("begin"), DISTINCT),
        st.tuples(st.just("store"), DISTINCT, st.booleans()),
        st.tuples(st.just("store"), DISTINCT, st.just(True)),
        st.tuples(st.just("end"), st.booleans()),
        st.tuples(st.just("release"), LEASES),
        st.tuples(st.just("expire")),
        st.tuples(st.just("evict"), NUMBERS),
        st.tuples(st.just("flush")),
    ),
    min_size=10,
    max_size=40,
)


class Counted:
    """A cache of one group, and the sums of what its calls answered."""

    def __init__(self) -> None:
        config = CoreConfig(
            NUM_SLOTS * SLOT_ALIGN, SLOT_ALIGN, 100, lease_ttl_s=10.0, unadmitted_share=1.0
        )
        self.core = CacheCore(config, make_table(100), POLICIES["lru"](100))
        key_space = make_key_space("one", SLOT_ALIGN, SLOT_ALIGN)
        self.session = self.core.open_session("engine", "rank", key_space, 0.0).number
        self.expected = dict.fromkeys(asdict(self.core.counters), 0)
        self.stores: list[str] = []
        self.num_calls, self.now_s = 0, 0.0

    def count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.expected[name] += number

    def name(self) -> str:
        self.num_calls += 1
        return f"call {self.num_calls}"

    def take_evicted(self) -> None:
        self.count(evicted_blocks=sum(len(notice.hashes) for notice in self.core.take_effects()))

    def lookup(self, numbers: list[int]) -> None:
        (mask,) = self.core.lookup(1, [HashList(0, words_of(numbers))])
        self.count(lookup_blocks=len(mask), lookup_hit_blocks=int(mask.sum()))

    def acquire(self, lease: int, numbers: list[int]) -> None:
        name = f"read {lease}"
        if self.core.leases.get("engine", name) is not None:
            return
        hashes = [HashList(0, words_of(numbers))]
        (mask,) = self.core.acquire(self.session, name, hashes, 0.0, self.now_s).pinned
        self.count(acquired_blocks=int(mask.sum()), missed_blocks=int((~mask).sum()))

    def load(self, lease: int, succeeded: bool) -> None:
        name = f"read {lease}"
        if self.core.leases.get("engine", name) is None:
            return
        offsets = self.core.slot_offsets(self.session, name)[0]
        there = np.unique(offsets, return_index=True)[1]
        positions = there[offsets[there] >= 0].astype(np.int64)
        transfer = self.name()
        self.core.begin_load(self.session, transfer, name, [LoadPositions(0, positions)])
        self.core.end_load(self.session, transfer, succeeded)
        self.count(loaded_blocks=len(positions) if succeeded else 0)

    def begin(self, numbers: list[int]) -> None:
        transfer, runs = self.name(), [Run(0, words_of(numbers))]
        begin_store(self.core, self.session, transfer, transfer, runs, 0, 0.0, self.now_s)
        self.take_evicted()
        self.stores.append(transfer)

    def end(self, succeeded: bool) -> None:
        if not self.stores:
            return
        (results,) = self.core.end_store(self.session, self.stores.pop(), succeeded, self.now_s)
        of = {name: int((results == name).sum()) for name in BlockResult}
        self.count(
            stored_blocks=of[BlockResult.STORED],
            present_blocks=of[BlockResult.PRESENT],
            no_space_blocks=of[BlockResult.NO_SPACE],
            in_flight_blocks=of[BlockResult.IN_FLIGHT],
            aborted_blocks=of[BlockResult.ABORTED],
        )

    def store(self, numbers: list[int], succeeded: bool) -> None:
        self.begin(numbers)
        self.end(succeeded)

    def release(self, lease: int) -> None:
        if self.core.leases.get("engine", f"read {lease}") is not None:
            self.core.release(self.session, f"read {lease}")

    def expire(self) -> None:
        self.now_s += 11.0
        self.count(expired_leases=expire(self.core, self.now_s))

    def evict(self, numbers: list[int]) -> None:
        dropped, _ = evict(self.core, 1, 0, words_of(numbers))
        self.count(evicted_blocks=dropped)
        self.core.take_effects()

    def flush(self) -> None:
        self.count(flushed_blocks=flush(self.core, 1))
        self.core.take_effects()


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_counters_are_the_sums_of_what_calls_answered(steps: list[tuple[Any, ...]]) -> None:
    cache = Counted()
    for name, *arguments in steps:
        getattr(cache, name)(*arguments)
    while cache.stores:
        cache.end(True)
    assert asdict(cache.core.counters) == cache.expected
