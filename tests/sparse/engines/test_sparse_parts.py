"""Parts of sparse decode alone."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from hotkv_client.types import ResidencyOpened
from hotkv_sparse import SparseConfig, span
from hotkv_sparse.selection import exact_log_mass, select_layer
from hotkv_sparse.vllm import attention_layers
from hotkv_sparse.vllm.cpu.backend import HotAttentionBackend, HotAttentionImpl
from hotkv_sparse.vllm.cpu.batch import SparseLayer, by_kv_head
from hotkv_sparse.vllm.cpu.counters import block_mass
from hotkv_sparse.vllm.cpu.key_pages import KeyPacking, key_packing, unpacked_keys
from hotkv_sparse.vllm.cpu.pool import BlockReprManager, LayerShape
from hotkv_sparse.vllm.cpu.resident_pages import slot_places
from hotkv_sparse.vllm.cpu.resident_worker import ResidentWorker
from hotkv_sparse.vllm.cpu.sequence import LayerSequence
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.cuda.backend import HotFlashBackend
from hotkv_sparse.vllm.scheduler.rows import ResidentOnly, RowNames, SparseRows
from hotkv_sparse.vllm.step import KeptBlocks, ResidentRow, ResidentStep
from hotkv_vllm import plugin
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConfigError, ConnectorConfig
from tests.sparse.engines.sparse_parts import BLOCK, GROUP, HEADS, QUERIES, Cache
from tests.vllm.tiny import transfer_config, write_model

current_platform.import_kernels()
# Kernels for AMX need the kernel's permission, which engines get from their matrix products.
torch.cpu._init_amx()
HEAD_SIZE = 64


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (HALF, "auto"),
        (torch.float16, "auto"),
        (torch.float32, "auto"),
        (HALF, "fp8_e4m3"),
        (HALF, "fp8_e5m2"),
        (torch.float32, "fp8"),
    ],
)
@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256])
def test_keys_are_read_back_from_vllms_pages(
    dtype: torch.dtype, cache_dtype: str, head_size: int
) -> None:
    if cache_dtype != "auto" and head_size % 32:
        pytest.skip("vLLM has no such kernel")
    cache = Cache(5, head_size, dtype, cache_dtype=cache_dtype)
    blocks = np.array([3, 0, 4], np.int32)
    expected = cache.keys.float().numpy().reshape(5, BLOCK, HEADS, head_size)[blocks]
    assert np.array_equal(cache.keys_of(blocks), expected)


@pytest.mark.parametrize(("run", "pair"), [(32, 1), (16, 1), (16, 2), (32, 4), (32, 64)])
def test_packings_of_other_processors(run: int, pair: int) -> None:
    """Groups of `run` tokens, in each groups of `pair` channels."""
    keys = torch.randn((5, HEADS, BLOCK, 64))
    split = keys.view(5, HEADS, BLOCK // run, run, 64 // pair, pair)
    pages = torch.zeros((5, HEADS, BLOCK, 128))
    pages.view(5, HEADS, 2, -1)[:, :, 0] = split.permute(0, 1, 2, 4, 3, 5).reshape(5, HEADS, -1)
    numbers = (
        torch.arange(BLOCK * 64)
        .view(BLOCK // run, run, 64 // pair, pair)
        .permute(0, 2, 1, 3)
        .reshape(-1)
    )
    blocks = torch.tensor([2, 0])
    for packing in (KeyPacking(run, pair), KeyPacking(0, 0, numbers.argsort())):
        found = unpacked_keys(pages, blocks, packing, pages.dtype)
        assert torch.equal(found, keys[blocks].transpose(1, 2))


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_the_packing_of_any_kernel_is_found(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    numbers = torch.arange(tokens * 64)

    def found(packed: torch.Tensor) -> KeyPacking:
        def write(keys: Any, _: Any, key_pages: torch.Tensor, *__: Any, **___: Any) -> None:
            key_pages[0] = keys.reshape(-1)[packed].view(1, tokens, 64)

        monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", write)
        return key_packing(tokens, 64, torch.float32, "another")

    for run, pair in ((tokens, 64), (tokens, 1), (16, 4), *[(32, 2)] * (tokens > 16)):
        split = numbers.view(tokens // run, run, 64 // pair, pair).permute(0, 2, 1, 3)
        assert found(split.reshape(-1)) == KeyPacking(run, pair)
    order = found(numbers.flip(0)).order
    assert order is not None and torch.equal(order, numbers.flip(0))
    with pytest.raises(Unsupported, match="another in a way that can't be read back"):
        found(numbers // 2)


# ------------------------------------------------------------------------------------ vLLM's kernel


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return EngineArgs(
        str(write_model(tmp_path_factory.mktemp("model"))), skip_tokenizer_init=True
    ).create_engine_config()


def metadata(
    tables: list[list[int]],
    seq_lens: list[int],
    num_queries: list[int],
    cache: Cache,
    dtype: torch.dtype = torch.float32,
) -> CPUAttentionMetadata:
    """seq_lens, num_queries: context and new tokens by row."""
    width = max(len(table) for table in tables) + 2
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    starts = torch.tensor(np.concatenate([[0], np.cumsum(num_queries)]), dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    shape = (len(tables), QUERIES, HEADS, HEAD_SIZE, lengths, dtype, starts)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        *shape, True, -1, cache.isa, True, None, cache.cache_dtype
    )
    slots = torch.full((sum(num_queries),), -1, dtype=torch.int64)
    return CPUAttentionMetadata(
        sum(num_queries), max(num_queries), starts, max(seq_lens), lengths, table, slots, schedule
    )


class Chosen(SparseWorker):
    """chosen: blocks by layer and request; None: all."""

    chosen: dict[tuple[str, str], list[int] | None]

    def _select(self, layer: SparseLayer, row: Any, query_QD: Any) -> Any:
        chosen = self.chosen[layer.name, row.request_id]
        return np.array(range(len(row.blocks_C)) if chosen is None else chosen, np.int32)


def forward(
    config: VllmConfig,
    worker: SparseWorker | None,
    cache: Cache,
    layer: SparseLayer,
    given: Any,
    query: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the queries too.

    worker: None: vLLM's own attention.
    query: None: random.
    """
    with set_current_vllm_config(config):
        kind = cache.cache_dtype
        one = HotAttentionImpl(QUERIES, HEAD_SIZE, HEAD_SIZE**-0.5, HEADS, None, None, kind)
    if worker is not None:
        one.attach(worker, layer)
    if query is None:
        query = torch.randn((given.num_actual_tokens, QUERIES, HEAD_SIZE))
    output = torch.zeros_like(query)
    holder: Any = SimpleNamespace(
        isa=cache.isa, _k_scale_float=cache.key_scale, _v_scale_float=cache.value_scale
    )
    nothing: Any = None
    one.forward(holder, query, nothing, nothing, cache.pages, given, output)
    return query, output


