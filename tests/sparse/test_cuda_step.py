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
from tests.sparse.cuda_support import CpuDevice, needs_compiler

pytestmark = [needs_compiler, pytest.mark.long]
HEADS, GROUP, SIZE, LAYER = 2, 3, 64, 4


class Engine:
    """One sequence beside an absent one: keys and values, a cache of pages, an arena with copies of
    complete blocks, the reference hot set."""

    def __init__(
        self, config: SparseConfig, block: int, num_tokens: int, num_slots: int, seed: int
    ) -> None:
        self.config, self.block, self.rng = config, block, np.random.default_rng(seed)
        self.num_tokens, self.max_blocks = num_tokens, -(-num_tokens // block) + 6
        self.keys = self.rng.standard_normal((self.max_blocks * block, HEADS, SIZE)).astype(
            np.float32
        )
        self.values = self.rng.standard_normal(self.keys.shape).astype(np.float32)
        shape = StepShape(2, self.max_blocks, block, HEADS * GROUP, HEADS, SIZE, num_slots)
        self.cache = np.full((2 * num_slots, 2, block, HEADS, SIZE), np.nan, np.float32)
        fragment = self.cache[0, 0].nbytes
        self.arena = np.full((self.max_blocks, 2 * fragment + 48), 0xEE, np.uint8)
        fragments = [
            Fragment(16, self.cache.ctypes.data, fragment),
            Fragment(32 + fragment, self.cache.ctypes.data + fragment, fragment),
        ]
        device = CpuDevice(seed)
        self.work = Workspace(device, config, shape)
        self.work.pages[:] = self.rng.permutation(2 * num_slots).reshape(2, -1)
        self.index = Index(device, IndexShape("rot2u", HEADS, SIZE, block), self.max_blocks)
        at = [
            Pages(
                self.cache.ctypes.data + part * fragment,
                "float32",
                2 * block * HEADS * SIZE,
                HEADS * SIZE,
                SIZE,
            )
            for part in (0, 1)
        ]
        self.selector = CudaSelector(
            self.work, LAYER, self.index, *at, CudaHotSets(self.work, fragments, 2 * fragment)
        )
        self.rows = self.rng.permutation(self.max_blocks).astype(np.int32)
        self.hot = HotSet(num_slots - 2, 2, config.cache_policy)
        self.num_loaded = 0
        self.prefill()

    def prefill(self) -> None:
        complete, where = (
            self.num_tokens // self.block,
            span(self.config, self.num_tokens, self.block),
        )
        pages = Pages(self.keys, "float32", self.block * HEADS * SIZE, HEADS * SIZE, SIZE)
        blocks = np.arange(complete, dtype=np.int32)
        self.index.build(pages, blocks, self.rows[:complete].copy(), complete)
        for block in range(complete):
            self.store(block)
        begun = self.hot.extend(where, complete, complete).new.blocks
        first = np.array([b for b in where.always if b < complete], np.int32)
        seeded = np.concatenate(
            [begun, self.hot.seed(np.concatenate([first, where.candidates[:3]])).blocks]
        )
        self.selector.hot.place(0, seeded, self.hot.capacity_blocks, where.count)
        self.selector.hot.used_at[0] = 0
        self.selector.hot.clocks[0] = 0
        for block in seeded.tolist():
            self.page(block)[:] = self.content(block)

    def content(self, block: int) -> np.ndarray:
        """[2, tokens, heads, channels]"""
        part = slice(block * self.block, (block + 1) * self.block)
        return np.stack([self.keys[part], self.values[part]])

    def page(self, block: int) -> np.ndarray:
        return self.cache[self.work.pages[0, self.selector.hot.slot_of[0, block]]]

    def store(self, block: int) -> None:
        keys, values = self.content(block).reshape(2, -1).view(np.uint8)
        (
            self.arena[block, 16 : 16 + keys.size],
            self.arena[block, 32 + keys.size : 32 + 2 * keys.size],
        ) = keys, values
        self.work.set_blocks(
            0, block, self.rows[block : block + 1], np.array([self.arena[block].ctypes.data])
        )

    def query(self) -> np.ndarray:
        around = self.keys[self.rng.integers(0, self.num_tokens, 4)].sum(axis=0)
        return (
            np.repeat(around, GROUP, axis=0) * 1.5 + self.rng.standard_normal((HEADS * GROUP, SIZE))
        ).astype(np.float32)

    def lengthen(self, more: int) -> None:
        """The context gains tokens; blocks that fill are stored, and their representations built
        from the engine's pages."""
        before, self.num_tokens = self.num_tokens, self.num_tokens + more
        where = span(self.config, self.num_tokens, self.block)
        growth = self.hot.extend(where, self.num_tokens // self.block)
        self.work.begin(np.array([self.num_tokens, 0], np.int32))
        self.selector.hot.grow()
        assert (
            self.selector.hot.slot_of[0, : where.count].tolist()
            == self.hot.slot_of[: where.count].tolist()
        )
        assert not self.work.faults.any()
        for token in range(before, self.num_tokens):
            block, place = divmod(token, self.block)
            self.page(block)[:, place] = self.keys[token], self.values[token]
        for block in growth.swap_out.tolist():
            pages = self.selector._keys
            page = self.work.pages[0, self.selector.hot.slot_of[0, block]]
            self.index.build(
                pages, np.array([page], np.int32), self.rows[block : block + 1].copy(), 1
            )
            self.store(block)
        self.hot.swapped_out(growth.swap_out, True)

    def step(self) -> None:
        query, where = self.query(), span(self.config, self.num_tokens, self.block)
        queries = Queries(
            np.stack([query, np.full_like(query, np.nan)]), "float32", query.size, SIZE
        )
        self.selector.step(queries)
        number = int(self.selector.numbers[0])
        found = Selection(
            self.selector.blocks[0, :number].copy(),
            self.selector.chosen[0, :number].copy(),
            float(self.selector.mass[0]),
        )
        self.check_selection(query, where.always, found)
        expected = self.hot.step(found, self.config.max_correction_blocks)
        counts = self.selector.hot.counts[0]
        self.num_loaded += int(counts[LOADED])
        assert (
            self.selector.hot.loads[0, 0, : counts[LOADED]].tolist()
            == expected.load.blocks.tolist()
        )
        assert self.selector.hot.state[0].tolist() == self.hot.state.tolist()
        assert (
            self.selector.hot.slot_of[0, : where.count].tolist()
            == self.hot.slot_of[: where.count].tolist()
        )
        self.check_attention(query, expected.map.blocks)
        assert not self.work.faults.any() and not self.selector.hot.counts[1].any()

    def check_selection(self, query: np.ndarray, always: np.ndarray, found: Selection) -> None:
        tokens = np.flatnonzero(np.isin(np.arange(self.num_tokens) // self.block, always))
        log_mass = exact_log_mass(query, self.keys[tokens])
        np.testing.assert_allclose(self.work.always_log_mass[0], log_mass, rtol=1e-5, atol=1e-4)
        shape = self.index.shape
        pool = self.index.pool[:, : shape.kv_heads * shape.head_bytes].reshape(
            -1, shape.kv_heads, shape.head_bytes
        )
        count = -(-self.num_tokens // self.block)
        rows = np.where(
            np.arange(count) < self.num_tokens // self.block, self.rows[:count], 0
        ).astype(np.int32)
        sources = {"rot2u": Source(pool)}
        want = select_layer(
            self.config,
            LAYER,
            query,
            sources,
            rows,
            log_mass,
            self.num_tokens,
            self.block,
        )
        # What lies at the bound may fall to either side of it by rounding.
        assert set(want.blocks.tolist()) ^ set(found.blocks.tolist()) <= set(
            want.blocks[np.argsort(want.weights)[:1]].tolist()
        ) | set(found.blocks[np.argsort(found.weights)[:1]].tolist())
        assert found.mass == pytest.approx(want.mass, abs=2e-4)

    def check_attention(self, query: np.ndarray, blocks: np.ndarray) -> None:
        """The table names what the reference's map does, its pages hold it, and attention over it
        is right."""
        attended, tokens = self.selector.hot.counts[0, [ATTENDED, SEQUENCE_TOKENS]].tolist()
        slots = self.selector.hot.slots[0, :attended]
        held = self.selector.hot.block_of[0, slots]
        assert (
            sorted(held.tolist()) == blocks.tolist()
            and held[-1] == (self.num_tokens - 1) // self.block
        )
        pages = self.selector.hot.table[0, :attended]
        assert pages.tolist() == self.work.pages[0, slots].tolist()
        cache = self.cache[pages].swapaxes(0, 1).reshape(2, -1, HEADS, SIZE)[:, :tokens]
        truth = np.concatenate([self.content(b) for b in held.tolist()], axis=1)[:, :tokens]
        assert np.array_equal(cache, truth)
        scores = np.einsum("hgd,thd->hgt", query.reshape(HEADS, GROUP, SIZE), truth[0]) / np.sqrt(
            SIZE
        )
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = np.einsum(
            "hgt,thd->hgd", shares / shares.sum(axis=-1, keepdims=True), truth[1]
        ).reshape(-1, SIZE)
        out, log_mass = (
            np.full((2, HEADS * GROUP, SIZE), np.nan, np.float32),
            np.zeros((2, HEADS * GROUP), np.float32),
        )
        self.selector.attend(
            Queries(np.stack([query, query]), "float32", query.size, SIZE), out, log_mass=log_mass
        )
        np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            log_mass[0], np.log(np.exp(scores).sum(axis=-1)).reshape(-1), rtol=1e-4
        )
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
