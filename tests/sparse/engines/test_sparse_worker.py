"""`SparseWorker` without an engine."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_sparse import SparseConfig
from hotkv_sparse.selection import exact_log_mass
from hotkv_sparse.vllm.cpu import worker as worker_module
from hotkv_sparse.vllm.cpu.key_pages import KeyFormat, KeyPacking, KeyPages
from hotkv_sparse.vllm.cpu.sequence import LayerSequence
from hotkv_vllm.counter_help import every_counter
from tests.sparse.engines.sparse_parts import BLOCK, HEADS, QUERIES
from tests.sparse.engines.sparse_workers import BLOCKS, Engine

# ------------------------------------------------------------------------------------------- budget


@settings(max_examples=40)
@given(
    topk=st.one_of(st.integers(320, BLOCKS * BLOCK), st.floats(0.3, 1.0)),
    policy=st.sampled_from(["lru", "none"]),
    scored=st.sampled_from(
        [{}, {"adaptive_p": 0.5}, {"adaptive_p": 0.95}, {"fusion": {"rot2u": 1.0}}]
    ),
    sinks=st.integers(0, 70),
    recent=st.integers(1, 100),
    most=st.integers(0, 4),
    start=st.integers(400, 1200),
    gaps=st.lists(st.sampled_from([1, 1, 1, 31, 33, 200, -300]), min_size=1, max_size=12),
)
def test_attention_gets_no_more_tokens_than_the_budget(
    topk: float,
    policy: str,
    scored: dict[str, Any],
    sinks: int,
    recent: int,
    most: int,
    start: int,
    gaps: list[int],
) -> None:
    try:
        config = SparseConfig(
            topk, sink_tokens=sinks, recent_tokens=recent, max_correction_blocks=most,
            cache_policy=policy, min_context_tokens=384, **scored,
        )  # fmt: skip
        config.check(8, BLOCK)
    except HotKVError:
        reject()
    engine = Engine(config)
    engine.context_tokens = start
    for gap in gaps:
        engine.context_tokens = min(max(engine.context_tokens + gap, 384), BLOCKS * BLOCK)
        context = engine.context_tokens
        for rewrite in engine.step("ab"):
            lengths = [context] if rewrite is None else rewrite.seq_lens.tolist()
            assert max(lengths) <= (topk if isinstance(topk, int) else topk * context)
    assert "sparse_faults" not in engine.worker.take_counters()


# -------------------------------------------------------------------------------------------- pages


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 3), group=st.integers(1, 9),
    head_size=st.sampled_from([32, 64, 80, 128]),
    packing=st.sampled_from([(32, 1), (16, 1), (16, 2), (32, 2), (32, 32), (64, 1)]),
    count=st.integers(1, 6), excess=st.integers(0, 63),
    dtype=st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
    ),
    strength=st.sampled_from([0.1, 1.0, 30.0]),
)  # fmt: skip
def test_mass_from_packed_pages_is_their_keys(
    seed: int,
    heads: int,
    group: int,
    head_size: int,
    packing: tuple[int, int],
    count: int,
    excess: int,
    dtype: torch.dtype,
    strength: float,
) -> None:
    run, pair = packing
    pair = head_size if pair == 32 else pair
    tokens, rng = 64 if run == 64 else 32, np.random.default_rng(seed)
    pages = torch.from_numpy(
        rng.standard_normal((7, heads, tokens, 2 * head_size)).astype(np.float32)
    ).to(dtype)
    scale = 1.0
    if dtype.itemsize == 1:
        pages, scale = pages.view(torch.uint8), 0.75
    # The pages lie between another layer's: not contiguous.
    pages = torch.stack([torch.zeros_like(pages), pages], dim=1)[:, 1]
    one = KeyPages(pages, KeyFormat(KeyPacking(run, pair), dtype, lambda: scale))
    query = rng.standard_normal((heads * group, head_size)).astype(np.float32) * np.float32(
        strength
    )
    blocks = rng.permutation(7)[:count].astype(np.int32)
    num_tokens = count * tokens - min(excess, tokens)
    expected = exact_log_mass(
        query, one.keys_of(blocks).reshape(-1, heads, head_size)[:num_tokens], 0.125
    )
    np.testing.assert_allclose(
        one.log_mass(query, blocks, num_tokens, 0.125), expected, rtol=2e-5, atol=2e-4
    )


def test_pages_follow_memory_and_refuse_absent_blocks() -> None:
    pages = torch.randn((4, HEADS, BLOCK, 128))
    one, query, blocks = (
        KeyPages(pages, KeyFormat(KeyPacking(32, 1), pages.dtype)),
        np.ones((QUERIES, 64), np.float32),
        np.array([3, 1], np.int32),
    )
    before = one.log_mass(query, blocks, 40, 1.0)
    pages.set_(pages.clone().mul_(2.0))
    assert not np.allclose(one.log_mass(query, blocks, 40, 1.0), before)
    assert one.page_bytes == HEADS * BLOCK * 128 * 4
    for wrong in ([4], [-1]):
        with pytest.raises(IndexError, match="of a layer that has 4"):
            one.log_mass(query, np.array(wrong, np.int32), 9, 1.0)


# ----------------------------------------------------------------------------------------- counters


def test_layer_counters_add_up_swaps_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RECALL_STEPS", 3)
    engine = Engine()
    sums: dict[str, float] = {}
    layers: dict[int, dict[str, float]] = {}
    broken = np.full((2, QUERIES, 64), np.nan, np.float32)
    for number in range(12):
        engine.step("ab", queries=broken if number == 5 else None)
        for name, value in engine.worker.take_counters().items():
            sums[name] = sums.get(name, 0) + value
        if number % 4 == 3:
            for index, counted in engine.worker.take_layer_counters().items():
                for name, value in counted.items():
                    layers.setdefault(index, {})[name] = layers.get(index, {}).get(name, 0) + value
    assert set(layers) == {2, 7}
    assert set(layers[2]) <= set(SPARSE_COUNTERS)
    assert layers[2]["selects"] == 24
    # Recall is measured in every third step, by layers in turn.
    assert [layers[index]["recall_samples"] for index in (2, 7)] == [2, 2]
    assert 0 < layers[2]["recall"] <= 2 and 0 < layers[2]["estimated_mass"] <= 24
    assert 0 < layers[2]["true_mass"] <= 2 * (1 + 1e-6)
    assert sums == pytest.approx(
        {
            "sparse_" + name: layers[2].get(name, 0) + layers[7].get(name, 0)
            for name in layers[2] | layers[7]
        }
    )
    page_bytes = HEADS * BLOCK * 2 * 64 * 2
    joined = (
        sums["sparse_seeded_blocks"]
        + sums["sparse_corrected_blocks"]
        + sums["sparse_prefetched_blocks"]
    )
    assert sums["sparse_swap_bytes"] == joined * page_bytes > 0
    assert engine.worker.take_counters() == {} and engine.worker.take_layer_counters() == {}
    assert {"sparse_" + name for name in SPARSE_COUNTERS} == {
        name for name in every_counter() if name.startswith("sparse_")
    }


def test_masses_count_learned_sinks_as_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks get .99 of the attention."""
    monkeypatch.setattr(worker_module, "RECALL_STEPS", 1)
    engine = Engine(sink_logits=np.full(QUERIES, 16, np.float32))
    for _ in range(4):
        engine.step("a")
    counted = engine.worker.take_counters()
    assert counted["sparse_attended_blocks"] < counted["sparse_context_blocks"]
    for part, whole in (("estimated_mass", "selects"), ("true_mass", "recall_samples")):
        assert 0.99 < counted["sparse_" + part] / counted["sparse_" + whole] <= 1.0