def attention(
    cache: Cache, query: torch.Tensor, table: list[int], positions: Sequence[int], length: int
) -> torch.Tensor:
    """positions: indices in `table`."""
    tokens = [
        table[p] * BLOCK + t for p in positions for t in range(BLOCK) if p * BLOCK + t < length
    ]
    keys, values = (
        t[tokens].float().repeat_interleave(GROUP, dim=1) for t in (cache.keys, cache.values)
    )
    scores = torch.einsum("qd,tqd->qt", query.float(), keys) * query.shape[-1] ** -0.5
    return torch.einsum("qt,tqd->qd", scores.softmax(dim=1), values)


@pytest.mark.parametrize(("cache_dtype", "noise"), [("auto", 1e-5), ("fp8_e4m3", 1e-3)])
def test_rewritten_row_changes_no_other(
    vllm_config: VllmConfig, cache_dtype: str, noise: float
) -> None:
    """Other rows: a prefill chunk, a short decode, one that is not listed."""
    cache = Cache(40, HEAD_SIZE, torch.float32, cache_dtype=cache_dtype)
    layer = cache.layer()
    worker = Chosen(SparseConfig(min_context_tokens=256), [layer])
    tables = [
        [7, 3, 21, 30, 9, 14, 2, 38, 11],
        [4, 5, 6, 8, 10, 12, 13, 15, 16],
        [17, 18],
        [19, 20, 22, 23, 24, 25, 26, 27],
        [28, 29, 31, 32, 33, 34, 35, 36, 37],
    ]
    seq_lens = [8 * BLOCK + 1, 9 * BLOCK, 40, 8 * BLOCK, 9 * BLOCK]
    worker.begin_step(SparseRows((11, 27), ("a", "d")))
    worker.chosen = {("layer", "a"): [0, 2, 5, 8], ("layer", "d"): [1, 7]}
    given = metadata(tables, seq_lens, [1, 3, 1, 1, 1], cache)
    query, output = forward(vllm_config, worker, cache, layer, given)
    # Row, context blocks, and later tokens of its chunk.
    seen = [
        (0, [0, 2, 5, 8], 0),
        (1, range(9), 2),
        (1, range(9), 1),
        (1, range(9), 0),
        (2, range(2), 0),
        (3, [1, 7], 0),
        (4, range(9), 0),
    ]
    for token, (row, positions, later) in enumerate(seen):
        wanted = attention(cache, query[token], tables[row], positions, seq_lens[row] - later)
        assert torch.allclose(output[token], wanted, atol=noise), token
    counted = worker.take_counters().keys()
    assert counted == {"sparse_built_blocks", "sparse_build_s", "sparse_select_s"}
    assert given.seq_lens.tolist() == seq_lens


