"""Compares `HotSet` with a naive model, and tracks each slot's content."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.hotset import MAX_SETS, AdaptiveCapacity, HotSet, SlotState
from hotkv_sparse.selection import CandidateSpan
from tests.sparse.naive import NaiveHotSet
from tests.sparse.support import selection_of


class Machine(RuleBasedStateMachine):
    """`content` maps slots to blocks; it changes where an engine or its prefetcher would write."""

    @initialize(
        capacity=st.integers(1, 14),
        spare=st.integers(0, 4),
        policy=st.sampled_from(["lru", "none"]),
        num_host=st.integers(0, 30),
    )
    def begin(self, capacity: int, spare: int, policy: str, num_host: int) -> None:
        self.hot = HotSet(capacity, spare, policy)
        self.model = NaiveHotSet(capacity, spare, policy)
        self.content: dict[int, int] = {}
        self.wanted: list[int] = []
        self.out: list[int] = []
        self.grow(num_host + 1, num_host, num_host)

    def span(self, count: int) -> tuple[int, int]:
        return min(1, count), max(min(1, count), count - 2)

    def grow(self, count: int, complete: int, num_host: int) -> None:
        first, last = self.span(count)
        before = (self.hot.map().blocks.tolist(), self.hot.span)
        expected = self.model.extend(first, last, count, complete, num_host)
        try:
            growth = self.hot.extend(CandidateSpan(first, last, count), complete, num_host)
        except HotKVError as error:
            assert error.reason is Reason.OVERLOADED and expected is None
            assert before == (self.hot.map().blocks.tolist(), self.hot.span)
            return
        new, out = growth.new, growth.swap_out.tolist()
        assert expected == (new.blocks.tolist(), new.victims.tolist(), out)
        self.write(new.slots, new.blocks)
        self.out = sorted((set(self.out) | set(out)) & set(range(complete)))
        self.wanted = [b for b in self.wanted if b < count]

    def write(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        busy = (SlotState.LOADING, SlotState.CANCELLED)
        assert not any(self.hot.state[slot] in busy for slot in slots.tolist())
        self.content.update(zip(slots.tolist(), blocks.tolist(), strict=True))

    @rule(more=st.integers(0, 2), partial=st.booleans())
    def lengthen(self, more: int, partial: bool) -> None:
        count = self.hot.span.count + more
        self.grow(count, max(count - partial, 0), 0)

    @rule(fewer=st.integers(1, 5))
    def rewind(self, fewer: int) -> None:
        self.hot.swapped_out(np.array(self.out, np.int32), False)
        self.model.swapped_out(self.out, False)
        self.out = []
        count = max(self.hot.span.count - fewer, 0)
        self.grow(count, max(count - 1, 0), 0)

    @precondition(lambda self: self.out)
    @rule(success=st.booleans(), share=st.floats(0, 1))
    def settle_swaps(self, success: bool, share: float) -> None:
        done = self.out[: int(np.ceil(share * len(self.out)))]
        self.hot.swapped_out(np.array(done, np.int32), success)
        self.model.swapped_out(done, success)
        self.out = self.out[len(done) :]

    @rule(data=st.data(), max_loads=st.integers(0, 4))
    def step(self, data: st.DataObject, max_loads: int) -> None:
        span = self.hot.span
        blocks = st.lists(st.integers(0, max(span.count - 1, 0)), max_size=8)
        weights = {b: float(data.draw(st.integers(-3, 3))) for b in data.draw(blocks) if span.count}
        weights |= {b: np.inf for b in range(span.count) if b < span.first or b >= span.last}
        before = set(self.hot.map().blocks.tolist())
        result = self.hot.step(selection_of(weights), max_loads)
        after, loaded = set(result.map.blocks.tolist()), result.load.blocks.tolist()
        victims = result.load.victims.tolist()
        always = {b for b in weights if weights[b] == np.inf}
        assert len(loaded) <= max(max_loads, len(always - before))
        lost = set(victims) & set(weights)
        assert before & set(weights) - lost <= after and not lost & always
        assert len(lost) <= len(always - before), "selected blocks make room for always kept ones"
        can_go = {b for b in after - always if self.hot.has_copy[b]}
        assert always <= after or not can_go
        assert result.num_resident == len(before & set(weights) - always)
        expected_load, expected_prefetch, expected_victims = self.model.step(weights, max_loads)
        assert (loaded, result.prefetch.tolist()) == (expected_load, expected_prefetch)
        assert sorted(victims) == sorted(expected_victims)
        self.write(result.load.slots, result.load.blocks)
        self.wanted = result.prefetch.tolist()

    @rule()
    def prefetch(self) -> None:
        moves = self.hot.begin_prefetch(np.array(self.wanted, np.int32))
        assert not set(moves.slots.tolist()) & set(self.hot.map().slots.tolist())
        assert moves.blocks.tolist() == self.model.begin_prefetch(self.wanted)
        self.model.loading.update(zip(moves.slots.tolist(), moves.blocks.tolist(), strict=True))
        self.content.update(zip(moves.slots.tolist(), moves.blocks.tolist(), strict=True))

    @rule(count=st.integers(1, 3))
    def prefetch_done(self, count: int) -> None:
        slots = sorted(self.model.loading)[:count]
        self.hot.finish_prefetch(np.array(slots, np.int32))
        for slot in slots:
            self.model.finish_prefetch(slot)

    @rule()
    def adopt(self) -> None:
        old = self.hot.map()
        copy = (old.blocks.tolist(), old.slots.tolist())
        moves = self.hot.adopt()
        assert (old.blocks.tolist(), old.slots.tolist()) == copy
        assert (moves.blocks.tolist(), moves.victims.tolist()) == self.model.adopt()

    @rule(capacity=st.integers(1, 16))
    def resize(self, capacity: int) -> None:
        victims = self.hot.resize(capacity).tolist()
        assert victims == self.model.resize(capacity)

    @rule(data=st.data())
    def seed(self, data: st.DataObject) -> None:
        # They are loaded, so they must be in host memory.
        able = np.flatnonzero(self.hot.has_copy[: self.hot.span.count]).tolist()
        blocks = data.draw(st.lists(st.sampled_from(able), max_size=6)) if able else []
        moves = self.hot.seed(np.array(blocks, np.int32))
        assert moves.blocks.tolist() == self.model.seed(blocks)
        self.write(moves.slots, moves.blocks)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "hot"):
            return
        self.hot.check_invariants()
        present = self.hot.map()
        assert [self.content[s] for s in present.slots.tolist()] == present.blocks.tolist()
        assert present.blocks.tolist() == sorted(self.model.used_at)


TestHotSet = Machine.TestCase


def test_many_victims_are_the_coldest_in_their_order() -> None:
    """There are enough for the hot set's radix sort."""
    hot = HotSet(500, 0)
    hot.extend(CandidateSpan(0, 500, 500), 500, 500)
    hot.seed(np.arange(500, dtype=np.int32))
    used = list(range(498, -1, -3))
    for block in used:
        hot.step(selection_of({block: 1.0}), 1)
    unused = [block for block in range(500) if block % 3]
    assert hot.resize(100).tolist() == unused + used[:67]
    hot.resize(501)
    assert hot.num_slots == 501


