"""A layer's decode steps as a whole on CUDA's kernels, run on the CPU, against `select_layer`,
`HotSet` and plain attention."""

import numpy as np
import pytest

from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.hotsets import ATTENDED, LOADED, SEQUENCE_TOKENS, CudaHotSets, Fragment
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace
from hotkv_sparse.hotset import HotSet
from hotkv_sparse.selection import Selection, Source, exact_log_mass, select_layer, span
from tests.sparse.cuda_support import CpuDevice, needs_compiler, place

pytestmark = [needs_compiler, pytest.mark.long]
HEADS, GROUP, SIZE, LAYER = 2, 3, 64, 4


class Engine:
    """A sequence next to an absent sequence: keys and values, a cache of pages, an arena with
    copies of complete blocks, the reference hot set."""

    def __init__(
        self, config: SparseConfig, block: int, num_tokens: int, num_slots: int, seed: int
    ) -> None:
        self.config, self.block, self.rng = config, block, np.random.default_rng(seed)
        self.num_tokens, self.max_blocks = num_tokens, -(-num_tokens // block) + 6
        shape = (self.max_blocks * block, HEADS, SIZE)
        self.keys, self.values = self.rng.standard_normal((2, *shape)).astype(np.float32)
        self.cache = np.full((2 * num_slots, 2, block, HEADS, SIZE), np.nan, np.float32)
        half, at = self.cache[0, 0].nbytes, self.cache.ctypes.data
        self.arena = np.full((self.max_blocks, 2 * half + 48), 0xEE, np.uint8)
        fragments = [Fragment(16, at, half), Fragment(32 + half, at + half, half)]
        device = CpuDevice(seed)
        sizes = StepShape(2, self.max_blocks, block, HEADS * GROUP, HEADS, SIZE, num_slots)
        self.work = Workspace(device, config, sizes)
        self.work.pages[:] = self.rng.permutation(2 * num_slots).reshape(2, -1)
        self.index = Index(device, IndexShape("rot2u", HEADS, SIZE, block), self.max_blocks)
        page = (2 * block * HEADS * SIZE, HEADS * SIZE, SIZE)
        pages = [Pages(at + part * half, "float32", *page) for part in (0, 1)]
        hot = CudaHotSets(self.work, fragments, 2 * half)
        self.selector = CudaSelector(self.work, LAYER, self.index, *pages, hot)
        self.rows = self.rng.permutation(self.max_blocks).astype(np.int32)
        self.hot = HotSet(num_slots - 2, 2, config.cache_policy)
        self.num_loaded = 0
        self.prefill()

    def prefill(self) -> None:
        complete = self.num_tokens // self.block
        where, device = span(self.config, self.num_tokens, self.block), self.selector.hot
        pages = Pages(self.keys, "float32", self.block * HEADS * SIZE, HEADS * SIZE, SIZE)
        blocks = np.arange(complete, dtype=np.int32)
        self.index.build(pages, blocks, self.rows[:complete].copy(), complete)
        for block in range(complete):
            self.store(block)
        begun = self.hot.extend(where, complete, complete).new.blocks
        first = np.array([b for b in where.always if b < complete], np.int32)
        seeds = self.hot.seed(
            np.concatenate([first, np.arange(where.first, where.first + 3)])
        ).blocks
        seeded = np.concatenate([begun, seeds])
        place(device, seeded, self.hot.capacity_blocks, where.count)
        device.used_at[0] = 0
        device.clocks[0] = 0
        for block in seeded.tolist():
            self.page(block)[:] = self.content(block)

    def content(self, block: int) -> np.ndarray:
        """Returns a block's keys and values, [2, tokens, heads, channels]."""
        part = slice(block * self.block, (block + 1) * self.block)
        return np.stack([self.keys[part], self.values[part]])

    def page(self, block: int) -> np.ndarray:
        return self.cache[self.work.pages[0, self.slot_of(block)]]

    def store(self, block: int) -> None:
        keys, values = self.content(block).reshape(2, -1).view(np.uint8)
        slot, size = self.arena[block], keys.size
        slot[16 : 16 + size], slot[32 + size : 32 + 2 * size] = keys, values
        address = np.array([slot.ctypes.data])
        self.work.set_blocks(0, block, self.rows[block : block + 1], address)

    def query(self) -> np.ndarray:
        around = self.keys[self.rng.integers(0, self.num_tokens, 4)].sum(axis=0)
        noise = self.rng.standard_normal((HEADS * GROUP, SIZE))
        return (np.repeat(around, GROUP, axis=0) * 1.5 + noise).astype(np.float32)

    def lengthen(self, more: int) -> None:
        """Adds tokens to the context; blocks that fill are stored, and their representations built
        from the engine's pages."""
        before, self.num_tokens = self.num_tokens, self.num_tokens + more
        where = span(self.config, self.num_tokens, self.block)
        growth = self.hot.extend(where, self.num_tokens // self.block)
        self.work.begin(np.array([self.num_tokens, 0], np.int32))
        self.selector.hot.grow()
        self.check_slots(where.count)
        assert not self.work.faults.any()
        for token in range(before, self.num_tokens):
            block, place = divmod(token, self.block)
            self.page(block)[:, place] = self.keys[token], self.values[token]
        for block in growth.swap_out.tolist():
            page, row = self.work.pages[0, self.slot_of(block)], self.rows[block : block + 1].copy()
            self.index.build(self.selector._keys, np.array([page], np.int32), row, 1)
            self.store(block)
        self.hot.swapped_out(growth.swap_out, True)

    def slot_of(self, block: int) -> int:
        return int(self.selector.hot.slot_of[0, block])

    def check_slots(self, count: int) -> None:
        assert self.selector.hot.slot_of[0, :count].tolist() == self.hot.slot_of[:count].tolist()

    def step(self) -> None:
        query, where = self.query(), span(self.config, self.num_tokens, self.block)
        selector, device = self.selector, self.selector.hot
        both = np.stack([query, np.full_like(query, np.nan)])
        selector.step(Queries(both, "float32", query.size, SIZE))
        number, mass = int(selector.numbers[0]), float(selector.mass[0])
        blocks, weights = selector.blocks[0, :number], selector.chosen[0, :number]
        found = Selection(blocks.copy(), weights.copy(), mass)
        self.check_selection(query, where.always, found)
        expected = self.hot.step(found, self.config.max_correction_blocks)
        loaded = int(device.counts[0][LOADED])
        self.num_loaded += loaded
        assert device.loads[0, 0, :loaded].tolist() == expected.load.blocks.tolist()
        assert device.state[0].tolist() == self.hot.state.tolist()
        self.check_slots(where.count)
        self.check_attention(query, expected.map.blocks)
        assert not self.work.faults.any() and not device.counts[1].any()

    def check_selection(self, query: np.ndarray, always: np.ndarray, found: Selection) -> None:
        tokens = np.flatnonzero(np.isin(np.arange(self.num_tokens) // self.block, always))
        log_mass = exact_log_mass(query, self.keys[tokens])
        np.testing.assert_allclose(self.work.always_log_mass[0], log_mass, rtol=1e-5, atol=1e-4)
        heads, size = self.index.shape.kv_heads, self.index.shape.head_bytes
        pool = self.index.pool[:, : heads * size].reshape(-1, heads, size)
        blocks = np.arange(-(-self.num_tokens // self.block))
        is_complete = blocks < self.num_tokens // self.block
        rows = np.where(is_complete, self.rows[: len(blocks)], 0).astype(np.int32)
        context = (log_mass, self.num_tokens, self.block)
        sources = {"rot2u": Source(pool)}
        want = select_layer(self.config, LAYER, query, sources, rows, *context)
        # Blocks at the bound may fall to either side of it by rounding.
        mine, theirs = set(found.blocks.tolist()), set(want.blocks.tolist())
        bound = {int(one.blocks[np.argmin(one.weights)]) for one in (want, found)}
        assert mine ^ theirs <= bound
        assert found.mass == pytest.approx(want.mass, abs=2e-4)

    def check_attention(self, query: np.ndarray, blocks: np.ndarray) -> None:
        """Checks that the table names the same blocks as the reference's map, that its pages hold
        them, and that attention over it is right."""
        device = self.selector.hot
        attended, tokens = device.counts[0, [ATTENDED, SEQUENCE_TOKENS]].tolist()
        slots, pages = device.slots[0, :attended], device.table[0, :attended]
        held = device.block_of[0, slots].tolist()
        assert sorted(held) == blocks.tolist() and held[-1] == (self.num_tokens - 1) // self.block
        assert pages.tolist() == self.work.pages[0, slots].tolist()
        cache = self.cache[pages].swapaxes(0, 1).reshape(2, -1, HEADS, SIZE)[:, :tokens]
        keys, values = np.concatenate([self.content(b) for b in held], axis=1)[:, :tokens]
        assert np.array_equal(cache, [keys, values])
        grouped = query.reshape(HEADS, GROUP, SIZE)
        scores = np.einsum("hgd,thd->hgt", grouped, keys) / np.sqrt(SIZE)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        expected = np.einsum("hgt,thd->hgd", shares, values).reshape(-1, SIZE)
        out = np.full((2, HEADS * GROUP, SIZE), np.nan, np.float32)
        log_mass = np.zeros((2, HEADS * GROUP), np.float32)
        queries = Queries(np.stack([query, query]), "float32", query.size, SIZE)
        self.selector.attend(queries, out, log_mass=log_mass)
        np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)
        exact = np.log(np.exp(scores).sum(axis=-1)).reshape(-1)
        np.testing.assert_allclose(log_mass[0], exact, rtol=1e-4)
        assert (out[1] == 0).all() and np.isneginf(log_mass[1]).all()


@pytest.mark.parametrize(
    ("options", "block", "num_tokens", "num_slots"),
    [
        pytest.param({}, 16, 1500, 24, marks=pytest.mark.long),
        ({"max_correction_blocks": 2}, 32, 2900, 24),
        ({"cache_policy": "none", "sparse_topk": 0.2}, 16, 1000, 20),
        ({"adaptive_p": 0.7, "sparse_topk": 0.4}, 16, 1015, 40),
    ],
)
def test_steps_are_the_references_steps(
    options: dict[str, object], block: int, num_tokens: int, num_slots: int
) -> None:
    config = SparseConfig(min_context_tokens=0, **options)  # type: ignore[arg-type]
    engine = Engine(config, block, num_tokens, num_slots, seed=num_tokens)
    for more in (1, 1, 15, 3, 1, 16):
        engine.lengthen(more)
        engine.step()
    assert engine.num_loaded > 0


@pytest.mark.parametrize(("policy", "seed"), [("lru", 1), ("lru", 2), ("none", 3)])
def test_a_full_hot_set_makes_the_references_steps(policy: str, seed: int) -> None:
    """Adds blocks that are in host memory only, and fills the hot set by selections, so that always
    kept blocks take the slots of selected ones. Each step must be the reference's."""
    config = SparseConfig(
        sparse_topk=30, sink_tokens=1, recent_tokens=3, max_correction_blocks=1, cache_policy=policy
    )
    rng, capacity, count, num_taken = np.random.default_rng(seed), 9, 15, 0
    work = Workspace(
        CpuDevice(seed), config, StepShape(1, 60, 1, HEADS * GROUP, HEADS, 64, capacity)
    )
    device, hot = CudaHotSets(work, [], 0), HotSet(capacity, 0, policy)
    work.has_copy[:] = 1
    hot.extend(span(config, count, 1), count, count)
    seeded = hot.seed(np.arange(capacity, dtype=np.int32)).blocks
    place(device, seeded, capacity, count)
    device.used_at[0] = device.clocks[0] = 0
    # A block without a copy is never evicted.
    work.has_copy[0, 4] = hot.has_copy[4] = 0
    for _ in range(30):
        count += int(rng.integers(0, 3))
        where = span(config, count, 1)
        hot.extend(where, count, count)
        device.known[0] = count
        work.begin(np.array([count], np.int32))
        mapped = hot.map().blocks
        some = mapped if rng.integers(2) else rng.integers(0, count, 8)
        blocks = np.unique(np.concatenate([where.always, some])).astype(np.int32)
        weights = rng.random(len(blocks)).astype(np.float32)
        weights[np.isin(blocks, where.always)] = np.inf
        listed, heavy = np.zeros((2, 1, work.max_selected), np.float32)
        listed = listed.astype(np.int32)
        listed[0, : len(blocks)], heavy[0, : len(blocks)] = blocks, weights
        device.correct(listed, heavy, np.array([len(blocks)], np.int32))
        found = hot.step(Selection(blocks, weights, 1.0), config.max_correction_blocks)
        loaded, num_victims, num_ahead = device.counts[0, :3].tolist()
        assert device.loads[0, 0, :loaded].tolist() == found.load.blocks.tolist()
        assert sorted(device.victims[0, :num_victims]) == sorted(found.load.victims)
        assert device.prefetch[0, :num_ahead].tolist() == found.prefetch[:8].tolist()
        assert device.state[0].tolist() == hot.state.tolist()
        assert device.slot_of[0, :count].tolist() == hot.slot_of[:count].tolist()
        assert set(where.always) <= set(found.map.blocks)
        num_taken += len(set(found.load.victims) & set(blocks))
    assert num_taken or policy == "none"