def test_layers_share_tables_attend_to_their_own(vllm_config: VllmConfig) -> None:
    """Layers choose other numbers of blocks, other blocks, all for one request, all for both."""
    caches = [Cache(24, HEAD_SIZE, torch.float32, seed) for seed in range(4)]
    layers = [replace(cache.layer(), name=f"layer{n}", index=n) for n, cache in enumerate(caches)]
    worker = Chosen(SparseConfig(min_context_tokens=256), layers)
    tables = [[7, 3, 21, 9, 14, 2, 11, 0, 5], [4, 6, 8, 10, 12, 13, 15, 16, 17]]
    seq_lens = [8 * BLOCK + 9, 9 * BLOCK]
    chosen: list[list[list[int] | None]] = [
        [[0, 2, 8], [1, 2, 3, 8]],
        [[1, 5, 8], [0, 4, 5, 8]],
        [None, [6, 8]],
        [None, None],
    ]
    worker.chosen = {
        (f"layer{n}", request): one[row]
        for n, one in enumerate(chosen)
        for row, request in enumerate("ab")
    }
    worker.begin_step(SparseRows((5, 17), ("a", "b")))
    given = metadata(tables, seq_lens, [1, 1], caches[0])
    for cache, layer, positions in zip(caches, layers, chosen, strict=True):
        query, output = forward(vllm_config, worker, cache, layer, given)
        for row, wanted in enumerate(positions):
            seen = range(9) if wanted is None else wanted
            expected = attention(cache, query[row], tables[row], seen, seq_lens[row])
            assert torch.allclose(output[row], expected, atol=1e-5), (layer.name, row)
    assert given.seq_lens.tolist() == seq_lens
    assert given.block_table[:, :9].tolist() == tables


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_hot", [20, 3], ids=["hot slots", "staging"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bf16"])
def test_whole_budget_equals_dense_bit_for_bit(
    vllm_config: VllmConfig, dtype: torch.dtype, num_hot: int
) -> None:
    """Two threads share a context; with one, the order of blocks seldom changes a bit in bf16.

    num_hot: slots; 19 blocks are only in host memory.
    """
    count, freed = 24, 20
    cache = Cache(2 * count, HEAD_SIZE, dtype)
    layer, page_bytes = cache.layer(), cache.pages[0].numel() * dtype.itemsize
    own, others = np.split(np.random.default_rng(0).permutation(2 * count), 2)
    context, generator = count * BLOCK - 5, torch.Generator().manual_seed(0)
    query = torch.randn((1, QUERIES, HEAD_SIZE), generator=generator).to(dtype)
    given = metadata([own.tolist()], [context], [1], cache, dtype)
    _, expected = forward(vllm_config, None, cache, layer, given, query)
    turned = [*reversed(range(count - 1)), count - 1]
    other = metadata([own[turned].tolist()], [context], [1], cache, dtype)
    reordered = forward(vllm_config, None, cache, layer, other, query)[1]
    assert dtype == HALF or not reordered.equal(expected), "the order shows"
    config = SparseConfig(
        residency="host", sparse_topk=2048, dense_layers=(), min_context_tokens=256
    )
    worker = ResidentWorker(config, [layer], slot_places([layer], [layer.name], 0))
    memory = cache.pages.view(torch.uint8).reshape(-1).numpy().copy()
    arena: Any = SimpleNamespace(memory=memory, file_id=(1, 1), holds=lambda _: True)
    worker.residents.arena_of = lambda: arena
    first = -(-config.sink_tokens // BLOCK)
    cache.pages[own[first:freed]] = cache.pages[others] = torch.nan
    places, nowhere = own.astype(np.int64) * page_bytes, np.full(count, -1, np.int64)
    row = ResidentRow(
        "a",
        int(own[-1]),
        int(own[0]),
        True,
        freed,
        tuple(others[:num_hot].tolist()),
        (KeptBlocks(0, places, nowhere, (1, 1)),),
        ResidencyOpened("a", 1, 1, 1),
        context,
        1,
    )
    worker.begin_step(SparseRows((int(own[-1]),), ("a",)))
    worker.begin_resident(ResidentStep((row,)))
    _, found = forward(vllm_config, worker, cache, layer, given, query)
    assert found.equal(expected) and not worker.residents.take_lost()


@pytest.mark.parametrize("sink_logits", [None, np.arange(QUERIES, dtype=np.float32)])
def test_exact_mass_of_blocks(sink_logits: np.ndarray | None) -> None:
    cache = Cache(9, 64, torch.float32)
    query = np.random.default_rng(0).standard_normal((QUERIES, 64)).astype(np.float32)
    blocks = np.array([4, 1, 8, 0], np.int32)
    found = block_mass(cache.keys_of, query, blocks, 3 * BLOCK + 7, BLOCK, 0.125, sink_logits)
    keys = np.concatenate([cache.keys.numpy().reshape(9, BLOCK, HEADS, 64)[b] for b in blocks])[
        : 3 * BLOCK + 7
    ]
    scores = np.einsum("hgd,thd->hgt", query.reshape(HEADS, GROUP, 64), keys) * 0.125
    if sink_logits is not None:
        scores = np.append(scores, sink_logits.reshape(HEADS, GROUP, 1), axis=-1)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = (shares / shares.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))[: 3 * BLOCK + 7]
    assert np.allclose(found, [shares[i * BLOCK : (i + 1) * BLOCK].sum() for i in range(4)])