def test_blocks_above_lowered_capacity_go_once_copied() -> None:
    hot = HotSet(6, 1)
    copied = hot.extend(CandidateSpan(2, 5, 7), 7, 1).swap_out
    hot.finish_prefetch(hot.begin_prefetch(np.zeros(1, np.int32)).slots)
    assert hot.resize(4).tolist() == [], "no block has a copy in host memory"
    assert not len(hot.adopt().blocks) and hot.map().blocks.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(HotKVError, match="1 new blocks don't fit in HotSet") as caught:
        hot.extend(CandidateSpan(2, 6, 8), 8)
    assert caught.value.reason is Reason.OVERLOADED and hot.span == CandidateSpan(2, 5, 7)
    assert hot.map().blocks.tolist() == [1, 2, 3, 4, 5, 6]
    hot.swapped_out(copied, True)
    growth = hot.extend(CandidateSpan(2, 6, 8), 8)
    assert growth.new.blocks.tolist() == [7] and growth.new.victims.tolist() == [2, 3, 4]
    assert hot.map().blocks.tolist() == [1, 5, 6, 7]
    hot.check_invariants()


def test_always_kept_blocks_take_selected_blocks_slots() -> None:
    """Of the always-kept 0 and 11, 11 is only in host memory; the selected 3 has the lowest
    weight."""
    hot = HotSet(5, 0)
    hot.extend(CandidateSpan(1, 9, 10), 10, 10)
    hot.seed(np.array([0, 9, 3, 4, 5], np.int32))
    hot.extend(CandidateSpan(1, 11, 12), 12, 12)
    found = hot.step(selection_of({0: np.inf, 11: np.inf, 3: 0.1, 4: 0.3, 5: 0.2, 9: 0.4}), 1)
    assert found.load.blocks.tolist() == [11] and found.load.victims.tolist() == [3]
    assert found.map.blocks.tolist() == [0, 4, 5, 9, 11]
    assert found.prefetch.tolist() == [3] and found.num_resident == 4
    hot.check_invariants()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda hot: HotSet(0), "use 1 and 0 or more"),
        (lambda hot: HotSet(4, policy="mru"), "cache_policy is 'mru'"),
        (lambda hot: hot.step(selection_of({20: 1.0}), 1), "from 0 to 19"),
        (lambda hot: hot.begin_prefetch(np.array([20], np.int32)), "from 0 to 19"),
        (lambda hot: hot.seed(np.array([20], np.int32)), "from 0 to 19"),
        (lambda hot: hot.finish_prefetch(np.array([0], np.int32)), "no prefetch is"),
        (lambda hot: hot.resize(0), "use 1 or more"),
        (lambda hot: hot.extend(CandidateSpan(1, 18, 20), 21), "21 blocks complete"),
    ],
)
def test_refusals(call: Callable[[HotSet], object], words: str) -> None:
    hot = HotSet(10, 4)
    hot.extend(CandidateSpan(1, 18, 20), 20, 20)
    hot.seed(np.array([0, 18, 19], np.int32))
    with pytest.raises(HotKVError, match=words) as caught:
        call(hot)
    assert caught.value.reason is Reason.INVALID_FIELD


@given(
    budget=st.integers(1, 1000),
    always=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50)), max_size=80),
)
def test_capacity_stays_in_bounds(budget: int, always: int, steps: list[tuple[int, int]]) -> None:
    capacity = AdaptiveCapacity(budget, always)
    assert capacity.capacity_blocks == max(budget, always)
    for selected, left in steps:
        blocks, least = capacity.observe(selected, left), max(min(selected, budget), always)
        assert min(2 * least - 1, budget) <= blocks == capacity.capacity_blocks
        assert always <= blocks <= max(min(MAX_SETS * budget, budget), always)


def test_capacity_rises_at_once_falls_slowly() -> None:
    capacity = AdaptiveCapacity(1000, 5)
    assert [capacity.observe(wanted, 0) for wanted in (50, 400, 50)] == [100, 800, 784]
    assert [capacity.observe(50, 0) for _ in range(200)][-1] == 100
    capacity = AdaptiveCapacity(300, 5)
    assert [capacity.observe(50, 3) for _ in range(60)][-1] == 200
    assert [capacity.observe(50, 0) for _ in range(200)][-1] == 100
