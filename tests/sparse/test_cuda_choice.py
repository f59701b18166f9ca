"""Compares the CUDA kernels for weights, selection and hot sets, on the CPU, with the numpy
references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hotkv_proto.errors import HotKVError
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda import workspace
from hotkv_sparse.cuda.hotsets import (
    ATTENDED,
    LOADED,
    PREFETCH,
    RESIDENT,
    SELECTED,
    SEQUENCE_TOKENS,
    VICTIMS,
    CudaHotSets,
)
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace
from hotkv_sparse.hotset import HotSet
from hotkv_sparse.selection import CandidateSpan, floor_blocks, span
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
    scorer: str = "mean",
    kv: tuple[Pages, Pages] = (NOWHERE, NOWHERE),
    **sizes: int,
) -> CudaSelector:
    shape = StepShape(num_sequences, max_blocks, BLOCK, num_heads, 1, 16, num_slots, **sizes)
    work = Workspace(CpuDevice(seed), config, shape)
    index = Index(work.device, IndexShape(scorer, 1, 16, BLOCK), 1)
    return CudaSelector(work, 5, index, *kv, CudaHotSets(work, (), 0))


@given(
    tokens=st.lists(st.integers(0, 300 * BLOCK), min_size=1, max_size=5),
    sinks=st.sampled_from([0, 1, 16, 32, 33]),
    recent=st.sampled_from([1, 16, 64, 70]),
    topk=st.sampled_from([0.1, 0.0371, 1.0, 1000, 2048]),
    policy=st.sampled_from(["lru", "none"]),
)
@settings(max_examples=40, deadline=None)
def test_plans_as_the_reference_does(
    tokens: list[int], sinks: int, recent: int, topk: float, policy: str
) -> None:
    config = SparseConfig(
        sparse_topk=topk,
        sink_tokens=sinks,
        recent_tokens=recent,
        scorer="mean",
        cache_policy=policy,
    )
    work = layer(config, len(tokens), 300)._workspace
    work.begin(np.array(tokens, np.int32))
    for row, count in zip(work.plan, tokens, strict=True):
        where = span(config, count, BLOCK)
        budget = max(config.selected_blocks(count, BLOCK) - where.num_always, 0)
        room = min(budget, where.last - where.first)
        expected = [where.first, where.last, where.count, room, floor_blocks(BLOCK), count]
        assert row[:6].tolist() == expected


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
    selector = layer(config, 2, max_blocks, num_heads, max_blocks, seed % 5, scorer)
    work = selector._workspace
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
    # rtol is too strict for subnormal numbers.
    np.testing.assert_allclose(work.always_mass[0], expected.always_shared, rtol=1e-5, atol=1e-37)
    # Given the device's weights, the choice must equal the oracle's.
    want = oracle.select(
        work.weights[0, middle].copy(), float(work.always_mass[0]), where,
        config.selected_blocks(num_tokens, BLOCK), adaptive_p=adaptive_p,
        floor_blocks=floor_blocks(BLOCK),
    )  # fmt: skip
    number = int(selector.numbers[0])
    assert selector.numbers[1] == 0
    assert selector.blocks[0, :number].tolist() == want.blocks.tolist()
    assert selector.chosen[0, :number].tolist() == want.weights.tolist()
    assert selector.mass[0] == pytest.approx(want.mass, rel=1e-5, abs=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.lists(st.sampled_from([0, 1, 100, 1000, 20000, 50000]), min_size=2, max_size=2),
    topk=st.sampled_from([64, 0.1, 0.7, 1.0]),
    adaptive_p=st.sampled_from([None, 0.3, 0.9, 0.999]),
    grain=st.sampled_from([0.0, 0.5, 3.0]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    piece_blocks=st.sampled_from([100, 1000]),
)
@settings(max_examples=20, deadline=None)
def test_several_thread_blocks_choose_as_one(
    seed: int,
    tokens: list[int],
    topk: float,
    adaptive_p: float | None,
    grain: float,
    spread: float,
    piece_blocks: int,
) -> None:
    """Bit for bit, also after other steps; a grain makes equal weights."""
    rng = np.random.default_rng(seed)
    config = SparseConfig(
        sparse_topk=topk, adaptive_p=adaptive_p, scorer="rot2u", sink_tokens=16, recent_tokens=16
    )
    selectors = []
    for most_by_one in (10000, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workspace, "MOST_CHOSEN_BY_ONE", most_by_one)
            patch.setattr(workspace, "_PIECE_BLOCKS", piece_blocks)
            selectors.append(layer(config, 2, 3128, 2, 8, seed % 5, "rot2u"))
    for length in tokens:
        scores = (rng.standard_normal((2, 2, 3128)) * spread).astype(np.float32)
        if grain:
            scores = np.round(scores / np.float32(grain)) * np.float32(grain)
        scores[:, :, rng.random(3128) < 0.1] = -np.inf
        log_mass = (rng.standard_normal((2, 2)) * 3).astype(np.float32)
        found = []
        for selector in selectors:
            work = selector._workspace
            work.begin(np.array([tokens[0], length], np.int32))
            work.scores[:], work.always_log_mass[:] = scores, log_mass
            selector.choose()
            rows = [
                part[row, : selector.numbers[row]].tobytes()
                for part in (selector.blocks, selector.chosen)
                for row in range(2)
            ]
            found.append((rows, selector.numbers.tolist(), selector.mass.tobytes()))
        assert found[0] == found[1]


def test_unreachable_share_takes_a_whole_selection() -> None:
    where = {"sink_tokens": 16, "recent_tokens": 16}
    config = SparseConfig(sparse_topk=0.5, adaptive_p=0.99, scorer="rot2u", **where)
    selector = layer(config, 1, 100, 1, 100, scorer="rot2u")
    work = selector._workspace
    work.begin(np.array([1600], np.int32))
    work.scores[:], work.always_log_mass[:] = 0.0, -np.inf
    selector.choose()
    assert selector.numbers[0] == 25 and selector.blocks[0, :25].tolist() == [*range(24), 99]


def attend_to_hot_set(
    selector: CudaSelector, tokens: int, blocks: np.ndarray, slots: np.ndarray, pages: np.ndarray
) -> None:
    """Makes `blocks` the hot set, in `slots` with `pages`, and writes the block table."""
    work, hot = selector._workspace, selector.hot
    hot.state[0, slots], hot.block_of[0, slots] = 1, blocks
    hot.slot_of[0, blocks], work.pages[0, slots] = slots, pages
    work.begin(np.array([tokens], np.int32))
    selector.blocks[0, 0], selector.numbers[0] = blocks[-1], 1
    selector.chosen[0, 0] = np.inf
    hot.correct(selector.blocks, selector.chosen, selector.numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(20 * BLOCK, 60 * BLOCK))
@settings(max_examples=10, deadline=None)
def test_whole_budget_equals_dense_bit_for_bit(dtype: str, seed: int, tokens: int) -> None:
    """Dense: block i is in slot i."""
    rng, count = np.random.default_rng(seed), -(-tokens // BLOCK)
    config = SparseConfig(sparse_topk=1.0, scorer="mean")
    kept = rng.standard_normal((2, count, BLOCK, 16)).astype(np.float32)
    query = rng.standard_normal((1, 2, 16)).astype(np.float32) * 3
    found = []
    for order in (np.arange(count), rng.permutation(count)):
        where = rng.permutation(count)
        stored = np.empty_like(kept)
        stored[:, where] = kept
        if dtype == "bfloat16":
            stored = (stored.view(np.uint32) >> 16).astype(np.uint16)
        keys, values = (Pages(part, dtype, 16 * BLOCK, 16, 16) for part in stored)
        selector = layer(config, 1, count, 2, count, seed % 5, kv=(keys, values))
        attend_to_hot_set(selector, tokens, np.arange(count), order, where)
        out = np.zeros((1, 2, 16), np.float32)
        selector.attend(Queries(query, "float32", 32, 16), out)
        found.append(out)
        assert selector.hot.table[0].tolist() == where.tolist()
        assert selector.hot.lengths[0] == tokens
    assert found[0].tobytes() == found[1].tobytes()


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from([33, 1000, 2**16 * BLOCK, 2**16 * BLOCK + 1, 70000 * BLOCK - 3]),
    num_slots=st.sampled_from([3, 40, 1100]),
)
@settings(max_examples=15, deadline=None)
def test_block_table_has_the_contexts_order(seed: int, tokens: int, num_slots: int) -> None:
    """A thread block puts 2^16 blocks in order at a time."""
    rng, count = np.random.default_rng(seed), -(-tokens // BLOCK)
    selector = layer(SparseConfig(scorer="mean"), 1, count, 1, num_slots, seed % 5)
    number = int(rng.integers(1, min(num_slots, count) + 1))
    blocks = np.append(rng.choice(count - 1, number - 1, replace=False), count - 1)
    slots = rng.permutation(num_slots)[:number]
    pages = rng.permutation(1000 + number)[:number]
    attend_to_hot_set(selector, tokens, blocks, slots, pages)
    hot, order = selector.hot, np.argsort(blocks)
    assert hot.slots[0, :number].tolist() == slots[order].tolist()
    assert hot.table[0, :number].tolist() == pages[order].tolist()
    length = number * BLOCK - (count * BLOCK - tokens)
    assert hot.counts[0, [ATTENDED, SEQUENCE_TOKENS]].tolist() == [number, length]
    assert hot.lengths[0] == length


def upload(hot: HotSet, selector: CudaSelector) -> None:
    """To the device's sequence 1."""
    device, work, count = selector.hot, selector._workspace, hot.span.count
    device.state[1], device.block_of[1] = hot.state, hot.block_of
    device.used_at[1] = hot.used_at
    device.slot_of[1], work.has_copy[1] = -1, 0
    device.slot_of[1, :count] = hot.slot_of[:count]
    work.has_copy[1, :count] = hot.has_copy[:count]
    device.capacities[1], device.clocks[1] = hot.capacity_blocks, hot.clock
    work.plan[1, :3] = hot.span.first, hot.span.last, count