# ----------------------------------------------------------------------------------------- hot sets


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=60))
def test_covering_budget_loses_no_block_to_rejected_drafts(steps: list[tuple[int, int]]) -> None:
    """By step: tokens with drafts, and how many of them stay."""
    rng, tokens = np.random.default_rng(0), 900
    _, manager = sketches(rng, 40)
    rows = np.arange(40, dtype=np.int32)
    manager.update(5, rows)
    config = SparseConfig(sparse_topk=1.0, min_context_tokens=320)
    sequence = LayerSequence(config, 5, BLOCK)
    for computed, kept in steps:
        count = -(-(tokens + computed) // BLOCK)
        query = rng.standard_normal((QUERIES, 32)).astype(np.float32)
        always, sources = np.zeros(QUERIES, np.float32), manager.sources(5)
        found = sequence.step(query, sources, rows[:count], always, tokens + computed, 0.2)
        assert len(found.blocks) == count
        tokens += min(kept, computed)


def test_drafts_select_by_the_mean_over_their_tokens() -> None:
    rng = np.random.default_rng(1)
    _, manager = sketches(rng, 30)
    rows, source = np.arange(30, dtype=np.int32), manager.sources(5)["rot2u"]
    manager.update(5, rows)
    queries = rng.standard_normal((3, QUERIES, 32)).astype(np.float32)
    config = SparseConfig(min_context_tokens=256, dense_layers=(), sparse_topk=1.0)

    def weights(query: np.ndarray) -> np.ndarray:
        always = np.zeros(len(query), np.float32)
        found = select_layer(
            config, 5, query, {"rot2u": source}, rows, always, 30 * BLOCK, BLOCK, scale=0.2
        )
        where = span(config, 30 * BLOCK, BLOCK)
        return found.weights[np.isin(found.blocks, range(where.first, where.last))]

    together = weights(by_kv_head(list(queries), HEADS))
    apart = np.mean([weights(one) for one in queries], axis=0)
    np.testing.assert_allclose(together, apart, rtol=1e-4)


def sketches(rng: np.random.Generator, count: int) -> tuple[Any, BlockReprManager]:
    keys = rng.standard_normal((count, BLOCK, HEADS, 32)).astype(np.float32)
    shape = LayerShape(count, BLOCK, HEADS, 32, ("rot2u",))
    return keys, BlockReprManager({5: shape}, {5: lambda blocks: keys[blocks]})


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    topk=st.one_of(st.integers(224, 900), st.floats(0.05, 1.0)),
    most=st.integers(0, 4),
    policy=st.sampled_from(["lru", "none"]),
    adaptive=st.sampled_from([None, 0.5, 0.9]),
    start=st.integers(400, 900),
    gaps=st.lists(st.sampled_from([1, 1, 1, 1, -2, 4, 31, 33, 200, -40]), min_size=1, max_size=60),
)
def test_sequence_attends_its_due_within_its_moves(
    seed: int,
    topk: float,
    most: int,
    policy: str,
    adaptive: float | None,
    start: int,
    gaps: list[int],
) -> None:
    """The context grows, jumps as after dense steps, or shrinks as of a recomputed request."""
    config = SparseConfig(
        sparse_topk=topk,
        adaptive_p=adaptive,
        max_correction_blocks=most,
        cache_policy=policy,
        min_context_tokens=256,
    )
    rng = np.random.default_rng(seed)
    keys, manager = sketches(rng, 80)
    rows = rng.permutation(80).astype(np.int32)
    manager.update(5, rows)
    sequence, context, before = LayerSequence(config, 5, BLOCK), start, np.empty(0, np.int32)
    for place, gap in enumerate(gaps):
        context = min(max(context + gap, 256), 80 * BLOCK)
        where, budget = span(config, context, BLOCK), config.budget_blocks(context, BLOCK)
        query = rng.standard_normal((QUERIES, 32)).astype(np.float32) * 2
        always = exact_log_mass(query, keys[:4].reshape(-1, HEADS, 32))
        found = sequence.step(query, manager.sources(5), rows[: where.count], always, context, 0.2)
        attended = found.blocks
        assert (np.diff(attended) > 0).all() and attended[-1] == where.count - 1
        assert np.isin(where.always, attended).all()
        assert found.num_corrected <= most and found.num_hits <= found.num_wanted
        come = np.setdiff1d(attended, before)
        middle = come[(come >= where.first) & (come < where.last)]
        assert len(middle) <= found.num_seeded + found.num_corrected + found.num_prefetched
        assert found.num_seeded == 0 or place == 0
        if place == 0:
            assert np.isin(found.selection.blocks, attended).all()
        if budget >= where.count and adaptive is None and place == 0:
            assert len(attended) == where.count
        before = attended


