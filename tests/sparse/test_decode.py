"""Compares a decode step in one compiled call with separate scoring, selection and hot set."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import HotSet, Selection, Source, SparseConfig, build, exact_log_mass, span
from hotkv_sparse.axes import Axes, AxesEstimate
from hotkv_sparse.decode import Always, Decoded, Scorer, decode
from hotkv_sparse.selection import select_layer
from tests.oracles.sparse import as_stored
from tests.sparse.support import UNCALIBRATED

TOKENS, HEADS, QUERIES = 16, 2, 6
KINDS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
"""In the order of the kernel's numbers."""
NOTHING = np.empty(0, np.int32)


def axes_of(keys: Any) -> tuple[Any, Axes]:
    tokens = keys.reshape(-1, *keys.shape[2:])
    estimate = AxesEstimate(*tokens.shape[1:])
    estimate.add(tokens, tokens)
    return estimate.axes(len(tokens)) or pytest.fail("enough tokens")


def pages_of(stored: Any, run: int, pair: int) -> Any:
    """Keys [B blocks, T tokens, H heads, D channels] as bytes, ordered [T / run][D /
    pair][run][pair] within block and head."""
    blocks, tokens, heads, size = stored.shape
    parts = stored.reshape(blocks, tokens // run, run, heads, size // pair, pair)
    ordered = np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 2, 5))
    return ordered.view(np.uint8).reshape(blocks, heads, -1)


def in_parts(
    config: SparseConfig, hot: HotSet, query: Any, source: Source, rows: Any, always: Any,
    tokens: int, block: int, scale: float, most: int, arriving: Any,
) -> tuple[Any, Selection, Any, int, int, int, int]:  # fmt: skip
    """A decode step as separate calls.

    source, rows: the sketches, and each block's row.
    always: log mass of the always-kept blocks [query heads].
    most: blocks to load.
    arriving: slots whose prefetch has ended.
    """
    num_adopted = 0
    if len(arriving):
        hot.finish_prefetch(arriving)
        num_adopted = len(hot.adopt().blocks)
    found = select_layer(
        config, 0, query, {config.scorer: source}, rows, always, tokens, block, scale=scale
    )
    step, where = hot.step(found, most), hot.span
    ahead = hot.begin_prefetch(step.prefetch).slots
    num_loaded = int(((step.load.blocks >= where.first) & (step.load.blocks < where.last)).sum())
    return (
        step.map, found, ahead, num_loaded, num_adopted, step.num_selected, step.num_resident,
    )  # fmt: skip