class StepMachine(RuleBasedStateMachine):
    """Compares the device's hot set tables with `HotSet`. The device runs steps and growth; all
    other changes are made in the reference and copied to it."""

    @initialize(
        capacity=st.integers(4, 40),
        spare=st.integers(0, 4),
        policy=st.sampled_from(["lru", "none"]),
        count=st.integers(4, 60),
        corrections=st.integers(0, 4),
        seed=st.integers(0, 3),
        prefetch=st.integers(1, 5),
    )
    def begin(
        self,
        capacity: int,
        spare: int,
        policy: str,
        count: int,
        corrections: int,
        seed: int,
        prefetch: int,
    ) -> None:
        self.hot = HotSet(capacity, spare, policy)
        where = {"sink_tokens": 16, "recent_tokens": 32, "scorer": "mean"}
        config = SparseConfig(cache_policy=policy, max_correction_blocks=corrections, **where)
        self.num_slots = capacity + spare
        sizes = {"num_slots": self.num_slots, "max_prefetch": prefetch}
        self.selector = layer(config, 2, 200, seed=seed, **sizes)
        self.loading: list[int] = []
        self.wanted: np.ndarray = np.empty(0, np.int32)
        self.reach(count)
        self.hot.seed(np.array([0, count - 2, count - 1], np.int32))

    def reach(self, count: int) -> None:
        self.hot.extend(CandidateSpan(1, count - 2, count), count, count)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        where, selector, device = self.hot.span, self.selector, self.selector.hot
        work = selector._workspace
        most = min(12, work.max_selected - 4)
        chosen = data.draw(st.lists(st.integers(0, where.count - 1), max_size=most))
        weights = {b: float(data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))) for b in chosen}
        weights |= {int(b): np.inf for b in where.always}
        selection = selection_of(weights)
        upload(self.hot, self.selector)
        number = len(selection.blocks)
        selector.numbers[:] = [0, number]
        selector.blocks[1, :number] = selection.blocks
        selector.chosen[1, :number] = selection.weights
        device.correct(selector.blocks, selector.chosen, selector.numbers)
        expected = self.hot.step(selection, work.config.max_correction_blocks)
        counts, load = device.counts[1], expected.load
        found = device.loads[1, :, : counts[LOADED]].tolist()
        assert found[:2] == [load.blocks.tolist(), load.slots.tolist()]
        victims = device.victims[1, : counts[VICTIMS]].tolist()
        assert sorted(victims) == sorted(load.victims.tolist())
        wanted = expected.prefetch.tolist()[: device.prefetch.shape[1]]
        assert device.prefetch[1, : counts[PREFETCH]].tolist() == wanted
        assert counts[SELECTED] == expected.num_selected
        assert counts[RESIDENT] == expected.num_resident
        self.compare()
        self.wanted = expected.prefetch

    def compare(self) -> None:
        hot, device, count = self.hot, self.selector.hot, self.hot.span.count
        assert device.state[1].tolist() == hot.state.tolist()
        assert device.block_of[1].tolist() == hot.block_of.tolist()
        assert device.slot_of[1, :count].tolist() == hot.slot_of[:count].tolist()
        mapped = hot.state == 1
        assert device.used_at[1][mapped].tolist() == hot.used_at[mapped].tolist()
        assert device.clocks[1] == hot.clock

    @precondition(lambda self: self.hot.span.count < 200)
    @rule(more=st.integers(1, 3))
    def grow(self, more: int) -> None:
        """The next step computes these blocks, so they need slots at once. Without room nothing
        may change."""
        hot, device, work = self.hot, self.selector.hot, self.selector._workspace
        count = min(hot.span.count + more, 200)
        upload(self.hot, self.selector)
        device.known[1], work.faults[0] = hot.span.count, 0
        work.begin(np.array([0, count * BLOCK], np.int32))
        device.grow()
        try:
            computed = hot.extend(CandidateSpan(1, count - 2, count), count).swap_out
        except HotKVError:
            assert work.faults[0] == 1
        else:
            assert work.faults[0] == 0 and device.known[1] == count
            hot.swapped_out(computed, True)
        self.compare()

    @rule(count=st.integers(0, 4))
    def prefetch(self, count: int) -> None:
        self.loading += self.hot.begin_prefetch(self.wanted[:count]).slots.tolist()

    @rule(count=st.integers(0, 4))
    def prefetched(self, count: int) -> None:
        self.hot.finish_prefetch(np.array(self.loading[:count], np.int32))
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