def test_unloaded_blocks_are_there_next_step() -> None:
    config = SparseConfig(sparse_topk=640, max_correction_blocks=1, min_context_tokens=256)
    rng = np.random.default_rng(3)
    _, manager = sketches(rng, 60)
    rows = np.arange(60, dtype=np.int32)
    manager.update(5, rows)
    sequence, always = LayerSequence(config, 5, BLOCK), np.full(QUERIES, -5.0, np.float32)
    first, second = (rng.standard_normal((QUERIES, 32)).astype(np.float32) * 3 for _ in range(2))
    sequence.step(first, manager.sources(5), rows, always, 60 * BLOCK, 0.2)
    one = sequence.step(second, manager.sources(5), rows, always, 60 * BLOCK, 0.2)
    missing = np.setdiff1d(one.selection.blocks, one.blocks)
    assert len(missing) > 0 and (one.num_corrected, one.num_prefetched) == (1, 0)
    two = sequence.step(second, manager.sources(5), rows, always, 60 * BLOCK, 0.2)
    assert two.num_prefetched == min(len(missing), 8) and np.isin(missing[:1], two.blocks).all()


def test_new_window_blocks_leave_room_for_corrections() -> None:
    """The window's blocks don't count against `max_correction_blocks`."""
    config = SparseConfig(sparse_topk=0.4, max_correction_blocks=1, min_context_tokens=256)
    rng = np.random.default_rng(3)
    _, manager = sketches(rng, 60)
    rows = np.arange(60, dtype=np.int32)
    manager.update(5, rows)
    sequence, always = LayerSequence(config, 5, BLOCK), np.full(QUERIES, -5.0, np.float32)
    first, second = (rng.standard_normal((QUERIES, 32)).astype(np.float32) * 3 for _ in range(2))
    sequence.step(first, manager.sources(5), rows[:40], always, 40 * BLOCK, 0.2)
    found = sequence.step(second, manager.sources(5), rows, always, 60 * BLOCK, 0.2)
    assert found.num_corrected == 1 and np.isin([58, 59], found.blocks).all()


