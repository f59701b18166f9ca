"""CUDA's kernels that plan, weigh and choose, and the hot set's step, on the CPU, against the numpy
references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hotkv_proto.errors import HotKVError
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.hotsets import LOADED, PREFETCH, RESIDENT, SELECTED, VICTIMS, CudaHotSets
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector
from hotkv_sparse.cuda.workspace import StepShape, Workspace
from hotkv_sparse.hotset import HotSet
from hotkv_sparse.selection import Span, floor_blocks, span
from tests.oracles import sparse as oracle
from tests.sparse.cuda_support import CpuDevice, needs_compiler
from tests.sparse.support import selection_of

pytestmark = needs_compiler
BLOCK = 16
NOWHERE = Pages(np.zeros(1, np.float32), "float32", 0, 0, 0)


def layer(
    config: SparseConfig,
    num_sequences: int,
    max_blocks: int,
    num_heads: int = 2,
    num_slots: int = 8,
    seed: int = 0,
    **sizes: int,
) -> CudaSelector:
    shape = StepShape(num_sequences, max_blocks, BLOCK, num_heads, 1, 16, num_slots, **sizes)
    work = Workspace(CpuDevice(seed), config, shape)
    index = Index(work.device, IndexShape("mean", 1, 16, BLOCK), 1)
    return CudaSelector(work, 5, index, NOWHERE, NOWHERE, CudaHotSets(work, (), 0))


@given(
    tokens=st.lists(st.integers(0, 300 * BLOCK), min_size=1, max_size=5),
    sinks=st.sampled_from([0, 1, 16, 32, 33]),
    recent=st.sampled_from([1, 16, 64, 70]),
    topk=st.sampled_from([0.1, 0.0371, 1.0, 1000, 2048]),
)
@settings(max_examples=40, deadline=None)
def test_plans_as_the_reference_does(
    tokens: list[int], sinks: int, recent: int, topk: float
) -> None:
    config = SparseConfig(sparse_topk=topk, sink_tokens=sinks, recent_tokens=recent, scorer="mean")
    selector = layer(config, len(tokens), 300)
    selector._workspace.begin(np.array(tokens, np.int32))
    for row, count in zip(selector._workspace.plan, tokens, strict=True):
        where = span(config, count, BLOCK)
        room = min(
            max(config.budget_blocks(count, BLOCK) - where.num_always, 0), where.last - where.first
        )
        assert row[:6].tolist() == [
            where.first,
            where.last,
            where.count,
            room,
            floor_blocks(BLOCK),
            count,
        ]


@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.sampled_from([1, 100, 1000, 20000, 50000]),
    num_heads=st.sampled_from([1, 2, 5]),
    adaptive_p=st.sampled_from([None, 0.3, 0.9, 0.999]),
    grain=st.sampled_from([0.0, 0.5, 3.0]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
)
@settings(max_examples=30, deadline=None)
def test_chooses_what_the_reference_chooses(
    seed: int,
    num_tokens: int,
    num_heads: int,
    adaptive_p: float | None,
    grain: float,
    spread: float,
) -> None:
    rng = np.random.default_rng(seed)
    scorer = "mean" if adaptive_p is None else "rot2u"
    config = SparseConfig(sparse_topk=0.1, adaptive_p=adaptive_p, scorer=scorer)
    max_blocks = -(-num_tokens // BLOCK) + 3
    shape = StepShape(2, max_blocks, BLOCK, num_heads, 1, 16, max_blocks)
    work = Workspace(CpuDevice(seed % 5), config, shape)
    index = Index(work.device, IndexShape(scorer, 1, 16, BLOCK), 1)
    selector = CudaSelector(work, 5, index, NOWHERE, NOWHERE, CudaHotSets(work, (), 0))
    work.begin(np.array([num_tokens, 0], np.int32))
    where = span(config, num_tokens, BLOCK)
    scores = (rng.standard_normal((num_heads, max_blocks)) * spread).astype(np.float32)
    if grain:
        scores = np.round(scores / np.float32(grain)) * np.float32(grain)
    scores[:, rng.random(max_blocks) < 0.1] = -np.inf
    log_mass = (rng.standard_normal(num_heads) * 3).astype(np.float32)
    work.scores[0], work.always_log_mass[:] = scores, log_mass
    selector.choose()
    middle = slice(where.first, where.last)
    expected = oracle.aggregate(scores[:, middle], log_mass, 1)
    np.testing.assert_allclose(work.weights[0, middle], expected.shared, rtol=1e-4, atol=1e-12)
    # Below the smallest normal number a last digit is more than rtol.
    np.testing.assert_allclose(work.always_mass[0], expected.always_shared, rtol=1e-5, atol=1e-37)
    # The choice is exact in the weights that the device has.
    want = oracle.select(
        work.weights[0, middle].copy(), float(work.always_mass[0]), where,
        config.budget_blocks(num_tokens, BLOCK), adaptive_p=adaptive_p,
        floor_blocks=floor_blocks(BLOCK),
    )  # fmt: skip
    number = int(selector.numbers[0])
    assert selector.numbers[1] == 0
    assert selector.blocks[0, :number].tolist() == want.blocks.tolist()
    assert selector.chosen[0, :number].tolist() == want.weights.tolist()
    assert selector.mass[0] == pytest.approx(want.mass, rel=1e-5, abs=1e-6)


def test_a_share_that_nothing_reaches_takes_the_whole_budget() -> None:
    config = SparseConfig(
        sparse_topk=0.5, adaptive_p=0.99, scorer="rot2u", sink_tokens=16, recent_tokens=16
    )
    shape = StepShape(1, 100, BLOCK, 1, 1, 16, 100)
    work = Workspace(CpuDevice(), config, shape)
    index = Index(work.device, IndexShape("rot2u", 1, 16, BLOCK), 1)
    selector = CudaSelector(work, 5, index, NOWHERE, NOWHERE, CudaHotSets(work, (), 0))
    work.begin(np.array([1600], np.int32))
    work.scores[:] = 0.0
    work.always_log_mass[:] = -np.inf
    selector.choose()
    assert selector.numbers[0] == 50 and selector.blocks[0, :50].tolist() == [*range(49), 99]


class StepMachine(RuleBasedStateMachine):
    """The device's step against the hot set's, from the same tables; what else changes a hot set
    happens to the reference."""

    @initialize(
        capacity=st.integers(4, 40), spare=st.integers(0, 4),
        policy=st.sampled_from(["lru", "none"]),
        count=st.integers(4, 60), corrections=st.integers(0, 4), seed=st.integers(0, 3),
        max_prefetch=st.integers(1, 5),
    )  # fmt: skip
    def begin(
        self,
        capacity: int,
        spare: int,
        policy: str,
        count: int,
        corrections: int,
        seed: int,
        max_prefetch: int,
    ) -> None:
        self.hot = HotSet(capacity, spare, policy)
        config = SparseConfig(
            cache_policy=policy,
            max_correction_blocks=corrections,
            scorer="mean",
            sink_tokens=16,
            recent_tokens=32,
        )
        self.num_slots = capacity + spare
        self.selector = layer(
            config, 2, 200, num_slots=self.num_slots, seed=seed, max_prefetch=max_prefetch
        )
        self.loading: list[int] = []
        self.wanted: np.ndarray = np.empty(0, np.int32)
        self.reach(count)
        self.hot.seed(np.array([0, count - 2, count - 1], np.int32))

    def reach(self, count: int) -> None:
        self.hot.extend(Span(1, count - 2, count), count, count)

    def upload(self) -> None:
        selector, hot, count = self.selector, self.hot, self.hot.span.count
        selector.hot.state[1], selector.hot.block_of[1], selector.hot.used_at[1] = (
            hot.state,
            hot.block_of,
            hot.used_at,
        )
        selector.hot.slot_of[1], selector._workspace.has_copy[1] = -1, 0
        selector.hot.slot_of[1, :count], selector._workspace.has_copy[1, :count] = (
            hot.slot_of[:count],
            hot.has_copy[:count],
        )
        selector.hot.capacities[1], selector.hot.clocks[1] = hot.capacity_blocks, hot.clock
        selector._workspace.plan[1, :3] = self.hot.span.first, self.hot.span.last, count

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        where, selector = self.hot.span, self.selector
        config = selector._workspace.config
        chosen = data.draw(
            st.lists(
                st.integers(0, where.count - 1),
                max_size=min(12, selector._workspace.max_selected - 4),
            )
        )
        weights = {b: float(data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))) for b in chosen}
        weights |= {int(b): np.inf for b in where.always}
        selection = selection_of(weights)
        self.upload()
        number = len(selection.blocks)
        selector.numbers[:] = [0, number]
        selector.blocks[1, :number], selector.chosen[1, :number] = (
            selection.blocks,
            selection.weights,
        )
        selector.hot.correct(selector.blocks, selector.chosen, selector.numbers)
        expected = self.hot.step(selection, config.max_correction_blocks)
        counts = selector.hot.counts[1]
        loaded, count = int(counts[LOADED]), where.count
        assert selector.hot.loads[1, 0, :loaded].tolist() == expected.load.blocks.tolist()
        assert selector.hot.loads[1, 1, :loaded].tolist() == expected.load.slots.tolist()
        assert sorted(selector.hot.victims[1, : counts[VICTIMS]].tolist()) == sorted(
            expected.load.victims.tolist()
        )
        assert (
            selector.hot.prefetch[1, : counts[PREFETCH]].tolist()
            == expected.prefetch.tolist()[: selector.hot.prefetch.shape[1]]
        )
        assert (counts[SELECTED], counts[RESIDENT]) == (
            expected.num_selected,
            expected.num_resident,
        )
        assert (
            selector.hot.state[1].tolist() == self.hot.state.tolist()
            and selector.hot.block_of[1].tolist() == self.hot.block_of.tolist()
        )
        assert selector.hot.slot_of[1, :count].tolist() == self.hot.slot_of[:count].tolist()
        mapped = self.hot.state == 1
        assert (
            selector.hot.used_at[1][mapped].tolist() == self.hot.used_at[mapped].tolist()
            and selector.hot.clocks[1] == self.hot.clock
        )
        self.wanted = expected.prefetch

    @rule(count=st.integers(0, 4))
    def prefetch(self, count: int) -> None:
        self.loading += self.hot.begin_prefetch(self.wanted[:count]).slots.tolist()

    @rule(count=st.integers(0, 4), success=st.booleans())
    def prefetched(self, count: int, success: bool) -> None:
        self.hot.finish_prefetch(np.array(self.loading[:count], np.int32), success)
        self.loading = self.loading[count:]

    @rule()
    def adopt(self) -> None:
        self.hot.adopt()

    @rule(capacity=st.integers(4, 40))
    def resize(self, capacity: int) -> None:
        self.hot.resize(min(capacity, self.num_slots - self.hot.spare_slots))

    @rule(more=st.integers(1, 3))
    def lengthen(self, more: int) -> None:
        if self.hot.span.count + more <= 200:
            self.reach(self.hot.span.count + more)


TestStepMachine = StepMachine.TestCase
TestStepMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_refuses_what_the_device_cannot() -> None:
    with pytest.raises(HotKVError, match="on CUDA"):
        layer(SparseConfig(fusion={"mean": 1.0}), 1, 10)


def test_a_layer_has_its_own_scorer() -> None:
    with pytest.raises(HotKVError, match="layer 5 is scored by rot2u; the index is mean"):
        layer(SparseConfig(), 1, 10)
