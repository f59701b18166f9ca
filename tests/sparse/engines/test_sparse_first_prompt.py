"""Layers that compute their sketches' axes from the first prompt."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers import rotary_embedding

from hotkv_proto import native
from hotkv_sparse import SparseConfig, build
from hotkv_sparse.axes import AxesEstimate
from hotkv_sparse.centre import FIRST_TOKENS, Centres, LayerCentre
from hotkv_sparse.vllm import attention_layers
from hotkv_sparse.vllm.cpu.batch import Batch
from hotkv_sparse.vllm.cpu.first_prompt import ENOUGH_TOKENS, NO_TURNING, FirstPrompt, Turning
from hotkv_sparse.vllm.cpu.pool import BlockReprManager
from hotkv_sparse.vllm.cpu.setup import _calibrating, install
from hotkv_vllm.compat import Unsupported
from tests.sparse.engines.sparse_parts import BLOCK, HEADS, QUERIES, Cache
from tests.sparse.engines.sparse_pools import HEADS as POOL_HEADS
from tests.sparse.engines.sparse_pools import SIZE as POOL_SIZE
from tests.sparse.engines.sparse_pools import described, layer_of
from tests.sparse.engines.sparse_runs import (
    COVERING,
    LENGTHS,
    SELECTING,
    References,
    Start,
    check_counters,
    dense,
    start,
    totals,
)
from tests.sparse.engines.sparse_workers import BLOCKS, Engine
from tests.vllm.runs import prompts

__all__ = ["dense", "start"]
CONFIG = SparseConfig(
    sparse_topk=640, scorer="mix2", min_context_tokens=256, max_correction_blocks=2, dense_layers=()
)


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """rows: context tokens and new ones, by request."""
    starts = np.concatenate([[0], np.cumsum([queries for _, queries in rows])]).astype(np.int32)
    lengths = np.array([context for context, _ in rows], np.int32)
    none = np.zeros((len(rows), 1), np.int32)
    return Batch(starts, lengths, none, np.full(int(starts[-1]), -1, np.int64))


def tokens(dice: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Keys [count, 2 KV heads, 16 channels] and queries [count, 6 query heads, 16]."""
    shapes = (count, 2, 16), (count, 6, 16)
    keys, queries = (dice.standard_normal(shape).astype(np.float32) for shape in shapes)
    return keys * np.linspace(0.2, 3, 16, dtype=np.float32) + 1, queries


# ------------------------------------------------------------------------------------------ moments


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 9),
)
def test_all_but_the_first_tokens_of_contexts_count(
    steps: list[list[tuple[int, int]]], seed: int
) -> None:
    dice, given_axes = np.random.default_rng(seed), []
    turning = Turning(np.array([1.0, 0.1, 0.01]), 5000)
    one = FirstPrompt({3: (2, 16)}, turning, lambda *found: given_axes.append(found))
    expected = AxesEstimate(2, 16)
    for rows in steps:
        # Also rows without queries, and padding.
        rows = [(context, min(context, queries)) for context, queries in rows]
        keys, queries = tokens(dice, sum(count for _, count in rows))
        counted, positions, place = [], [], 0
        for context, count in rows:
            counted += [
                place + number
                for number in range(count)
                if context - count + number >= FIRST_TOKENS
            ]
            positions += list(range(context - count, context))
            place += count
        where = np.array(positions, np.int64)[counted]
        expected.add_moved(keys[counted], queries[counted], where, turning.frequencies, 5000)
        one.see(3, batch_of(rows), keys, queries)
    assert one.waiting[3].num_tokens == expected.num_tokens and not given_axes
    keys, queries = tokens(dice, FIRST_TOKENS + ENOUGH_TOKENS)
    # NaN and infinity don't count.
    one.see(3, batch_of([(FIRST_TOKENS + ENOUGH_TOKENS,) * 2]), keys * np.nan, queries)
    where = np.arange(FIRST_TOKENS, FIRST_TOKENS + ENOUGH_TOKENS)
    expected.add_moved(
        keys[FIRST_TOKENS:], queries[FIRST_TOKENS:], where, turning.frequencies, 5000
    )
    one.see(3, batch_of([(FIRST_TOKENS + ENOUGH_TOKENS,) * 2]), keys, queries)
    ((index, mu, axes),) = given_axes
    other_mu, other = expected.axes() or pytest.fail("enough tokens")
    assert index == 3 and not one.waiting
    np.testing.assert_array_equal(mu, other_mu)
    assert axes.to_bytes() == other.to_bytes()


# ------------------------------------------------------------------------------------------- worker


def shown(engine: Engine, count: int) -> None:
    """Keys like those in the pages."""
    dice = np.random.default_rng(5)
    queries = dice.standard_normal((count, QUERIES, 64)).astype(np.float32)
    keys = dice.standard_normal((count, HEADS, 64)).astype(np.float32)
    for layer in engine.layers:
        engine.worker.first_prompt.see(layer.index, batch_of([(count, count)]), keys, queries)