@settings(max_examples=60)
@example(
    seed=1, scorer="rot2u", head_size=64, group=5, centred=False, paged="float16", pair=2, block=16,
    is_whole=True, sinks=False, policy="lru", topk=7, most=1, start=300, gaps=[1],
)  # fmt: skip
@given(
    seed=st.integers(0, 2**32 - 1), scorer=st.sampled_from([*UNCALIBRATED, "mix2"]),
    head_size=st.sampled_from([16, 40, 64, 128]), group=st.integers(1, 6), centred=st.booleans(),
    paged=st.sampled_from(["", *KINDS]), pair=st.integers(1, 2),
    block=st.sampled_from([16, 32]), is_whole=st.booleans(), sinks=st.booleans(),
    policy=st.sampled_from(["lru", "none"]), topk=st.integers(7, 30), most=st.integers(0, 4),
    start=st.integers(200, 600),
    gaps=st.lists(st.sampled_from([1, 1, 1, 15, 40, -30]), min_size=1, max_size=25),
)  # fmt: skip
def test_one_call_equals_its_parts_step(
    seed: int, scorer: str, head_size: int, group: int, centred: bool, paged: str, pair: int,
    block: int, is_whole: bool, sinks: bool, policy: str, topk: int, most: int, start: int,
    gaps: list[int],
) -> None:  # fmt: skip
    rng, scale = np.random.default_rng(seed), 0.2
    keys = rng.standard_normal((60, block, HEADS, head_size)).astype(np.float32)
    dtype, num_queries, run = paged or "float32", HEADS * group, block if is_whole else 16
    # Only 16-bit values are stored in pairs.
    pair = pair if dtype in ("float16", "bfloat16") else 1
    key_scale = float(rng.uniform(0.5, 2.0)) if dtype.startswith("float8") else 1.0
    keys, stored = as_stored(keys / np.float32(key_scale), dtype)
    keys = keys * np.float32(key_scale)
    pages, packing = pages_of(stored, run, pair), (block, run, pair, KINDS.index(dtype))
    mu, axes = axes_of(keys) if scorer == "mix2" else (keys.mean(axis=(0, 1)), None)
    mu = mu if centred and scorer not in ("quest", "mean") else None
    pool = build(scorer, keys, mu, axes=axes)
    source = Source(pool, mu, 0.05 if centred else None, axes)
    config = SparseConfig(
        sparse_topk=topk * block, scorer=scorer, sink_tokens=20, recent_tokens=40, dense_layers=(),
        cache_policy=policy,
    )  # fmt: skip
    rows = rng.permutation(60).astype(np.int32)
    place = Scorer.of(scorer, source, num_queries, head_size, scale)
    one, other = (HotSet(2 * topk, 3, policy) for _ in range(2))
    selected, context = np.zeros(60, np.bool_), start
    arriving = [NOTHING, NOTHING]
    logits = np.where(sinks, rng.standard_normal(num_queries), -np.inf).astype(np.float32)
    for gap in gaps:
        context = min(max(context + gap, 150), 60 * block)
        where = span(config, context, block)
        for hot in (one, other):
            if where != hot.span:
                hot.swapped_out(
                    hot.extend(where, context // block, context // block).swap_out, True
                )
                hot.seed(where.always)
        query = rng.standard_normal((num_queries, head_size)).astype(np.float32) * 2
        blocks = rows[where.always]
        num_tokens = len(blocks) * block - (where.count * block - context)
        exact = exact_log_mass(
            query, keys[blocks].reshape(-1, HEADS, head_size)[:num_tokens], scale
        )
        mass = np.logaddexp(exact, logits)
        always = Always.known(mass)
        if paged:
            always = Always(logits, pages, blocks, (num_tokens, *packing), key_scale)
        expected = in_parts(
            config, other, query, source, rows, mass, context, block, scale, most, arriving[1]
        )
        before, budget = selected.copy(), config.budget_blocks(context, block)
        found = decode(one, place, query, rows, always, budget, most, arriving[0], selected)
        compare(found, expected)
        chosen = np.zeros(60, np.bool_)
        chosen[found.selection.blocks] = True
        assert np.array_equal(selected, before | chosen)
        arriving = [found.ahead, expected[2]]
        one.check_invariants()
        for name in ("state", "block_of", "used_at", "slot_of", "has_copy", "clock"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def compare(found: Decoded, expected: tuple[Any, ...]) -> None:
    present, selection, ahead, *counts = expected
    assert np.array_equal(found.map.blocks, present.blocks)
    assert np.array_equal(found.map.slots, present.slots)
    assert np.array_equal(found.selection.blocks, selection.blocks)
    assert np.allclose(found.selection.weights, selection.weights, rtol=1e-3, atol=1e-6)
    assert found.selection.mass == pytest.approx(selection.mass, rel=1e-4)
    assert np.array_equal(found.ahead, ahead)
    assert [found.num_loaded, found.num_adopted, found.num_selected, found.num_resident] == counts


def test_refusal_of_what_doesnt_fit_changes_nothing() -> None:
    keys = np.random.default_rng(0).standard_normal((9, TOKENS, HEADS, 32)).astype(np.float32)
    source, query = Source(build("rot2u", keys)), np.ones((QUERIES, 32), np.float32)
    with pytest.raises(HotKVError) as caught:
        Scorer.of("rot2u", source, QUERIES, 64, 1.0)
    assert caught.value.reason is Reason.INVALID_FIELD
    place, hot = Scorer.of("rot2u", source, QUERIES, 32, 1.0), HotSet(9)
    where = span(SparseConfig(sink_tokens=16, recent_tokens=16), 9 * TOKENS, TOKENS)
    hot.extend(where, 9, 9)
    hot.seed(where.always)
    version, blocks = hot.version, np.arange(9, dtype=np.int32)
    nothing = np.zeros(QUERIES, np.float32)
    for rows, always, error in (
        (blocks + 3, Always.known(nothing), HotKVError),
        (blocks - 3, Always.known(nothing), HotKVError),
        (
            blocks,
            Always(nothing, pages_of(keys, TOKENS, 1), blocks + 1, (9, TOKENS, TOKENS, 1, 2)),
            IndexError,
        ),
    ):
        selected = np.zeros(9, np.bool_)
        with pytest.raises(error):
            decode(hot, place, query, rows, always, 6, 2, NOTHING, selected)
        assert (hot.version, hot.clock, selected.any()) == (version, 0, False)
    hot.check_invariants()