# --------------------------------------------------------------------------------------------- rows


def test_scheduler_names_decoding_requests_by_written_block() -> None:
    names = RowNames(SparseConfig(min_context_tokens=64), [(0, 32), (2, 16)])
    tables = {
        "a": ([1, 2, 3, 4], [9], [11, 12, 13, 14, 15, 16, 17, 18]),
        "b": ([5, 6], [9], [7, 8]),
        "c": ([20, 21, 22], [9], [30] * 6),
    }
    requests = {
        "a": SimpleNamespace(request_id="a", num_prompt_tokens=50, num_computed_tokens=96),
        "b": SimpleNamespace(request_id="b", num_prompt_tokens=20, num_computed_tokens=40),
        "c": SimpleNamespace(request_id="c", num_prompt_tokens=90, num_computed_tokens=89),
    }
    for request in requests.values():
        names.arrived(request)

    def output(**scheduled: int) -> Any:
        state = SimpleNamespace(get_block_ids=lambda request_id: tables.get(request_id))
        return SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled)

    # Token 96 begins a's fourth block. b is too short, c ends its prompt.
    assert names.of_step(output(a=1, b=1, c=1, d=1)) == SparseRows((4, 17), ("a", "a"), ())
    assert names.of_step(output(a=2)) == SparseRows()
    # From 64 tokens of context on.
    for computed, rows in ((62, SparseRows()), (63, SparseRows((2, 14), ("a", "a")))):
        requests["a"].num_computed_tokens = computed
        assert names.of_step(output(a=1)) == rows
    names.ended("a")
    names.ended("d")
    assert names.of_step(output(a=1)) == SparseRows((), (), ("a",))
    requests["c"].num_computed_tokens = 90
    assert names.of_step(output(c=1)) == SparseRows((22, 30), ("c", "c"), ())


@pytest.mark.parametrize(("residency", "covered"), [("off", 250), ("host", 0)])
def test_request_within_the_budget_is_not_named(residency: str, covered: int) -> None:
    """With residency it is named, so that blocks go to hot slots.

    covered: longest context that is not listed.
    """
    config = SparseConfig(
        sparse_topk=250, min_context_tokens=64, residency=residency, dense_layers=()
    )
    names = RowNames(config, [(0, 32)])
    one = SimpleNamespace(request_id="a", num_prompt_tokens=50, num_computed_tokens=0)
    names.arrived(one)
    state = SimpleNamespace(get_block_ids=lambda _: (list(range(20)),))
    for tokens in (64, 249, 250, 251, 300):
        one.num_computed_tokens = tokens - 1
        step = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens={"a": 1})
        assert bool(names.of_step(step).request_ids) == (tokens > covered), tokens