def test_thousands_of_blocks_join_heaviest_first() -> None:
    """More than a thread block has threads; a prefetch of some of them is under way."""
    rng, count = np.random.default_rng(0), 3000
    hot = HotSet(2100, 500, "lru")
    where = {"sink_tokens": 16, "recent_tokens": 32, "scorer": "mean"}
    config = SparseConfig(sparse_topk=1.0, max_correction_blocks=1700, **where)
    sizes = {"num_slots": 2600, "max_prefetch": 1200}
    selector = layer(config, 2, count, **sizes)
    device = selector.hot
    hot.extend(CandidateSpan(1, count - 2, count), count, count)
    hot.seed(np.array([0, count - 2, count - 1], np.int32))
    hot.begin_prefetch(rng.permutation(count)[:400].astype(np.int32))
    upload(hot, selector)
    blocks = np.sort(rng.permutation(np.arange(1, count - 2))[:2800])
    weights = {int(b): float(w) for b, w in zip(blocks, rng.integers(1, 50, 2800), strict=True)}
    selection = selection_of(weights | dict.fromkeys((0, count - 2, count - 1), np.inf))
    number = len(selection.blocks)
    selector.numbers[:] = [0, number]
    selector.blocks[1, :number] = selection.blocks
    selector.chosen[1, :number] = selection.weights
    device.correct(selector.blocks, selector.chosen, selector.numbers)
    expected = hot.step(selection, 1700)
    loads = device.loads[1, :, : device.counts[1, LOADED]].tolist()
    assert loads == [expected.load.blocks.tolist(), expected.load.slots.tolist()]
    found = device.prefetch[1, : device.counts[1, PREFETCH]].tolist()
    assert len(loads[0]) == 1700 and found == expected.prefetch.tolist()[:1200]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SparseConfig(fusion={"mean": 1.0}), "on CUDA"),
        (SparseConfig(), "layer 5 is scored by rot2u; the index is mean"),
    ],
)
def test_refuses_what_the_device_cannot(config: SparseConfig, words: str) -> None:
    with pytest.raises(HotKVError, match=words):
        layer(config, 1, 10)