def self_calibrating() -> Engine:
    engine = Engine(CONFIG)
    caches = [Cache(BLOCKS, 64, torch.bfloat16, seed) for seed in range(2)]
    engine.layers = [
        replace(cache.layer(("mix2",)), name=f"layer{n}", index=n)
        for cache, n in zip(caches, (2, 7), strict=True)
    ]
    engine.worker = type(engine.worker)(CONFIG, engine.layers)
    return engine


def test_rows_are_dense_until_their_layer_calibrates() -> None:
    engine = self_calibrating()
    assert set(engine.worker.first_prompt.waiting) == {2, 7}
    assert engine.step("a") == [None, None]
    shown(engine, ENOUGH_TOKENS // 2)
    assert engine.step("a") == [None, None]
    assert engine.worker.take_counters().get("sparse_built_blocks", 0) == 0
    shown(engine, ENOUGH_TOKENS)
    assert not engine.worker.first_prompt.waiting
    rewrites = engine.step("a")
    assert all(rewrite is not None for rewrite in rewrites)
    counted = engine.worker.take_counters()
    assert counted["sparse_built_blocks"] == 2 * (BLOCKS - 1) and "sparse_faults" not in counted
    for layer in engine.layers:
        (source,) = engine.worker.sketches.sources(layer.index).values()
        blocks = np.flatnonzero(engine.worker.sketches.built(layer.index)).astype(np.int32)
        assert len(blocks) == BLOCKS - 1
        expected = build("mix2", layer.keys_of(blocks), source.mu, axes=source.axes)
        assert np.array_equal(source.pool[blocks], expected)


def test_the_blocks_that_matter_are_found() -> None:
    """The query matches the keys of one block."""
    engine = self_calibrating()
    shown(engine, FIRST_TOKENS + ENOUGH_TOKENS)
    table, layer = engine.table("a"), engine.layers[0]
    for position in (5, 17, 30):
        wanted = layer.keys_of(np.array([table[position]], np.int32))[0, 3]
        query = np.repeat(wanted, QUERIES // HEADS, axis=0)[None] * 3
        rewrites = engine.step("a", queries=query.astype(np.float32))
        assert rewrites[0] is not None
        length = -(-int(rewrites[0].seq_lens[0]) // BLOCK)
        assert length < BLOCKS and table[position] in rewrites[0].tables[0, :length]


def test_what_was_built_without_axes_is_forgotten() -> None:
    """rot2u gets a centre too, so its bytes mean something else."""
    cache = Cache(BLOCKS, 64, torch.bfloat16)
    layer = cache.layer(("rot2u", "mix2"))
    pool = BlockReprManager({5: layer.shape}, {5: layer.keys_of})
    blocks = np.arange(6, dtype=np.int32)
    assert pool.update(5, blocks) == 0 and not pool.is_calibrated(5)
    pool.mark_built(5, blocks)
    estimate = AxesEstimate(HEADS, 64)
    estimate.add(cache.keys.float().numpy(), np.repeat(cache.keys.float().numpy(), 3, axis=1))
    mu, axes = estimate.axes() or pytest.fail("enough tokens")
    pool.calibrate(5, mu, axes)
    assert pool.is_calibrated(5) and not pool.built(5).any()
    assert pool.update(5, blocks) == 6
    sources = pool.sources(5)
    keys = layer.keys_of(blocks)
    assert np.array_equal(sources["rot2u"].pool[blocks], build("rot2u", keys, mu))
    assert sources["rot2u"].axes is None
    assert np.array_equal(sources["mix2"].pool[blocks], build("mix2", keys, mu, axes=axes))


# ------------------------------------------------------------------------------------------ sharing


def test_what_an_engine_calibrates_itself_is_not_shared() -> None:
    with pytest.raises(Unsupported, match=r"calibrates itself.*hotkv\.sparse_centre"):
        described([layer_of(1, ("mix2",)), layer_of(2, ("rot2u",))])


def test_files_axes_are_part_of_a_kind() -> None:
    kinds = []
    for seed in (0, 1):
        dice = np.random.default_rng(seed)
        estimate = AxesEstimate(POOL_HEADS, POOL_SIZE)
        keys = dice.standard_normal((2000, POOL_HEADS, POOL_SIZE)).astype(np.float32)
        estimate.add(keys, keys)
        _, axes = estimate.axes() or pytest.fail("enough tokens")
        mu = np.ones((POOL_HEADS, POOL_SIZE), np.float32)
        centres = Centres("m", 2048, {1: LayerCentre(mu, {}, axes)})
        layers = []
        for name in ("mix2", "rot2u"):
            layer = layer_of(1, (name,), mu=mu)
            layers.append(replace(layer, shape=replace(layer.shape, axes=axes)))
        kinds += [described([layer], centres).kinds[0].version for layer in layers]
    # Only mix2 uses axes.
    assert len({kinds[0], kinds[1], kinds[2]}) == 3 and kinds[1] == kinds[3]


# ------------------------------------------------------------------------------------------- engine


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sparse",
    [
        pytest.param(COVERING, id="covering", marks=pytest.mark.long),
        pytest.param(SELECTING, id="selecting"),
    ],
)
def test_engine_calibrates_itself_exact_within_budgets(
    start: Start, dense: References, sparse: dict[str, Any]
) -> None:
    """The prompts together calibrate; the budget covers each."""
    run = {"max_num_batched_tokens": 128, "max_num_seqs": 6, "enable_prefix_caching": False}
    one = start(sparse | {"scorer": "mix2"}, **run)
    if sparse is SELECTING:
        one.ask("select_always")
    batch = prompts(4, LENGTHS)
    expected = dense.ask(engine=run, prompts=batch, max_tokens=20)
    for _ in range(2):
        assert one.ask("generate", prompts=batch, max_tokens=20)["tokens"] == expected["tokens"]
    if sparse is SELECTING:
        check_counters(totals(one), 4)
    pool = one.ask("pool")
    assert all(pool["built"]) and pool["wrong"] == 0


def test_an_engine_without_kernels_decodes_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setenv("HOTKV_DISABLE_NUMBA", "1")
    with pytest.raises(Unsupported, match="HOTKV_DISABLE_NUMBA is set: server and sparse decode"):
        install(SparseConfig(), None, None, {})


# -------------------------------------------------------------------------------------------- RoPE


def rotary(head_size: int, theta: float, **more: Any) -> SimpleNamespace:
    """Rows of the table are positions, cosines before sines."""
    angles = np.arange(4)[:, None] * theta ** -np.arange(0, 1, 2 / head_size)
    table = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    given = {"head_size": head_size, "is_neox_style": True, "cos_sin_cache": table} | more
    return SimpleNamespace(**given)


def known(monkeypatch: pytest.MonkeyPatch, *modules: SimpleNamespace) -> Any:
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", dict(enumerate(modules)))
    return attention_layers.rope_frequencies(64)


def test_frequencies_are_those_of_the_models_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = 10000.0 ** -np.arange(0, 1, 1 / 32)
    one, slow, other = rotary(64, 1e4), rotary(64, 5e5), rotary(128, 1e4)
    np.testing.assert_allclose(known(monkeypatch, other, one), expected, rtol=1e-9)
    np.testing.assert_array_equal(known(monkeypatch, one, rotary(64, 1e4)), known(monkeypatch, one))
    # RoPE scalings may multiply cosine and sine.
    scaled = rotary(64, 1e4, cos_sin_cache=one.cos_sin_cache * 1.3)
    np.testing.assert_allclose(known(monkeypatch, scaled), expected, rtol=1e-9)
    # 32 of 64 channels: 16 frequencies.
    part = rotary(64, 1e4, cos_sin_cache=rotary(32, 1e4).cos_sin_cache)
    assert len(known(monkeypatch, part)) == 16
    for modules in ((), (other,), (one, slow), (rotary(64, 1e4, is_neox_style=False),)):
        assert known(monkeypatch, *modules) is None
    assert known(monkeypatch, rotary(64, 1e4, cos_sin_cache=None)) is None


def test_unknown_rotation_replaces_mix2(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless a file has the axes of all layers."""
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=77))
    impl = SimpleNamespace(head_size=POOL_SIZE)
    layers: Any = [SimpleNamespace(index=index, impl=impl) for index in (1, 2)]
    plain, mixed = SparseConfig(scorer="rot2u"), SparseConfig(fusion={"mix2": 1.0, "mean": 0.5})

    def calibrating(settings: SparseConfig, centres: Any = None) -> Any:
        return _calibrating(settings, layers, config, centres)

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    assert calibrating(plain) == (plain, NO_TURNING) and not caplog.text
    assert calibrating(CONFIG) == (replace(CONFIG, scorer="rot2u"), NO_TURNING)
    assert "name the file in hotkv.sparse_centre" in caplog.text
    assert calibrating(mixed)[0].fusion == {"rot2u": 1.0, "mean": 0.5}
    with_axes: Any = SimpleNamespace(axes=lambda index: object())
    assert calibrating(CONFIG, with_axes) == (CONFIG, NO_TURNING)
    half: Any = SimpleNamespace(axes={1: object()}.get)
    assert calibrating(CONFIG, half)[0].scorer == "rot2u"
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {0: rotary(POOL_SIZE, 1e4)})
    settings, found = calibrating(CONFIG)
    assert settings is CONFIG
    assert len(found.frequencies) == POOL_SIZE // 2 and found.context_tokens == 77