def test_a_step_is_decided_once() -> None:
    """One connector counts them, one tells the workers."""
    names = RowNames(SparseConfig(min_context_tokens=64), [(0, 32)])
    one = SimpleNamespace(request_id="a", num_prompt_tokens=50, num_computed_tokens=96)
    names.arrived(one)
    names.ended("gone")
    state = SimpleNamespace(get_block_ids=lambda _: ([1, 2, 3, 4],))
    step = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens={"a": 1})
    decided = names.of_step(step)
    one.num_computed_tokens = 10
    assert names.of_step(step) is decided and decided.request_ids == ("a",)


@pytest.mark.parametrize("replays_decode", [True, False])
@pytest.mark.parametrize("beside", [1, 2])
def test_on_cuda_only_ungraphable_rows_break_rules(replays_decode: bool, beside: int) -> None:
    """A graph can't attend densely to blocks in host memory.

    beside: another request's tokens; only with 1 the step may be replayed.
    """
    away, resident = {"prompt", "short", "answer"}, {"prompt", "short", "answer", "here"}
    limits = ResidentOnly(resident.__contains__, replays_decode)
    config = SparseConfig(min_context_tokens=64)
    names = RowNames(config, [(0, 32)], away.__contains__, limits)
    positions = {
        "prompt": (100, 99),
        "short": (20, 40),
        "answer": (50, 96),
        "here": (100, 99),
        "whole": (50, 96),
        "other": (100, 0),
    }
    for name, (prompt, computed) in positions.items():
        names.arrived(
            SimpleNamespace(request_id=name, num_prompt_tokens=prompt, num_computed_tokens=computed)
        )
    state = SimpleNamespace(get_block_ids=lambda _: (list(range(8)),))
    scheduled = dict.fromkeys(positions, 1) | {"other": beside}
    step = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled)
    is_replayed = replays_decode and beside == 1
    expected = {"short", "answer"} | ({"prompt"} if is_replayed else set())
    assert set(names.of_step(step).request_ids) == expected


# ------------------------------------------------------------------------------------------- plugin


def test_plugin_and_attention_apply_only_where_configured(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = entry_points(group="vllm.general_plugins", name="hotkv")
    assert found, (
        "this installation of hotkv has no such entry point; install it again (make setup)"
    )
    for entry in found:
        assert entry.load() is plugin.register
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    plugin.register()
    backend: Any = registry.AttentionBackendEnum.CPU_ATTN.get_class()
    assert backend is HotAttentionBackend and backend.get_name() == "CPU_ATTN"
    assert registry.AttentionBackendEnum.FLASH_ATTN.get_class() is HotFlashBackend
    for extra, expected in (
        ({}, CPUAttentionBackendImpl),
        ({"hotkv.sparse": {}}, HotAttentionImpl),
    ):
        with_extra = copy.copy(vllm_config)
        with_extra.kv_transfer_config = KVTransferConfig(
            **transfer_config() | {"kv_connector_extra_config": extra}
        )
        with set_current_vllm_config(with_extra):
            assert backend.get_impl_cls() is expected
    with set_current_vllm_config(vllm_config):
        assert backend.get_impl_cls() is CPUAttentionBackendImpl


def test_the_plugin_leaves_others_alone_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = registry.AttentionBackendEnum
    theirs = dict.fromkeys((backends.CPU_ATTN, backends.FLASH_ATTN), "somebody.else.Backend")
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(theirs))
    plugin.register()
    assert {one: one.get_path() for one in theirs} == theirs
    monkeypatch.setattr(attention_layers, "override_cpu_attention", lambda path: 1 / 0)
    plugin.register()


# ------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"topk": 1}, "hotkv.sparse.topk = 1: there is no such setting"),
        ({"sparse_topk": 0}, "hotkv.sparse.sparse_topk is 0; use a number of tokens"),
    ],
)
def test_wrong_settings_name_field_and_fix(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectorConfig.from_extra_config({"hotkv.sparse": value})
    assert message in str(error.value)