def test_steps_tell_what_any_layer_selected() -> None:
    engine = Engine()
    selected: dict[str, set[int]] = {"a": set(), "b": set()}
    original = LayerSequence.decode

    def noted(request_id: str) -> Callable[..., Any]:
        def decode(self: LayerSequence, *arguments: Any) -> Any:
            found = original(self, *arguments)
            selected[request_id] |= set(found.selection.blocks.tolist())
            return found

        return decode

    for _ in range(3):
        for request_id in "ab":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LayerSequence, "decode", noted(request_id))
                engine.step(request_id)
        taken = engine.worker.take_steps()
        assert {
            request_id: set(positions.tolist()) for request_id, positions in taken.items()
        } == selected
        assert all(
            (np.diff(positions) > 0).all() and positions.dtype == np.int32
            for positions in taken.values()
        )
        selected = {"a": set(), "b": set()}
    assert engine.worker.take_steps() == {}


# ------------------------------------------------------------------------------------------- faults


def test_repeatedly_broken_layer_rests_and_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.step("a")
    with caplog.at_level(logging.WARNING, logger=worker_module.logger.name):
        assert [engine.step("a", break_layer=1)[0] is not None for _ in range(2)] == [True, True]
        assert engine.step("a")[1] is not None, (
            "two faults do not make a layer rest, and a good step forgives them"
        )
        for _ in range(worker_module.MAX_IN_A_ROW):
            engine.step("a", break_layer=1)
        counted = engine.worker.take_layer_counters()
        assert counted[7]["faults"] == 2 + worker_module.MAX_IN_A_ROW and "faults" not in counted[2]
        for _ in range(worker_module.FIRST_REST_STEPS):
            found = engine.step("a", break_layer=1)
            assert found[0] is not None and found[1] is None
        assert "faults" not in engine.worker.take_layer_counters().get(7, {}), (
            "a resting layer isn't tried"
        )
        engine.step("a", break_layer=1)
        for _ in range(2 * worker_module.FIRST_REST_STEPS):
            assert engine.step("a")[1] is None
        assert engine.worker.take_layer_counters()[7]["faults"] == 1
        assert all(rewrite is not None for rewrite in engine.step("a"))
        assert repr(engine.worker._faults) == "LayerFaults()"
    said = [record.getMessage().count("layer7 broke") for record in caplog.records]
    assert [count for count in said if count] == [1, 1]
